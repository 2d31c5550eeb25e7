"""A training script with types, as a user writes it; a test checks and runs it."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

Array = jax.Array | np.ndarray


class Batch(NamedTuple):
    x: Array  # (n, 4)
    y: Array  # (n,)


class Params(NamedTuple):
    w: jax.Array
    v: jax.Array


class State(NamedTuple):
    params: Params
    opt_state: optax.OptState
    step: jax.Array


class Metrics(NamedTuple):
    loss: jax.Array
    accuracy: jax.Array


tx = jdp.skip_unused(optax.adam(1e-2))


def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    logits = jnp.tanh(jnp.matmul(batch.x, params.w)) @ params.v
    losses = optax.sigmoid_binary_cross_entropy(logits, batch.y)
    return jnp.mean(losses), jnp.mean((logits > 0) == (jnp.asarray(batch.y) > 0))


@jdp.data_parallel(replicated_argnames="rate")
def step(state: State, batch: Batch, *, rate: float) -> tuple[State, Metrics]:
    hook = jdp.hooks.cast(jnp.bfloat16)
    grad_fn = jdp.value_and_grad(loss_fn, has_aux=True, find_unused=True, hook=hook)
    ((loss, accuracy), grads), used = grad_fn(state.params, batch)
    updates, opt_state = tx.update(grads, state.opt_state, state.params, used=used)
    params = add(state.params, updates, rate)
    return State(params, opt_state, state.step + 1), Metrics(loss, accuracy)


def add(params: Params, updates: Params, rate: float) -> Params:
    return Params(params.w + rate * updates.w, params.v + rate * updates.v)


@jdp.data_parallel
def evaluate(state: State, batch: Batch, weight: Array) -> tuple[State, Metrics]:
    loss, accuracy = loss_fn(state.params, batch)
    metrics = Metrics(loss, accuracy)
    return state, jdp.average(metrics, weight=weight.sum(), divide_by="weight")


@jdp.replicated
def measure(params: Params, batch: Batch) -> Metrics:
    return Metrics(*loss_fn(params, batch))


def batches(seed: int, count: int) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x = rng.normal(size=(18, 4)).astype(np.float32)
        yield Batch(x, (x.sum(axis=1) > 0).astype(np.float32))


def main(world: jdp.World) -> list[float]:
    key_w, key_v = jax.random.split(jax.random.key(0))
    params = Params(jax.random.normal(key_w, (4, 8)), jax.random.normal(key_v, (8,)))
    params = jdp.replicate(world, params)
    state = State(params, tx.init(params), jnp.zeros((), jnp.int32))
    losses: list[float] = []
    for batch in batches(0, 20):
        state, metrics = step(state, jdp.global_batch(world, batch), rate=1.0)
        losses.append(float(metrics.loss))
    for batch, weight in jdp.join_batches(batches(1, 2), world=world):
        state, metrics = evaluate(state, batch, weight)
        losses.append(metrics.loss.item())
    for batch in batches(2, 1):
        losses.append(float(measure(state.params, batch).loss))
    losses.append(float(measure.over(state.params, batches(2, 2)).loss))
    jdp.check_replicas(state.params, world=world)
    return losses


if __name__ == "__main__":
    print(main(jdp.init()))
