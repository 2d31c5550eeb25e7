"""Shared memory: the all-reduce of CPU processes on one host.

Small buffers take one stage: each process writes its own into the shared memory, and
sums all. Large ones take two: each process sums one part of all, in place in its own
buffer, and copies the parts of the others. In the second nothing is copied that its
owner alone reads: of S bytes on n processes each writes S / n * (n - 1), reads as much
to sum it, writes S / n of result, and reads the other S / n * (n - 1).
"""

import contextvars
import threading
import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.buffer_callback import buffer_callback

from jdp import compat, mesh
from jdp.collectives.shared_segment import SharedSegment
from jdp.mesh import World
from jdp.types import AxisName

Op = Literal["sum", "mean", "min", "max", "product"]

DEFAULT_NUM_BYTES = 64 << 20
# One stage reads all buffers on each process, two stages wait twice: on 2 processes
# they cost the same at about 32 KiB (`jdp bench step`'s machine).
_ONE_STAGE_BYTES = 32 << 10
# A chunk is summed and written to the shared memory while it is in the cache.
_CHUNK_BYTES = 128 << 10
_LINE = 64  # bytes of a cache line; parts of two processes never share one.
_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class SharedBuffer:
    """What the processes of one host reduce through; see `create_shared_buffer`."""

    def __init__(self, world: World, num_bytes: int, *, key: str):
        """Use `create_shared_buffer`."""
        self.world = world
        self.num_bytes = num_bytes
        count = world.process_count
        small = 2 * count * _ONE_STAGE_BYTES
        self._segment = SharedSegment(
            world, small + (count + 1) * num_bytes + count * _LINE, key=key
        )
        memory = np.frombuffer(self._segment.memory, np.uint8)
        cuts = [0, count * _LINE, count * _LINE + small]
        # Two of each, because the next round may begin while others still read.
        self._calls = memory[: cuts[1]].view(np.uint32).reshape(count, -1)
        self._small = memory[cuts[1] : cuts[2]].reshape(2, count, _ONE_STAGE_BYTES)
        self._large = memory[cuts[2] :].reshape(count + 1, num_bytes)
        self._lock = threading.Lock()
        self._round = 0
        self._failure: str | None = None

    @property
    def all_reduce(self) -> "SharedMemoryAllReduce":
        """The all-reduce through this memory; see `SharedMemoryAllReduce`."""
        return SharedMemoryAllReduce(self)

    def reduce_in_place(
        self,
        arrays: Sequence[np.ndarray],
        op: Op,
        call: int,
        pieces: Sequence["_Piece"],
    ) -> None:
        """Replaces arrays of one dtype by their reductions over the processes.

        Args:
          arrays: contiguous and writeable, shape (n,) each.
          op: see `SharedMemoryAllReduce`.
          call: what must be equal on all processes, or they reduce different things.
          pieces: what `_cut` made of their sizes.

        Raises:
          RuntimeError: a process is gone, or reduces something else.
        """
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            try:
                for piece in pieces:
                    self._reduce_piece(arrays, op, call, piece)
            except RuntimeError as error:
                self._failure = str(error)
                raise

    def _reduce_piece(
        self, arrays: Sequence[np.ndarray], op: Op, call: int, piece: "_Piece"
    ) -> None:
        own, dtype = self.world.process_index, arrays[0].dtype
        self._round += 1
        side = self._round % 2
        self._calls[own, side] = call
        num_bytes = piece.size * dtype.itemsize
        if not piece.own:  # One stage: nobody has a part of its own.
            slots = list(self._small[side, :, :num_bytes].view(dtype))
            for i, where, at in piece.others:
                slots[own][at] = arrays[i][where]
            self._meet(call)
            for i, where, at in piece.others:
                _reduce([slot[at] for slot in slots], op, out=arrays[i][where])
            return
        *slots, result = self._large[:, :num_bytes].view(dtype)
        mine = slots.pop(own)
        for i, where, at in piece.others:
            mine[at] = arrays[i][where]
        self._meet(call)
        for i, where, at in piece.own:
            part = arrays[i][where]
            _reduce([part, *(slot[at] for slot in slots)], op, out=part)
            result[at] = part
        self._segment.arrive_and_wait()
        for i, where, at in piece.others:
            arrays[i][where] = result[at]

    def _meet(self, call: int) -> None:
        self._segment.arrive_and_wait()
        calls = self._calls[:, self._round % 2]
        if (calls != call).any():
            other = int(np.flatnonzero(calls != call)[0])
            raise RuntimeError(
                f"Process {other} reduces another buffer than process "
                f"{self.world.process_index}: programs that reduce through shared "
                "memory must run in the same order on all processes, and each must "
                "end, or hand a result on, before the next begins."
            )


def create_shared_buffer(
    world: World, num_bytes: int = DEFAULT_NUM_BYTES
) -> SharedBuffer:
    """Makes the memory through which the processes of one host reduce.

    Every process calls it, in the same order as other things that all processes do. It
    is freed with its last reference on each process; nothing stays in /dev/shm.

    Args:
      world: the processes, with one CPU replica each.
      num_bytes: of the largest buffer that goes through it at once, in bytes; a larger
        one goes in pieces. It takes that much for each process and once more.

    Raises:
      RuntimeError: see `SharedSegment`.
      ValueError: a process has several replicas, or `num_bytes` is below 1.
    """
    if num_bytes < 1:
        raise ValueError(f"`num_bytes` must be at least 1, got {num_bytes}.")
    _check_world(world)
    number = 0 if world.store is None else world.store.next_round()
    num_bytes = -(-num_bytes // _LINE) * _LINE
    return SharedBuffer(world, num_bytes, key=f"jdp/shared_memory/{number}")


class SharedMemoryAllReduce:
    """Reduces over all replicas, which are CPU processes of one host.

    16-bit floats are summed in float32. It has side effects, so that a program keeps
    its all-reduces in order, one after the other; two programs that do not depend on
    each other must not run at the same time.
    """

    __name__ = "shared_memory_all_reduce"

    def __init__(self, buffer: SharedBuffer | None = None):
        """Reduces through `buffer`; None: see `shared_memory_all_reduce`."""
        self._buffer = buffer

    def __call__(
        self, x: jax.Array, axis_name: AxisName, *, op: Op = "sum"
    ) -> jax.Array:
        """Reduces one buffer.

        Args:
          x: shape (n,), floating, complex or integer.
          axis_name: all axes of the world.
          op: "sum", "mean", "min", "max" or "product".

        Returns:
          The reduction, like `x`, bitwise the same on all replicas; by JAX's types it
          may differ between them, so that `jdp.data_parallel` needs
          `check_vma=False`.

        Raises:
          ValueError: `axis_name` is not bound, or not over all replicas; unknown `op`.
          TypeError: the mean of integers.
          RuntimeError: when it runs: a process has ended, or did not come in time.
        """
        return self.reduce_group([x], axis_name, op=op)[0]

    def reduce_group(
        self,
        arrays: Sequence[jax.Array],
        axis_name: AxisName,
        *,
        op: Op = "sum",
        has_data: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Reduces arrays of one dtype and of any shapes, without packing them.

        They go from where they are into the shared memory and back, in place. Where
        `has_data`, bool (), is False, this replica has zeros, whatever they hold.
        """
        world = mesh.current_world() if self._buffer is None else self._buffer.world
        _check(arrays[0], axis_name, op, world)
        if world.num_replicas == 1 or sum(x.size for x in arrays) == 0:
            return list(arrays)
        return _bind(arrays, op, world, self._buffer, has_data)


# Through a buffer of `DEFAULT_NUM_BYTES`, which the processes of the current world make
# when a program with it first runs.
shared_memory_all_reduce = SharedMemoryAllReduce()


class _Default:
    """The buffer of the current world; like the world, there is one."""

    lock = threading.Lock()
    buffer: SharedBuffer | None = None


def _default_buffer(world: World) -> SharedBuffer:
    with _Default.lock:
        if _Default.buffer is None or _Default.buffer.world is not world:
            _Default.buffer = SharedBuffer(
                world, DEFAULT_NUM_BYTES, key="jdp/shared_memory/default"
            )
        return _Default.buffer


class _Last(NamedTuple):
    """The last all-reduce of the function that is traced."""

    trace: Any
    token: jax.Array  # uint32 (1,); whoever takes it comes later.
    number: int


_last: contextvars.ContextVar[_Last | None] = contextvars.ContextVar(
    "last_shared_memory_all_reduce", default=None
)


def _bind(
    arrays: Sequence[jax.Array],
    op: Op,
    world: World,
    buffer: SharedBuffer | None,
    has_data: jax.Array | None,
) -> list[jax.Array]:
    last = _last.get()
    if last is None or last.trace is not compat.current_trace():
        last = _Last(compat.current_trace(), jnp.zeros(1, jnp.uint32), 0)
    sizes = [x.size for x in arrays]
    dtype = arrays[0].dtype
    call = zlib.crc32(f"{last.number} {op} {dtype}{sizes}".encode())
    num_bytes = DEFAULT_NUM_BYTES if buffer is None else buffer.num_bytes
    pieces = _cut(sizes, dtype.itemsize, num_bytes, world)

    def callback(context: Any, results: Any, *operands: Any) -> None:
        *reduced, _ = results
        flat = [np.asarray(x).reshape(-1) for x in reduced]
        if has_data is not None and not np.asarray(operands[-1]):
            for x in flat:
                x.fill(0)
        found = _default_buffer(world) if buffer is None else buffer
        found.reduce_in_place(flat, op, call, pieces)

    # XLA runs what does not depend on each other in any order, another one in every
    # process: the token makes it one order.
    shared = [*arrays, last.token]
    *reduced, token = buffer_callback(
        callback,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shared],
        has_side_effect=True,
        input_output_aliases={i: i for i in range(len(shared))},
    )(*shared, *([] if has_data is None else [has_data]))
    _last.set(_Last(last.trace, token, last.number + 1))
    return reduced


class _Segment(NamedTuple):
    """A run of elements of one array."""

    array: int
    where: slice  # in the array.
    at: slice  # in the piece.


class _Piece(NamedTuple):
    """What goes through the shared memory at once."""

    size: int  # elements.
    others: list[_Segment]  # what other processes sum; everything, in one stage.
    own: list[_Segment]  # what this process sums, in chunks.


def _cut(
    sizes: Sequence[int], itemsize: int, num_bytes: int, world: World
) -> list[_Piece]:
    """Cuts arrays, one after the other, into pieces that fit, and these into parts."""
    total = sum(sizes)
    step = max(num_bytes, _ONE_STAGE_BYTES) // itemsize
    pieces = []
    for start in range(0, total, step):
        stop = min(total, start + step)
        size = stop - start
        if size * itemsize <= _ONE_STAGE_BYTES:
            pieces.append(_Piece(size, _segments(sizes, start, 0, size, size), []))
            continue
        a, b = _part(size, itemsize, world)
        others = _segments(sizes, start, 0, a, size)
        others += _segments(sizes, start, b, size, size)
        own = _segments(sizes, start, a, b, _CHUNK_BYTES // itemsize)
        pieces.append(_Piece(size, others, own))
    return pieces


def _segments(
    sizes: Sequence[int], piece: int, a: int, b: int, chunk: int
) -> list[_Segment]:
    """Lists the runs from `a` to `b` of the piece that begins at `piece`."""
    found, first = [], 0
    for i, size in enumerate(sizes):
        start, stop = max(first, piece + a), min(first + size, piece + b)
        for k in range(start, stop, chunk):
            end = min(k + chunk, stop)
            where, at = slice(k - first, end - first), slice(k - piece, end - piece)
            found.append(_Segment(i, where, at))
        first += size
    return found


def _check(x: jax.Array, axis_name: AxisName, op: Op, world: World) -> None:
    if op not in get_args(Op):
        raise ValueError(f"`op` must be one of {get_args(Op)}, got {op!r}.")
    _check_world(world)
    try:
        size = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"`axis_name={axis_name!r}` is not bound here; bound axes: "
            f"{compat.bound_axis_names() or 'none'}."
        ) from None
    if size != world.num_replicas:
        raise ValueError(
            f"`axis_name={axis_name!r}` has {size} replicas, but shared memory reduces "
            f"over all {world.num_replicas} of the world, {world.axis_name!r}."
        )
    if op == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"The mean of {x.dtype} is no {x.dtype}; sum, or cast before.")


def _check_world(world: World) -> None:
    if world.num_replicas != world.process_count:
        raise ValueError(
            f"{world.num_replicas} replicas on {world.process_count} processes: the "
            "shared-memory all-reduce is for one CPU replica a process."
        )
    device = world.local_devices[0]
    if device.platform != "cpu":
        raise ValueError(
            f"The replicas are on {device.platform}; the shared-memory all-reduce is "
            "for CPUs."
        )


def _part(size: int, itemsize: int, world: World) -> tuple[int, int]:
    """First element, and the one after the last, of the part this process sums."""
    step = _LINE // itemsize
    count = world.process_count
    ends = [size * p // count // step * step for p in range(count)] + [size]
    return ends[world.process_index], ends[world.process_index + 1]


def _reduce(operands: list[np.ndarray], op: Op, *, out: np.ndarray) -> None:
    """Reduces into `out`, which may be the first of the operands."""
    ufunc, first = _UFUNCS[op], operands[0]
    is_narrow = out.itemsize == 2 and jnp.issubdtype(out.dtype, jnp.floating)
    total = first.astype(np.float32) if is_narrow else out
    for i, operand in enumerate(operands[1:]):
        if is_narrow:
            operand = operand.astype(np.float32)
        ufunc(first if i == 0 and not is_narrow else total, operand, out=total)
    if op == "mean":
        np.divide(total, len(operands), out=total)
    if is_narrow:
        out[...] = total
