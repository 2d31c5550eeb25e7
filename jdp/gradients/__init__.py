"""Gradients: averaged over replicas, accumulated, weighted."""
