"""Local replicas: the replicas of one process, reduced before its processes are.

XLA runs each replica of a process on a thread of its own. The threads meet, each sums
a part of all their arrays, one of them reduces the sums over the processes, and each
takes a copy of the result.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from jdp.collectives import base
from jdp.collectives.base import Op
from jdp.collectives.host import arithmetic
from jdp.replicas.mesh import World

ReduceInPlace = Callable[[Sequence[np.ndarray], Op, int], None]


class LocalReplicas:
    """Meeting place of the threads of one process that run its replicas."""

    def __init__(self, world: World):
        """Makes the place; each thread waits for `world.timeout_s` at most."""
        count = len(world.local_devices) or 1
        self._world, self.count = world, count
        self._given: list[Sequence[np.ndarray]] = [()] * count
        self._calls = [0] * count
        self._totals: list[np.ndarray] = []
        self._failure: str | None = None
        self._action: Callable[[], None] = lambda: None
        self._barrier = threading.Barrier(count, self._act, world.timeout_s)

    def reduce(
        self,
        replica: int,
        arrays: Sequence[np.ndarray],
        op: Op,
        call: int,
        reduce_in_place: ReduceInPlace,
    ) -> None:
        """Replaces arrays of one replica by their reductions over all replicas.

        Args:
          replica: number of the calling replica within its process.
          arrays: its arrays, of one dtype: contiguous and writeable, shape (n,) each.
          op: see `HostAllReduce`.
          call: identifier of the operation, equal on all replicas.
          reduce_in_place: reduces arrays over the processes; called on one thread.

        Raises:
          RuntimeError: a replica did not arrive in time, reduces something else, or
            `reduce_in_place` raised.
        """
        if self.count == 1:
            reduce_in_place(arrays, op, call)
            return
        step: Op = "sum" if op == "mean" else op

        def over_processes(totals: Sequence[np.ndarray]) -> None:
            reduce_in_place(totals, step, call)
            if op == "mean":
                for total in totals:
                    arithmetic.divide(total, self._world.num_replicas)

        self._reduce_threads(replica, arrays, step, call, over_processes)

    def _reduce_threads(
        self,
        replica: int,
        arrays: Sequence[np.ndarray],
        op: Op,
        call: int,
        over_processes: Callable[[Sequence[np.ndarray]], None],
    ) -> None:
        self._given[replica], self._calls[replica] = arrays, call
        self._meet(self._begin)
        for k, total in enumerate(self._totals):
            part = _part(total.size, replica, self.count)
            given = [arrays[k][part] for arrays in self._given]
            arithmetic.reduce(given, op, out=total[part])
        totals = self._totals
        self._meet(lambda: over_processes(totals))
        for x, total in zip(arrays, totals, strict=True):
            if x is not total:
                x[...] = total
        self._meet(self._end)

    def _begin(self) -> None:
        """Chooses the memory of the totals: the arrays of replica 0, if wide enough."""
        if len(set(self._calls)) > 1:
            raise RuntimeError(
                "The replicas of this process reduce different buffers: programs that "
                "reduce on the host must be called from one thread."
            )
        first = self._given[0]
        wide = base.accumulator(first[0].dtype, "sum")
        self._totals = [
            x if x.dtype == wide else np.empty(x.shape, wide) for x in first
        ]

    def _end(self) -> None:
        """Drops the arrays, whose memory XLA uses for something else from now on."""
        self._given, self._totals = [()] * self.count, []

    def _meet(self, action: Callable[[], None]) -> None:
        """Waits for all threads; the last one runs `action` before any goes on."""
        self._action = action
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError(
                self._failure
                or "A replica of this process did not come to an all-reduce on the "
                "host in time."
            ) from None

    def _act(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._failure = str(error)
            raise


def _part(size: int, replica: int, count: int) -> slice:
    return slice(size * replica // count, size * (replica + 1) // count)
