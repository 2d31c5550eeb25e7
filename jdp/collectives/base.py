"""Base: the contract of an all-reduce, and helpers that its implementations share.

The contract of `all_reduce(x, axis_name, *, op="sum") -> x`:

- `x` is a flat buffer, shape (n,), of any n; every replica of the axis calls it the
  same number of times, in the same order, with the same shape, dtype and options, under
  `shard_map`, `pmap(axis_name=)` or `vmap(axis_name=)`.
- Every replica gets bitwise the same result, in the dtype of `x`. Under `shard_map`
  with `check_vma=True` the type of the result is invariant over the axis.
- Sums and products of 16-bit floats are kept in float32 and rounded once, at the end.
  Partial sums travel in float32; inputs and results travel in 16 bits.
- The mean of integers is rounded towards zero.
- On an axis of size 1 the result is `x`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jdp import compat, types
from jdp.compat import annotations
from jdp.types import AxisName

Op = Literal["sum", "mean", "min", "max", "product"]
Pairs = Sequence[tuple[int, int]]  # (source rank, destination rank).


class ReplicaGroup(NamedTuple):
    """Replicas that reduce together, and the rank of this one."""

    axis_name: AxisName
    size: int
    rank: jax.Array  # int32 ()


class ReduceScatterAllGather(NamedTuple):
    """Two halves of an all-reduce; between them replica i holds part i.

    The buffer, shape (n,), is padded to a multiple of the number of replicas and cut
    into equal parts, shape (ceil(n / num_replicas),).
    """

    reduce_scatter: Callable[..., jax.Array]  # (x, axis_name, *, op, dtype) -> part
    all_gather: Callable[..., jax.Array]  # (part, axis_name) -> padded buffer
    # The same for several arrays of one dtype, without packing them, or None:
    # ([(num_replicas, k), ...], axis_name, *, op) -> [(k,), ...], and its inverse.
    scatter_rows: Callable[..., list[jax.Array]] | None = None
    gather_rows: Callable[..., list[jax.Array]] | None = None


def enter(x: jax.Array, axis_name: AxisName, op: Op) -> tuple[jax.Array, ReplicaGroup]:
    """Checks the arguments of an all-reduce and finds the group that takes part.

    Raises:
      ValueError: `x` is not flat, `op` is unknown, or `axis_name` is not bound.
      TypeError: `op` is not defined for the dtype of `x`.
    """
    if op not in get_args(Op):
        raise ValueError(f"`op` must be one of {', '.join(get_args(Op))}, got {op!r}.")
    if x.ndim != 1:
        raise ValueError(
            f"`x` must be a flat buffer, shape (n,), got shape {x.shape}. Pass "
            "`x.ravel()`, or pack a tree with `jdp.flatten_buckets`."
        )
    check_dtype(x.dtype, op)
    group = find_group(axis_name)
    return cast_varying(x, axis_name), group


def find_group(axis_name: AxisName) -> ReplicaGroup:
    """Returns the replicas of an axis.

    Raises:
      ValueError: `axis_name` is not bound.
    """
    size = compat.axis_size(axis_name)
    return ReplicaGroup(
        axis_name, size, compat.axis_index(types.as_axis_names(axis_name))
    )


def is_trivial(x: jax.Array, group: ReplicaGroup) -> bool:
    """Whether there is nothing to send."""
    return group.size == 1 or x.size == 0


def accumulator(dtype: Any, op: Op) -> Any:
    """Returns the dtype in which values of `dtype` are reduced."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_narrow and op not in ("min", "max") else dtype


def combine(op: Op, a: jax.Array, b: jax.Array) -> jax.Array:
    """Reduces two arrays to one, in the dtype of the accumulator."""
    a, b = (x.astype(accumulator(x.dtype, op)) for x in (a, b))
    match op:
        case "sum" | "mean":
            return a + b
        case "product":
            return a * b
        case "min":
            return jnp.minimum(a, b)
        case "max":
            return jnp.maximum(a, b)


def finish(x: jax.Array, op: Op, num_replicas: int, dtype: Any) -> jax.Array:
    """Turns the accumulated value into the result, in `dtype`."""
    if op == "mean":
        is_integer = jnp.issubdtype(x.dtype, jnp.integer)
        x = (
            lax.div(x, jnp.full_like(x, num_replicas))
            if is_integer
            else x / num_replicas
        )
    return x.astype(dtype)


def exchange(x: jax.Array, group: ReplicaGroup, pairs: Pairs) -> jax.Array:
    """Sends `x` along `pairs`; ranks that are not a destination get undefined values.

    Args:
      x: any shape, the same on all replicas.
      group: the replicas; all of them make this call.
      pairs: each rank is at most once a source and at most once a destination.
    """
    names = types.as_axis_names(group.axis_name)
    if set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes):
        return lax.ppermute(x, names, pairs)
    # An axis of `vmap`, whose `ppermute` wants a source for every rank, and one name.
    source_of = dict(enumerate(range(group.size))) | {b: a for a, b in pairs}
    if len(names) == 1:
        return lax.ppermute(x, names, [(a, b) for b, a in source_of.items()])
    everyone = x
    for name in reversed(names):
        everyone = lax.all_gather(everyone, name)
    sources = jnp.array([source_of[b] for b in range(group.size)])
    return everyone.reshape(group.size, *x.shape)[sources[group.rank]]


def all_to_all(rows: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sends row i of `rows`, shape (num_replicas, m), to replica i.

    Returns:
      Shape (num_replicas, m): row i was sent by replica i.
    """
    names = types.as_axis_names(axis_name)
    shape = rows.shape
    rows = rows.reshape(*[lax.axis_size(name) for name in names], *shape[1:])
    # One axis after the other, since `vmap` takes one name at a time.
    for dimension, name in enumerate(names):
        rows = lax.all_to_all(rows, name, dimension, dimension, tiled=True)
    return rows.reshape(shape)


def pad(x: jax.Array, multiple: int) -> jax.Array:
    """Pads `x`, shape (n,), with zeros to a multiple of `multiple` elements."""
    missing = -x.size % multiple
    return jnp.pad(x, (0, missing)) if missing else x


def default_num_chunks(num_bytes: int, bytes_per_chunk: int) -> int:
    """Returns the default number of chunks of a buffer.

    The default is 1, except on CPU, where chunks have about `bytes_per_chunk`: replicas
    of one process share its caches, and a buffer that does not fit takes twice as long.
    """
    is_cpu = jax.default_backend() == "cpu"
    return max(1, num_bytes // bytes_per_chunk) if is_cpu else 1


def limit_chunks(num_chunks: int, num_elements: int) -> int:
    """Returns `num_chunks`, at most one per element.

    Raises:
      ValueError: `num_chunks` is less than 1.
    """
    if num_chunks < 1:
        raise ValueError(f"`num_chunks` must be at least 1, got {num_chunks}.")
    return max(1, min(num_chunks, num_elements))


def empty(shape: tuple[int, ...], like: jax.Array) -> jax.Array:
    """Returns a buffer to fill in a loop, with the dtype and varying axes of `like`."""
    axes = sorted(compat.varying_axes(like))
    return compat.cast_varying(jnp.zeros(shape, like.dtype), axes)


def cast_varying(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Casts `x` to a type that varies over `axis_name`, where JAX tracks that."""
    return compat.cast_varying(x, sorted(compat.tracked_axes(axis_name)))


def replicated(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Declares that `x` is the same on all replicas, to JAX's types and to jdp.

    No data moves. The caller guarantees it: JAX cannot prove it, so `lax.pcast` does
    not offer this direction. Where JAX tracks varying axes by type, the derivative is
    taken of the copy on replica 0.
    """
    return annotations.declare_replicated(x, types.as_axis_names(axis_name))


def check_dtype(dtype: Any, op: Op) -> None:
    """Raises TypeError unless arrays of `dtype` can be reduced by `op`."""
    if not jnp.issubdtype(dtype, jnp.number):
        raise TypeError(
            f"`x` must be of a number's dtype, got {dtype}. Cast it, to int32 for "
            "example."
        )
    if op in ("min", "max") and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"`op={op!r}` is not defined for {dtype}.")
