"""Tracing: how much does reading the program of the loss add to tracing a step?"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

import jdp

_NUM_LAYERS, _WIDTH, _NUM_HEADS, _VOCABULARY = 24, 256, 8, 1000


def init_transformer() -> dict[str, Any]:
    """Returns the shapes of a decoder of 24 layers, 12 leaves each."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32)

    d = _WIDTH
    layer = {
        "norm1": {"scale": array(d), "bias": array(d)},
        "qkv": {"w": array(d, 3 * d), "b": array(3 * d)},
        "out": {"w": array(d, d), "b": array(d)},
        "norm2": {"scale": array(d), "bias": array(d)},
        "up": {"w": array(d, 4 * d), "b": array(4 * d)},
        "down": {"w": array(4 * d, d), "b": array(d)},
    }
    return {
        "embedding": array(_VOCABULARY, d),
        "layers": [layer] * _NUM_LAYERS,
        "head": array(d, _VOCABULARY),
    }


def make_loss() -> Callable[[Any, Any], jax.Array]:
    """Returns a new loss function, which is not in any cache of JAX."""

    def dense(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["w"] + p["b"]

    def norm(p: Any, x: jax.Array) -> jax.Array:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]

    def attention(p: Any, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        split = (batch, length, 3, _NUM_HEADS, width // _NUM_HEADS)
        q, k, v = jnp.moveaxis(dense(p["qkv"], x).reshape(split), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        is_past = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(is_past, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return dense(p["out"], mixed.reshape(x.shape))

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens[:, :-1]]
        for p in params["layers"]:
            x = x + attention(p, norm(p["norm1"], x))
            x = x + dense(p["down"], jax.nn.gelu(dense(p["up"], norm(p["norm2"], x))))
        log_p = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()

    return loss_fn


def measure(world: jdp.World, rounds: int = 7) -> dict[str, float]:
    """Times the tracing of a training step, in turns, in milliseconds.

    The steps are traced by `jax.jit(...).trace` under `shard_map` over the same mesh.
    Nothing is lowered or compiled.

    Returns:
      Medians of: "by hand", with `jax.value_and_grad` and one `psum` of a flat buffer;
      "without", with `jax.value_and_grad` and `jdp.sync_gradients`; "with", with
      `jdp.value_and_grad(find_unused=True)`, which also reads the program; and "both",
      `jdp.gradient_order` and `jdp.used_parameters` alone.
    """
    params = init_transformer()
    tokens = jax.ShapeDtypeStruct((2 * world.num_replicas, 65), np.int32)
    one = jax.ShapeDtypeStruct((2, 65), np.int32)

    def tracing_of(way: Callable[..., Any]) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            step = _sharded(way(make_loss()), world)
            return lambda: step.trace(params, tokens)

        return make

    def both() -> Callable[[], Any]:
        loss_fn = make_loss()
        return lambda: _both(loss_fn, params, one)

    turns = {
        "by hand": tracing_of(_by_hand),
        "without": tracing_of(_without_reading),
        "with": tracing_of(_with_reading),
        "both": both,
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for make in turns.values():
        make()()  # fills JAX's caches of jnp's own functions.
    for round_index in range(rounds):
        for name in list(turns)[:: 1 if round_index % 2 == 0 else -1]:
            seconds[name].append(_time(turns[name]()))
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def _both(loss_fn: Callable[..., Any], params: Any, tokens: Any) -> None:
    jdp.gradient_order(loss_fn, params, tokens)
    jax.eval_shape(lambda *args: _only_arrays(loss_fn, *args), params, tokens)


def _only_arrays(loss_fn: Callable[..., Any], params: Any, tokens: Any) -> list[Any]:
    used = jax.tree.leaves(jdp.used_parameters(loss_fn, params, tokens))
    return [flag for flag in used if isinstance(flag, jax.Array)]


def _by_hand(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, tokens: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        buffer, unravel = ravel_pytree(grads)
        grads = unravel(lax.pmean(buffer, "data"))
        return _sgd(params, grads), lax.pmean(loss, "data")

    return step


def _without_reading(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, tokens: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        return _sgd(params, jdp.sync_gradients(grads)), lax.pmean(loss, "data")

    return step


def _with_reading(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, tokens: Any) -> Any:
        grad_fn = jdp.value_and_grad(loss_fn, find_unused=True)
        (loss, grads), _ = grad_fn(params, tokens)
        return _sgd(params, grads), loss

    return step


def _sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)


def _sharded(step: Callable[..., Any], world: jdp.World) -> Any:
    return jax.jit(
        jax.shard_map(
            step,
            mesh=world.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(world.axis_name)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def _time(fn: Callable[[], Any]) -> float:
    gc.collect()  # garbage of the previous turn.
    start_s = time.perf_counter()
    fn()
    return time.perf_counter() - start_s
