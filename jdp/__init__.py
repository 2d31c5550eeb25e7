"""jdp: data-parallel training for JAX."""

from jdp import collectives
from jdp.accumulation import accumulate_gradients
from jdp.backward.loss import gradient_order, used_parameters
from jdp.buckets import BucketPlan, flatten_buckets, plan_buckets, unflatten_buckets
from jdp.description import describe
from jdp.grad_sync import local_gradients, sync_gradients, value_and_grad
from jdp.join import Joinable, JoinHook
from jdp.layer_sync import sync_in_backward
from jdp.mesh import World, global_batch
from jdp.optimizer import distributed_optimizer, skip_unused
from jdp.reduction import average
from jdp.replicas import check_replicas, check_same_program, replicate
from jdp.runtime.cluster import init
from jdp.runtime.join_context import Join
from jdp.runtime.uneven_batches import join_batches
from jdp.spmd import data_parallel
from jdp.types import AllReduce

__all__ = [
    "AllReduce",
    "BucketPlan",
    "Join",
    "JoinHook",
    "Joinable",
    "World",
    "accumulate_gradients",
    "average",
    "check_replicas",
    "check_same_program",
    "data_parallel",
    "describe",
    "distributed_optimizer",
    "flatten_buckets",
    "global_batch",
    "gradient_order",
    "init",
    "join_batches",
    "local_gradients",
    "plan_buckets",
    "replicate",
    "skip_unused",
    "sync_gradients",
    "sync_in_backward",
    "unflatten_buckets",
    "used_parameters",
    "value_and_grad",
]
