"""Auto: which all-reduce `all_reduce="auto"` takes for each buffer on this mesh."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jdp import compat, types
from jdp.collectives import cost_model, measurement
from jdp.collectives.base import Op
from jdp.collectives.cost_model import Links
from jdp.collectives.pallas import choice, gpu_topology, tuning
from jdp.collectives.pallas.all_reduce import PallasAllReduce
from jdp.collectives.pallas.choice import THRESHOLDS, Thresholds, Topology
from jdp.collectives.shared_memory.all_reduce import shared_memory_all_reduce
from jdp.collectives.xla import psum_all_reduce
from jdp.replicas import mesh
from jdp.replicas.mesh import World
from jdp.types import AllReduce, AxisName

_logger = logging.getLogger("jdp")
_BUDGET_S = 10.0  # to measure in.


@dataclasses.dataclass(frozen=True)
class AutoAllReduce:
    """Chooses an all-reduce per buffer, while a program is traced.

    Replicas that are CPU processes of one host reduce through shared memory. Sums and
    means on GPUs of one host take the custom kernel where `should_use_custom` says so.
    In all other cases, the first program that is traced measures with `fit_links` on
    all processes, which takes about 10 s at most, once per job, and `choose` decides
    from these times. Without a world of `jdp.init`, or on other axes than its own,
    `psum` is used.

    The custom kernel is tried once per job before it is used. If it does not compile or
    gives a wrong sum, it is not used.

    Attributes:
      thresholds: which sizes take the kernel; see `jdp bench collectives --tune`.
      explain: called with the reason for each buffer that does not take the kernel.
    """

    thresholds: Thresholds = THRESHOLDS
    explain: Callable[[str], None] | None = None

    @property
    def value(self) -> AllReduce:
        """This reduction as an `AllReduce`."""
        return AllReduce(self, choose=self.choose, name="auto")

    def __call__(
        self, x: jax.Array, axis_name: AxisName, *, op: Op = "sum"
    ) -> jax.Array:
        """Reduces one buffer; see the contract in `jdp.collectives.base`."""
        aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return self.choose(aval, axis_name, op=op).reduce(x, axis_name, op=op)

    def choose(
        self, buffer: jax.ShapeDtypeStruct, axis_name: AxisName, *, op: Op = "sum"
    ) -> AllReduce:
        """Returns the all-reduce for a buffer of that shape and dtype."""
        world = mesh.find_current_world()
        reason = "there is no world of `jdp.init` over the axes that are reduced"
        found = None
        if world is not None and _is_whole(world, axis_name):
            found = _find(world)
            reason = "nothing is known about the devices yet"
        if found is None:
            self._explain(buffer, reason)
            return AllReduce(psum_all_reduce, name="psum")
        assert world is not None
        num_bytes = buffer.size * buffer.dtype.itemsize
        reason = self._why_not_custom(buffer, num_bytes, op, found)
        if reason is None:
            algorithm = choice.choose_algorithm(
                num_bytes,
                world.num_replicas,
                thresholds=self.thresholds,
                can_multicast=found.topology.has_multicast
                and buffer.dtype == choice.MULTIMEM_DTYPE,
            )
            return PallasAllReduce(algorithm, self.thresholds).value
        self._explain(buffer, reason)
        if found.links is None:
            return shared_memory_all_reduce.value
        name = cost_model.choose(num_bytes, world.num_replicas, found.links)
        return AllReduce(found.candidates[name], name=name)

    def _why_not_custom(
        self, buffer: jax.ShapeDtypeStruct, num_bytes: int, op: Op, found: "_Found"
    ) -> str | None:
        if op not in ("sum", "mean"):
            return f"it sums, and `op` is {op!r}"
        return found.kernel_fails or choice.why_not_custom(
            num_bytes,
            found.world.num_replicas,
            buffer.dtype,
            found.topology,
            self.thresholds,
        )

    def _explain(self, buffer: jax.ShapeDtypeStruct, reason: str) -> None:
        if self.explain is not None:
            self.explain(f"{buffer} does not take the custom all-reduce: {reason}.")


auto_all_reduce = AutoAllReduce()


@contextlib.contextmanager
def without_measuring() -> Iterator[None]:
    """Keeps "auto" from measuring in this context; until it has, it is `psum`."""
    token = _may_measure.set(False)
    try:
        yield
    finally:
        _may_measure.reset(token)


_may_measure: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "may_measure", default=True
)


@dataclasses.dataclass(frozen=True)
class _Found:
    """Facts found about a world."""

    world: World
    topology: Topology
    kernel_fails: str | None  # why the custom kernel failed when it was tried.
    candidates: dict[str, Callable[..., jax.Array]]
    links: Links | None  # None: shared memory is available and the fastest.


class _LastSearch:
    """Result of the last search; there is one per process, like the world."""

    lock = threading.Lock()
    found: _Found | None = None


def _find(world: World) -> _Found | None:
    with _LastSearch.lock:
        if _LastSearch.found is None or _LastSearch.found.world is not world:
            if not _may_measure.get():
                return None
            # In a thread of its own, where no function is being traced.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                _LastSearch.found = pool.submit(_look, world).result()
        return _LastSearch.found


def _look(world: World) -> _Found:
    """Finds the facts about a world; every process calls it."""
    topology, kernel_fails = find_kernel(world)
    candidates = measurement.candidates(world)
    links = None
    if "shared_memory" not in candidates:
        if world.is_main_process:
            _logger.info(
                '`all_reduce="auto"` measures which all-reduce is the fastest on %d '
                "replicas, once per job, for about %g s at most.",
                world.num_replicas,
                _BUDGET_S,
            )
        links = measurement.fit_links(world, candidates, budget_s=_BUDGET_S)
    return _Found(world, topology, kernel_fails, candidates, links)


def find_kernel(world: World) -> tuple[Topology, str | None]:
    """Finds the GPU topology, and tries the custom kernel where it could be used.

    Every process calls it.

    Returns:
      The topology, and why the kernel fails on it, or None.
    """
    topology = gpu_topology.find_topology(world)
    n = world.num_replicas
    reason = choice.why_not_custom(0, n, jnp.float32, topology, tuning.all_sizes(n))
    if reason is not None:
        return topology, None  # `choose` gives the reason per buffer.
    return topology, measurement.find_failure(world, tuning.kernels(n, topology))


def _is_whole(world: World, axis_name: AxisName) -> bool:
    """Whether this is traced under `shard_map` over all of the world's mesh."""
    names = types.as_axis_names(axis_name)
    manual = jax.sharding.get_abstract_mesh()
    return (
        world.num_replicas > 1
        and names == world.axis_names
        and set(names) <= set(manual.manual_axes)
        and compat.axis_size(axis_name) == world.num_replicas
    )
