"""Ring: the fewest bytes a replica can send, in 2(n - 1) rounds between neighbours."""

import jax
import jax.numpy as jnp
from jax import lax

from jdp.collectives import base
from jdp.collectives.base import Op, ReduceScatterAllGather, ReplicaGroup
from jdp.compat import annotations
from jdp.types import AxisName

# Size of a message. 16 MiB over 8 CPU devices, in place: 47 ms uncut, 21 with 1 MiB and
# with half of it, 26 with a quarter; `lax.psum` 19.
_CHUNK_BYTES = 1 << 20
_MAX_UNROLLED = 16  # rounds; unrolled, XLA on CPU leaves out a copy of each message.


def ring_all_reduce(
    x: jax.Array,
    axis_name: AxisName,
    *,
    op: Op = "sum",
    bidirectional: bool = False,
    num_chunks: int | None = None,
) -> jax.Array:
    """Reduces along a ring: one pass sums the parts, a second one distributes them.

    For any n, each replica sends 2(n - 1) messages of 1/n of the buffer to its
    neighbour (Patarasuk and Yuan, 2009).

    Args:
      x: shape (n,).
      axis_name: the axis, or axes, over which replicas lie.
      op: "sum", "mean", "min", "max" or "product".
      bidirectional: whether half of the buffer travels the other way at the same time.
        It helps where links carry both directions at full speed.
      num_chunks: number of pieces that are reduced one after another, which bounds
        the memory in use. None: 1, except on CPU, where messages have 1 MiB.

    Returns:
      The reduction, shape (n,), dtype of `x`; see `jdp.collectives.base`.
    """
    x, group = base.enter(x, axis_name, op)
    if base.is_trivial(x, group):
        return base.replicated(x, axis_name)
    n, size = group.size, x.size
    directions = (1, -1) if bidirectional else (1,)
    num_columns = -(-size // (n * len(directions)))
    if num_chunks is None:
        num_chunks = default_num_chunks(size, x.itemsize, n * len(directions))
    num_chunks = base.limit_chunks(num_chunks, num_columns)
    buffer = base.pad(x, n * len(directions) * num_chunks)
    width = buffer.size // (n * len(directions) * num_chunks)

    # In place: in a step `x` is a bucket without a later use. A second buffer
    # of fresh pages takes as long on CPU as all the sums; so does the copy that XLA
    # makes where the loop carries another shape than (n,).
    def reduce_chunk(j: jax.Array | int, buffer: jax.Array) -> jax.Array:
        lanes = [
            _Lane(group, d, (j * len(directions) + k) * width, width)
            for k, d in enumerate(directions)
        ]
        held = _scatter(lanes, buffer, op)
        held = [base.finish(y, op, n, x.dtype) for y in held]
        held, (buffer,) = annotations.order_after(held, [buffer])
        return _gather(lanes, held, buffer)

    buffer = _repeat(0, num_chunks, reduce_chunk, buffer, unroll=False)
    return base.replicated(buffer[:size], axis_name)


def default_num_chunks(num_elements: int, itemsize: int, num_parts: int) -> int:
    """Returns the default number of chunks of a buffer."""
    num_columns = -(-num_elements // num_parts)
    return base.default_num_chunks(num_columns * itemsize, _CHUNK_BYTES)


def ring_reduce_scatter(
    x: jax.Array,
    axis_name: AxisName,
    *,
    op: Op = "sum",
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Reduces and scatters: replica i gets the reduction of part i of n.

    Args:
      x: shape (n,); padded with zeros to a multiple of the number of replicas.
      axis_name: the axis, or axes, over which replicas lie.
      op: "sum", "mean", "min", "max" or "product".
      dtype: dtype of the result; None: the dtype of `x`. With float32, a 16-bit
        `x` is not rounded at the end.

    Returns:
      Shape (ceil(n / num_replicas),).
    """
    x, group = base.enter(x, axis_name, op)
    dtype = x.dtype if dtype is None else dtype
    if base.is_trivial(x, group):
        return base.finish(x, op, 1, dtype)
    x = base.pad(x, group.size)
    (y,) = _scatter([_Lane(group, 1, 0, x.size // group.size)], x, op)
    return base.finish(y, op, group.size, dtype)


def ring_all_gather(part: jax.Array, axis_name: AxisName) -> jax.Array:
    """Gathers: every replica gets all parts, in the order of their ranks.

    Args:
      part: shape (m,).
      axis_name: the axis, or axes, over which replicas lie.

    Returns:
      Shape (num_replicas * m,), the same on all replicas.
    """
    part, group = base.enter(part, axis_name, "sum")
    if base.is_trivial(part, group):
        return base.replicated(part, axis_name)
    out = base.empty((group.size * part.size,), part)
    out = _gather([_Lane(group, 1, 0, part.size)], [part], out)
    return base.replicated(out, axis_name)


RING = ReduceScatterAllGather(ring_reduce_scatter, ring_all_gather)


class _Lane:
    """Stream in one direction of the ring: `width` elements from `start` of a part."""

    def __init__(
        self, group: ReplicaGroup, direction: int, start: jax.Array | int, width: int
    ):
        self.group = group
        self._direction = direction
        self._start = start
        self._width = width

    def send(self, held: jax.Array) -> jax.Array:
        n = self.group.size
        pairs = [(i, (i + self._direction) % n) for i in range(n)]
        return base.exchange(held, self.group, pairs)

    def take(self, buffer: jax.Array, num_steps_back: jax.Array | int) -> jax.Array:
        at = self._find(buffer, num_steps_back)
        return lax.dynamic_slice(buffer, (at,), (self._width,))

    def put(
        self, buffer: jax.Array, held: jax.Array, num_steps_back: jax.Array | int
    ) -> jax.Array:
        at = self._find(buffer, num_steps_back)
        return lax.dynamic_update_slice(buffer, held, (at,))

    def _find(self, buffer: jax.Array, num_steps_back: jax.Array | int) -> jax.Array:
        n = self.group.size
        part = (self.group.rank - self._direction * num_steps_back) % n
        return jnp.asarray(part * (buffer.size // n) + self._start)


def _scatter(lanes: list[_Lane], buffer: jax.Array, op: Op) -> list[jax.Array]:
    """Reduces all parts: replica i sends part i - 1 first and ends with part i."""
    n = lanes[0].group.size

    def one_round(t: jax.Array | int, held: list[jax.Array]) -> list[jax.Array]:
        return [
            base.combine(op, lane.send(y), lane.take(buffer, t + 2))
            for lane, y in zip(lanes, held, strict=True)
        ]

    # The first round sends inputs, which have not been reduced, in their own dtype.
    held = one_round(0, [lane.take(buffer, 1) for lane in lanes])
    return _repeat(1, n - 1, one_round, held, unroll=n <= _MAX_UNROLLED)


def _gather(lanes: list[_Lane], held: list[jax.Array], out: jax.Array) -> jax.Array:
    n = lanes[0].group.size
    for lane, y in zip(lanes, held, strict=True):
        out = lane.put(out, y, 0)

    def one_round(t, carry):
        held, out = carry
        held = [lane.send(y) for lane, y in zip(lanes, held, strict=True)]
        for lane, y in zip(lanes, held, strict=True):
            out = lane.put(out, y, t + 1)
        return held, out

    carry = (held, out)
    return _repeat(0, n - 1, one_round, carry, unroll=n <= _MAX_UNROLLED)[1]


def _repeat(start: int, stop: int, body, carry, *, unroll: bool):
    """Runs `lax.fori_loop`, or the body itself for fewer than two rounds."""
    if stop - start > 1:
        return lax.fori_loop(start, stop, body, carry, unroll=unroll)
    return body(start, carry) if stop > start else carry
