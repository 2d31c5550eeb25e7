"""Transforms: what binds an axis of replicas, for tests that hold under each."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests import harness, rarely

AXIS = "data"


def _under_shard_map(check_vma, jit=jax.jit):
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
        return jit(mapped)(shared, local)

    return run


def _under_pmap(jit=lambda mapped: mapped):
    def run(fn, n, shared, local):
        mapped = jax.pmap(fn, AXIS, in_axes=(None, 0), devices=jax.devices()[:n])
        return jax.tree.map(lambda x: np.asarray(x)[0], jit(mapped)(shared, local))

    return run


def _under_vmap(jit=lambda mapped: mapped):
    def run(fn, n, shared, local):
        mapped = jax.vmap(fn, in_axes=(None, 0), axis_name=AXIS, axis_size=n)
        return jax.tree.map(lambda x: np.asarray(x)[0], jit(mapped)(shared, local))

    return run


TRANSFORMS = {
    "shard_map": _under_shard_map(check_vma=True),
    "shard_map unchecked": _under_shard_map(check_vma=False),
    "pmap": _under_pmap(),
    "vmap": _under_vmap(),
}
# One program each, also of what `vmap` runs one operation after the other.
COMPILED_FAST = {
    "shard_map": _under_shard_map(check_vma=True, jit=harness.jit_fast),
    "shard_map unchecked": _under_shard_map(check_vma=False, jit=harness.jit_fast),
    "pmap": _under_pmap(harness.jit_fast),
    "vmap": _under_vmap(harness.jit_fast),
}


def _each_of(runs):
    often = [runs["shard_map"], runs["vmap"]]
    return pytest.mark.parametrize(
        "run", rarely.cases(runs.values(), often=often), ids=runs
    )


transforms = _each_of(TRANSFORMS)
transforms_compiled_fast = _each_of(COMPILED_FAST)
# None is "flat" on the CPU.
packings = pytest.mark.parametrize(
    "packing", rarely.cases(["flat", "tuple", None], often=("tuple", None))
)
sizes = pytest.mark.parametrize("n", rarely.cases([1, 2, 4, 8], often=(1, 4)))
