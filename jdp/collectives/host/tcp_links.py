"""TCP links: numpy arrays reduced over connections among processes."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from jdp.collectives.base import Op
from jdp.collectives.host import algorithms, links
from jdp.collectives.host.local_replicas import LocalReplicas
from jdp.collectives.host.strip import Packed
from jdp.collectives.host.transfer import Aborted, LinkBroken, Transfer
from jdp.replicas import progress, stamps, world_end
from jdp.replicas.mesh import World
from jdp.types import AxisName


class TcpLinks:
    """Connections over which processes reduce; see `open_tcp_links`."""

    def __init__(
        self,
        world: World,
        processes: Sequence[int],
        *,
        key: str,
        axis_name: AxisName = (),
    ):
        """Opens the connections.

        Args:
          world: the world.
          processes: any processes of the world.
          key: where the processes meet in the store.
          axis_name: axes to reduce over; (): not used inside programs.
        """
        self.world, self.axis_name = world, axis_name
        self._processes = tuple(processes)
        self.rank = self._processes.index(world.process_index)
        self._sockets = links.open_links(world, processes, key=key)
        self.local = LocalReplicas(world)
        self._lock = threading.Lock()
        self._number = 0
        self._failure: str | None = None
        self._is_aborted = False
        world_end.register(self.close)

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes, by rank."""
        return self._processes

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._processes)

    def close(self) -> None:
        """Closes the connections; later reductions raise RuntimeError."""
        world_end.unregister(self.close)
        self._is_aborted = True
        with self._lock:
            self._failure = self._failure or "The TCP links have been closed."
            self._hang_up()

    def reduce_in_place(
        self,
        arrays: Sequence[np.ndarray],
        op: Op,
        call: int,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Replaces arrays of one dtype by their reductions over the processes.

        Args:
          arrays: contiguous and writeable, shape (n,) each.
          op: see `HostAllReduce`.
          call: identifier of the operation, equal on all processes.
          ranks: ranks to reduce over, including this one; None: all. Every process of
            the links makes the call.

        Raises:
          RuntimeError: a process has ended, did not arrive in time, or reduces
            something else.
        """
        packed = Packed(arrays)
        with self._in_turn(call, ranks) as transfer:
            group = range(self.count) if ranks is None else ranks
            own = group.index(self.rank)
            algorithms.all_reduce(transfer, packed.arrays, op, own, len(group))
        packed.unpack()

    def reduce_scatter(
        self,
        rows: Sequence[np.ndarray],
        op: Op,
        call: int,
        outs: Sequence[np.ndarray],
    ) -> None:
        """See `HostMedium`."""
        with self._in_turn(call) as transfer:
            algorithms.reduce_scatter(transfer, rows, op, self.rank, outs)

    def all_gather(
        self, parts: Sequence[np.ndarray], call: int, outs: Sequence[np.ndarray]
    ) -> None:
        """See `HostMedium`."""
        with self._in_turn(call) as transfer:
            algorithms.all_gather(transfer, parts, self.rank, outs)

    def broadcast(self, array: np.ndarray, root: int, call: int) -> None:
        """Replaces an array by the array of one process.

        Args:
          array: shape (n,), contiguous and writeable.
          root: rank of that process among the processes of the links.
          call: see `reduce_in_place`.
        """
        with self._in_turn(call) as transfer:
            algorithms.broadcast(transfer, array, root, self.rank, self.count)

    @contextlib.contextmanager
    def _in_turn(
        self, call: int, ranks: Sequence[int] | None = None
    ) -> Iterator[Transfer]:
        """Allows one collective at a time, and none after a failed one."""
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            self._number += 1
            begun_ns = time.monotonic_ns()
            holds_up = progress.is_held_up() if stamps.has_record() else True
            sockets = self._sockets
            if ranks is not None:
                sockets = {
                    i: sockets[rank] for i, rank in enumerate(ranks) if rank in sockets
                }
            transfer = Transfer(
                sockets,
                call,
                self._number,
                timeout_s=self.world.timeout_s,
                is_aborted=lambda: self._is_aborted,
            )
            try:
                yield transfer
            except (LinkBroken, Aborted) as error:
                self._failure = self._describe(error, ranks)
                self._hang_up()
                raise RuntimeError(self._failure) from None
            except BaseException as error:
                self._failure = f"A TCP all-reduce failed: {error!r}."
                self._hang_up()
                raise
            holds_up = holds_up and progress.is_held_up()
            stamps.add_wait(transfer.waited_ns, holds_up=holds_up)
            stamps.add_reduction(time.monotonic_ns() - begun_ns)

    def _hang_up(self) -> None:
        """Lets the others know that this process reduces no more."""
        for link in self._sockets.values():
            link.close()

    def _describe(
        self, error: LinkBroken | Aborted, ranks: Sequence[int] | None
    ) -> str:
        if isinstance(error, Aborted):
            return "The TCP links have been closed."
        rank = error.rank if ranks is None else ranks[error.rank]
        own, process = self.world.process_index, self._processes[rank]
        match error.why:
            case "ended":
                return (
                    f"The link to process {process} broke in a TCP all-reduce: the "
                    "process has ended or given up, or its host or the network failed; "
                    "the others cannot go on without it."
                )
            case "silent":
                return (
                    f"Process {process} sent nothing in a TCP all-reduce for "
                    f"{self.world.timeout_s:g} s; it may have stopped, or make other "
                    "all-reduces than the rest, as with a last batch of another size."
                )
        return (
            f"Process {process} reduces another buffer than process {own}: programs "
            "that reduce over TCP must be called in the same order on all processes, "
            "from one thread."
        )
