"""Pallas: XLA programs with the custom kernel, for sums on the GPUs of one host."""

import jax

from jdp.collectives import PallasAllReduce, auto
from jdp.collectives.base import Op
from jdp.collectives.pallas import choice
from jdp.eager.execution.base import CollectiveTask, SetMembers
from jdp.eager.execution.xla import Route, Xla, platform_of
from jdp.types import AxisName

_OPS = ("sum", "average")


class _WhereFaster:
    """Selection of the kernel: sums whose sizes and dtypes it reduces faster."""

    def __init__(self, members: SetMembers):
        world = members.world
        self._num_members = members.size
        self.why_not = ""
        if platform_of(members) != "gpu":
            self.why_not = "for GPUs"
        elif not world.is_plain:
            self.why_not = "the mesh is the user's"
        elif world.num_replicas != world.process_count:
            self.why_not = "a process has several replicas"
        elif members.set_id != 0 or members.size == 1:
            self.why_not = "for the global process set of several processes"
        else:
            self._topology, fails = auto.find_kernel(world)
            self.why_not = fails or self._find_obstacle(0, "float32") or ""

    def is_enabled(self, task: CollectiveTask) -> bool:
        """See `Selection`."""
        if self.why_not or task.kind != "all_reduce" or task.op not in _OPS:
            return False
        return self._find_obstacle(task.num_bytes, task.dtype.name) is None

    def describe(self) -> str:
        """See `Selection`."""
        return self.why_not or f"{self._num_members} GPUs"

    def switch(self, *, all_reduce: bool, all_gather: bool) -> None:
        """See `Selection`."""

    def all_reduce(self, x: jax.Array, axis_name: AxisName, *, op: Op) -> jax.Array:
        """Reduces with the algorithm of the kernel that is fastest for the size."""
        algorithm = choice.choose_algorithm(
            x.size * x.dtype.itemsize,
            self._num_members,
            thresholds=choice.THRESHOLDS,
            can_multicast=self._topology.has_multicast
            and x.dtype == choice.MULTIMEM_DTYPE,
        )
        return PallasAllReduce(algorithm)(x, axis_name, op=op)

    def _find_obstacle(self, num_bytes: int, dtype: str) -> str | None:
        return choice.why_not_custom(
            num_bytes, self._num_members, dtype, self._topology
        )


def make_pallas_kernel(members: SetMembers) -> Xla:
    """Constructs the implementation; on GPUs all members try the kernel together."""
    selection = _WhereFaster(members)
    route = Route(all_reduce=selection.all_reduce)
    if not selection.why_not:
        world = members.world
        route = route._replace(mesh=world.mesh, axis_name=world.axis_name)
    return Xla(members, name="Pallas kernel", selection=selection, route=route)
