"""Gradients: the derivatives of eager collectives, outside of `jit`.

The rules are Horovod's, except that reductions other than sum and average have no
derivative here. They treat the losses of the processes as one: the gradient of a sum is
the sum of the gradients. The gradients of `all_gather` and `broadcast` are averages, as
if each process had computed the loss of all.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jdp.types import PyTree

Collective = Callable[..., Any]  # (tree, name=) -> tree.
Begin = Callable[..., Any]  # (tree, name=) -> Handle of it.
Forward = Callable[[Any, str], tuple[Any, Any]]  # (x, name) -> (result, residuals).
_LINEAR = ("sum", "average")
_SUFFIX = ".gradient"  # appended to the names of collectives of gradients.
# Arrays move between host and devices even where the caller forbids transfers.
_TRANSFERS = functools.partial(jax.transfer_guard, "allow")
# (residuals, gradient of the result, name) -> gradient of x.
Backward = Callable[[Any, Any, str], Any]


_USE = (
    "Inside of `jit`, use `jdp.data_parallel`, `jdp.sync_gradients` or "
    "`jdp.collectives`."
)


def describe_unsupported(leaf: jax.core.Tracer) -> str:
    """Explains why a collective cannot be called with a tracer."""
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
        f"in `_async` have none. Call the ones without `_async`. {_USE}"
    )


def all_reduce(call: Collective, op: str, tree: PyTree, name: str) -> PyTree:
    """Calls an all-reduce whose gradient is reduced in the same way.

    Only sums and averages have a derivative; the backward pass of others is a
    TypeError.

    Args:
      call: the collective, called with a tree and a name.
      op: its reduction.
      tree: pytree of arrays, some of them traced.
      name: name of the collective.
    """

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: PyTree, name: str) -> Any:
        if op not in _LINEAR:
            raise TypeError(
                f"{name.removesuffix(_SUFFIX)!r}: a reduction with `op={op!r}` has no "
                "derivative here; 'sum' and 'average' have one. Apply "
                "`jax.lax.stop_gradient` to the input if no gradient is needed, or "
                "compute the result from `jdp.eager.all_gather`, which has one."
            )
        return call(gradient, name=name)

    return _call_with_vjp(forward, backward, tree, name)


def all_gather(
    begin: Begin, average: Collective, place: int, tree: PyTree, name: str
) -> PyTree:
    """Calls an all-gather; each process takes its rows of the averaged gradient.

    Args:
      begin: begins the collective, called with a tree and a name.
      average: the average over the same processes.
      place: position of this process among them.
      tree: see `all_reduce`.
      name: see `all_reduce`.
    """

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        # A scalar has no rows; the coordinator refuses it on all ranks.
        num_rows = jax.tree.map(lambda x: x.shape[0] if x.ndim else 0, x)
        # First the call that may be refused here: the others must not see rows alone.
        whole = begin(x, name=name)
        rows = jax.tree.map(lambda n: np.array([n]), num_rows)
        counting = begin(rows, name=f"{name}.rows")
        try:
            counts = counting.result()
        except RuntimeError:
            whole.result()  # Its name is free only after that.
            raise
        ends = jax.tree.map(lambda count: int(count[: place + 1].sum()), counts)
        return whole.result(), (num_rows, ends)

    def backward(kept: Any, gradient: PyTree, name: str) -> Any:
        num_rows, ends = kept
        return jax.tree.map(
            lambda mean, n, end: None if mean is None else mean[end - n : end],
            average(gradient, name=name),
            num_rows,
            ends,
            is_leaf=_is_none,
        )

    return _call_with_vjp(forward, backward, tree, name)


def broadcast(
    call: Collective, average: Collective, is_root: bool, tree: PyTree, name: str
) -> PyTree:
    """Calls a broadcast; its gradient is averaged on the root, and zero elsewhere."""

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: PyTree, name: str) -> Any:
        mean = average(gradient, name=name)
        return mean if is_root else jax.tree.map(jnp.zeros_like, mean)

    return _call_with_vjp(forward, backward, tree, name)


def reduce_scatter(
    call: Collective, gather: Collective, factor: float, tree: PyTree, name: str
) -> PyTree:
    """Calls a reduce-scatter; its gradient is gathered and multiplied by `factor`."""

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: PyTree, name: str) -> Any:
        return jax.tree.map(lambda g: g * factor, gather(gradient, name=name))

    return _call_with_vjp(forward, backward, tree, name)


def all_to_all(call: Callable[..., Any], x: jax.Array, splits: Any, name: str) -> Any:
    """Calls an all-to-all; the rows of its gradient are sent back.

    Args:
      call: `all_to_all`, called with one array, splits and a name.
      x: traced array.
      splits: number of rows for each process.
      name: see `all_reduce`.

    Returns:
      The received rows, and their number from each process.
    """
    splits = np.asarray(splits)

    def forward(x: jax.Array, name: str) -> tuple[Any, Any]:
        out, received = call(x, splits, name=name)
        return (out, received), (received, x.shape[0])

    def backward(kept: Any, gradients: Any, name: str) -> Any:
        received, num_rows = kept
        back, _ = call(gradients[0], np.asarray(received), name=name)
        missing = int(num_rows) - back.shape[0]  # Rows that were not sent.
        return jnp.pad(back, [(0, missing)] + [(0, 0)] * (back.ndim - 1))

    return _call_with_vjp(forward, backward, x, name)


def _call_with_vjp(
    forward: Forward, backward: Backward, tree: PyTree, name: str
) -> PyTree:
    """Applies a collective with its derivative to all leaves of a tree at once.

    If a leaf is refused, no leaf is submitted.
    """
    if any([_is_pushed_forward(leaf) for leaf in jax.tree.leaves(tree)]):
        raise TypeError(_describe_others())
    try:
        with _TRANSFERS():
            return _call(forward, backward, name, jax.tree.map(jnp.asarray, tree))
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(_describe_others()) from error  # JAX does not name it.


def _is_pushed_forward(leaf: Any) -> bool:
    """Whether `jax.jvp` traces a leaf; JAX complains only after the collective."""
    if not isinstance(leaf, ad.JVPTracer):
        return False
    # `jax.grad` pushes forward too, but its tangent is a tracer of a jaxpr.
    return "Jaxpr" not in type(leaf.tangent).__name__


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
    # Integers have no gradient. None stands for it and is not a leaf of a tree.
    gradient = jax.tree.map(
        lambda g: None if g.dtype == jax.dtypes.float0 else g, gradient
    )
    with _TRANSFERS():
        return (backward(kept, gradient, f"{name}{_SUFFIX}"),)


def _is_none(x: Any) -> bool:
    return x is None


_call.defvjp(_run_forward, _run_backward)
