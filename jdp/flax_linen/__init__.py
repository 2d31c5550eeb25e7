"""Flax linen: train states, loss scaling and batch norm on all replicas."""

from jdp.flax_linen.batch_norm_layer import (
    SyncBatchNorm,
    convert_batch_norm,
    sync_batch_norms,
)
from jdp.flax_linen.loss_scaling import DynamicScale
from jdp.flax_linen.train_state import TrainState

__all__ = [
    "DynamicScale",
    "SyncBatchNorm",
    "TrainState",
    "convert_batch_norm",
    "sync_batch_norms",
]
