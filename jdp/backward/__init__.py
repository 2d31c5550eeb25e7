"""Backward: what the program of a loss tells about its backward pass."""
