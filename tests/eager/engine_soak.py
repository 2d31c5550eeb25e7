"""Soak: random operations of the eager engine in random orders, and random deaths.

python -m tests.eager.engine_soak --operations 200000 --deaths 60
"""

import argparse
import importlib
import os
import signal
import time

import numpy as np

import jdp
from jdp import eager
from tests import harness

_WINDOW = 25  # operations that are under way at once.
_NUM_NAMES = 200  # so that the cache has to make room, and some names change shape.
_KINDS = (
    "all_reduce",
    "all_reduce",
    "all_reduce",
    "all_reduce",
    "group",
    "all_gather",
    "broadcast",
    "reduce_scatter",
    "all_to_all",
    "in_set",
)
_DTYPES = (np.float32, np.float32, np.float64, np.int32, np.int8, np.float16)
_OPS = ("sum", "average", "min", "max")
_DEADLINE_S = 3.0


class _Operation:
    """One operation of a window: the same on all processes, but for its data."""

    def __init__(self, shared, number, size, evens):
        self.kind = str(shared.choice(_KINDS))
        self.name = f"{self.kind} {number}"
        self.dtype = _DTYPES[shared.integers(len(_DTYPES))]
        self.op = str(shared.choice(_OPS))
        if self.kind == "reduce_scatter":
            self.op = "sum"
        rows = int(np.exp(shared.uniform(0, np.log(5000))))
        if shared.random() < 0.7:  # Mostly the same shape under one name.
            rows = 1 + number * 7 % 600
        self.shape = (rows,) if shared.random() < 0.7 else (rows, 2)
        self.root = int(shared.integers(size))
        self.value = int(shared.integers(10))
        self.size = size
        self.evens = evens

    def data(self, rank):
        """Small whole numbers, exact in every dtype."""
        x = np.arange(int(np.prod(self.shape))) % 7 + self.value + rank
        return x.astype(self.dtype).reshape(self.shape)

    def submit(self, rank):
        x = self.data(rank)
        match self.kind:
            case "all_reduce":
                return eager.all_reduce_async(x, name=self.name, op=self.op)
            case "group":
                return eager.grouped_all_reduce_async(
                    [x, x[:1]], name=self.name, op=self.op
                )
            case "all_gather":
                return eager.all_gather_async(x[: rank + 1], name=self.name)
            case "broadcast":
                return eager.broadcast_async(x, root=self.root, name=self.name)
            case "reduce_scatter":
                return eager.reduce_scatter_async(x, name=self.name, op=self.op)
            case "all_to_all":
                return eager.all_to_all_async(x, self._splits(rank), name=self.name)
            case "in_set":
                if rank not in self.evens.ranks:
                    return None
                return eager.all_reduce_async(
                    x, name=self.name, op="sum", process_set=self.evens
                )

    def is_right(self, rank, got):
        """Whether the result is what the ranks' data make, bit by bit."""
        ranks = range(self.size)
        match self.kind:
            case "all_reduce":
                return np.array_equal(got, self._reduce(ranks))
            case "group":
                want = self._reduce(ranks)
                return np.array_equal(got[0], want) and np.array_equal(got[1], want[:1])
            case "all_gather":
                want = np.concatenate([self.data(r)[: r + 1] for r in ranks])
                return np.array_equal(got, want)
            case "broadcast":
                return np.array_equal(got, self.data(self.root))
            case "reduce_scatter":
                rows = self._reduce(ranks)
                return np.array_equal(got, np.array_split(rows, self.size)[rank])
            case "all_to_all":
                parts, counts = [], []
                for r in ranks:
                    splits = self._splits(r)
                    start = sum(splits[:rank])
                    parts.append(self.data(r)[start : start + splits[rank]])
                    counts.append(splits[rank])
                received, from_whom = got
                return np.array_equal(received, np.concatenate(parts)) and (
                    from_whom.tolist() == counts
                )
            case "in_set":
                return np.array_equal(got, sum(self.data(r) for r in self.evens.ranks))

    def _splits(self, rank):
        left, splits = self.shape[0], []
        for other in range(self.size):
            splits.append(min(left, (rank + other) % 3))
            left -= splits[-1]
        return splits

    def _reduce(self, ranks):
        data = np.stack([self.data(r) for r in ranks])
        match self.op:
            case "sum":
                return data.sum(axis=0, dtype=self.dtype)
            case "min":
                return data.min(axis=0)
            case "max":
                return data.max(axis=0)
        total = data.astype(np.float64).sum(axis=0)
        if np.issubdtype(self.dtype, np.integer):
            return np.trunc(total / self.size).astype(self.dtype)
        if self.dtype == np.float16:
            return (total.astype(np.float32) / np.float32(self.size)).astype(np.float16)
        return total.astype(self.dtype) / self.dtype(self.size)


def run_randomly(num_operations, seed):
    """Windows of operations in another order on each process; returns what is wrong."""
    world = jdp.init(timeout_s=60.0)
    eager.init(world, eager.EagerOptions(cache_capacity=120, fusion_bytes=1 << 16))
    rank, size = eager.rank(), eager.size()
    evens = eager.add_process_set(range(0, size, 2))
    shared = np.random.default_rng(seed)  # the same on all processes.
    own = np.random.default_rng([seed, rank])
    wrong = []
    for _ in range(num_operations // _WINDOW):
        numbers = shared.choice(_NUM_NAMES, _WINDOW, replace=False)
        window = [_Operation(shared, int(i), size, evens) for i in numbers]
        handles = []
        for i in own.permutation(_WINDOW):
            handles.append((window[i], window[i].submit(rank)))
            if own.random() < 0.02:
                time.sleep(own.exponential(1e-3))
        for i in own.permutation(_WINDOW):
            operation, handle = handles[i]
            if handle is None:
                continue
            got = eager.synchronize(handle, timeout_s=60.0)
            if not operation.is_right(rank, got):
                wrong.append(operation.name)
    eager.barrier()
    eager.shutdown()
    return wrong


def run_until_killed(victim, signum, delay_s):
    """One process dies or stops after a while; the others must raise, and say who."""
    world = jdp.init(timeout_s=60.0)
    eager.init(world, eager.EagerOptions(timeout_s=_DEADLINE_S))
    rank = eager.rank()
    eager.barrier()
    if rank == victim:
        pid = os.getpid()
        if os.fork() == 0:  # from outside, so that it comes at any moment.
            time.sleep(delay_s)
            os.kill(pid, signum)
            os._exit(0)

    def go_on():
        sizes = (1, 1000, 300_000)
        for number in range(10**9):
            handles = [
                eager.all_reduce_async(np.ones(n, np.float32), name=f"n{n}", op="sum")
                for n in sizes
            ]
            for handle in handles[:: 1 if (number + rank) % 2 else -1]:
                eager.synchronize(handle)

    start_s = time.monotonic()
    text, _ = harness.error_text(go_on)
    seconds = time.monotonic() - start_s - delay_s
    print(f"SURVIVED {seconds:.2f} {text}", flush=True)
    os._exit(1)  # So that the launcher ends the one that has stopped.


def check_death(victim, signum, delay_s, num_processes=3):
    """Runs one death; returns what the survivors said, and their slowest time."""
    outcome = harness.run_processes(
        run_until_killed, num_processes, victim, signum, delay_s, grace_s=4.0
    )
    said = [line for line in outcome.output.splitlines() if "SURVIVED" in line]
    said = [line.partition("SURVIVED ")[2] for line in said]
    survivors = {line.split(" ", 1)[1] for line in said}
    assert len(said) >= num_processes - 1, outcome.output
    for text in survivors:
        assert f"rocess {victim} " in text, outcome.output
    return max(float(line.split()[0]) for line in said)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--deaths", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start_s = time.monotonic()
    wrong = harness.run_checked(
        run_randomly, args.processes, args.operations, args.seed
    )
    assert not any(wrong), wrong
    seconds = time.monotonic() - start_s
    print(
        f"{args.operations} operations on {args.processes} processes, all exact, "
        f"{seconds:.0f} s",
        flush=True,
    )
    rng = np.random.default_rng(args.seed)
    slowest = {signal.SIGKILL: 0.0, signal.SIGSTOP: 0.0}
    for number in range(args.deaths):
        victim = int(rng.integers(3))
        signum = (signal.SIGKILL, signal.SIGSTOP)[number % 2]
        seconds = check_death(victim, signum, float(rng.uniform(0, 0.5)))
        slowest[signum] = max(slowest[signum], seconds)
    for signum, seconds in slowest.items():
        print(f"{signum.name}: all others raised, the last after {seconds:.2f} s")


if __name__ == "__main__":
    # The processes import this module by its name.
    importlib.import_module("tests.eager.engine_soak").main()
