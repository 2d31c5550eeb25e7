"""Soak: many shared-memory reductions, and many deaths in the middle of them.

python -m tests.collectives.shared_memory_soak --reductions 100000 --deaths 100
"""

import argparse
import os
import signal
import time

import numpy as np

import jdp
from jdp.collectives.shared_memory.all_reduce import create_shared_buffer
from tests import harness

_NUM_BYTES = 1 << 18  # so that the largest take several pieces.
_MAX_ELEMENTS = 200_000


def _make_reduce(world):
    buffer = create_shared_buffer(world, _NUM_BYTES)

    def reduce(arrays, number):
        buffer.reduce_in_place(arrays, "sum", number % (1 << 31))

    return reduce


def reduce_many(num_reductions, seed):
    """Random sizes, alone and in groups, with random delays; returns what is wrong."""
    world = jdp.init(timeout_s=60.0)
    reduce = _make_reduce(world)
    shared = np.random.default_rng(seed)  # the same on all processes.
    own = np.random.default_rng([seed, world.process_index])
    count, wrong = world.process_count, 0
    for number in range(num_reductions):
        num_arrays = int(shared.choice([1, 1, 1, 5, 40]))
        top = np.log(_MAX_ELEMENTS / num_arrays)
        sizes = np.exp(shared.uniform(0, top, num_arrays)).astype(int)
        values = shared.integers(1000, size=num_arrays)
        arrays = [
            np.arange(v, v + n, dtype=np.float32) + world.process_index
            for v, n in zip(values, sizes, strict=True)
        ]
        if own.random() < 0.01:
            time.sleep(own.exponential(1e-3))
        reduce(arrays, number)
        for x, v, n in zip(arrays, values, sizes, strict=True):
            total = np.arange(v, v + n, dtype=np.float32) * count + sum(range(count))
            wrong += not np.array_equal(x, total)
    return wrong


def reduce_until_killed(delay_s):
    """Process 1 dies after a while; the others must raise, and say so."""
    world = jdp.init(timeout_s=20.0)
    reduce = _make_reduce(world)
    sizes = (10, 100_000)

    def go_on(until_s):
        number = 0
        while time.monotonic() < until_s:
            arrays = [np.ones(sizes[number % 2], np.float32)]
            reduce(arrays, number)
            number += 1

    if world.process_index == 1:
        pid = os.getpid()
        killer = os.fork()
        if killer == 0:  # from outside, so that it comes at any moment.
            time.sleep(delay_s)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
    start_s = time.monotonic()
    text, _ = harness.error_text(lambda: go_on(start_s + 60.0))
    seconds = time.monotonic() - start_s
    print(f"SURVIVED {seconds - delay_s:.2f} {text}", flush=True)


def main() -> None:
    """Runs both; ends with an error if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reductions", type=int, default=100_000)
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    before = os.listdir("/dev/shm")
    start_s = time.monotonic()
    values = harness.run_checked(
        reduce_many, options.processes, options.reductions, int(time.time())
    )
    print(
        f"{options.reductions} reductions on {options.processes} processes: "
        f"{sum(values)} wrong, {time.monotonic() - start_s:.0f} s"
    )
    assert not any(values)
    rng = np.random.default_rng()
    latest = 0.0
    for k in range(options.deaths):
        outcome = harness.run_processes(
            reduce_until_killed, 2, float(rng.uniform(0, 0.5)), grace_s=5.0
        )
        survived = outcome.output.partition("SURVIVED ")[2]
        assert "Process 1 has ended" in survived, (k, outcome.output)
        latest = max(latest, float(survived.split()[0]))
        assert os.listdir("/dev/shm") == before, k
    print(
        f"{options.deaths} deaths: the survivor raised each time, at most "
        f"{latest:.2f} s later; nothing is left in /dev/shm"
    )


if __name__ == "__main__":
    # The processes find the functions by the name of their module.
    from tests.collectives import shared_memory_soak

    shared_memory_soak.main()
