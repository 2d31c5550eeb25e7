"""Diagnosis: timelines, records of requests, and differences between ranks."""
