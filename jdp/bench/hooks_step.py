"""Processes of `jdp bench hooks`: which steps do they time?"""

import sys
from typing import Any

import jdp
from jdp.bench import hook_option, jax_step
from jdp.bench.channel import StepConfig
from jdp.hooks import CommHook


def make_step(world: jdp.World, config: StepConfig, hook: CommHook | None) -> Any:
    """Returns the step `(state, batch) -> (state, loss)`, and its first state."""

    def step(state: Any, batch: Any) -> Any:
        params, hook_state = state
        # Over gloo, since hooks save bytes between hosts.
        grad_fn = jdp.value_and_grad(
            jax_step.loss_fn, all_reduce=None, hook=hook, hook_state=hook_state
        )
        out = grad_fn(params, batch)
        (loss, grads), hook_state = out if hook_state is not None else (out, None)
        return (jax_step.sgd(params, grads, config), hook_state), loss

    params = jdp.replicate(world, jax_step.init_params(config))
    hook_state = None
    if hook is not None:
        hook_state = jdp.hooks.init_state(hook, params, world=world)
    return jdp.data_parallel(step, world=world), (params, hook_state)


def main(port: int, config: StepConfig, hooks: list[str]) -> None:
    """Runs one process."""
    world = jdp.init()
    steps = {"no hook": make_step(world, config, None)}
    for text in hooks:
        steps[text] = make_step(world, config, hook_option.parse(text))
    jax_step.serve(port, world, config, steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), StepConfig(*map(int, sys.argv[2:5])), sys.argv[5:])
