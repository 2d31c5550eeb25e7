"""Shared buffer: numpy arrays reduced through memory that processes share.

Small buffers take one stage: each process writes its buffer into the shared memory and
sums all buffers. Large buffers take two stages: each process sums one part of all
buffers, in place in its own buffer, and then copies the other parts. In two stages,
with S bytes and n processes, each process writes S / n * (n - 1) bytes, reads as many
to sum them, writes S / n bytes of result, and reads S / n * (n - 1) bytes of results.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jdp import types
from jdp.collectives import base
from jdp.collectives.base import Op
from jdp.collectives.shared_memory import cutting
from jdp.collectives.shared_memory.cutting import ReducePiece, RowsPiece
from jdp.collectives.shared_memory.shared_segment import SharedSegment
from jdp.replicas.mesh import World
from jdp.types import AxisName

DEFAULT_NUM_BYTES = 64 << 20
_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class SharedBuffer:
    """Shared memory in which processes of a host reduce; see `create_shared_buffer`."""

    def __init__(
        self,
        world: World,
        processes: Sequence[int],
        num_bytes: int,
        *,
        key: str,
        axis_name: AxisName = (),
    ):
        """Maps the memory; `processes` may be any processes of one host."""
        processes = tuple(processes)
        self.world = world
        self.axis_name = axis_name  # (): not used inside programs.
        self.num_bytes = num_bytes
        self._processes = processes
        self._rank = processes.index(world.process_index)
        count = len(processes)
        small = 2 * count * cutting.ONE_STAGE_BYTES
        segment = SharedSegment(
            world,
            small + (count + 1) * num_bytes + count * cutting.LINE_BYTES,
            key=key,
            processes=processes,
        )
        self._segment: SharedSegment | None = segment  # None: freed.
        memory = np.frombuffer(segment.memory, np.uint8)
        cuts = [0, count * cutting.LINE_BYTES, count * cutting.LINE_BYTES + small]
        # Two of each, since the next round may begin while other processes still read.
        self._calls = memory[: cuts[1]].view(np.uint32).reshape(count, -1)
        self._small = memory[cuts[1] : cuts[2]].reshape(
            2, count, cutting.ONE_STAGE_BYTES
        )
        self._large = memory[cuts[2] :].reshape(count + 1, num_bytes)
        self._lock = threading.Lock()
        self._round = 0
        self._failure: str | None = None

    def free(self) -> None:
        """Frees the memory on this process, also while programs hold the buffer.

        Later reductions raise RuntimeError.
        """
        with self._lock:
            self._failure = "The shared buffer has been freed."
            self._calls = self._small = self._large = np.empty(0, np.uint8)
            self._segment = None

    def cut(self, sizes: Sequence[int], itemsize: int) -> list[ReducePiece]:
        """Cuts concatenated arrays into pieces that fit, and these into parts."""
        return cutting.cut_arrays(
            sizes, itemsize, self.num_bytes, self._rank, len(self._processes)
        )

    def cut_rows(self, sizes: Sequence[int], itemsize: int) -> list[RowsPiece]:
        """Cuts concatenated arrays of which each process has a row."""
        return cutting.cut_rows(sizes, itemsize, self.num_bytes, len(self._processes))

    def reduce_in_place(
        self,
        arrays: Sequence[np.ndarray],
        op: Op,
        call: int,
        pieces: Sequence[ReducePiece],
    ) -> None:
        """Replaces arrays of one dtype by their reductions over the processes.

        Args:
          arrays: contiguous and writeable, shape (n,) each.
          op: see `SharedMemoryAllReduce`.
          call: identifier of the operation, equal on all processes.
          pieces: result of `cut` for their sizes.

        Raises:
          RuntimeError: a process has ended, or reduces something else.
        """
        with self._in_turn() as segment:
            for piece in pieces:
                self._reduce_piece(segment, arrays, op, call, piece)

    def reduce_scatter(
        self,
        rows: Sequence[np.ndarray],
        op: Op,
        call: int,
        outs: Sequence[np.ndarray],
        steps: Sequence[RowsPiece],
    ) -> None:
        """Reduces the row of this process in each array.

        Args:
          rows: arrays of one dtype, shape (num_processes, n) each.
          op: see `SharedMemoryAllReduce`.
          call: see `reduce_in_place`.
          outs: shape (n,) each, dtype of `rows` or of their sum.
          steps: result of `cut_rows` for the sizes n.
        """
        own, count, dtype = self._rank, len(self._processes), rows[0].dtype
        with self._in_turn() as segment:
            for size, runs in steps:
                num_bytes = count * size * dtype.itemsize
                slots = self._large[:count, :num_bytes].view(dtype)
                # By source, destination and element.
                slots = slots.reshape(count, count, size)
                for rank in self._others():
                    for i, where, at in runs:
                        slots[own, rank, at] = rows[i][rank, where]
                self._meet(segment, call)
                for i, where, at in runs:
                    parts = [slots[rank, own, at] for rank in range(count)]
                    parts[own] = rows[i][own, where]
                    reduce(parts, op, out=outs[i][where])
                segment.arrive_and_wait()

    def all_gather(
        self,
        parts: Sequence[np.ndarray],
        call: int,
        outs: Sequence[np.ndarray],
        steps: Sequence[RowsPiece],
    ) -> None:
        """Gathers the parts of each array from all processes.

        Args:
          parts: arrays of one dtype, shape (n,) each.
          call: see `reduce_in_place`.
          outs: arrays of that dtype, shape (num_processes, n) each.
          steps: see `reduce_scatter`.
        """
        dtype = parts[0].dtype
        with self._in_turn() as segment:
            for size, runs in steps:
                slots = self._large[:-1, : size * dtype.itemsize].view(dtype)
                for i, where, at in runs:
                    slots[self._rank, at] = parts[i][where]
                self._meet(segment, call)
                for i, where, at in runs:
                    outs[i][:, where] = slots[:, at]
                segment.arrive_and_wait()

    def all_to_all(self, parts: np.ndarray, call: int, out: np.ndarray) -> None:
        """Sends part i to process i, and receives one part per process.

        Args:
          parts: shape (num_processes, n), one row per process.
          call: see `reduce_in_place`.
          out: shape (num_processes, n), dtype of `parts`; row i comes from process i.
        """
        count, width = parts.shape
        step = max(1, self.num_bytes // (count * parts.itemsize))
        with self._in_turn() as segment:
            for start in range(0, width, step):
                columns = slice(start, min(start + step, width))
                size = columns.stop - start
                slots = self._large[:count, : count * size * parts.itemsize]
                slots = slots.view(parts.dtype).reshape(count, count, size)
                slots[self._rank] = parts[:, columns]
                self._meet(segment, call)
                out[:, columns] = slots[:, self._rank]
                segment.arrive_and_wait()

    def broadcast(self, array: np.ndarray, root: int, call: int) -> None:
        """Replaces an array by the array of one process.

        Args:
          array: shape (n,), writeable.
          root: rank of that process among the processes of the buffer.
          call: see `reduce_in_place`.
        """
        step = max(1, self.num_bytes // array.itemsize)
        with self._in_turn() as segment:
            for start in range(0, array.size, step):
                part = array[start : start + step]
                slot = self._large[root, : part.nbytes].view(array.dtype)
                if self._rank == root:
                    slot[...] = part
                self._meet(segment, call)
                if self._rank != root:
                    part[...] = slot
                segment.arrive_and_wait()

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[SharedSegment]:
        """Allows one reduction at a time, and none after a failed one."""
        with self._lock:
            if self._failure is not None or self._segment is None:
                raise RuntimeError(self._failure)
            try:
                yield self._segment
            except RuntimeError as error:
                self._failure = str(error)
                raise

    def _others(self) -> list[int]:
        return [r for r in range(len(self._processes)) if r != self._rank]

    def _reduce_piece(
        self,
        segment: SharedSegment,
        arrays: Sequence[np.ndarray],
        op: Op,
        call: int,
        piece: ReducePiece,
    ) -> None:
        own, dtype = self._rank, arrays[0].dtype
        num_bytes = piece.size * dtype.itemsize
        if not piece.own:  # One stage: no process has a part of its own.
            side = (self._round + 1) % 2
            slots = list(self._small[side, :, :num_bytes].view(dtype))
            for i, where, at in piece.others:
                slots[own][at] = arrays[i][where]
            self._meet(segment, call)
            for i, where, at in piece.others:
                reduce([slot[at] for slot in slots], op, out=arrays[i][where])
            return
        *slots, result = self._large[:, :num_bytes].view(dtype)
        for i, where, at in piece.others:
            slots[own][at] = arrays[i][where]
        self._meet(segment, call)
        for i, where, at in piece.own:
            part = arrays[i][where]
            # In rank order, as in one stage, so that sums have the same bits for every
            # size of the arrays. So `part` is not necessarily the first.
            parts = [slot[at] for slot in slots]
            parts[own] = part
            reduce(parts, op, out=result[at])
            part[...] = result[at]
        segment.arrive_and_wait()
        for i, where, at in piece.others:
            arrays[i][where] = result[at]

    def _meet(self, segment: SharedSegment, call: int) -> None:
        self._round += 1
        side = self._round % 2
        self._calls[self._rank, side] = call
        segment.arrive_and_wait()
        calls = self._calls[:, side]
        if (calls != call).any():
            other = self._processes[int(np.flatnonzero(calls != call)[0])]
            raise RuntimeError(
                f"Process {other} reduces another buffer than process "
                f"{self.world.process_index}: programs that reduce through shared "
                "memory must be called in the same order on all processes, from one "
                "thread."
            )


def find_processes(world: World, axis_name: AxisName) -> tuple[int, ...]:
    """Returns the processes that reduce with this one, by rank on the axis.

    Raises:
      ValueError: `axis_name` is neither all axes of the world nor the inner axis of a
        pair, a process has several replicas, or they are not on CPU.
    """
    if world.num_replicas != world.process_count:
        raise ValueError(
            f"{world.num_replicas} replicas on {world.process_count} processes: the "
            "shared-memory all-reduce is for one CPU replica per process."
        )
    device = world.local_devices[0]
    if device.platform != "cpu":
        raise ValueError(
            f"The replicas are on {device.platform}; the shared-memory all-reduce is "
            "for CPUs."
        )
    names = types.as_axis_names(axis_name)
    if names == world.axis_names:
        return tuple(range(world.process_count))
    if names == world.axis_names[1:]:
        size = world.mesh.devices.shape[1]
        first = world.process_index // size * size
        return tuple(range(first, first + size))
    raise ValueError(
        f"`axis_name={axis_name!r}`: shared memory reduces over all axes of the world, "
        f"{world.axis_name!r}, or over the inner axis of a pair."
    )


@np.errstate(all="ignore")
def reduce(operands: Sequence[np.ndarray], op: Op, *, out: np.ndarray) -> None:
    """Reduces arrays of one process into `out`, which may be the first of them.

    As in JAX, overflow gives infinity and inf - inf gives NaN, without a warning.

    Args:
      operands: two or more, of one shape and dtype.
      op: see `SharedMemoryAllReduce`.
      out: array of the same shape, with their dtype or the dtype of their sum.
    """
    ufunc, (first, second, *rest) = _UFUNCS[op], operands
    dtype = base.accumulator(first.dtype, "sum")
    total = out if out.dtype == dtype else np.empty(out.shape, dtype)
    ufunc(_as_type(first, dtype), _as_type(second, dtype), out=total)
    for operand in rest:
        ufunc(total, _as_type(operand, dtype), out=total)
    if op == "mean":
        _divide(total, len(operands))
    if total is not out:
        out[...] = total


def _as_type(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x if x.dtype == dtype else x.astype(dtype)


def _divide(x: np.ndarray, count: int) -> None:
    """Divides in place; integers are rounded towards zero."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        np.divide(x, count, out=x)
        return
    if x.dtype.itemsize == 1:  # 8 bits or fewer might not hold `count`.
        x[...] = np.trunc(x.astype(np.float32) / count).astype(x.dtype)
        return
    is_rounded_down = (x < 0) & (x % count != 0)
    np.floor_divide(x, count, out=x)
    x += is_rounded_down
