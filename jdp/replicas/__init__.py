"""Replicas: the devices of a job, and what their processes agree on."""
