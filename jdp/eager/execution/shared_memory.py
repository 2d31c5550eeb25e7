"""Shared memory: numpy arrays of the processes of one host."""

import itertools

import numpy as np

from jdp.collectives.base import Op
from jdp.collectives.shared_memory import cutting
from jdp.collectives.shared_memory.shared_buffer import LEAST_NUM_BYTES, SharedBuffer
from jdp.eager.execution.base import CollectiveTask, SetMembers


class SharedMemory:
    """Implementation that exchanges data through memory shared by the members.

    Args:
      members: the process set; waits end after `members.world.timeout_s`.
      num_bytes: size of the largest piece that is moved at once; 0: disabled.
      key: where the members meet in the store.
    """

    name = "shared memory"
    is_bounded = True

    def __init__(self, members: SetMembers, num_bytes: int, *, key: str):
        self._size = members.size
        self._buffer: SharedBuffer | None = None
        self._why_not = ""
        self._calls = itertools.count(1)
        if num_bytes == 0:
            self._why_not = "switched off by `shared_memory_bytes=0`"
        elif members.size == 1:
            self._why_not = "there is one member"
        else:
            try:
                self._buffer = SharedBuffer(
                    members.world,
                    members.ranks,
                    cutting.round_up(num_bytes),
                    key=key,
                    least_bytes=LEAST_NUM_BYTES,
                )
            except RuntimeError as error:  # Raised on all members.
                self._why_not = str(error)

    def is_enabled(self, task: CollectiveTask) -> bool:
        """See `Implementation`."""
        return (
            self._buffer is not None and not task.is_on_device and task.op != "adasum"
        )

    def describe(self) -> str:
        """See `Implementation`."""
        if self._buffer is None:
            return self._why_not
        return f"{self._buffer.num_bytes >> 20} MiB for each of {self._size} processes"

    def all_reduce(self, arrays: list[np.ndarray], op: Op) -> list[np.ndarray]:
        """See `Implementation`."""
        self._open().reduce_in_place(arrays, op, self._next_call())
        return arrays

    def adaptive_sum(self, array: np.ndarray) -> np.ndarray:
        """Raises AssertionError: `is_enabled` refuses adasum."""
        raise AssertionError

    def all_gather(self, part: np.ndarray) -> np.ndarray:
        """See `Implementation`."""
        out = np.empty((self._size, part.size), part.dtype)
        self._open().all_gather([part], self._next_call(), [out])
        return out

    def reduce_scatter(self, parts: np.ndarray, op: Op) -> np.ndarray:
        """See `Implementation`."""
        out = np.empty(parts.shape[1], parts.dtype)
        self._open().reduce_scatter([parts], op, self._next_call(), [out])
        return out

    def all_to_all(self, parts: np.ndarray) -> np.ndarray:
        """See `Implementation`."""
        out = np.empty_like(parts)
        self._open().all_to_all(parts, self._next_call(), out)
        return out

    def broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        """See `Implementation`."""
        self._open().broadcast(array, root, self._next_call())
        return array

    def switch(self, *, all_reduce: bool, all_gather: bool) -> None:
        """See `Implementation`."""

    def close(self) -> None:
        """See `Implementation`."""
        if self._buffer is not None:
            self._buffer.free()

    def _open(self) -> SharedBuffer:
        assert self._buffer is not None
        return self._buffer

    def _next_call(self) -> int:
        # The number reveals members that are out of step.
        return next(self._calls) & 0xFFFFFFFF
