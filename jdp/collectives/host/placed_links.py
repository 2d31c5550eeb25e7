"""Placed links: shared memory within hosts, and TCP among them.

The processes of a host reduce through the memory that they share. Then each reduces a
part of the sums over TCP, with the processes of its place on the other hosts, and gives
the results to the rest of its host.
"""

from collections.abc import Sequence

import numpy as np

from jdp.collectives import base
from jdp.collectives.base import Op
from jdp.collectives.host import arithmetic
from jdp.collectives.host.local_replicas import LocalReplicas
from jdp.collectives.host.strip import Packed, Strip
from jdp.collectives.host.tcp_links import TcpLinks
from jdp.collectives.shared_memory.shared_buffer import SharedBuffer
from jdp.replicas.mesh import World
from jdp.types import AxisName

# Up to here, one round over TCP among all takes less time than three rounds.
_MOST_FLAT_BYTES = 16 << 10


class PlacedLinks:
    """Memory and connections of processes on several hosts, as many on each."""

    def __init__(self, links: TcpLinks, within: SharedBuffer, num_local: int):
        """Takes links among all processes, and the memory of this host.

        Args:
          links: among the processes of all hosts, host by host.
          within: memory of the processes of this host.
          num_local: number of processes of each host.
        """
        self.world: World = links.world
        self.axis_name: AxisName = links.axis_name
        self._links, self._within, self._num_local = links, within, num_local
        self.local = LocalReplicas(self.world)

    def close(self) -> None:
        """Closes the connections and frees the memory."""
        self._links.close()
        self._within.free()

    def reduce_in_place(self, arrays: Sequence[np.ndarray], op: Op, call: int) -> None:
        """Replaces arrays of one dtype by their reductions over the processes.

        Args:
          arrays: contiguous and writeable, shape (n,) each.
          op: see `HostAllReduce`.
          call: identifier of the operation, equal on all processes.

        Raises:
          RuntimeError: a process has ended, did not arrive in time, or reduces
            something else.
        """
        if sum(x.nbytes for x in arrays) <= _MOST_FLAT_BYTES:
            self._links.reduce_in_place(arrays, op, call)
            return
        dtype = base.accumulator(arrays[0].dtype, op)
        is_narrow = dtype != arrays[0].dtype
        wide = [x.astype(dtype) for x in arrays] if is_narrow else arrays
        packed = Packed(wide)
        self._reduce_wide(packed.arrays, "sum" if op == "mean" else op, call)
        packed.unpack()
        for x, total in zip(arrays, wide, strict=True):
            if op == "mean":
                arithmetic.divide(total, self._links.count)
            if is_narrow:
                x[...] = total

    def _reduce_wide(self, arrays: Sequence[np.ndarray], op: Op, call: int) -> None:
        self._within.reduce_in_place(arrays, op, call)
        strip = Strip(arrays)
        parts = [strip.views(*part) for part in strip.cut(self._num_local)]
        place = self._links.rank % self._num_local
        ranks = range(place, self._links.count, self._num_local)
        if parts[place]:
            self._links.reduce_in_place(parts[place], op, call, ranks=ranks)
        for root, views in enumerate(parts):
            for x in views:
                self._within.broadcast(x, root, call)

    def reduce_scatter(
        self,
        rows: Sequence[np.ndarray],
        op: Op,
        call: int,
        outs: Sequence[np.ndarray],
    ) -> None:
        """See `HostMedium`."""
        self._links.reduce_scatter(rows, op, call, outs)

    def all_gather(
        self, parts: Sequence[np.ndarray], call: int, outs: Sequence[np.ndarray]
    ) -> None:
        """See `HostMedium`."""
        self._links.all_gather(parts, call, outs)
