"""Pallas: the custom kernel, for sums on GPUs of one host."""

from collections.abc import Callable

import jax

from jdp.collectives import PallasAllReduce, auto
from jdp.collectives.base import Op
from jdp.collectives.pallas import choice
from jdp.eager.execution.base import Members, Task
from jdp.eager.execution.xla import Xla

_OPS = ("sum", "average")


class PallasKernel(Xla):
    """Reduces with `jdp.collectives.pallas_all_reduce` where it is the faster one."""

    def __init__(self, members: Members):
        """Makes it; on GPUs all members try the kernel together."""
        super().__init__(members)
        self.name = "Pallas kernel"
        world = members.world
        self._why_not = ""
        if self._platform != "gpu":
            self._why_not = "for GPUs"
        elif world.num_replicas != world.process_count:
            self._why_not = "a process has several replicas"
        elif members.set_id != 0 or members.size == 1:
            self._why_not = "for the set of all processes, of which there are several"
        else:
            self._topology, fails = auto.find_kernel(world)
            self._why_not = fails or self._find_obstacle(0, "float32") or ""
            self._mesh = world.mesh
            self._axis_name = world.axis_name

    def is_enabled(self, task: Task) -> bool:
        """See `Implementation`."""
        if self._why_not or task.kind != "all_reduce" or task.op not in _OPS:
            return False
        return self._find_obstacle(task.num_bytes, task.dtype.name) is None

    def describe(self) -> str:
        """See `Implementation`."""
        return self._why_not or f"{self._members.size} GPUs"

    def _find_obstacle(self, num_bytes: int, dtype: str) -> str | None:
        return choice.why_not_custom(
            num_bytes, self._members.size, dtype, self._topology
        )

    def _make_all_reduce(self, op: Op) -> Callable[[jax.Array], jax.Array]:
        count = self._members.size

        def reduce(x: jax.Array) -> jax.Array:
            algorithm = choice.choose_algorithm(
                x.size * x.dtype.itemsize,
                count,
                thresholds=choice.THRESHOLDS,
                can_multicast=self._topology.has_multicast
                and x.dtype == choice.MULTIMEM_DTYPE,
            )
            return PallasAllReduce(algorithm)(x, self._axis_name, op=op)

        return reduce
