"""Coordinator: which operations are ready on all ranks, and in what order they run."""
