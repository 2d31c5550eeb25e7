"""Shared buffer: numpy arrays reduced through memory that processes share.

Small buffers take one stage: each process writes its buffer into the shared memory and
sums all buffers. Large buffers take two stages: each process sums one part of all
buffers, in place in its own buffer, and then copies the other parts. In two stages,
with S bytes and n processes, each process writes S / n * (n - 1) bytes, reads as many
to sum them, writes S / n bytes of result, and reads S / n * (n - 1) bytes of results.
A large buffer goes through the memory in pieces, so that what one process writes is
still in a cache when another reads it. While the sums of a piece are made, the next
piece is written, so the processes wait once per piece.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from jdp.collectives.base import Op
from jdp.collectives.host import arithmetic
from jdp.collectives.host.local_replicas import LocalReplicas
from jdp.collectives.shared_memory import cutting
from jdp.collectives.shared_memory.cutting import ReducePiece, RowsPiece
from jdp.collectives.shared_memory.shared_segment import SharedSegment
from jdp.replicas import stamps
from jdp.replicas.mesh import World
from jdp.types import AxisName

# Pieces that stay in the second-level cache. On 2 cores with 2 MiB each, pieces of 256
# KiB to 2 MiB take 101 MB in 24 to 26 ms, and of 16 and 64 MiB in 33 and 36 ms.
DEFAULT_NUM_BYTES = 1 << 20
LEAST_NUM_BYTES = 64 << 10  # below this, waits take longer than copies.
_MAX_CACHED = 256  # ways to cut arrays.
_logger = logging.getLogger("jdp")


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
        least_bytes: int | None = None,
    ):
        """Maps the memory.

        Args:
          world: the world.
          processes: any processes of one host.
          num_bytes: size of the largest piece that is moved at once, in bytes.
          key: where the processes meet in the store.
          axis_name: axes to reduce over; (): not used inside programs.
          least_bytes: where the host has no room for `num_bytes`, a half of it, a
            quarter, and so on is taken, down to this size; None: nothing less.
        """
        processes = tuple(processes)
        self.world = world
        self.axis_name = axis_name
        self._processes = processes
        self._rank = processes.index(world.process_index)
        count = len(processes)
        small = 2 * count * cutting.ONE_STAGE_BYTES
        rest = small + count * cutting.LINE_BYTES
        choices = _halve(num_bytes, num_bytes if least_bytes is None else least_bytes)
        segment = SharedSegment(
            world,
            [rest + 2 * (count + 1) * choice for choice in choices],
            key=key,
            processes=processes,
        )
        self._segment: SharedSegment | None = segment  # None: freed.
        memory = np.frombuffer(segment.memory, np.uint8)
        self.num_bytes = (memory.size - rest) // (2 * (count + 1))
        if self.num_bytes < num_bytes and self._rank == 0:
            _logger.info(
                "This host has room for %d KiB of shared memory per process, not %d: "
                "larger buffers are reduced in pieces.",
                self.num_bytes >> 10,
                num_bytes >> 10,
            )
        cuts = [0, count * cutting.LINE_BYTES, count * cutting.LINE_BYTES + small]
        # Two of each, since the next round may begin while other processes still read.
        self._calls = memory[: cuts[1]].view(np.uint32).reshape(count, -1)
        self._small = memory[cuts[1] : cuts[2]].reshape(
            2, count, cutting.ONE_STAGE_BYTES
        )
        large = memory[cuts[2] :].reshape(2, count + 1, self.num_bytes)
        self._slots, self._results = large[:, :-1], large[:, -1]
        self._lock = threading.Lock()
        self._pieces: dict[tuple[tuple[int, ...], int], Sequence[ReducePiece]] = {}
        self.local = LocalReplicas(world)
        self._round = 0
        self._failure: str | None = None

    def free(self) -> None:
        """Frees the memory on this process, also while programs hold the buffer.

        Later reductions raise RuntimeError.
        """
        with self._lock:
            self._failure = "The shared buffer has been freed."
            self._calls = self._small = np.empty(0, np.uint8)
            self._slots = self._results = np.empty(0, np.uint8)
            self._segment = None

    def reduce_in_place(
        self,
        arrays: Sequence[np.ndarray],
        op: Op,
        call: int,
    ) -> None:
        """Replaces arrays of one dtype by their reductions over the processes.

        Args:
          arrays: contiguous and writeable, shape (n,) each.
          op: see `HostAllReduce`.
          call: identifier of the operation, equal on all processes.

        Raises:
          RuntimeError: a process has ended, or reduces something else.
        """
        pieces = self._cut(arrays)
        with self._in_turn() as segment:
            large = [piece for piece in pieces if piece.own]
            if large:
                self._reduce_large(segment, arrays, op, call, large)
            for piece in pieces[len(large) :]:
                self._reduce_small(segment, arrays, op, call, piece)

    def _cut(self, arrays: Sequence[np.ndarray]) -> Sequence[ReducePiece]:
        """Cuts concatenated arrays into pieces that fit, and these into parts."""
        sizes, itemsize = tuple([x.size for x in arrays]), arrays[0].itemsize
        pieces = self._pieces.get((sizes, itemsize))
        if pieces is None:
            if len(self._pieces) == _MAX_CACHED:
                self._pieces.clear()
            pieces = cutting.cut_arrays(
                sizes, itemsize, self.num_bytes, self._rank, len(self._processes)
            )
            self._pieces[sizes, itemsize] = pieces
        return pieces

    def _cut_rows(self, sizes: Sequence[int], itemsize: int) -> Sequence[RowsPiece]:
        """Cuts concatenated arrays of which each process has a row."""
        return cutting.cut_rows(sizes, itemsize, self.num_bytes, len(self._processes))

    def reduce_scatter(
        self,
        rows: Sequence[np.ndarray],
        op: Op,
        call: int,
        outs: Sequence[np.ndarray],
    ) -> None:
        """Reduces the row of this process in each array.

        Args:
          rows: arrays of one dtype, shape (num_processes, n) each.
          op: see `HostAllReduce`.
          call: see `reduce_in_place`.
          outs: shape (n,) each, dtype of `rows` or of their sum.
        """
        own, count, dtype = self._rank, len(self._processes), rows[0].dtype
        with self._in_turn() as segment:
            for size, runs in self._cut_rows(
                [x.shape[1] for x in rows], dtype.itemsize
            ):
                num_bytes = count * size * dtype.itemsize
                slots = self._slots[0, :, :num_bytes].view(dtype)
                # By source, destination and element.
                slots = slots.reshape(count, count, size)
                for rank in self._others():
                    for i, where, at in runs:
                        slots[own, rank, at] = rows[i][rank, where]
                self._meet(segment, call)
                for i, where, at in runs:
                    parts = [slots[rank, own, at] for rank in range(count)]
                    parts[own] = rows[i][own, where]
                    arithmetic.reduce(parts, op, out=outs[i][where])
                segment.arrive_and_wait()

    def all_gather(
        self,
        parts: Sequence[np.ndarray],
        call: int,
        outs: Sequence[np.ndarray],
    ) -> None:
        """Gathers the parts of each array from all processes.

        Args:
          parts: arrays of one dtype, shape (n,) each.
          call: see `reduce_in_place`.
          outs: arrays of that dtype, shape (num_processes, n) each.
        """
        dtype = parts[0].dtype
        with self._in_turn() as segment:
            for size, runs in self._cut_rows([x.size for x in parts], dtype.itemsize):
                slots = self._slots[0, :, : size * dtype.itemsize].view(dtype)
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
                slots = self._slots[0, :, : count * size * parts.itemsize]
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
                slot = self._slots[0, root, : part.nbytes].view(array.dtype)
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
            begun_ns = time.monotonic_ns()
            try:
                yield self._segment
            except RuntimeError as error:
                self._failure = str(error)
                raise
            stamps.add_reduction(time.monotonic_ns() - begun_ns)

    def _others(self) -> list[int]:
        return [r for r in range(len(self._processes)) if r != self._rank]

    def _reduce_small(
        self,
        segment: SharedSegment,
        arrays: Sequence[np.ndarray],
        op: Op,
        call: int,
        piece: ReducePiece,
    ) -> None:
        """Reduces in one stage: no process has a part of its own."""
        own, dtype = self._rank, arrays[0].dtype
        side = (self._round + 1) % 2
        slots = list(self._small[side, :, : piece.size * dtype.itemsize].view(dtype))
        for i, where, at in piece.others:
            slots[own][at] = arrays[i][where]
        self._meet(segment, call)
        for i, where, at in piece.others:
            arithmetic.reduce([slot[at] for slot in slots], op, out=arrays[i][where])

    def _reduce_large(
        self,
        segment: SharedSegment,
        arrays: Sequence[np.ndarray],
        op: Op,
        call: int,
        pieces: Sequence[ReducePiece],
    ) -> None:
        """Reduces in two stages, with two sides of the memory in turns."""
        own, dtype = self._rank, arrays[0].dtype
        sides = []
        for k, piece in enumerate(pieces):
            num_bytes = piece.size * dtype.itemsize
            slots = list(self._slots[k % 2, :, :num_bytes].view(dtype))
            sides.append((slots, self._results[k % 2, :num_bytes].view(dtype)))

        def write(k: int) -> None:
            for i, where, at in pieces[k].others:
                sides[k][0][own][at] = arrays[i][where]

        write(0)
        self._meet(segment, call)
        for k, (slots, result) in enumerate(sides):
            for i, where, at in pieces[k].own:
                part = arrays[i][where]
                # In rank order, as in one stage, so that sums have the same bits for
                # every size of the arrays. So `part` is not necessarily the first.
                parts = [slot[at] for slot in slots]
                parts[own] = part
                arithmetic.reduce(parts, op, out=result[at])
                part[...] = result[at]
            if k + 1 < len(pieces):
                write(k + 1)
            segment.arrive_and_wait()
            for i, where, at in pieces[k].others:
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


def _halve(num_bytes: int, least: int) -> list[int]:
    """Returns `num_bytes`, half of it and so on, all at least `least`."""
    choices = [num_bytes]
    while choices[-1] // 2 >= least:
        choices.append(cutting.round_up(choices[-1] // 2))
    return choices
