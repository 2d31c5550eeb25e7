"""Device program: how do the results of a program of one device become whole arrays?

Beside manual model axes, how a result lies over the devices follows from the program:
it may be the same on all devices of a replica, or differ between them. So the program
is traced first, and its results are put together afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jdp import compat
from jdp.compat import annotations
from jdp.replicas import layouts
from jdp.replicas.mesh import World
from jdp.types import PyTree


class DeviceProgram:
    """Traced program of one device."""

    def __init__(self, world: World, closed: Any, varying: list[frozenset[str]]):
        """Use `trace`.

        Args:
          world: the replicas.
          closed: closed jaxpr with one `shard_map`; its results look the same on all.
          varying: per result, the axes of the mesh over which its type varies.
        """
        self._world = world
        self.closed = closed
        self.varying = varying

    def put_together(self, specs: Sequence[PartitionSpec]) -> Any:
        """Returns the closed jaxpr whose results have these partitions."""
        own = self._world.program_axes
        run = compat.put_together(self.closed, [layouts.keep(s, own) for s in specs])
        return jax.make_jaxpr(run)(*self.closed.in_avals)


def trace(
    world: World,
    fn: Callable[..., Sequence[jax.Array]],
    in_specs: PyTree,
    args: tuple[PyTree, ...],
) -> DeviceProgram:
    """Traces the program of one device.

    JAX tracks by type what varies over the axes of the mesh, so that derivatives are
    right along the manual model axes: the gradient of a parameter that all devices of
    a replica have is summed over them.

    Args:
      world: the replicas.
      fn: a function of the parts that a device has, which returns a list of arrays.
      in_specs: a prefix of `args`, of partitions along the data and the manual axes.
      args: whole arrays.
    """
    found: list[list[frozenset[str]]] = []

    def run(*args: PyTree) -> list[jax.Array]:
        results = fn(*args)
        found.append([compat.varying_axes(x) for x in results])
        return [annotations.forget_axes(x, world.program_axes) for x in results]

    mapped = jax.shard_map(
        run,
        mesh=world.mesh,
        in_specs=in_specs,
        out_specs=PartitionSpec(),
        axis_names=world.program_axes,
        check_vma=True,
    )
    closed = jax.make_jaxpr(mapped)(*args)
    return DeviceProgram(world, closed, found[-1])
