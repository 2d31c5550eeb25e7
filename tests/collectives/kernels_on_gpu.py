"""The custom all-reduce on a GPU, against exact sums: `make gpu`.

All replicas are blocks of a cluster on one GPU, so this shows that kernels are right on
hardware: their barriers, addresses and rounding. With several GPUs the real ones are
checked too.

    python -m tests.collectives.kernels_on_gpu --json results.json
"""

import argparse
import concurrent.futures
import itertools
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jdp
from jdp.bench import kernel, tune
from jdp.bench.rows import Rows
from jdp.collectives.pallas import choice, gpu_topology, kernel_launch, tuning

SIZES = tuple(1 << k for k in range(10, 27, 2))  # bytes, 1 KiB to 64 MiB.
DTYPES = ("float32", "bfloat16", "float16")


class Case(NamedTuple):
    """A kernel."""

    algorithm: choice.Algorithm
    num_replicas: int
    dtype: str
    num_bytes: int  # of a replica's buffer; what is odd about a size is added.
    extra: int  # elements.

    def reduce(self, xs):
        """Returns what each replica gets, shape (num_replicas, n)."""
        launch = choice.default_launch(
            self.num_bytes,
            self.num_replicas,
            self.algorithm,
            max_blocks=choice.MAX_BLOCKS,
        )
        return kernel_launch.all_reduce_in_cluster(xs, self.algorithm, launch)


def make_cases():
    """Returns all kernels, small buffers first."""
    return [
        Case(algorithm, num_replicas, dtype, num_bytes, extra)
        for num_bytes, algorithm, num_replicas, dtype, extra in itertools.product(
            SIZES, ("one_stage", "two_stage"), (2, 4, 6, 8), DTYPES, (0, 3)
        )
    ]


def count_wrong(case, reduce, repeats, seed):
    """Returns how many elements were wrong; each repeat has its own random numbers.

    They are whole, so that every sum is exact in 16 bits, in any order.
    """
    size = case.num_bytes // jnp.dtype(case.dtype).itemsize + case.extra
    shape = (case.num_replicas, size)

    def once(i, wrong):
        key = jax.random.fold_in(jax.random.key(seed), i)
        bits = jax.random.bits(key, shape, jnp.uint8)
        xs = (bits % 17).astype(jnp.int32) - 8
        expected = xs.sum(0).astype(case.dtype)
        results = reduce(xs.astype(case.dtype))
        differ = results != expected  # NaN, which memory may hold, differs too.
        return wrong + differ.sum(dtype=jnp.int32)

    return lax.fori_loop(0, repeats, once, jnp.int32(0))


def check(
    cases, repeats, *, reduce=Case.reduce, seed=0, report=print, rows=None
) -> list[dict[str, Any]]:
    """Runs cases until `rows` is late; returns a row for each."""
    rows = Rows(None) if rows is None else rows

    def compile_one(case):
        def run():
            return count_wrong(case, lambda xs: reduce(case, xs), repeats, seed)

        return case, jax.jit(run).lower().compile()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for case, program in pool.map(compile_one, cases):
            if rows.is_late:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            wrong = int(program())
            rows.add({**case._asdict(), "repeats": repeats, "wrong": wrong})
            if wrong:
                report(f"WRONG: {case}: {wrong} elements in {repeats} repeats")
    return rows.written


def check_replicas(world, repeats):
    """Checks the real kernels on as many GPUs as there are; rows, or why not."""
    topology = gpu_topology.find_topology(world)
    rows = []
    for n in (n for n in (2, 4, 6, 8) if n <= world.num_replicas):
        reason = choice.why_not_custom(0, n, jnp.float32, topology)
        if reason is not None:
            rows.append({"num_replicas": n, "why_not": reason})
            continue
        few = tune.take(world, n)
        kernels = tuning.kernels(n, topology)
        for (name, all_reduce), dtype, size in itertools.product(
            kernels.items(), DTYPES, SIZES
        ):
            if name == "multimem" and dtype != "float32":
                continue
            wrong = _count_wrong_on(few, all_reduce, dtype, size, repeats)
            row = {"algorithm": name, "dtype": dtype, "num_bytes": size}
            rows.append({"num_replicas": n, **row, "repeats": repeats, "wrong": wrong})
    return rows


def _count_wrong_on(world, all_reduce, dtype, num_bytes, repeats):
    size = num_bytes // jnp.dtype(dtype).itemsize

    def run():
        axis = world.axis_name

        def once(i, wrong):
            key = jax.random.fold_in(jax.random.key(0), i)
            key = jax.random.fold_in(key, lax.axis_index(axis))
            xs = (jax.random.bits(key, (size,), jnp.uint8) % 17).astype(jnp.int32) - 8
            expected = lax.psum(xs, axis).astype(dtype)
            differ = all_reduce(xs.astype(dtype), axis) != expected
            return wrong + differ.sum(dtype=jnp.int32)

        return lax.psum(lax.fori_loop(0, repeats, once, jnp.int32(0)), axis)

    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        run, mesh=world.mesh, in_specs=(), out_specs=spec, check_vma=False
    )
    return int(jax.jit(mapped)())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--json", type=pathlib.Path, help="one object a line")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"There is no GPU here, only {jax.default_backend()}.")
    start_s = time.monotonic()
    rows = Rows(arguments.json, arguments.limit_s)
    machine = kernel.describe_machine()
    rows.add(machine)
    cases = [case for case in make_cases() if case.num_bytes <= arguments.max_bytes]
    check(cases, arguments.repeats, rows=rows)
    num_clusters = len(rows.written) - 1
    if jax.device_count() > 1 and not rows.is_late:
        for row in check_replicas(jdp.init(), arguments.repeats):
            rows.add(row)
    wrong = [row for row in rows.written if row.get("wrong")]
    print(
        f"{num_clusters} of {len(cases)} kernels in clusters and "
        f"{len(rows.written) - 1 - num_clusters} of replicas, "
        f"{arguments.repeats} repeats each, {len(wrong)} wrong, "
        f"{time.monotonic() - start_s:.0f} s, on {machine['device']}"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
