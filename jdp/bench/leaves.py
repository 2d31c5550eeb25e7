"""`jdp bench leaves`: how long is a step of many parameters traced?"""

import gc
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.table
import typer

import jdp
from jdp import hooks
from jdp.bench import channel, driver

_WIDTH = 4


def bench_leaves(
    leaves: Annotated[int, typer.Option(min=1, help="Parameters.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Times of each.")] = 3,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Measure the CPU time to trace a step of many parameters.

    Each step trains matrices of 4 x 4, one after the other, with Adam on 2 CPU devices.
    A round makes the optimizer's state, and traces and lowers the step, of each way in
    turn; nothing is compiled or run. The table has medians over the rounds, and their
    ratio to Adam after `jdp.value_and_grad`.
    """
    channel.check_can_write(json_file)
    world = jdp.init(num_cpu_devices=2)
    result = measure(world, leaves, rounds)
    table = rich.table.Table(title=f"jax {jax.__version__}, {leaves:,} leaves, CPU s")
    for name in ("", "init", "trace and lower", "sum", "beside Adam"):
        table.add_column(name, justify="right" if name else "left")
    base = sum(result["adam"].values())
    for name, times in result.items():
        total = sum(times.values())
        row = [f"{x:.2f}" for x in (times["init_s"], times["lower_s"], total)]
        table.add_row(name, *row, f"{total / base:.2f}")
    rich.console.Console().print(table)
    found = {"num_leaves": leaves, "rounds": rounds, "cpu_s": result}
    driver.write_result(found, {}, json_file)


def measure(world: jdp.World, num_leaves: int, rounds: int) -> dict[str, Any]:
    """Returns median CPU times by way: "init_s" of the state, "lower_s" of the step."""
    params = {f"w{i:05d}": np.eye(_WIDTH, dtype=np.float32) for i in range(num_leaves)}
    batch = np.ones((2 * world.num_replicas, _WIDTH), np.float32)
    times: dict[str, Any] = {name: {"init_s": [], "lower_s": []} for name in _WAYS}
    _time(_WAYS["adam"], dict(list(params.items())[:2]), batch)  # fills JAX's caches.
    for _ in range(rounds):
        for name, make in _WAYS.items():
            for what, seconds in _time(make, params, batch).items():
                times[name][what].append(seconds)
    return {
        name: {what: statistics.median(x) for what, x in found.items()}
        for name, found in times.items()
    }


def _loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for w in params.values():
        x = jnp.tanh(x @ w)
    return (x**2).mean()


# A way is the optimizer and a function (params, batch) -> gradients and further
# arguments of its `update`. Each has new functions, which are in no cache of JAX.
_Way = Callable[[], tuple[Any, Callable[[Any, Any], tuple[Any, dict[str, Any]]]]]


def _new_loss() -> Callable[..., jax.Array]:
    return lambda *args: _loss_fn(*args)


def _adam() -> Any:
    grad_fn = jdp.value_and_grad(_new_loss())
    return optax.adam(1e-3), lambda *args: (grad_fn(*args)[1], {})


def _skip_unused() -> Any:
    grad_fn = jdp.value_and_grad(_new_loss(), find_unused=True)

    def differentiate(*args: Any) -> tuple[Any, dict[str, Any]]:
        (_, grads), used = grad_fn(*args)
        return grads, {"used": used}

    return jdp.skip_unused(optax.adam(1e-3)), differentiate


def _zero1() -> Any:
    return jdp.zero1(optax.adam(1e-3)), _local()


def _distributed_optimizer() -> Any:
    return jdp.distributed_optimizer(optax.adam(1e-3)), _local()


def _hook() -> Any:
    hook = hooks.cast(jnp.bfloat16)
    grad_fn = jdp.value_and_grad(_new_loss(), hook=hook)
    return optax.adam(1e-3), lambda *args: (grad_fn(*args)[1], {})


def _accumulate_gradients() -> Any:
    grad_fn = jdp.accumulate_gradients(_new_loss(), 2)
    return optax.adam(1e-3), lambda *args: (grad_fn(*args)[1], {})


def _local() -> Any:
    grad_fn = jdp.local_gradients(_new_loss())
    return lambda *args: (grad_fn(*args)[1], {})


_WAYS: dict[str, _Way] = {
    "adam": _adam,
    "skip_unused": _skip_unused,
    "zero1": _zero1,
    "distributed_optimizer": _distributed_optimizer,
    "accumulate_gradients": _accumulate_gradients,
    "hooks.cast": _hook,
}


def _time(make: _Way, params: Any, batch: Any) -> dict[str, float]:
    tx, differentiate = make()
    gc.collect()  # garbage of the previous turn.
    start_s = time.process_time()
    state = params, tx.init(params)
    init_s = time.process_time() - start_s

    @jdp.data_parallel
    def step(state: Any, batch: Any) -> Any:
        params, opt = state
        grads, extra = differentiate(params, batch)
        updates, opt = tx.update(grads, opt, params, **extra)
        return (optax.apply_updates(params, updates), opt), {}

    start_s = time.process_time()
    step.lower(state, batch)
    return {"init_s": init_s, "lower_s": time.process_time() - start_s}
