"""jdp: data-parallel training for JAX."""

from jdp.buckets import BucketPlan, flatten_buckets, plan_buckets, unflatten_buckets
from jdp.grad_sync import average, local_gradients, sync_gradients, value_and_grad
from jdp.mesh import World, global_batch
from jdp.optimizer import distributed_optimizer
from jdp.replicas import check_replicas, check_same_program, replicate
from jdp.runtime.cluster import init
from jdp.spmd import data_parallel
from jdp.types import AllReduce

__all__ = [
    "AllReduce",
    "BucketPlan",
    "World",
    "average",
    "check_replicas",
    "check_same_program",
    "data_parallel",
    "distributed_optimizer",
    "flatten_buckets",
    "global_batch",
    "init",
    "local_gradients",
    "plan_buckets",
    "replicate",
    "sync_gradients",
    "unflatten_buckets",
    "value_and_grad",
]
