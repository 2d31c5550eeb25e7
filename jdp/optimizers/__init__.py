"""Optimizers: optax transformations that work on all replicas."""
