"""Every part of jdp under the checks that JAX offers: leaks, ranks, NaN, 64 bits."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jdp
from jdp import flax_linen, flax_nnx
from tests import harness, rarely

N = 2  # replicas.
PARAMS = {
    "w": np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16),
    "v": np.linspace(1, 2, 32, dtype=np.float32).reshape(16, 2),
    "b": np.float32([0.5, -0.5]),
}
X = np.linspace(0, 1, 2 * N * 3 * 8, dtype=np.float32).reshape(2 * N * 3, 8)
BATCH = {"x": X, "weight": np.ones(len(X), np.float32)}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*can never receive a gradient"),
    pytest.mark.filterwarnings("ignore:.*may be left out of a step"),
]


def loss_fn(params, batch):
    """A branch of its own for each sample's sign, and padding that may be zero."""
    h = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    h = lax.cond(h[0, 0] > 0, lambda h: h + params["b"][None], lambda h: h * 2, h)
    weight = batch["weight"]
    return ((h**2).mean(1) * weight).sum() / jnp.maximum(weight.sum(), 1)


def loss_and_arrays(params, batch):
    """A loss, and arrays and constants beside it."""
    loss = loss_fn(params, batch)
    return loss, {"most": batch["x"].max(), "twice": 2 * loss, "count": 3}


def of_layers(params, batch):
    """A scan over layers that reduces their gradients in the backward pass."""
    stack = {"w": jnp.stack([params["w"], params["w"]])}

    def layer(h, own):
        own = jdp.sync_in_backward(own)
        return jnp.tanh(h @ own["w"] @ own["w"].T), None

    h, _ = lax.scan(layer, batch["x"], stack)
    return (h**2).mean()


def _total(batch):
    return batch["weight"].sum()


def _sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def _are_gradients(tree):
    is_like = isinstance(tree, dict) and tree.keys() == PARAMS.keys()
    return is_like and jnp.result_type(tree["w"]) == np.float32  # Flags are bools.


def _of(grad_fn, **find):
    """A step with `value_and_grad`, or its like, of these options."""

    def step(params, batch):
        options = {k: v(batch) for k, v in find.items()}
        out = grad_fn(**options)(params, batch)
        while not _are_gradients(out[1]):
            out = out[0]
        return _sgd(params, out[1]), {}

    return PARAMS, step


def _counted():
    def step(params, batch):
        is_large = batch["x"] > 0.5
        count = jdp.average({"own": is_large.sum(0), "half": is_large.mean()})
        return params, {"count": is_large.sum(), "any": is_large.any(), **count}

    return PARAMS, step


def _synced():
    def step(params, batch):
        _, grads = jdp.local_gradients(loss_fn)(params, batch)
        grads = jdp.sync_gradients(grads, weight=_total(batch))
        return _sgd(params, grads), jdp.average({"a": batch["x"].mean()})

    return PARAMS, step


def _hook(hook):
    state = {
        "params": PARAMS,
        "hook": jdp.hooks.init_state(hook, PARAMS, world=_world()),
    }

    def step(state, batch):
        has_state = bool(jax.tree.leaves(state["hook"]))
        own = state["hook"] if has_state else None
        options = {"weight": _total(batch), "hook": hook, "hook_state": own}
        out = jdp.value_and_grad(loss_fn, **options)(state["params"], batch)
        (_, grads), own = out if has_state else (out, state["hook"])
        return {"params": _sgd(state["params"], grads), "hook": own}, {}

    return state, step


def _transformed(tx, *, find_unused=False, local=True):
    state = {"params": PARAMS, "opt": tx.init(PARAMS)}
    take = jdp.local_gradients if local else jdp.value_and_grad

    def step(state, batch):
        out = take(loss_fn, find_unused=find_unused)(state["params"], batch)
        (loss, grads), *used = out if find_unused else (out,)
        options = {"used": used[0]} if find_unused else {}
        updates, opt = tx.update(grads, state["opt"], state["params"], **options)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return state, step


def _apart(local):
    def step(state, batch):
        _, grads = jdp.local_gradients(loss_fn)(state.params.value, batch)
        return local.update(grads, state), {}

    return local.init(PARAMS), step


def _noise():
    noise = jdp.noise_scale()

    def step(state, batch):
        grad_fn = jdp.value_and_grad(loss_fn, find_norms=True)
        (_, grads), norms = grad_fn(state["params"], batch)
        scale, kept = noise.update(norms, state["noise"])
        return {"params": _sgd(state["params"], grads), "noise": kept}, {
            "known": jnp.isfinite(scale)
        }

    return {"params": PARAMS, "noise": noise.init()}, step


class _Linen(nn.Module):
    norm: type

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(self.norm(use_running_average=False)(x))


def _linen(is_converted, is_weighted):
    kind = nn.BatchNorm if is_converted else flax_linen.SyncBatchNorm
    model = _Linen(kind)
    variables = model.init(jax.random.key(0), X)
    model = flax_linen.convert_batch_norm(model) if is_converted else model

    def step(state, batch):
        def loss(params):
            weight = batch["weight"] if is_weighted else None
            with jdp.batch_norm.sample_weights(weight):
                y, new = model.apply(
                    {**state, "params": params}, batch["x"], mutable=["batch_stats"]
                )
            return (y**2).mean(), new

        weight = _total(batch) if is_weighted else None
        grad_fn = jdp.value_and_grad(loss, has_aux=True, weight=weight)
        (_, new), grads = grad_fn(state["params"])
        return {"params": _sgd(state["params"], grads), **new}, {}

    return variables, step


def _nnx():
    layer = flax_nnx.SyncBatchNorm(8, rngs=nnx.Rngs(0))
    graph, params, stats = nnx.split(layer, nnx.Param, ...)

    def step(state, batch):
        def loss(params):
            model = nnx.merge(graph, params, jax.tree.map(jnp.array, state["stats"]))
            y = model(batch["x"], weight=batch["weight"])
            return (y**2).mean(), nnx.state(model, nnx.BatchStat)

        (_, stats), grads = jdp.value_and_grad(loss, has_aux=True)(state["params"])
        return {"params": _sgd(state["params"], grads), "stats": stats}, {}

    return {"params": params, "stats": stats}, step


def _accumulate(**options):
    return functools.partial(
        jdp.accumulate_gradients, options.pop("loss", loss_fn), 4, **options
    )


def _grad(**options):
    return functools.partial(
        jdp.value_and_grad, options.pop("loss", loss_fn), **options
    )


PARTS = {
    "value_and_grad": lambda: _of(_grad()),
    "has_aux": lambda: _of(_grad(loss=loss_and_arrays, has_aux=True)),
    "find_unused": lambda: _of(_grad(find_unused=True), weight=_total),
    "find_norms": lambda: _of(_grad(find_norms=True), weight=_total),
    "tuple packing": lambda: _of(_grad(packing="tuple"), weight=_total),
    "divide_by": lambda: _of(_grad(divide_by="world"), weight=_total),
    "all_reduce": lambda: _of(_grad(all_reduce=jdp.collectives.ring_all_reduce)),
    "sync_in_backward": lambda: _of(_grad(loss=of_layers)),
    "sync_gradients": _synced,
    "metrics": _counted,
    "accumulate": lambda: _of(_accumulate()),
    "accumulate weights": lambda: _of(
        _accumulate(find_unused=True), weight=lambda b: b["weight"]
    ),
    "accumulate aux": lambda: _of(
        _accumulate(loss=loss_and_arrays, has_aux=True, find_norms=True)
    ),
    "none": lambda: _hook(jdp.hooks.none()),
    "cast": lambda: _hook(jdp.hooks.cast(jnp.bfloat16)),
    "int8": lambda: _hook(jdp.hooks.int8()),
    "rows": lambda: _hook(jdp.hooks.rows(2)),
    "top_k": lambda: _hook(jdp.hooks.top_k(0.25)),
    "power_sgd": lambda: _hook(jdp.hooks.power_sgd(1, start_step=1)),
    "chain": lambda: _hook(
        jdp.hooks.chain(jdp.hooks.power_sgd(1), jdp.hooks.cast(jnp.float16))
    ),
    "distributed_optimizer": lambda: _transformed(
        jdp.distributed_optimizer(optax.adam(0.1))
    ),
    "skip_unused": lambda: _transformed(
        jdp.skip_unused(optax.adam(0.1)), find_unused=True, local=False
    ),
    "zero1": lambda: _transformed(jdp.zero1(optax.adamw(0.1), world=_world())),
    "local_sgd": lambda: _apart(
        jdp.local_sgd(optax.sgd(0.1), world=_world(), period=2)
    ),
    "diloco": lambda: _apart(jdp.diloco(optax.sgd(0.1), world=_world(), period=2)),
    "noise_scale": _noise,
    "linen": lambda: _linen(False, False),
    "linen weights": lambda: _linen(False, True),
    "linen converted": lambda: _linen(True, True),
    "nnx": _nnx,
}


@functools.cache
def _world():
    return harness.local_world(N)


def _kinds(state):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), state)


EVERY_FIFTH = list(PARTS)[::5]


@pytest.mark.parametrize("part", rarely.cases(PARTS, often=EVERY_FIFTH))
def test_it_runs_under_all_checks(part):
    has_adam = part in ("distributed_optimizer", "skip_unused", "zero1")
    promotion = "standard" if has_adam else "strict"  # Adam of optax needs it.
    state, step = PARTS[part]()
    kinds = _kinds(state)
    step = jdp.data_parallel(step, world=_world(), donate_state=False)
    with (
        jax.checking_leaks(),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion(promotion),
        jax.debug_nans(True),
    ):
        for _ in range(2):
            state, _ = step(state, BATCH)
    assert _kinds(state) == kinds
    leaves = jax.tree.leaves(state)
    assert all(np.isfinite(x).all() for x in leaves if x.dtype == np.float32)


@pytest.mark.parametrize("part", rarely.cases(PARTS, often=EVERY_FIFTH))
def test_with_64_bits_a_state_keeps_its_dtypes(part):
    with jax.enable_x64(True), jax.checking_leaks():
        state, step = PARTS[part]()
        step = jdp.data_parallel(step, world=_world(), donate_state=False)
        new_state, _ = step.lower(state, BATCH).out_info
        assert _kinds(new_state) == _kinds(state)


@pytest.mark.parametrize("function", [jdp.gradient_order, jdp.used_parameters])
def test_what_reads_a_loss_keeps_no_tracer(function):
    expected = function(loss_fn, PARAMS, BATCH)
    with jax.checking_leaks(), jax.numpy_rank_promotion("raise"):
        found = jax.jit(lambda p, b: function(loss_fn, p, b))(PARAMS, BATCH)
        assert jax.tree.map(bool, found) == jax.tree.map(bool, expected)
        assert jax.tree.leaves(function(loss_fn, PARAMS, BATCH))
