"""Batch norm over the samples of all replicas, for layers of any framework."""

from jdp.batch_norm.layer import sample_weights

__all__ = ["sample_weights"]
