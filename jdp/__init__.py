"""jdp: data-parallel training for JAX.

A name of jdp, with all that it needs, is imported when it is first used, and so are
`jdp.collectives`, `jdp.hooks` and `jdp.watch`. Import `jdp.batch_norm`, `jdp.eager`,
`jdp.flax_linen`, `jdp.flax_nnx` and `jdp.parameter_server` where you use them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jdp.runtime import last_handler as _last_handler

if TYPE_CHECKING:
    from jdp import collectives as collectives
    from jdp import hooks as hooks
    from jdp import watch as watch
    from jdp.backward.loss_queries import gradient_order, used_parameters
    from jdp.evaluation.decorator import replicated
    from jdp.fingerprints.fingerprint import StateFingerprint, fingerprint_state
    from jdp.fingerprints.record import FingerprintRecord
    from jdp.gradients.accumulate import accumulate_gradients
    from jdp.gradients.averaging import average
    from jdp.gradients.buffers import broadcast_from, sync_buffers
    from jdp.gradients.differentiation import value_and_grad
    from jdp.gradients.in_backward import sync_in_backward
    from jdp.gradients.metric_objects import merge_metrics
    from jdp.gradients.noise import GradientNorms, NoiseScaleState, noise_scale
    from jdp.gradients.objective import mean_loss
    from jdp.gradients.sums import sum_over_replicas
    from jdp.gradients.sync import local_gradients, sync_gradients
    from jdp.join.context import Join
    from jdp.join.uneven_batches import join_batches
    from jdp.optimizers.diloco import diloco
    from jdp.optimizers.distributed_optimizer import distributed_optimizer
    from jdp.optimizers.local_sgd import local_sgd
    from jdp.optimizers.local_training import LocalTraining
    from jdp.optimizers.loss_scale import LossScaleState, dynamic_loss_scale, loss_scale
    from jdp.optimizers.reshard import checkpoint_template, consolidate, reshard, spread
    from jdp.optimizers.skip_unused import skip_unused
    from jdp.optimizers.zero1 import zero1
    from jdp.optimizers.zero_state import ZeroState
    from jdp.replicas.initial_state import copy_per_replica
    from jdp.replicas.joinable import Joinable, JoinHook
    from jdp.replicas.mesh import World, global_batch
    from jdp.replicas.per_replica import PerReplica
    from jdp.replicas.replication import check_replicas, check_same_program, replicate
    from jdp.replicas.shard_keys import shard_key
    from jdp.replicas.sharding import StreamShard
    from jdp.replicas.shards import Shard
    from jdp.runtime.cluster import init
    from jdp.runtime.leaving import shutdown
    from jdp.step.decorator import data_parallel
    from jdp.step.description import describe
    from jdp.trees.buckets import (
        BucketPlan,
        flatten_buckets,
        plan_buckets,
        unflatten_buckets,
    )
    from jdp.types import AllReduce

__version__ = "0.1.0.dev0"  # pyproject.toml reads it from here.

__all__ = [
    "AllReduce",
    "BucketPlan",
    "FingerprintRecord",
    "GradientNorms",
    "Join",
    "JoinHook",
    "Joinable",
    "LocalTraining",
    "LossScaleState",
    "NoiseScaleState",
    "PerReplica",
    "Shard",
    "StateFingerprint",
    "StreamShard",
    "World",
    "ZeroState",
    "accumulate_gradients",
    "average",
    "broadcast_from",
    "check_replicas",
    "check_same_program",
    "checkpoint_template",
    "consolidate",
    "copy_per_replica",
    "data_parallel",
    "describe",
    "diloco",
    "distributed_optimizer",
    "dynamic_loss_scale",
    "fingerprint_state",
    "flatten_buckets",
    "global_batch",
    "gradient_order",
    "init",
    "join_batches",
    "local_gradients",
    "local_sgd",
    "loss_scale",
    "mean_loss",
    "merge_metrics",
    "noise_scale",
    "plan_buckets",
    "replicate",
    "replicated",
    "reshard",
    "shard_key",
    "shutdown",
    "skip_unused",
    "spread",
    "sum_over_replicas",
    "sync_buffers",
    "sync_gradients",
    "sync_in_backward",
    "unflatten_buckets",
    "used_parameters",
    "value_and_grad",
    "zero1",
]

# By module, its names in `__all__`: the same as above, for when a program runs.
_NAMES = {
    "jdp.backward.loss_queries": "gradient_order used_parameters",
    "jdp.evaluation.decorator": "replicated",
    "jdp.fingerprints.fingerprint": "StateFingerprint fingerprint_state",
    "jdp.fingerprints.record": "FingerprintRecord",
    "jdp.gradients.accumulate": "accumulate_gradients",
    "jdp.gradients.averaging": "average",
    "jdp.gradients.buffers": "broadcast_from sync_buffers",
    "jdp.gradients.differentiation": "value_and_grad",
    "jdp.gradients.in_backward": "sync_in_backward",
    "jdp.gradients.metric_objects": "merge_metrics",
    "jdp.gradients.noise": "GradientNorms NoiseScaleState noise_scale",
    "jdp.gradients.objective": "mean_loss",
    "jdp.gradients.sums": "sum_over_replicas",
    "jdp.gradients.sync": "local_gradients sync_gradients",
    "jdp.join.context": "Join",
    "jdp.join.uneven_batches": "join_batches",
    "jdp.optimizers.diloco": "diloco",
    "jdp.optimizers.distributed_optimizer": "distributed_optimizer",
    "jdp.optimizers.local_sgd": "local_sgd",
    "jdp.optimizers.local_training": "LocalTraining",
    "jdp.optimizers.loss_scale": "LossScaleState dynamic_loss_scale loss_scale",
    "jdp.optimizers.reshard": "checkpoint_template consolidate reshard spread",
    "jdp.optimizers.skip_unused": "skip_unused",
    "jdp.optimizers.zero1": "zero1",
    "jdp.optimizers.zero_state": "ZeroState",
    "jdp.replicas.initial_state": "copy_per_replica",
    "jdp.replicas.joinable": "Joinable JoinHook",
    "jdp.replicas.mesh": "World global_batch",
    "jdp.replicas.per_replica": "PerReplica",
    "jdp.replicas.replication": "check_replicas check_same_program replicate",
    "jdp.replicas.shard_keys": "shard_key",
    "jdp.replicas.sharding": "StreamShard",
    "jdp.replicas.shards": "Shard",
    "jdp.runtime.cluster": "init",
    "jdp.runtime.leaving": "shutdown",
    "jdp.step.decorator": "data_parallel",
    "jdp.step.description": "describe",
    "jdp.trees.buckets": "BucketPlan flatten_buckets plan_buckets unflatten_buckets",
    "jdp.types": "AllReduce",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_PACKAGES = ("collectives", "hooks", "watch")
_OTHERS = ("batch_norm", "eager", "flax_linen", "flax_nnx", "parameter_server")


_last_handler.reserve()


def __getattr__(name: str) -> Any:
    """Imports a name of jdp when it is first used."""
    if name in _PACKAGES:
        return importlib.import_module(f"jdp.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value  # Found without this function from now on.
        return value
    hint = f". Import it: `from jdp import {name}`." if name in _OTHERS else ""
    raise AttributeError(f"module 'jdp' has no attribute {name!r}{hint}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
