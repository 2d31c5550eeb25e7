"""Processes of `jdp bench step --overlap`: which steps do they time?"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jdp
from jdp.bench import channel, jax_step, overlap
from jdp.bench.channel import StepConfig
from jdp.trees import buckets


class State(NamedTuple):
    """State of a step; it holds the loss, since metrics would be averaged."""

    params: Any
    loss: Any  # of the last step, ().


Step = Callable[[Any, Any], tuple[Any, Any]]


def stack(params: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stacks layers, (l, ...) each."""
    return {k: np.stack([p[k] for p in params]) for k in params[0]}


def make_loop_loss(sync: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """Returns the loss of layers in a loop; `sync` is applied to each layer's slice."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            p = sync(p)
            return h + jnp.tanh(h @ p["w"] + p["b"]) * p["s"] * 0.1, None

        x, y = batch
        h, _ = lax.scan(layer, x, params)
        return jnp.mean((h - y) ** 2)

    return loss_fn


def make_step(loss_fn: Callable[..., jax.Array], config: StepConfig) -> Step:
    """Returns a step of jdp."""

    def step(state: State, batch: Any) -> tuple[State, Any]:
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        return State(jax_step.sgd(state.params, grads, config), loss), {}

    return step


def without_communication(
    loss_fn: Callable[..., jax.Array], config: StepConfig
) -> Step:
    """Returns the same step without communication, for each replica alone."""

    def step(own: jdp.PerReplica, batch: Any) -> tuple[jdp.PerReplica, Any]:
        params = own.value.params
        loss, grads = jdp.local_gradients(loss_fn)(params, batch)
        return jdp.PerReplica(State(jax_step.sgd(params, grads, config), loss)), {}

    return step


def synchronise(state: State, batch: Any) -> tuple[State, Any]:
    """Sends the parameters like gradients, in the buckets of `jdp.value_and_grad`."""
    order = jdp.gradient_order(jax_step.loss_fn, state.params, batch)
    plan = buckets.default_plan(state.params, order)
    return state._replace(params=jdp.sync_gradients(state.params, plan=plan)), {}


def synchronise_stacked(state: State, batch: Any) -> tuple[State, Any]:
    """Sends stacked layers, which come out of the loop together."""
    return state._replace(params=jdp.sync_gradients(state.params)), {}


def synchronise_in_loop(state: State, batch: Any) -> tuple[State, Any]:
    """Sends stacked layers one by one, in a loop."""
    _, synced = lax.scan(lambda _, g: (None, jdp.sync_gradients(g)), None, state.params)
    return state._replace(params=synced), {}


def make_steps(config: StepConfig) -> dict[str, Step]:
    """Returns by "model: variant" a step."""
    after, inside = make_loop_loss(lambda p: p), make_loop_loss(jdp.sync_in_backward)
    models = {
        "blocks": (jax_step.loss_fn, jax_step.loss_fn, synchronise),
        "loop, reduced after it": (after, after, synchronise_stacked),
        "loop, reduced in it": (inside, after, synchronise_in_loop),
    }
    steps = {}
    for model, (loss_fn, local_loss_fn, communicate) in models.items():
        variants = {
            overlap.STEP: make_step(loss_fn, config),
            overlap.NO_COMMUNICATION: without_communication(local_loss_fn, config),
            overlap.COMMUNICATION: communicate,
        }
        steps |= {f"{model}: {name}": step for name, step in variants.items()}
    return steps


def main(port: int, config: StepConfig, num_layers: int) -> None:
    """Runs one process."""
    world = jdp.init()
    batch = jdp.global_batch(world, jax_step.make_batch(config, world.process_index))
    loop = stack(jax_step.init_params(config._replace(num_blocks=num_layers)))

    def runner(name: str, step: Step) -> channel.RunSteps:
        compiled = jdp.data_parallel(step, world=world)
        is_blocks = name.startswith("blocks: ")
        params = jax_step.init_params(config) if is_blocks else loop
        first: Any = jdp.replicate(world, State(params, np.float32(0)))
        if name.endswith(f": {overlap.NO_COMMUNICATION}"):
            first = jdp.copy_per_replica(first, world=world)
        state = [first]

        def once() -> None:
            state[0], _ = compiled(state[0], batch)
            jax.block_until_ready(state[0])

        once()  # compiles
        return lambda num_steps: channel.time_steps(once, num_steps)

    variants = {name: runner(name, step) for name, step in make_steps(config).items()}
    channel.serve(port, "jax", world.process_index, variants)


if __name__ == "__main__":
    driver_port, *sizes = map(int, sys.argv[1:])
    main(driver_port, StepConfig(*sizes[:3]), sizes[3])
