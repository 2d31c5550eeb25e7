"""Around the averaging: what optax does to the gradients of one replica alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.lib import _jax  # Only this switches tracebacks off.

import jdp
from jdp import flax_nnx
from tests import harness, rarely

PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}
BATCH = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
WRAPPERS = {
    "zero1": jdp.zero1,
    "distributed_optimizer": jdp.distributed_optimizer,
}


def _loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def _trace(tx, take_gradients=None, repeat=1):
    """Traces a step of two replicas; nothing runs."""
    world = harness.local_world(2)
    take_gradients = take_gradients or jdp.local_gradients(_loss)

    @jdp.data_parallel(world=world)
    def step(state, x):
        params, opt = state
        for _ in range(repeat):
            _, grads = take_gradients(params, x)
            updates, opt = tx.update(grads, opt, params)
            params = optax.apply_updates(params, updates)
        return (params, opt), {}

    state = jdp.replicate(world, PARAMS)
    return step.trace((state, tx.init(state)), BATCH)


REFUSED = {
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "clip": optax.clip(1.0),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "zero_nans": optax.zero_nans(),
    "scale_by_sign": optax.scale_by_sign(),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "keep_params_nonnegative": optax.keep_params_nonnegative(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_not_linear_is_refused_in_front(wrapper, name):
    world, clip = harness.local_world(2), REFUSED[name]
    inner = WRAPPERS[wrapper](optax.sgd(0.1), world=world)
    remedy = rf"jdp\.{wrapper}\(optax\.chain\(optax\.{name}\(\.\.\.\), tx\)\)"
    message = f"`optax.{name}` stands before `jdp.{wrapper}`.*{remedy}"
    with pytest.raises(ValueError, match=message):
        _trace(optax.chain(clip, inner))
    _trace(WRAPPERS[wrapper](optax.chain(clip, optax.sgd(0.1)), world=world))


def _wrapped_otherwise(inner):
    clip = optax.clip_by_global_norm(1.0)
    chain = optax.chain(optax.scale(2.0), clip, optax.scale(0.5), inner)
    labels = {"w": "a", "b": "b"}
    yield chain
    yield optax.chain(clip, optax.chain(optax.identity(), inner))
    yield optax.named_chain(("clip", clip), ("mean", inner))
    yield optax.chain(optax.masked(clip, {"w": True, "b": False}), inner)
    yield optax.masked(chain, {"w": True, "b": True})
    yield optax.partition({"a": chain, "b": chain}, labels)
    yield optax.inject_hyperparams(
        lambda rate: optax.chain(clip, optax.scale(rate), inner)
    )(rate=1.0)


@pytest.mark.parametrize("index", range(7))
def test_it_is_found_in_other_wrappers(index):
    inner = jdp.distributed_optimizer(optax.sgd(0.1))
    tx = list(_wrapped_otherwise(inner))[index]
    with pytest.raises(ValueError, match=r"`optax\.clip_by_global_norm` stands before"):
        _trace(tx)


def _scan(update):
    def scan(grads, state, params=None):
        def body(carry, _):
            return update(grads, carry[1], params), None

        return jax.lax.scan(body, (grads, state), length=1)[0]

    return scan


def _within(wrap, tx):
    return optax.GradientTransformationExtraArgs(tx.init, wrap(tx.update))


BETWEEN = {  # What stands between, or around the averaging: (inner) -> what is behind.
    "stateless": lambda inner: optax.chain(
        optax.stateless_with_tree_map(lambda g, p: g * 2.0), inner
    ),
    "casts": lambda inner: optax.chain(
        optax.stateless_with_tree_map(lambda g, p: g.astype(jnp.bfloat16)),
        optax.stateless_with_tree_map(lambda g, p: g.astype(jnp.float32)),
        inner,
    ),
    "own": lambda inner: optax.chain(_own_clip(), inner),
    "conditionally_mask": lambda inner: optax.conditionally_mask(
        inner, lambda step, **_: step >= 0
    ),
    "jit": lambda inner: _within(jax.jit, inner),
    "checkpoint": lambda inner: _within(jax.checkpoint, inner),
    "scan": lambda inner: _within(_scan, inner),
    "nested": lambda inner: _within(jax.jit, _within(_scan, _within(jax.jit, inner))),
    "all": lambda inner: optax.chain(_own_clip(), _within(jax.jit, inner)),
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("wrapper", rarely.cases(WRAPPERS, often=("zero1",)))
def test_it_is_found_behind_code_of_the_user_and_outside_of_a_jaxpr(wrapper, name):
    inner = WRAPPERS[wrapper](optax.sgd(0.1), world=harness.local_world(2))
    behind = BETWEEN[name](inner)
    _trace(optax.chain(optax.scale(2.0), behind))
    _trace(optax.chain(_own_clip(), behind))
    # The user calls optax in a transformation of his own, on purpose.
    clip = optax.clip(1.0)
    own = optax.stateless(lambda g, p: clip.update(g, clip.init(g))[0])
    _trace(optax.chain(own, behind))
    with pytest.raises(ValueError, match=f"`optax.clip` stands before `jdp.{wrapper}`"):
        _trace(optax.chain(clip, behind))
    with pytest.raises(ValueError, match=f"`optax.clip` stands before `jdp.{wrapper}`"):
        _trace(optax.chain(_within(jax.jit, clip), behind))


def test_it_is_found_in_a_chain_that_code_of_the_user_calls():
    inner = optax.chain(optax.clip(1.0), jdp.distributed_optimizer(optax.sgd(0.1)))
    own = optax.GradientTransformation(
        inner.init, lambda grads, state, params: inner.update(grads, state, params)
    )
    with pytest.raises(ValueError, match=r"`optax\.clip` stands before"):
        _trace(optax.chain(optax.scale(2.0), own))


def test_values_that_reach_the_averaging_in_many_ways_are_looked_at_once():
    def many(grads, params):
        def double(x):
            return x + x

        for _ in range(40):
            double = jax.jit(lambda x, inner=double: inner(x) + inner(x))
        for _ in range(40):  # 2**40 ways to the gradients, and into the jaxprs.
            grads = jax.tree.map(lambda x: x + x, grads)
        return jax.tree.map(double, grads)

    inner = jdp.distributed_optimizer(optax.sgd(0.1))
    _trace(optax.chain(optax.stateless(many), inner))
    _trace(optax.chain(optax.stateless(jax.jit(many)), inner))
    with pytest.raises(ValueError, match="`optax.clip` stands before"):
        _trace(optax.chain(optax.clip(1.0), optax.stateless(many), inner))


def test_it_is_found_in_a_loop_and_in_an_optimizer_of_nnx():
    tx = optax.chain(optax.clip(1.0), jdp.distributed_optimizer(optax.sgd(0.1)))
    world = harness.local_world(2)

    @jdp.data_parallel(world=world)
    def loop(state, x):
        def body(state, _):
            _, grads = jdp.local_gradients(_loss)(state[0], x)
            updates, opt = tx.update(grads, state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt), None

        return jax.lax.scan(body, state, length=2)[0], {}

    with pytest.raises(ValueError, match="`optax.clip` stands before"):
        loop.trace((PARAMS, tx.init(PARAMS)), BATCH)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    @flax_nnx.data_parallel(world=world)
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model, x: (model(x) ** 2).mean())(model, x)
        optimizer.update(model, grads)

    with pytest.raises(ValueError, match="`optax.clip` stands before"):
        step.trace(model, nnx.Optimizer(model, tx, wrt=nnx.Param), BATCH)


def _own_clip():
    def update(updates, state, params=None):
        norm = optax.tree.norm(updates)
        return jax.tree.map(lambda x: x / jnp.maximum(norm, 1.0), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _schedule(count):
    return jnp.cos(count.astype(jnp.float32))


ALLOWED = {
    "scale": optax.scale(2.0),
    "schedule": optax.scale_by_schedule(_schedule),
    "decay": optax.add_decayed_weights(0.1),
    "centralize": optax.centralize(),
    "noise": optax.add_noise(0.1, 0.5, key=0),
    "masked": optax.masked(optax.scale(2.0), {"w": True, "b": False}),
    "own": _own_clip(),
    "stateless": optax.stateless_with_tree_map(lambda g, p: g / (1 + jnp.abs(g))),
    "jit": optax.stateless(jax.jit(lambda g, p: jax.tree.map(jnp.tanh, g))),
}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_linear_or_of_the_user_may_be_in_front(wrapper, name):
    inner = WRAPPERS[wrapper](optax.sgd(0.1), world=harness.local_world(2))
    _trace(optax.chain(ALLOWED[name], inner))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_comes_behind_may_be_anything_in_several_updates_of_one_step(wrapper):
    inner = WRAPPERS[wrapper](optax.adam(0.1), world=harness.local_world(2))
    _trace(optax.chain(inner, optax.clip_by_global_norm(1.0)), repeat=2)


def _scaled(params, x):
    loss, grads = jdp.local_gradients(lambda p, x: 2.0**10 * _loss(p, x))(params, x)
    norm = optax.tree.norm(grads)  # of this replica, by the user
    clip = optax.clip_by_global_norm(1.0)
    grads, _ = clip.update(grads, clip.init(params))
    half = jax.tree.map(lambda g: g.astype(jnp.float16), grads)
    scale = 2.0**-10 / jnp.maximum(norm, 1)
    return loss, jax.tree.map(lambda g: g.astype(jnp.float32) * scale, half)


def _through_an_optimizer(params, x):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))

    def loss(params, x):
        updates, _ = inner.update(params, inner.init(params), params)
        adapted = optax.apply_updates(params, updates)
        logits = x @ adapted["w"]
        return optax.softmax_cross_entropy(logits, jax.nn.softmax(logits)).mean()

    return jdp.local_gradients(loss)(params, x)


def _in_one_line(clip, tx, grads, state, params):
    # fmt: off
    return tx.update(clip.update(grads, clip.init(params))[0], state, params)
    # fmt: on


def _by_a_helper(clip, tx, grads, state, params):
    def update(tx, grads, state):
        return tx.update(grads, state, params)

    grads, _ = update(clip, grads, clip.init(params))
    return update(tx, grads, state)


def _in_a_loop(clip, tx, grads, state, params):
    for each, old in ((clip, clip.init(params)), (tx, state)):
        grads, new = each.update(grads, old, params)
    return grads, new


CLIP = optax.clip_by_global_norm(1.0)


@pytest.mark.parametrize(
    ("update", "clip"),
    [
        (_in_one_line, optax.chain(CLIP, optax.scale(2.0))),
        (_by_a_helper, optax.chain(CLIP, optax.scale(2.0))),
        (_in_a_loop, CLIP),
    ],
)
def test_to_clip_each_replica_on_purpose_is_another_call_of_optax(update, clip):
    inner = jdp.distributed_optimizer(optax.sgd(0.1))
    outer = optax.chain(optax.scale(1.0), inner)
    _trace(
        optax.GradientTransformation(
            outer.init,
            lambda grads, state, params: update(clip, outer, grads, state, params),
        )
    )


def test_chains_that_one_place_calls_in_turn_are_taken_for_one():
    """As docs/zero1.md says: tracebacks do not tell these calls apart."""
    clip, inner = optax.chain(CLIP), jdp.distributed_optimizer(optax.sgd(0.1))
    outer = optax.chain(optax.scale(1.0), inner)
    tx = optax.GradientTransformation(
        outer.init,
        lambda grads, state, params: _in_a_loop(clip, outer, grads, state, params),
    )
    with pytest.raises(ValueError, match="`optax.clip_by_global_norm` stands before"):
        _trace(tx)


@pytest.mark.parametrize("take_gradients", [_scaled, _through_an_optimizer])
def test_what_the_user_does_to_gradients_is_none_of_it(take_gradients):
    inner = jdp.distributed_optimizer(optax.sgd(0.1))
    _trace(optax.chain(optax.scale(1.0), inner), take_gradients)
    _trace(inner, take_gradients)


@pytest.mark.parametrize("differentiate", [jdp.local_gradients, jax.value_and_grad])
def test_a_gradient_within_sam_may_be_of_each_replica(differentiate):
    world = harness.local_world(2)
    inner = jdp.distributed_optimizer(optax.sgd(0.1), world=world)
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    tx = optax.contrib.sam(inner, adversary, opaque_mode=True)

    @jdp.data_parallel(world=world)
    def step(state, x):
        grad_fn = differentiate(_loss)
        updates, opt = tx.update(
            grad_fn(state[0], x)[1],
            state[1],
            state[0],
            grad_fn=lambda p, _: grad_fn(p, x)[1],
        )
        return (optax.apply_updates(state[0], updates), opt), {}

    step.trace((PARAMS, tx.init(PARAMS)), BATCH)


def test_gradients_of_single_samples_are_clipped_in_front():
    private = optax.contrib.differentially_private_aggregate(1.0, 0.1, 0)
    inner = jdp.distributed_optimizer(optax.sgd(0.1))

    def per_sample(params, x):
        grad_fn = jax.vmap(jax.grad(_loss), in_axes=(None, 0))
        return 0.0, grad_fn(params, x[:, None])

    _trace(optax.chain(private, inner), per_sample)


def test_nothing_is_refused_without_tracebacks():
    tx = optax.chain(optax.clip(1.0), jdp.distributed_optimizer(optax.sgd(0.1)))
    _jax.set_tracebacks_enabled(False)
    try:
        _trace(tx)
        _trace(optax.chain(optax.clip(1.0), _within(jax.jit, tx)))
    finally:
        _jax.set_tracebacks_enabled(True)
    with pytest.raises(ValueError, match="`optax.clip` stands before"):
        _trace(tx)
