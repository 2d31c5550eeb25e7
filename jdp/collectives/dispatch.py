"""Dispatch: `all_reduce="auto"`, the fastest one for each buffer on this mesh."""

import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator

import jax

from jdp import mesh
from jdp.collectives import cost_model, measurement
from jdp.collectives.base import Op
from jdp.collectives.cost_model import Links
from jdp.collectives.shared_memory import shared_memory_all_reduce
from jdp.collectives.xla import psum_all_reduce
from jdp.mesh import World
from jdp.types import AxisName


class AutoAllReduce:
    """Picks an all-reduce for each buffer, while a program is traced.

    Replicas that are CPU processes of one host reduce through shared memory. On other
    meshes the first program that is traced measures with `fit_links`, together with all
    processes, which takes some seconds, once a job; then `choose` picks. Where there is
    no world of `jdp.init`, or the axes are not its axes, it is `psum`.
    """

    __name__ = "auto"

    def __call__(
        self, x: jax.Array, axis_name: AxisName, *, op: Op = "sum"
    ) -> jax.Array:
        """Reduces one buffer; see the contract in `jdp.collectives.base`."""
        return self.pick(x.nbytes, axis_name)(x, axis_name, op=op)

    def pick(self, num_bytes: int, axis_name: AxisName) -> Callable[..., jax.Array]:
        """Returns the all-reduce for a buffer of so many bytes."""
        world = mesh.find_current_world()
        if world is None or not _is_whole(world, axis_name):
            return psum_all_reduce
        found = _find(world)
        if found is None:
            return psum_all_reduce
        if found.links is None:
            return shared_memory_all_reduce
        name = cost_model.choose(num_bytes, world.num_replicas, found.links)
        return found.candidates[name]


auto_all_reduce = AutoAllReduce()


@contextlib.contextmanager
def without_measuring() -> Iterator[None]:
    """While tracing: asks nobody; "auto" is `psum` if nothing is known yet."""
    token = _may_measure.set(False)
    try:
        yield
    finally:
        _may_measure.reset(token)


_may_measure: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "may_measure", default=True
)


class _Found:
    """What is known of the current world; like the world, there is one."""

    lock = threading.Lock()
    current: "_Found | None" = None

    def __init__(self, world: World):
        self.world = world
        self.candidates = measurement.candidates(world)
        self.links: Links | None = None  # Nothing is faster than shared memory.
        if "shared_memory" not in self.candidates:
            self.links = measurement.fit_links(world, self.candidates)


def _find(world: World) -> _Found | None:
    with _Found.lock:
        if _Found.current is None or _Found.current.world is not world:
            if not _may_measure.get():
                return None
            # A thread of its own is outside of the function that is traced here.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                _Found.current = pool.submit(_Found, world).result()
        return _Found.current


def _is_whole(world: World, axis_name: AxisName) -> bool:
    """Whether this is traced under `shard_map` over all of the world's mesh."""
    names = mesh.as_axis_names(axis_name)
    manual = jax.sharding.get_abstract_mesh()
    return (
        world.num_replicas > 1
        and names == world.axis_names
        and set(names) <= set(manual.manual_axes)
        and mesh.axis_size(axis_name) == world.num_replicas
    )
