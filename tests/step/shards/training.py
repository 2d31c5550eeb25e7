"""Training: runs whose bits must not depend on the number of replicas."""

import hashlib
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from jdp import flax_linen
from jdp.replicas import virtual_replicas

NUM_SHARDS = 8
_WIDTH = 24
_BATCH = 32  # samples of all replicas.


class Kind(NamedTuple):
    """What a run trains, and how."""

    tx: optax.GradientTransformation = optax.sgd(0.05, momentum=0.9)
    is_zero1: bool = False
    dropout: bool = False
    own_key: bool = False
    batch_norm: bool = False
    layers_in_scan: bool = False
    micro_batches: int = 1
    hook: Any = None
    is_uneven: bool = False


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01))
KINDS = {
    "momentum": Kind(),
    "clipped adamw": Kind(CLIPPED),
    "zero1": Kind(CLIPPED, is_zero1=True),
    "dropout": Kind(dropout=True),
    "dropout by shard": Kind(dropout=True, own_key=True),
    "batch norm": Kind(CLIPPED, batch_norm=True),
    "batch norm in a scan": Kind(layers_in_scan=True),
    "micro-batches": Kind(micro_batches=2, dropout=True),
    "cast": Kind(hook=jdp.hooks.cast(jnp.bfloat16)),
    "uneven": Kind(CLIPPED, is_uneven=True),
    "everything": Kind(CLIPPED, True, True, True, True),
}


class _Network(nn.Module):
    """Two dense layers, with what the kind asks for between them."""

    kind: Kind

    @nn.compact
    def __call__(self, x, key):
        for i in range(2):
            x = nn.tanh(nn.Dense(_WIDTH)(x))
            if self.kind.batch_norm:
                x = flax_linen.SyncBatchNorm(use_running_average=False)(x)
            if self.kind.dropout:
                key = jax.random.fold_in(key, i)
                x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)
        if self.kind.layers_in_scan:
            x, _ = lax.scan(_normalized_layer, x, jnp.full((2, 1), 0.5))
        return nn.Dense(3)(x)


def _normalized_layer(x, scale):
    mean = lax.pmean(x.mean(0), "data")
    return jnp.tanh(x - mean) * scale, None


def data(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the samples of all replicas in one step."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(_BATCH, 5)).astype(np.float32)
    return x, np.stack([x.sum(1), x.max(1), x.min(1)], 1)


def make_step(kind: Kind, tx: Any, world: Any, **options: Any) -> Any:
    """Returns the step of a kind: (state, x, y, weight, key) -> (state, metrics)."""
    network = _Network(kind)

    def loss_fn(params, x, y, weight, *, stats, key):
        variables = {"params": params, **stats}
        out, stats = network.apply(variables, x, key, mutable="batch_stats")
        losses = ((out - y) ** 2).mean(1) * weight
        return losses.sum() / jnp.maximum(weight.sum(), 1), stats

    @jdp.data_parallel(world=world, replicated_argnames="key", **options)
    def step(state, x, y, weight, *, key):
        params, opt_state, stats = state
        if kind.own_key:
            key = jdp.shard_key(key)
        amount = weight.sum() if kind.is_uneven else None
        args = params, x, y, weight
        more = {"stats": stats, "key": key}
        if kind.is_zero1:
            (loss, stats), grads = jdp.local_gradients(loss_fn, has_aux=True)(
                *args, **more
            )
            loss, stats = jdp.average((loss, stats))
        elif kind.micro_batches > 1:
            (loss, stats), grads = jdp.accumulate_gradients(
                loss_fn, kind.micro_batches, has_aux=True
            )(*args, **more)
        else:
            (loss, stats), grads = jdp.value_and_grad(
                loss_fn, has_aux=True, weight=amount, hook=kind.hook
            )(*args, **more)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": loss, "largest": lax.pmax(x.max(), "data")}
        return (params, opt_state, stats), metrics

    return step


def world_of(world: Any, num_shards: int = NUM_SHARDS) -> Any:
    """Returns a world that computes shards."""
    return virtual_replicas.with_shards(world, num_shards)


def optimizer_of(kind: Kind, world: Any) -> Any:
    """Returns the optimizer of a kind."""
    return jdp.zero1(kind.tx, world=world) if kind.is_zero1 else kind.tx


def make_state(kind: Kind, tx: Any, world: Any) -> Any:
    """Returns the first state of a kind."""
    network = _Network(kind._replace(layers_in_scan=False))  # They have no parameters.
    variables = network.init(jax.random.key(0), data(0)[0], jax.random.key(0))
    rng = np.random.default_rng(7)
    params = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.3,
        variables["params"],
    )
    params = jdp.replicate(world, params)
    stats = jax.tree.map(
        np.asarray, {k: v for k, v in variables.items() if k != "params"}
    )
    return params, tx.init(params), stats


def run(
    kind: Kind, world: Any, steps: range, state: Any = None, **options: Any
) -> tuple[Any, str]:
    """Trains; returns the state, and a digest of parameters and metrics.

    Args:
      kind: the kind.
      world: the replicas, with shards.
      steps: numbers of the steps.
      state: the state before them; None: the first one.
      **options: options of the step.
    """
    tx = optimizer_of(kind, world)
    step = make_step(kind, tx, world, **options)
    state = make_state(kind, tx, world) if state is None else state
    digest = hashlib.sha256()
    for number, (batch, weight) in zip(
        steps, _batches(kind, world, steps), strict=True
    ):
        key = jax.random.fold_in(jax.random.key(1), number)
        state, metrics = step(state, *batch, weight, key=key)
        for x in jax.tree.leaves(metrics):
            digest.update(np.asarray(x).tobytes())
    for x in jax.tree.leaves((state[0], state[2])):
        digest.update(np.asarray(x).tobytes())
    return state, digest.hexdigest()


def _batches(kind: Kind, world: Any, steps: range) -> Any:
    if not kind.is_uneven:
        size = _BATCH // world.process_count
        part = slice(world.process_index * size, (world.process_index + 1) * size)
        for number in steps:
            batch = tuple(x[part] for x in data(number))
            yield batch, np.ones(size, np.float32)
        return
    many = [data(number) for number in steps]
    whole = tuple(np.concatenate(xs)[:-11] for xs in zip(*many, strict=True))
    shard = world.shard(whole, shuffle=False)
    yield from jdp.join_batches(shard.batches(_BATCH), world=world)
