"""Measurement: times of all-reduces on the running mesh, and the links they imply."""

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jdp.collectives import candidates, cost_model
from jdp.collectives.cost_model import ALGORITHMS, Curve, Links
from jdp.collectives.host import ordered
from jdp.collectives.xla import psum_all_reduce
from jdp.replicas import agreement, wire
from jdp.replicas.mesh import World
from jdp.types import AllReduceFn

_logger = logging.getLogger("jdp")
# Sizes in bytes that `fit_links` measures by default. The sizes of most buckets come
# first, in case time runs out.
SIZES = (1 << 22, 1 << 20, 1 << 24, 1 << 26, 1 << 15, 1 << 10)
_BYTES_A_TURN = 1 << 20  # small buffers are reduced many times in a turn.
_MAX_REPEATS = 20
_SMALL_BYTES = 4 << 20
_TRIED_SIZE = 100_003  # prime; the sums are exact in float32.


class Seconds(msgspec.Struct, frozen=True):
    """Seconds that one all-reduce added to a program, one figure per round."""

    algorithm: str
    num_bytes: int
    rounds: list[float]

    @property
    def median(self) -> float:
        """The median of the rounds, at least a nanosecond."""
        return max(1e-9, statistics.median(self.rounds))


def time_all_reduces(
    world: World,
    all_reduces: Mapping[str, AllReduceFn],
    sizes: Sequence[int],
    *,
    rounds: int,
    budget_s: float | None = None,
) -> list[Seconds]:
    """Times all-reduces in turns, each as a step would run it.

    A program computes a buffer from another one and reduces it, a small buffer many
    times. The measured time is the difference to the same program without the
    all-reduce. Every process calls it and gets its own times.

    Args:
      world: the replicas.
      all_reduces: functions by name.
      sizes: sizes of the float32 buffers, in bytes.
      rounds: turns per function, after a turn that compiles and a turn that warms up.
      budget_s: seconds after which no new turn begins, except for the first size. All
        processes stop at the same turn. None: no limit.

    Returns:
      One record per name and size that was measured.
    """
    is_over: Callable[[], bool] = lambda: False  # noqa: E731
    found: list[Seconds] = []
    with_end = is_over if budget_s is None else _make_end(world, budget_s)
    for num_bytes in sizes:
        found += _time_size(world, all_reduces, num_bytes, rounds, is_over)
        is_over = with_end
    return found


def _make_end(world: World, budget_s: float) -> Callable[[], bool]:
    """Returns a function that tells all processes whether any is out of time."""
    deadline_s = time.monotonic() + budget_s
    program = make_program(world, psum_all_reduce, 1)

    def is_over() -> bool:
        late = np.full(world.num_local_replicas, time.monotonic() > deadline_s)
        x = jax.make_array_from_process_local_data(
            world.split, late.astype(np.float32), (world.num_replicas,)
        )
        return bool(np.asarray(program(x).addressable_data(0))[0] > 0)

    return is_over


def _time_size(
    world: World,
    all_reduces: Mapping[str, AllReduceFn],
    num_bytes: int,
    rounds: int,
    is_over: Callable[[], bool],
) -> list[Seconds]:
    """Times one size; returns no records if time runs out before a full round."""
    if is_over():
        return []
    count = num_repeats(num_bytes)
    # The first call after another program finds cold caches and sleeping peers.
    num_calls = 5 if num_bytes <= _SMALL_BYTES else 1
    programs = {
        name: make_program(world, all_reduce, count)
        for name, all_reduce in {"": lambda x, _: x, **all_reduces}.items()
    }
    size = max(1, num_bytes // 4)
    local = np.zeros(size * world.num_local_replicas, np.float32)
    shape = (size * world.num_replicas,)
    x = jax.make_array_from_process_local_data(world.split, local, shape)
    turns: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for name in (names + names[::-1]) * (rounds // 2 + 1) + names * (rounds % 2):
        if is_over():
            break
        seconds = []
        for _ in range(num_calls):
            start_s = time.perf_counter()
            x = jax.block_until_ready(programs[name](x))
            seconds.append((time.perf_counter() - start_s) / count)
        turns[name].append(statistics.median(seconds))
    num_rounds = min(map(len, turns.values()))
    bare = turns.pop("")
    found = []
    for name, seconds in turns.items():
        pairs = zip(seconds[2:num_rounds], bare[2:num_rounds], strict=True)
        found.append(Seconds(name, num_bytes, [a - b for a, b in pairs]))
    return found if num_rounds > 2 else []


def find_failure(world: World, all_reduces: Mapping[str, AllReduceFn]) -> str | None:
    """Tries all-reduces on small buffers; every process calls it and gets one answer.

    No process runs them before all processes have compiled them.

    Args:
      world: the replicas.
      all_reduces: functions by name; they are tried on float32.

    Returns:
      Why one of them cannot be used, as the first failing process says, or None.

    Raises:
      RuntimeError: an all-reduce did not finish within `world.timeout_s` seconds, so
        nothing else can run on its device now; or a process did not take part.
    """
    programs: dict[str, tuple[Callable[[jax.Array], jax.Array], jax.Array]] = {}

    def compile_them() -> str:
        spec = PartitionSpec(world.axis_names)
        local = [np.float32(i) + np.arange(_TRIED_SIZE) for i in _local_ranks(world)]
        shape = (_TRIED_SIZE * world.num_replicas,)
        flat = np.concatenate(local).astype(np.float32)
        for name, all_reduce in all_reduces.items():
            x = jax.make_array_from_process_local_data(world.split, flat, shape)
            mapped = jax.shard_map(
                lambda x, fn=all_reduce: fn(x, world.axis_name),
                mesh=world.mesh,
                in_specs=spec,
                out_specs=spec,
                check_vma=False,
            )
            try:
                programs[name] = (jax.jit(mapped).lower(x).compile(), x)
            except Exception as error:  # A compiler may raise anything.
                return f"{name} does not compile here: {type(error).__name__}: {error}"
        return ""

    def run_them() -> str:
        n = world.num_replicas
        expected = n * np.arange(_TRIED_SIZE) + n * (n - 1) / 2
        for name, (program, x) in programs.items():
            try:
                y = program(x)
                _wait(y, name, world.timeout_s)
            except jax.errors.JaxRuntimeError as error:
                return f"{name} does not run here: {error}"
            parts = [np.asarray(shard.data) for shard in y.addressable_shards]
            if not all(np.array_equal(part, expected) for part in parts):
                return f"{name} gave a wrong sum when it was tried"
        return ""

    for work in (compile_them, run_them):
        topic = "trial of all-reduces"
        with agreement.reporting(world, topic):
            reason = work()
        verdict = agreement.meet(
            world, topic, reason.encode(), lambda all: next(filter(None, all), b"")
        )
        if verdict:
            return wire.decode_text(verdict)
    return None


def _wait(y: Any, name: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not y.is_ready():
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"The all-reduce {name!r} did not come back within {timeout_s:g} s "
                "when it was tried; the devices are stuck in it. Start again with "
                "`jdp.collectives.psum_all_reduce` in place of 'auto'."
            )
        time.sleep(0.001)
    jax.block_until_ready(y)


def _local_ranks(world: World) -> list[int]:
    devices = list(world.mesh.devices.flat)
    return [devices.index(device) for device in world.local_devices]


def fit_links(
    world: World,
    all_reduces: Mapping[str, AllReduceFn] | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
    budget_s: float | None = None,
) -> Links:
    """Measures latency, bandwidth and cost of reducing on the running mesh.

    Every process calls it, and all get the result of process 0. It takes some seconds,
    mostly for compilation.

    Args:
      world: the replicas.
      all_reduces: functions to time, by name; None: all that `choose` can return.
      sizes: sizes of the buffers, in bytes.
      rounds: how often each all-reduce is timed per size.
      budget_s: seconds after which no further size is timed; the first of `sizes` is
        always timed. None: no limit.

    Returns:
      The links that fit the times of ring, halving-doubling and butterfly with the
      least relative error, together with all measured times, for `choose`.

    Raises:
      RuntimeError: a process did not take part.
    """
    if world.num_replicas == 1:
        return Links(0.0, math.inf)
    topic = "fit of the links"
    with agreement.reporting(world, topic):
        if all_reduces is None:
            all_reduces = candidates.find(world)
        own = time_all_reduces(
            world, all_reduces, sizes, rounds=rounds, budget_s=budget_s
        )
    body = agreement.meet(world, topic, msgspec.msgpack.encode(own), lambda all: all[0])
    return make_links(
        wire.decode(body, list[Seconds], what="A list of times"), world.num_replicas
    )


def make_links(measured: Sequence[Seconds], num_replicas: int) -> Links:
    """Fits latency, bandwidth and compute to measured times, weighted by 1 / time."""
    if not measured or not all(map(_is_possible, measured)):
        raise wire.Malformed(
            "A list of times is empty, or has times that cannot be. Install the same "
            "jdp in every process."
        )
    rows, ones = [], []
    for each in measured:
        algorithm = ALGORITHMS.get(each.algorithm)
        if algorithm is None or algorithm.counter is None:
            continue
        work = cost_model.predict(
            each.algorithm,
            each.num_bytes,
            num_replicas,
            Links(0.0, math.inf),
            num_chunks=cost_model.num_chunks_here(
                each.algorithm, each.num_bytes, num_replicas
            ),
        ).work
        row = [work.num_rounds, work.serial_bytes, work.reduced_bytes]
        rows.append([value / each.median for value in row])
        ones.append(1.0)
    latency_s = s_per_byte = compute_s = 0.0
    if rows:  # Otherwise no algorithm has a counter, and only the times are used.
        import scipy.optimize  # takes a quarter of a second, so only when measuring.

        (latency_s, s_per_byte, compute_s), _ = scipy.optimize.nnls(
            np.array(rows), np.array(ones)
        )
    curves: dict[str, list[tuple[int, float]]] = {}
    for each in sorted(measured, key=lambda each: each.num_bytes):
        points = curves.setdefault(each.algorithm, [])
        points.append((each.num_bytes, each.median))
    return Links(
        latency_s=float(latency_s),
        bandwidth_bytes_per_s=float(1 / s_per_byte) if s_per_byte else math.inf,
        compute_s_per_byte=float(compute_s),
        measured=tuple(
            Curve(name, num_replicas, tuple(points)) for name, points in curves.items()
        ),
    )


def _is_possible(each: Seconds) -> bool:
    # Negative numbers are possible: each is a difference of two times.
    is_finite = all(math.isfinite(x) and abs(x) < 1e6 for x in each.rounds)
    return bool(each.rounds) and is_finite and 0 < each.num_bytes < 1 << 50


def num_repeats(num_bytes: int) -> int:
    """Returns how often a program reduces a buffer to run long enough to be timed."""
    return max(1, min(_MAX_REPEATS, _BYTES_A_TURN // num_bytes))


def make_program(
    world: World, all_reduce: AllReduceFn, count: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns a program that makes a buffer and reduces it, `count` times.

    It takes an array split over the replicas and donates it to the result.
    """

    def once(x: jax.Array) -> jax.Array:
        with ordered.tracing_body():
            return all_reduce(x * jnp.float32(0.5), world.axis_name)

    def run(x: jax.Array) -> jax.Array:
        # No loop around large buffers: XLA on CPU copies the carry.
        return (
            once(x) if count == 1 else lax.fori_loop(0, count, lambda _, x: once(x), x)
        )

    spec = PartitionSpec(world.axis_names)
    mapped = jax.shard_map(
        run, mesh=world.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)
