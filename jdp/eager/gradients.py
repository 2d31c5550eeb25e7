"""Gradients: what `jax.grad` sees of an eager collective, outside of `jit`.

The rules are Horovod's. They treat the losses of the processes as one: the gradient of
a sum is the sum of the gradients. The gradients of `all_gather` and `broadcast` are
averages, as if each process had computed the loss of all.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdp import buckets
from jdp.types import PyTree

Collective = Callable[..., Any]  # (array, name=) -> array.
Forward = Callable[[Any, str], tuple[Any, Any]]  # -> (result, what backward needs).
Backward = Callable[[Any, Any, str], Any]  # (that, gradient of the result) -> of x.


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf is a tracer of JAX."""
    if isinstance(tree, np.ndarray):
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def all_reduce(call: Collective, tree: PyTree, name: str) -> PyTree:
    """The gradient is reduced in the same way.

    Args:
      call: the collective, of one array and a name.
      tree: pytree of arrays, of which some are traced.
      name: of the collective.
    """

    def forward(x: jax.Array, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: jax.Array, name: str) -> Any:
        return call(gradient, name=name)

    return _map(forward, backward, tree, name)


def all_gather(
    call: Collective, average: Collective, place: int, tree: PyTree, name: str
) -> PyTree:
    """The gradient is averaged, and each process takes the rows that were its own.

    Args:
      call: see `all_reduce`.
      average: the average over the same processes.
      place: of this process among them.
      tree: see `all_reduce`.
      name: see `all_reduce`.
    """

    def forward(x: jax.Array, name: str) -> tuple[Any, Any]:
        count = call(np.array([x.shape[0]]), name=f"{name}.rows")
        start = int(count[:place].sum())
        return call(x, name=name), (start, start + x.shape[0])

    def backward(rows: tuple[int, int], gradient: jax.Array, name: str) -> Any:
        return average(gradient, name=name)[rows[0] : rows[1]]

    return _map(forward, backward, tree, name)


def broadcast(
    call: Collective, average: Collective, is_root: bool, tree: PyTree, name: str
) -> PyTree:
    """The gradient is averaged on the root, and zero on others; see `all_gather`."""

    def forward(x: jax.Array, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: jax.Array, name: str) -> Any:
        mean = average(gradient, name=name)
        return mean if is_root else jnp.zeros_like(mean)

    return _map(forward, backward, tree, name)


def reduce_scatter(
    call: Collective, gather: Collective, factor: float, tree: PyTree, name: str
) -> PyTree:
    """The gradient is gathered, and multiplied with `factor`; see `all_gather`."""

    def forward(x: jax.Array, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: jax.Array, name: str) -> Any:
        return gather(gradient, name=name) * factor

    return _map(forward, backward, tree, name)


def all_to_all(call: Callable[..., Any], x: jax.Array, splits: Any, name: str) -> Any:
    """The gradient goes back to where the rows came from.

    Args:
      call: `all_to_all` of one array, splits and a name.
      x: traced.
      splits: how many rows go to each process.
      name: see `all_reduce`.

    Returns:
      The rows that came, and how many from each.
    """
    splits = np.asarray(splits)

    def forward(x: jax.Array, name: str) -> tuple[Any, Any]:
        out, received = call(x, splits, name=name)
        return (out, received), (received, x.shape[0])

    def backward(kept: Any, gradients: Any, name: str) -> Any:
        received, num_rows = kept
        back, _ = call(gradients[0], np.asarray(received), name=name)
        missing = int(num_rows) - back.shape[0]  # Rows that were sent to nobody.
        return jnp.pad(back, [(0, missing)] + [(0, 0)] * (back.ndim - 1))

    return _map(forward, backward, x, name)


def _map(forward: Forward, backward: Backward, tree: PyTree, name: str) -> PyTree:
    """Applies a collective with its derivative to each leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    paths = ["" if path == "(root)" else path for path in buckets.leaf_paths(tree)]
    results = [
        _call(forward, backward, name + path, jnp.asarray(leaf))
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _call(forward: Forward, backward: Backward, name: str, x: jax.Array) -> Any:
    return forward(x, name)[0]


def _run_forward(
    forward: Forward, backward: Backward, name: str, x: jax.Array
) -> tuple[Any, Any]:
    return forward(x, name)


def _run_backward(
    forward: Forward, backward: Backward, name: str, kept: Any, gradient: Any
) -> tuple[Any]:
    return (backward(kept, gradient, f"{name}.gradient"),)


_call.defvjp(_run_forward, _run_backward)
