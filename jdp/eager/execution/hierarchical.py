"""Hierarchical: XLA programs that reduce within each host before they cross hosts."""

import functools

from jdp import collectives
from jdp.eager.execution.base import CollectiveTask, SetMembers
from jdp.eager.execution.xla import Route, Xla

_all_reduce = functools.partial(
    collectives.hierarchical_all_reduce,
    within=collectives.PSUM,
    across=collectives.psum_all_reduce,
)


class _ChosenKinds:
    """Selection of the hierarchical programs: the kinds that are switched on."""

    def __init__(self, members: SetMembers):
        world = members.world
        self._mesh = world.mesh
        self._kinds: set[str] = set()
        self.why_not = ""
        if not world.is_plain:
            self.why_not = "the mesh is the user's"
        elif len(world.axis_names) != 2:
            self.why_not = "the world does not have a pair of axes"
        elif world.num_replicas != world.process_count:
            self.why_not = "a process has several replicas"
        elif members.set_id != 0:
            self.why_not = "for the global process set only"

    def is_enabled(self, task: CollectiveTask) -> bool:
        """See `Selection`."""
        is_plain = task.op != "adasum"
        return not self.why_not and task.kind in self._kinds and is_plain

    def describe(self) -> str:
        """See `Selection`."""
        if self.why_not:
            return self.why_not
        hosts, local = self._mesh.devices.shape
        kinds = ", ".join(sorted(self._kinds)) or "no operation, as none is switched on"
        return f"{hosts} hosts of {local} processes, for {kinds}"

    def switch(self, *, all_reduce: bool, all_gather: bool) -> None:
        """See `Selection`."""
        self._kinds = {"all_reduce"} if all_reduce else set()
        self._kinds |= {"all_gather"} if all_gather else set()


def make_hierarchical(
    members: SetMembers, *, all_reduce: bool, all_gather: bool
) -> Xla:
    """Constructs the implementation; all members call it together.

    Args:
      members: the process set.
      all_reduce: whether it accepts all-reduces.
      all_gather: whether it accepts all-gathers.
    """
    selection = _ChosenKinds(members)
    selection.switch(all_reduce=all_reduce, all_gather=all_gather)
    # It does not add in rank order, so nothing is reduced on the host.
    route = Route(all_reduce=_all_reduce, is_exact=False)
    if not selection.why_not:
        world = members.world
        route = route._replace(mesh=world.mesh, axis_name=world.axis_names)
    return Xla(members, name="hierarchical", selection=selection, route=route)
