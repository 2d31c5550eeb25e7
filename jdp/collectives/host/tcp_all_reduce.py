"""TCP all-reduce: among CPU processes of any hosts, inside `jit`."""

import contextlib

from jdp import types
from jdp.collectives.host import members
from jdp.collectives.host.default_media import DefaultMedia
from jdp.collectives.host.host_all_reduce import HostAllReduce
from jdp.collectives.host.links import all_are
from jdp.collectives.host.placed_links import PlacedLinks
from jdp.collectives.host.tcp_links import TcpLinks
from jdp.collectives.shared_memory.shared_buffer import (
    DEFAULT_NUM_BYTES,
    LEAST_NUM_BYTES,
    SharedBuffer,
)
from jdp.replicas.mesh import World
from jdp.types import AxisName

_TITLE = "TCP all-reduce"
_BUCKET_BYTES = 4 << 20


def open_tcp_links(world: World, *, axis_name: AxisName | None = None) -> TcpLinks:
    """Connects the processes of a world for reductions over TCP.

    Every process calls it, in the same order relative to other collective calls.
    Strangers are refused with the key of the job; what travels is not encrypted.

    Args:
      world: the processes, with as many CPU replicas each.
      axis_name: axes to reduce over: all, or the inner axis of a pair; None: all.

    Returns:
      The links, for `TcpAllReduce`.

    Raises:
      RuntimeError: on every process, if one cannot be reached, or did not arrive within
        `world.timeout_s`.
      ValueError: processes have different numbers of replicas, or several and
        `axis_name` is not all axes.
    """
    axis_name = world.axis_name if axis_name is None else axis_name
    number = 0 if world.store is None else world.store.next_round()
    return _open(world, axis_name, str(number))


def _open(world: World, axis_name: AxisName, name: str) -> TcpLinks:
    processes = members.find_processes(world, axis_name, _TITLE)
    key = f"jdp/tcp_links/{name}/{processes[0]}"
    return TcpLinks(world, processes, key=key, axis_name=axis_name)


def _open_default(world: World, axis_name: AxisName) -> TcpLinks | PlacedLinks:
    """Opens links; with shared memory within hosts, if each has as many processes."""
    name = f"default/{len(types.as_axis_names(axis_name))}"
    links = _open(world, axis_name, name)
    num_local, rest = divmod(world.process_count, world.num_nodes)
    if rest or 1 in (num_local, world.num_nodes) or links.count < world.process_count:
        return links
    first = links.rank // num_local * num_local
    within = None
    with contextlib.suppress(RuntimeError):
        within = SharedBuffer(
            world,
            links.processes[first : first + num_local],
            DEFAULT_NUM_BYTES,
            key=f"jdp/tcp_links/{name}/within/{first}",
            least_bytes=LEAST_NUM_BYTES,
        )
    is_shared = all_are(
        world,
        range(world.process_count),
        within is not None,
        key=f"jdp/tcp_links/{name}/shared",
        topic="opening of placed links",
    )
    if within is None or not is_shared:
        return links
    return PlacedLinks(links, within, num_local)


_defaults = DefaultMedia(_open_default)


def default_links(world: World, axis_name: AxisName) -> TcpLinks | PlacedLinks:
    """Returns the default links over these axes; the first call opens them.

    Raises:
      RuntimeError: see `open_tcp_links`.
    """
    return _defaults.find(world, axis_name)


class TcpAllReduce(HostAllReduce):
    """Reduces over CPU processes of any hosts, over TCP, in place of gloo.

    Small buffers take halving-doubling, and large ones a ring. Where each of several
    hosts has several processes, as many on each, large buffers are reduced through
    shared memory within the hosts first. Without `links`, it
    reduces over default links, opened when a program with it first runs.
    """

    name = "tcp_all_reduce"
    title = _TITLE
    bucket_bytes = _BUCKET_BYTES

    def __init__(self, links: TcpLinks | None = None):
        super().__init__(links)

    def _open_default(
        self, world: World, axis_name: AxisName
    ) -> TcpLinks | PlacedLinks:
        return default_links(world, axis_name)


tcp_all_reduce = TcpAllReduce()
TCP = tcp_all_reduce.halves
