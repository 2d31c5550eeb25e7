"""jdp: data-parallel training for JAX."""

from jdp import collectives, hooks
from jdp.accumulation import accumulate_gradients
from jdp.backward.loss import gradient_order, used_parameters
from jdp.buckets import BucketPlan, flatten_buckets, plan_buckets, unflatten_buckets
from jdp.buffer_sync import broadcast_from, sync_buffers
from jdp.description import describe
from jdp.grad_sync import local_gradients, sync_gradients, value_and_grad
from jdp.gradient_noise import GradientNorms, NoiseScaleState, noise_scale
from jdp.join import Joinable, JoinHook
from jdp.layer_sync import sync_in_backward
from jdp.local_training import LocalTraining, local_sgd
from jdp.mesh import World, global_batch
from jdp.objective import mean_loss
from jdp.optimizer import distributed_optimizer, skip_unused
from jdp.outer_steps import diloco
from jdp.per_replica import PerReplica
from jdp.reduction import average
from jdp.replica_state import copy_per_replica
from jdp.replicas import check_replicas, check_same_program, replicate
from jdp.resharding import consolidate, reshard, saved_like, spread
from jdp.runtime.cluster import init
from jdp.runtime.join_context import Join
from jdp.runtime.uneven_batches import join_batches
from jdp.spmd import data_parallel
from jdp.types import AllReduce
from jdp.zero import ZeroState, zero1

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
    "saved_like",
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
