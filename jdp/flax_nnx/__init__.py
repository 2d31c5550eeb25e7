"""Flax nnx: steps, gradients, metrics and batch norm of modules on all replicas."""

from jdp.flax_nnx.batch_norm_layer import SyncBatchNorm, convert_batch_norm
from jdp.flax_nnx.decorator import data_parallel
from jdp.flax_nnx.differentiation import value_and_grad

__all__ = ["SyncBatchNorm", "convert_batch_norm", "data_parallel", "value_and_grad"]
