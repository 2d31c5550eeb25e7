"""Kernel times: how long does the custom all-reduce take on one GPU, and at least?"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jdp
from jdp.bench import jax_step
from jdp.bench.channel import StepConfig
from jdp.collectives.pallas import choice
from jdp.collectives.pallas.choice import Algorithm, Launch
from jdp.compat import annotations

Arrays = Sequence[jax.Array]
COPY = "copy"
_COPY_BYTES = 1 << 30  # far more than any cache holds.


class Chain(NamedTuple):
    """Calls that run one after another, repeatedly."""

    calls: Sequence[Callable[..., jax.Array]]  # each takes the operands.
    operands: Arrays
    repeats: int  # repetitions of all calls in the shorter of two programs.


def time_chains(chains: Mapping[str, Chain], rounds: int) -> dict[str, list[float]]:
    """Times the calls of each chain in turns.

    Two programs per chain run the calls `repeats` times and three times that. Half of
    the difference, divided by the number of calls, is the time of one call on the
    device, without the time to start a program.

    Args:
      chains: the chains, by name.
      rounds: number of turns per chain, after one to warm up.

    Returns:
      By name, seconds per call in each round.
    """
    programs = {
        name: [_compile(chain, factor * chain.repeats) for factor in (1, 3)]
        for name, chain in chains.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in chains}
    for round_index in range(rounds + 1):
        for name in list(chains)[:: 1 if round_index % 2 == 0 else -1]:
            chain = chains[name]
            short_s, long_s = (
                min(_time(program, chain.operands) for _ in range(3))
                for program in programs[name]
            )
            count = 2 * chain.repeats * len(chain.calls)
            if round_index > 0:
                seconds[name].append((long_s - short_s) / count)
    return seconds


def make_program(chain: Chain, repeats: int) -> Callable[..., Any]:
    """Returns the function that runs the calls of a chain `repeats` times.

    It returns the result of each call, through a barrier that the next call waits for,
    so that XLA can neither drop a call nor merge two.
    """

    def run(*operands: jax.Array) -> list[jax.Array]:
        held, results = list(operands), []
        for call in list(chain.calls) * repeats:
            held, (y,) = annotations.order_after(held, [call(*held)])
            results.append(y)
        return results

    return run


# Independent launches of a CUDA graph may overlap.
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}


def _compile(chain: Chain, repeats: int) -> Callable[..., Any]:
    options = COMPILER_OPTIONS if jax.default_backend() == "gpu" else {}
    program = jax.jit(make_program(chain, repeats))
    return program.lower(*chain.operands).compile(compiler_options=options)


def _time(program: Callable[..., Any], operands: Arrays) -> float:
    start_s = time.perf_counter()
    jax.block_until_ready(program(*operands))
    return time.perf_counter() - start_s


def moved_bytes(
    algorithm: Algorithm, num_replicas: int, size: int, itemsize: int
) -> int:
    """Returns the bytes that one replica's kernel reads and writes.

    One stage reads all buffers and writes one. Two stages read a part of each and write
    it, read all parts and write the result.
    """
    part = size // num_replicas
    elements = {
        "one_stage": num_replicas * size + size,
        "two_stage": num_replicas * part + part + num_replicas * part + size,
    }[algorithm]
    return elements * itemsize


def copy_chain() -> Chain:
    """Returns a pass over memory, whose bandwidth gives the lower bound of a kernel."""
    x = jnp.zeros(_COPY_BYTES // 4, jnp.float32)
    return Chain([lambda x: x + 1], [x], 4)


class Kernel(NamedTuple):
    """Kernel of which one replica's share is timed."""

    algorithm: Algorithm
    num_replicas: int
    num_bytes: int  # of a replica's buffer.
    max_blocks: int

    @property
    def launch(self) -> Launch:
        """Default launch with at most `max_blocks` blocks."""
        return choice.default_launch(
            self.num_bytes,
            self.num_replicas,
            self.algorithm,
            max_blocks=self.max_blocks,
        )

    @property
    def name(self) -> str:
        """Name in a table."""
        return (
            f"{self.algorithm} n={self.num_replicas} {self.num_bytes >> 10} KiB "
            f"blocks={self.launch.num_blocks}"
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes that the kernel reads and writes."""
        return moved_bytes(self.algorithm, self.num_replicas, self.num_bytes // 4, 4)


def solo_chains(kernel: Kernel) -> dict[str, Chain]:
    """Returns chains of a kernel, of an empty kernel, and of XLA's reduction.

    The kernel's calls are the shares of all replicas in turn, so that together they
    read more than the caches hold.
    """
    # Pallas takes a third of a second to import; the other commands do without.
    from jdp.collectives.pallas import kernel_launch

    n, size = kernel.num_replicas, kernel.num_bytes // 4
    xs = jnp.ones((n, size), jnp.float32)
    launch = kernel.launch
    shares = [
        kernel_launch.all_reduce_alone(
            n, size, jnp.float32, kernel.algorithm, launch, rank=rank
        ).run
        for rank in range(n)
    ]
    operands: list[jax.Array] = [xs]
    if kernel.algorithm == "two_stage":
        operands.append(kernel_launch.parts_of(xs, launch))
    else:
        shares = [lambda xs, run=run: run(xs, None) for run in shares]
    shares = [jax.jit(share) for share in shares]  # Traced once, not at each repeat.
    width = kernel.moved_bytes // (n + 1) // 4
    same_bytes = jnp.ones((n, width), jnp.float32)
    repeats = max(1, math.ceil(64 / n))
    return {
        kernel.name: Chain(shares, operands, repeats),
        f"empty, {kernel.name}": Chain(
            [jax.jit(kernel_launch.do_nothing(launch))], [xs[0, :128]], 64
        ),
        f"XLA, {kernel.name}": Chain([lambda x: x.sum(0)], [same_bytes], 32),
    }


def time_steps(
    world: jdp.World, config: StepConfig, *, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Times a decorated step of one replica, and the plain jitted one, in turns.

    Steps are started one after another, and timed until the last is done.

    Returns:
      By name, seconds per step in each round.
    """

    def decorated(params: Any, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(jax_step.loss_fn)(params, batch)
        return jax_step.sgd(params, grads, config), loss

    def plain(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(jax_step.loss_fn)(params, batch)
        return jax_step.sgd(params, grads, config), loss

    run = {
        "decorated": jdp.data_parallel(decorated, world=world),
        "plain": jax.jit(plain, donate_argnums=0),
    }
    batch = jdp.global_batch(world, jax_step.make_batch(config, 0))
    states = {name: jdp.replicate(world, jax_step.init_params(config)) for name in run}
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for round_index in range(rounds + 1):
        for name in list(run)[:: 1 if round_index % 2 == 0 else -1]:
            start_s = time.perf_counter()
            loss = None
            for _ in range(steps):
                states[name], loss = run[name](states[name], batch)
            jax.block_until_ready((states[name], loss))
            if round_index > 0:
                seconds[name].append((time.perf_counter() - start_s) / steps)
    return seconds


def summarize(
    kernels: Sequence[Kernel], seconds: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """Turns the times of chains into one row per kernel.

    Args:
      kernels: the kernels that were timed.
      seconds: times of the `solo_chains` of each kernel, and of `copy_chain`, named
        `COPY`.

    Returns:
      Rows with microseconds per call; "over_bound", the time over the time of moving
      the same bytes at the bandwidth of a copy; "over_empty" and "over_xla".
    """
    bandwidth = 2 * _COPY_BYTES / statistics.median(seconds[COPY])
    rows = []
    for kernel in kernels:
        found = {
            what: statistics.median(seconds[f"{what}{kernel.name}"])
            for what in ("", "empty, ", "XLA, ")
        }
        bound_s = kernel.moved_bytes / bandwidth
        rows.append(
            {
                "kernel": kernel.name,
                "algorithm": kernel.algorithm,
                "num_replicas": kernel.num_replicas,
                "num_bytes": kernel.num_bytes,
                "num_blocks": kernel.launch.num_blocks,
                "us": 1e6 * found[""],
                "bound_us": 1e6 * bound_s,
                "empty_us": 1e6 * found["empty, "],
                "xla_us": 1e6 * found["XLA, "],
                "over_bound": found[""] / bound_s,
                "over_empty": found[""] / found["empty, "],
                "over_xla": found[""] / found["XLA, "],
            }
        )
    return rows


def check_share(kernel: Kernel) -> None:
    """Raises RuntimeError unless every replica's share is right where it was timed."""
    from jdp.collectives.pallas import kernel_launch  # late, as in `solo_chains`.

    n, size = kernel.num_replicas, kernel.num_bytes // 4
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.integers(-8, 8, (n, size)), jnp.float32)
    expected = xs.sum(0)
    for rank in range(n):
        share = kernel_launch.all_reduce_alone(
            n, size, jnp.float32, kernel.algorithm, kernel.launch, rank=rank
        )
        parts = None
        if kernel.algorithm == "two_stage":
            parts = kernel_launch.parts_of(xs, kernel.launch, rank=rank)
        y = jax.jit(share.run)(xs, parts)
        if not bool(jnp.array_equal(y, expected)):
            raise RuntimeError(f"{kernel.name}: the sum of replica {rank} is wrong.")
