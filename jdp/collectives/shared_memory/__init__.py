"""Shared memory: all-reduce of CPU processes on one host."""
