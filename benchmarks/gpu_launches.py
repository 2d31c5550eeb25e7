"""Launch shapes of the custom all-reduce, timed on one GPU: `make gpu-launches`.

One replica does its share (`pallas_launch.all_reduce_alone`), on the device's own clock
(CUPTI). `custom_choice.default_launch` was chosen from such rows. The default launch of
every kernel comes first, so that a run that is cut has these.

    python -m benchmarks.gpu_launches --json rows.jsonl --limit-s 400
"""

import argparse
import collections
import concurrent.futures
import itertools
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp.bench import kernel
from jdp.bench.kernel_times import moved_bytes
from jdp.bench.rows import Rows
from jdp.collectives.pallas import choice, kernel_launch
from jdp.collectives.pallas.choice import Algorithm, Launch

KERNELS: tuple[tuple[Algorithm, int], ...] = (
    ("one_stage", 64 << 10),
    ("one_stage", 1 << 20),
    ("two_stage", 1 << 20),
    ("two_stage", 8 << 20),
    ("two_stage", 64 << 20),
    ("one_stage", 256 << 10),
    ("two_stage", 256 << 10),
    ("one_stage", 8 << 20),
)
BLOCKS = (4, 8, 16, 36, 66, 132)
_COPY_BYTES = 1 << 30  # far more than any cache holds.


class Case(NamedTuple):
    """A kernel and its launch; buffers are float32."""

    algorithm: Algorithm
    num_replicas: int
    num_bytes: int
    launch: Launch

    @property
    def is_default(self) -> bool:
        return self.launch == _default(*self[:3])


def _default(algorithm: Algorithm, num_replicas: int, num_bytes: int) -> Launch:
    return choice.default_launch(
        num_bytes, num_replicas, algorithm, max_blocks=choice.MAX_BLOCKS
    )


def make_cases() -> list[Case]:
    """Returns all cases, the default launches first."""
    cases = []
    for (algorithm, num_bytes), n in itertools.product(KERNELS, (8, 2, 4)):
        default = _default(algorithm, n, num_bytes)
        # More threads than tiles have nothing to do but to meet.
        most = choice.default_launch(num_bytes, n, algorithm, max_blocks=132)
        unrolls = (1, 2) if n == 8 else (1, 2, 4)
        launches = [
            Launch(num_blocks, 4, unroll)
            for num_blocks, unroll in itertools.product(BLOCKS, unrolls)
            if most.num_blocks / 8 <= num_blocks <= 2 * most.num_blocks
        ]
        cases += [
            Case(algorithm, n, num_bytes, launch)
            for launch in dict.fromkeys([default, *launches])
        ]
    return sorted(cases, key=lambda case: not case.is_default)


def make_shares(case: Case) -> list[Callable[..., jax.Array]]:
    """Returns the work of some replicas, as functions of the same operands."""
    n, size = case.num_replicas, case.num_bytes // 4
    xs = jax.ShapeDtypeStruct((n, size), jnp.float32)
    shares = []
    for rank in range(0, n, 2) if n > 2 else range(n):
        share = kernel_launch.all_reduce_alone(
            n, size, jnp.float32, case.algorithm, case.launch, rank=rank
        )
        if case.algorithm == "two_stage":
            parts = jax.ShapeDtypeStruct(share.part_shape, jnp.float32)
            shares.append(jax.jit(share.run).lower(xs, parts))
        else:
            shares.append(jax.jit(lambda xs, run=share.run: run(xs, None)).lower(xs))
    return [share.compile() for share in shares]


def time_on_device(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Returns microseconds of each kernel that a GPU ran meanwhile, by name."""
    found = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        for plane in (p for p in profile.planes if "GPU" in p.name):
            for line in (each for each in plane.lines if "Stream" in each.name):
                for event in line.events:
                    found[event.name].append(event.duration_ns / 1e3)
    return found


def time_copy(repeats: int) -> float:
    """Returns the bytes per microsecond that a pass over memory reads and writes."""
    x = jnp.zeros(_COPY_BYTES // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copy(x).block_until_ready()
    found = time_on_device(
        lambda: [copy(x).block_until_ready() for _ in range(repeats)]
    )
    return 2 * _COPY_BYTES / max(map(statistics.median, found.values()))


def measure(
    case: Case,
    shares: Sequence[Callable[..., jax.Array]],
    bandwidth: float,
    repeats: int,
) -> dict[str, Any]:
    """Runs the shares in turns; returns a row.

    Raises:
      RuntimeError: the profile does not show the kernel.
    """
    n, size = case.num_replicas, case.num_bytes // 4
    operands = [jax.random.normal(jax.random.key(0), (n, size))]
    if case.algorithm == "two_stage":
        operands.append(kernel_launch.parts_of(operands[0], case.launch))
    jax.block_until_ready([share(*operands) for share in shares])  # warm up.

    def run() -> None:
        for _ in range(repeats):
            jax.block_until_ready([share(*operands) for share in shares])

    found = time_on_device(run)
    times = [us for k, v in found.items() if "jdp" in k or "mosaic" in k for us in v]
    if not times:
        raise RuntimeError(f"{case}: the profile has no such kernel, only {[*found]}.")
    us = statistics.median(times)
    bound_us = moved_bytes(case.algorithm, n, size, 4) / bandwidth
    return {
        "algorithm": case.algorithm,
        "num_replicas": n,
        "num_bytes": case.num_bytes,
        "num_blocks": case.launch.num_blocks,
        "num_warpgroups": case.launch.num_warpgroups,
        "unroll": case.launch.unroll,
        "is_default": case.is_default,
        "us": us,
        "bound_us": bound_us,
        "over_bound": us / bound_us,
        "repeats": len(times),
    }


def summarize(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each kernel: the default launch beside the best one."""
    by_kernel = collections.defaultdict(list)
    for row in rows:
        key = row["algorithm"], row["num_replicas"], row["num_bytes"]
        by_kernel[key].append(row)
    lines = []
    for (algorithm, n, num_bytes), found in by_kernel.items():
        best = min(found, key=lambda row: row["us"])
        (default,) = (row for row in found if row["is_default"])
        lines.append(
            f"{algorithm} n={n} {num_bytes >> 10} KiB: {default['us']:.1f} us with "
            f"{_name(default)}, {best['us']:.1f} with {_name(best)}, the best of "
            f"{len(found)}; bound {best['bound_us']:.1f}"
        )
    return lines


def _name(row: dict[str, Any]) -> str:
    return f"{row['num_blocks']} blocks, unroll {row['unroll']}"


def main() -> None:
    """Measures all cases until the limit is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--json", type=pathlib.Path, help="one object a line")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"There is no GPU here, only {jax.default_backend()}.")
    rows = Rows(arguments.json, arguments.limit_s)
    bandwidth = time_copy(arguments.repeats)
    rows.add(kernel.describe_machine() | {"copy_gb_per_s": bandwidth / 1e3})
    cases = make_cases()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        compiled = pool.map(make_shares, cases)
        for case, shares in zip(cases, compiled, strict=True):
            if rows.is_late:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            rows.add(measure(case, shares, bandwidth, arguments.repeats))
    for line in summarize(rows.written[1:]):
        print(line)
    print(f"{len(rows.written) - 1} of {len(cases)} launches were timed")


if __name__ == "__main__":
    main()
