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
from jax.interpreters import ad

from jdp.types import PyTree

Collective = Callable[..., Any]  # (tree, name=) -> tree.
Begin = Callable[..., Any]  # (tree, name=) -> Handle of it.
Forward = Callable[[Any, str], tuple[Any, Any]]  # -> (result, what backward needs).
_LINEAR = ("sum", "average")
_SUFFIX = ".gradient"  # of the names of collectives of gradients.
# Arrays go between host and devices whatever the caller's own arithmetic may do.
_TRANSFERS = functools.partial(jax.transfer_guard, "allow")
Backward = Callable[[Any, Any, str], Any]  # (that, gradient of the result) -> of x.


_USE = (
    "Inside of `jit`, use `jdp.data_parallel`, `jdp.sync_gradients` or "
    "`jdp.collectives`."
)


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


def all_reduce(call: Collective, op: str, tree: PyTree, name: str) -> PyTree:
    """The gradient of a sum or an average is reduced in the same way.

    Others have none: a gradient that comes to them is a TypeError.

    Args:
      call: the collective, of a tree and a name.
      op: its reduction.
      tree: pytree of arrays, of which some are traced.
      name: of the collective.
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

    return _call_with_vjp(forward, backward, tree, name)


def all_gather(
    begin: Begin, average: Collective, place: int, tree: PyTree, name: str
) -> PyTree:
    """The gradient is averaged, and each process takes the rows that were its own.

    Args:
      begin: begins the collective, of a tree and a name.
      average: the average over the same processes.
      place: of this process among them.
      tree: see `all_reduce`.
      name: see `all_reduce`.
    """

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        # A scalar has no rows, and is refused on all ranks.
        num_rows = jax.tree.map(lambda x: x.shape[0] if x.ndim else 0, x)
        # First what may be refused here, or the others would hear of the rows alone.
        whole = begin(x, name=name)
        rows = jax.tree.map(lambda n: np.array([n]), num_rows)
        counting = begin(rows, name=f"{name}.rows")
        try:
            counts = counting.result()
        except RuntimeError:
            whole.result()  # Its name is free only then.
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
    """The gradient is averaged on the root, and zero on others; see `all_gather`."""

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: PyTree, name: str) -> Any:
        mean = average(gradient, name=name)
        return mean if is_root else jax.tree.map(jnp.zeros_like, mean)

    return _call_with_vjp(forward, backward, tree, name)


def reduce_scatter(
    call: Collective, gather: Collective, factor: float, tree: PyTree, name: str
) -> PyTree:
    """The gradient is gathered, and multiplied with `factor`; see `all_gather`."""

    def forward(x: PyTree, name: str) -> tuple[Any, Any]:
        return call(x, name=name), None

    def backward(_: Any, gradient: PyTree, name: str) -> Any:
        return jax.tree.map(lambda g: g * factor, gather(gradient, name=name))

    return _call_with_vjp(forward, backward, tree, name)


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
        missing = int(num_rows) - back.shape[0]  # Rows that were not sent.
        return jnp.pad(back, [(0, missing)] + [(0, 0)] * (back.ndim - 1))

    return _call_with_vjp(forward, backward, x, name)


def _call_with_vjp(
    forward: Forward, backward: Backward, tree: PyTree, name: str
) -> PyTree:
    """Applies a collective with its derivative to all leaves of a tree at once.

    Where one of them is refused, the other processes hear of none.
    """
    if any([_is_pushed_forward(leaf) for leaf in jax.tree.leaves(tree)]):
        raise TypeError(_describe_others())
    try:
        with _TRANSFERS():
            return _call(forward, backward, name, jax.tree.map(jnp.asarray, tree))
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(_describe_others()) from error  # JAX does not say of what.


def _is_pushed_forward(leaf: Any) -> bool:
    """Whether `jax.jvp` traces it, which JAX itself says only after the collective."""
    if not isinstance(leaf, ad.JVPTracer):
        return False
    # That of a `jax.grad` which goes by `jax.jvp` is recorded, for the way back.
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
    # Integers have no gradient; None stands for it, and is no leaf of a call.
    gradient = jax.tree.map(
        lambda g: None if g.dtype == jax.dtypes.float0 else g, gradient
    )
    with _TRANSFERS():
        return (backward(kept, gradient, f"{name}{_SUFFIX}"),)


def _is_none(x: Any) -> bool:
    return x is None


_call.defvjp(_run_forward, _run_backward)
