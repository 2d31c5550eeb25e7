"""Auto: which all-reduce `all_reduce="auto"` takes for each buffer on this mesh."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp import compat, types
from jdp.collectives import candidates, cost_model, measurement, measurement_cache, xla
from jdp.collectives.base import Op, ReduceScatterAllGather
from jdp.collectives.cost_model import Links
from jdp.collectives.host import arithmetic
from jdp.collectives.host.tcp_all_reduce import tcp_all_reduce
from jdp.collectives.pallas import choice, gpu_topology, tuning
from jdp.collectives.pallas.all_reduce import PallasAllReduce
from jdp.collectives.pallas.choice import THRESHOLDS, Thresholds, Topology
from jdp.collectives.shared_memory.all_reduce import (
    SHARED_MEMORY,
    shared_memory_all_reduce,
)
from jdp.replicas import axes, mesh, progress
from jdp.replicas.mesh import World
from jdp.types import AllReduce, AxisName

_logger = logging.getLogger("jdp")
# Bytes that are measured, rounds, and the longest time. The sizes of most buckets come
# first, in case time runs out.
_SIZES = (1 << 18, 1 << 22, 1 << 15, 1 << 24)
_ROUNDS = 3
_BUDGET_S = 2.5


@dataclasses.dataclass(frozen=True)
class AutoAllReduce:
    """Chooses an all-reduce per buffer, while a program is traced.

    - CPU processes of one host reduce through shared memory, and the replicas of one
      process by XLA. Nothing is measured: `jdp.init` finds this out.
    - Sums and means on GPUs of one host take the custom kernel where
      `should_use_custom` says so. It is tried once per job before it is used. If it
      does not compile or gives a wrong sum, it is not used.
    - Elsewhere the first program that is traced measures with `fit_links` on all
      processes, for about 3 s at most, and `choose` decides from these times. They are
      kept on disk for the next job; see `jdp.collectives.measurement_cache`.
    - Without a world of `jdp.init`, or on other axes than its own, XLA reduces.

    Types, derivatives and `vmap` are as with `jax.lax.psum`.

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
        reduce = self.choose(aval, axis_name, op=op).reduce
        if reduce is lax.psum:
            reduce = xla.psum_all_reduce
        return reduce(x, axis_name, op=op)

    def choose(
        self, buffer: jax.ShapeDtypeStruct, axis_name: AxisName, *, op: Op = "sum"
    ) -> AllReduce:
        """Returns the all-reduce for a buffer of that shape and dtype."""
        world = mesh.find_current_world()
        if axes.traces_shards():
            return xla.PLAIN
        if world is None or not _is_whole(world, axis_name):
            reason = "there is no world of `jdp.init` over the axes that are reduced"
            self._explain(buffer, reason)
            return xla.PLAIN
        found = _find(world)
        if found is None:
            self._explain(buffer, "nothing is known about the devices yet")
            return UNDECIDED
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
        return found.choose(buffer, num_bytes)

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
UNDECIDED = AllReduce(lax.psum, name="auto")  # while nothing may be measured.


def choose_halves(axis_name: AxisName) -> ReduceScatterAllGather:
    """Chooses a reduce-scatter and an all-gather, as "auto" chooses an all-reduce.

    Between CPU processes of one host with one replica each, both go through shared
    memory, and elsewhere they are XLA's.
    """
    world = mesh.find_current_world()
    if axes.traces_shards():
        return xla.PSUM
    if world is None or world.num_local_replicas > 1 or not _is_whole(world, axis_name):
        return xla.PSUM
    found = _find(world)
    can_share = found is not None and "shared_memory" in found.candidates
    return SHARED_MEMORY if can_share else xla.PSUM


def prepare(world: World, *, is_one_host: bool) -> None:
    """Finds out whether the CPU processes of one host can share memory.

    Every process calls it when it joins the job. Programs can then be traced by any
    process alone. Nothing is measured.
    """
    devices = world.mesh.devices.flat
    if is_one_host and world.process_count > 1 and devices[0].platform == "cpu":
        with without_measuring(), _LastSearch.lock:
            _LastSearch.found = _look(world)


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
    links: Links | None  # None: nothing was measured.

    def choose(self, buffer: jax.ShapeDtypeStruct, num_bytes: int) -> AllReduce:
        """Chooses among the candidates."""
        if "shared_memory" in self.candidates:
            can_share = arithmetic.can_reduce(buffer.dtype)
            return shared_memory_all_reduce.value if can_share else xla.PLAIN
        if self.links is None or not self.links.measured:
            return xla.PLAIN
        name = cost_model.choose(num_bytes, self.world.num_replicas, self.links)
        if name == "psum":
            return xla.PLAIN
        if name == "tcp":
            can_sum = arithmetic.can_reduce(buffer.dtype)
            return tcp_all_reduce.value if can_sum else xla.PLAIN
        return AllReduce(self.candidates[name], name=name)


class _LastSearch:
    """Result of the last search; there is one per process, like the world."""

    lock = threading.Lock()
    found: _Found | None = None  # None: the first program has to measure.


def _find(world: World) -> _Found | None:
    with _LastSearch.lock:
        if _LastSearch.found is None or _LastSearch.found.world is not world:
            if not _may_measure.get() and world.process_count > 1:
                return None
            # In a thread of its own, where no function is being traced.
            pool = concurrent.futures.ThreadPoolExecutor(1)
            with pool, progress.waiting():
                _LastSearch.found = pool.submit(_look, world).result()
        return _LastSearch.found


def _look(world: World) -> _Found | None:
    """Finds the facts about a world; every process calls it.

    Returns None where it would have to measure, and must not.
    """
    topology, kernel_fails = find_kernel(world)
    if world.process_count == 1 and topology.platform == "cpu":
        return _Found(world, topology, kernel_fails, {}, None)
    found = candidates.find(world)
    if "shared_memory" in found:
        _log(world, "shared memory, for %d processes of one host", world.process_count)
        return _Found(world, topology, kernel_fails, found, None)
    if not _may_measure.get():
        return None
    links = measurement_cache.find_or_measure(
        world,
        found,
        lambda: measurement.fit_links(
            world, found, sizes=_SIZES, rounds=_ROUNDS, budget_s=_BUDGET_S
        ),
    )
    facts = _Found(world, topology, kernel_fails, found, links)
    chosen = [
        facts.choose(jax.ShapeDtypeStruct((n // 4,), "float32"), n) for n in _SIZES
    ]
    pairs = zip(_SIZES, chosen, strict=True)
    _log(
        world,
        "%s",
        ", ".join(f"{each.name} for {n >> 10} KiB" for n, each in pairs),
    )
    return facts


def _log(world: World, text: str, *args: Any) -> None:
    if world.is_main_process:
        _logger.info(f'`all_reduce="auto"` takes {text}.', *args)


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
        and world.is_plain
        and names == world.axis_names
        and set(names) <= set(manual.manual_axes)
        and compat.axis_size(axis_name) == world.num_replicas
    )
