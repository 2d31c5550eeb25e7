"""Gradients: what `jax.grad` sees of an eager collective, outside of `jit`.

The rules are Horovod's, but for reductions that are no sum or average, which have none
here. They treat the losses of the processes as one: the gradient of a sum is the sum of
the gradients. The gradients of `all_gather` and `broadcast` are averages, as if each
process had computed the loss of all.
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

Collective = Callable[..., Any]  # (tree, name=) -> tree.
Forward = Callable[[Any, str], tuple[Any, Any]]  # -> (result, what backward needs).
_LINEAR = ("sum", "average")
_SUFFIX = ".gradient"  # of the names of collectives of gradients.
Backward = Callable[[Any, Any, str], Any]  # (that, gradient of the result) -> of x.


_USE = (
    "Inside of `jit`, use `jdp.data_parallel`, `jdp.sync_gradients` or "
    "`jdp.collectives`."
)


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf is a tracer of JAX."""
    if isinstance(tree, np.ndarray):
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def describe_unsupported(leaf: jax.core.Tracer) -> str:
    """Says why a collective cannot be called with a tracer."""
    if "Jaxpr" in type(leaf).__name__:
        return (
            "An eager collective was called while JAX traces, for `jit`, "
            "`jax.checkpoint` or a loop such as `lax.scan`. It runs on the host, "
            f"outside of them. {_USE}"
        )
    return _describe_others()


def _describe_others() -> str:
    return (
        "An eager collective was called while JAX traces, for a transformation that it "
        "does not support: it has first derivatives by `jax.grad` and `jax.vjp`, but "
        "none of second order and no `jax.jvp` or `jax.vmap`, and functions that end "
        f"in `_async` have none. Call those without `_async`. {_USE}"
    )


def all_reduce(
    call: Collective, op: str, tree: PyTree, name: str, *, together: bool = False
) -> PyTree:
    """The gradient of a sum or an average is reduced in the same way.

    Others have none: a gradient that comes to them is a TypeError.

    Args:
      call: the collective, of a tree and a name.
      op: its reduction.
      tree: pytree of arrays, of which some are traced.
      name: of the collective.
      together: whether all leaves go in one call, or each in its own.
    """

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: PyTree, name: str) -> Any:
        if op not in _LINEAR:
            raise TypeError(
                f"{name.removesuffix(_SUFFIX)!r}: a reduction with `op={op!r}` has no "
                "derivative here; those with 'sum' and 'average' have. Reduce what "
                "`jax.lax.stop_gradient` gives where none is needed, or compute it "
                "from `jdp.eager.all_gather`, which has one."
            )
        return call(gradient, name=name)

    return _map(forward, backward, tree, name, together=together)


def all_gather(
    call: Collective,
    average: Collective,
    place: int,
    tree: PyTree,
    name: str,
    *,
    together: bool = False,
) -> PyTree:
    """The gradient is averaged, and each process takes the rows that were its own.

    Args:
      call: see `all_reduce`.
      average: the average over the same processes.
      place: of this process among them.
      tree: see `all_reduce`.
      name: see `all_reduce`.
      together: see `all_reduce`.
    """

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        num_rows = jax.tree.map(lambda x: np.array([x.shape[0]]), x)
        counts = call(num_rows, name=f"{name}.rows")
        ends = jax.tree.map(lambda count: int(count[: place + 1].sum()), counts)
        return call(x, name=name), (jax.tree.map(lambda n: int(n[0]), num_rows), ends)

    def backward(kept: Any, gradient: PyTree, name: str) -> Any:
        num_rows, ends = kept
        return jax.tree.map(
            lambda mean, n, end: None if mean is None else mean[end - n : end],
            average(gradient, name=name),
            num_rows,
            ends,
            is_leaf=_is_none,
        )

    return _map(forward, backward, tree, name, together=together)


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
    call: Collective,
    gather: Collective,
    factor: float,
    tree: PyTree,
    name: str,
    *,
    together: bool = False,
) -> PyTree:
    """The gradient is gathered, and multiplied with `factor`; see `all_gather`."""

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: PyTree, name: str) -> Any:
        return jax.tree.map(lambda g: g * factor, gather(gradient, name=name))

    return _map(forward, backward, tree, name, together=together)


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


def _map(
    forward: Forward,
    backward: Backward,
    tree: PyTree,
    name: str,
    *,
    together: bool = False,
) -> PyTree:
    """Applies a collective with its derivative to the tree, or to each leaf."""
    tree = jax.tree.map(jnp.asarray, tree)
    if together:
        return _call_with_vjp(forward, backward, name, tree)
    leaves, treedef = jax.tree.flatten(tree)
    paths = ["" if path == "(root)" else path for path in buckets.leaf_paths(tree)]
    results = [
        _call_with_vjp(forward, backward, name + path, leaf)
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, results)


def _call_with_vjp(forward: Forward, backward: Backward, name: str, x: PyTree) -> Any:
    try:
        return _call(forward, backward, name, x)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(_describe_others()) from error  # JAX does not say of what.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _call(forward: Forward, backward: Backward, name: str, x: PyTree) -> Any:
    return forward(x, name)[0]


def _run_forward(
    forward: Forward, backward: Backward, name: str, x: PyTree
) -> tuple[Any, Any]:
    return forward(x, name)


def _run_backward(
    forward: Forward, backward: Backward, name: str, kept: Any, gradient: Any
) -> tuple[Any]:
    # Integers have no gradient; None stands for it, and is no leaf of a call.
    gradient = jax.tree.map(
        lambda g: None if g.dtype == jax.dtypes.float0 else g, gradient
    )
    return (backward(kept, gradient, f"{name}{_SUFFIX}"),)


def _is_none(x: Any) -> bool:
    return x is None


_call.defvjp(_run_forward, _run_backward)
