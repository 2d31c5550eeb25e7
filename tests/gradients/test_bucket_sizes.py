"""Buckets have the size that is best for the all-reduce that takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp.types import AllReduce
from tests import harness

PARAMS = {name: np.ones((256, 1024), np.float32) for name in "abcdefgh"}  # 1 MiB each


def _loss(params, x):
    return sum(jnp.mean(x @ w) for w in params.values())


def _num_reductions(all_reduce, **options):
    world = harness.local_world(2)
    sizes = []

    def reduce(x, axis_name):
        sizes.append(x.size)
        return jax.lax.psum(x, axis_name)

    if all_reduce is not None:
        all_reduce = AllReduce(reduce, **all_reduce)

    @jdp.data_parallel(world=world)
    def step(params, x):
        grad_fn = jdp.value_and_grad(_loss, all_reduce=all_reduce or reduce, **options)
        loss, grads = grad_fn(params, x)
        return jax.tree.map(jnp.subtract, params, grads), loss

    step.lower(PARAMS, np.ones((4, 256), np.float32))
    return len([size for size in sizes if size > 1])


@pytest.mark.parametrize(
    ("size", "count"), [(None, 1), (1 << 20, 8), (1 << 18, 8), (2 << 20, 1)]
)
def test_an_all_reduce_names_its_size(size, count):
    assert _num_reductions({"bucket_bytes": size}) == count


def test_a_function_and_a_plan_of_the_users_have_their_own():
    assert _num_reductions(None) == 1
    plan = jdp.plan_buckets(PARAMS)
    assert _num_reductions({"bucket_bytes": 1 << 20}, plan=plan) == len(plan.buckets)
