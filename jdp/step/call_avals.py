"""Call avals: which shapes and dtypes have the arguments of all processes together?"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jdp.replicas import host_arrays, mesh
from jdp.replicas.mesh import World
from jdp.step import call_arguments, placement
from jdp.trees import tree_paths
from jdp.types import PyTree


def global_avals(world: World, batches: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Returns shapes, dtypes and shardings of the arguments of all processes together.

    Args:
      world: the replicas.
      batches: arrays or `jax.ShapeDtypeStruct`s, with the samples of this process.

    Raises:
      TypeError: a leaf is not an array.
      ValueError: a batch has no dimension 0.
    """

    def of_batches(tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        avals = [of_batch(tree, i, leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(treedef, avals)

    def of_batch(tree: PyTree, index: int, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, np.ndarray) or not hasattr(leaf, "dtype"):
            path = tree_paths.leaf_paths(tree)[index] or "(root)"
            host_arrays.as_host_array(leaf, f"The batch's leaf `{path}`")
        shape, dtype = _shape_and_dtype(leaf)
        if not shape:
            path = tree_paths.leaf_paths(tree)[index]
            raise ValueError(
                f"The batch's leaf `{path}` is a scalar; {mesh.SCALAR_ADVICE}"
            )
        if not (isinstance(leaf, jax.Array) and leaf.sharding == world.split):
            shape = (shape[0] * world.process_count, *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=world.split)

    def of_replicated(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = path[0].key + jax.tree_util.keystr(path[1:])
        placement.check_is_array(leaf, f"The argument `{name}`")
        shape, dtype = _shape_and_dtype(leaf)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=world.replicated)

    if not call_arguments.is_call(batches):
        return of_batches(batches)
    *others, call = batches
    found = dataclasses.replace(
        call,
        batches=of_batches(call.batches),
        replicated=jax.tree_util.tree_map_with_path(of_replicated, call.replicated),
    )
    return *of_batches(tuple(others)), found


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    aval = jax.eval_shape(lambda x: x, leaf)
    return aval.shape, aval.dtype
