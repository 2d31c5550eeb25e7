"""Transforms: what binds an axis of replicas, for tests that hold under each."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests import harness

AXIS = "data"


def _under_shard_map(check_vma):
    def run(fn, n, shared, local):
        def body(shared, local):
            return fn(shared, jax.tree.map(lambda x: x[0], local))

        world = harness.local_world(n)
        mapped = jax.shard_map(
            body,
            mesh=world.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(AXIS)),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
        return jax.jit(mapped)(shared, local)

    return run


def _under_pmap(fn, n, shared, local):
    mapped = jax.pmap(fn, AXIS, in_axes=(None, 0), devices=jax.devices()[:n])
    return jax.tree.map(lambda x: np.asarray(x)[0], mapped(shared, local))


def _under_vmap(fn, n, shared, local):
    mapped = jax.vmap(fn, in_axes=(None, 0), axis_name=AXIS, axis_size=n)
    return jax.tree.map(lambda x: np.asarray(x)[0], mapped(shared, local))


TRANSFORMS = {
    "shard_map": _under_shard_map(check_vma=True),
    "shard_map unchecked": _under_shard_map(check_vma=False),
    "pmap": _under_pmap,
    "vmap": _under_vmap,
}
transforms = pytest.mark.parametrize("run", TRANSFORMS.values(), ids=TRANSFORMS)
packings = pytest.mark.parametrize("packing", ["flat", "tuple", None])
sizes = pytest.mark.parametrize("n", [1, 2, 4, 8])
