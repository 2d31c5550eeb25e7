"""jdp: data-parallel training for JAX.

Import `jdp.batch_norm`, `jdp.eager`, `jdp.flax_linen`, `jdp.flax_nnx` and
`jdp.parameter_server` where you use them: `import jdp` does not import these.
"""

from jdp import collectives, hooks
from jdp.backward.loss_queries import gradient_order, used_parameters
from jdp.gradients.accumulate import accumulate_gradients
from jdp.gradients.averaging import average
from jdp.gradients.buffers import broadcast_from, sync_buffers
from jdp.gradients.differentiation import value_and_grad
from jdp.gradients.in_backward import sync_in_backward
from jdp.gradients.noise import GradientNorms, NoiseScaleState, noise_scale
from jdp.gradients.objective import mean_loss
from jdp.gradients.sync import local_gradients, sync_gradients
from jdp.join.context import Join
from jdp.join.uneven_batches import join_batches
from jdp.optimizers.diloco import diloco
from jdp.optimizers.distributed_optimizer import distributed_optimizer
from jdp.optimizers.local_sgd import local_sgd
from jdp.optimizers.local_training import LocalTraining
from jdp.optimizers.reshard import checkpoint_template, consolidate, reshard, spread
from jdp.optimizers.skip_unused import skip_unused
from jdp.optimizers.zero1 import zero1
from jdp.optimizers.zero_state import ZeroState
from jdp.replicas.initial_state import copy_per_replica
from jdp.replicas.joinable import Joinable, JoinHook
from jdp.replicas.mesh import World, global_batch
from jdp.replicas.per_replica import PerReplica
from jdp.replicas.replication import check_replicas, check_same_program, replicate
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
    "GradientNorms",
    "Join",
    "JoinHook",
    "Joinable",
    "LocalTraining",
    "NoiseScaleState",
    "PerReplica",
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
    "flatten_buckets",
    "global_batch",
    "gradient_order",
    "init",
    "join_batches",
    "local_gradients",
    "local_sgd",
    "mean_loss",
    "noise_scale",
    "plan_buckets",
    "replicate",
    "reshard",
    "shutdown",
    "skip_unused",
    "spread",
    "sync_buffers",
    "sync_gradients",
    "sync_in_backward",
    "unflatten_buckets",
    "used_parameters",
    "value_and_grad",
    "zero1",
]
