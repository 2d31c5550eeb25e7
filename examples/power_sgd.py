"""Trains the network of digits.py with compressed gradients, and without.

jdp launch -n 2 examples/power_sgd.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import Net, load_data
from flax import nnx

import jdp

HOOKS = {
    "none": jdp.hooks.none(),
    "cast": jdp.hooks.cast(jnp.bfloat16),
    "int8": jdp.hooks.int8(),
    "power_sgd": jdp.hooks.power_sgd(rank=4, start_step=60),
    "top_k": jdp.hooks.top_k(0.2),
    "power_sgd+cast": jdp.hooks.chain(
        jdp.hooks.power_sgd(rank=4, start_step=60), jdp.hooks.cast(jnp.bfloat16)
    ),
}


def train(
    world: jdp.World, hook: jdp.hooks.CommHook, epochs: int, seed: int
) -> tuple[float, int]:
    """Returns the accuracy on the test images, and the bytes sent per step."""
    train_x, train_y, test_x, test_y = load_data()
    batch_size = 64 // world.num_replicas * world.num_replicas
    num_steps = len(train_y) // batch_size
    graph, params = nnx.split(Net(nnx.Rngs(seed)))
    tx = optax.adam(optax.cosine_decay_schedule(4e-3, epochs * num_steps))

    def loss_fn(params, images, labels):
        logits = nnx.merge(graph, params)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    @jdp.data_parallel
    def step(state, images, labels):
        params, opt_state, hook_state = state
        grad_fn = jdp.value_and_grad(loss_fn, hook=hook, hook_state=hook_state)
        (loss, grads), hook_state = grad_fn(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, hook_state), {"loss": loss}

    params = jdp.replicate(world, params)
    state = (params, tx.init(params), jdp.hooks.init_state(hook, params))
    mine = slice(0, batch_size // world.process_count)
    num_bytes = jdp.describe(step, state, train_x[mine], train_y[mine]).wire_bytes
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(train_y))
        for k in range(num_steps):
            batch = order[k * batch_size : (k + 1) * batch_size]
            mine = np.split(batch, world.process_count)[world.process_index]
            state, _ = step(state, train_x[mine], train_y[mine])
    jdp.check_replicas(state, world=world)
    logits = nnx.merge(graph, jax.device_get(state[0]))(test_x)
    return float((logits.argmax(-1) == test_y).mean()), num_bytes


def main(names: list[str], epochs: int, seeds: int) -> None:
    world = jdp.init()
    for name in names:
        runs = [train(world, HOOKS[name], epochs, seed) for seed in range(seeds)]
        accuracies, num_bytes = zip(*runs, strict=True)
        if world.is_main_process:
            print(
                f"{name:14}  {num_bytes[0]:6,} bytes per step  "
                f"test accuracy {np.mean(accuracies):.2%}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--hooks", nargs="+", choices=HOOKS, default=["none", "power_sgd"]
    )
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=1, help="runs to average")
    arguments = parser.parse_args()
    for option in ("epochs", "seeds"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option} must be at least 1")
    main(arguments.hooks, arguments.epochs, arguments.seeds)
