"""Optimizer state in pieces: the numbers of the whole, in a part of the memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
from jdp import hooks
from tests import harness, rarely

PARAMS, BATCHES = harness.oracle_params(), harness.oracle_batches(4)
SIZE = sum(x.size for x in PARAMS.values())


def _is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.01),
    "adamw with a mask": optax.adamw(0.01, weight_decay=0.1, mask=_is_matrix),
    "clip by global norm": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(0.01)
    ),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "clip by block rms": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
    "lars": optax.lars(0.1),
    "lamb": optax.lamb(0.01),
    "labels": optax.multi_transform(
        {"matrix": optax.adam(0.01), "vector": optax.sgd(0.1)}, _labels
    ),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.01, 10)),
    "adafactor": optax.adafactor(0.01),
    "centralized": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "muon": optax.contrib.muon(0.01),
    "if finite": optax.apply_if_finite(optax.adam(0.01), 3),
    "every other step": optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)),
}


def _train(tx, world, batches=BATCHES, params=PARAMS, weight=False):
    axis_name = world.axis_name

    @jdp.data_parallel(world=world)
    def step(state, batch):
        params, opt = state
        loss, grads = jdp.local_gradients(harness.oracle_loss, axis_name=axis_name)(
            params, batch
        )
        options = {"weight": batch["x"].shape[0]} if weight else {}
        updates, opt = tx.update(grads, opt, params, **options)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    state = (params, tx.init(params))
    for batch in batches:
        state, _ = step(state, batch)
    return *state, step


def _expect(found, expected, atol=5e-7):
    for k, x in expected.items():
        np.testing.assert_allclose(found[k], x, rtol=0, atol=atol, err_msg=k)


@pytest.mark.parametrize("name", rarely.cases(OPTIMIZERS, often=list(OPTIMIZERS)[::3]))
def test_it_steps_as_the_whole_does(name):
    world, tx = harness.local_world(4), OPTIMIZERS[name]
    expected, _ = harness.train_alone(PARAMS, BATCHES, tx)
    found, _, _ = _train(jdp.zero1(tx, world=world), world)
    _expect(found, expected)


@pytest.mark.parametrize("n", rarely.cases([1, 2, 3, 8], often=(3,)))
@pytest.mark.parametrize("weight", [False, True])
def test_on_any_number_of_replicas(n, weight):
    batches = harness.oracle_batches(3, batch_size=24)
    tx = OPTIMIZERS["clip by global norm"]
    world = harness.local_world(n)
    expected, _ = harness.train_alone(PARAMS, batches, tx)
    found, state, _ = _train(jdp.zero1(tx, world=world), world, batches, weight=weight)
    _expect(found, expected)
    shapes = [x.shape for x in state.own.value]
    pieces = [(n, -(-x.size // n)) for x in jax.tree.leaves(PARAMS)]
    assert shapes == pieces * 2


def test_a_replica_holds_its_part_and_no_more():
    # As many elements as divide among 8: no padding hides in the sum.
    params = {"w": np.ones((64, 32), np.float32), "b": np.ones(16, np.float32)}
    world = harness.local_world(8)
    state = jdp.zero1(optax.adam(1e-3), world=world).init(params)
    whole = sum(x.nbytes for x in jax.tree.leaves(optax.adam(1e-3).init(params)))
    on_first = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert on_first == (whole - 4) / 8 + 4  # and the count, on each.


def test_moments_are_overwritten_where_they_lie():
    world = harness.local_world(2)
    *state, step = _train(jdp.zero1(optax.adam(0.01), world=world), world)
    text = step.lower(tuple(state), BATCHES[0]).compile().as_text()
    _, opt = state
    for width in {x.shape[1] for x in opt.own.value}:
        assert f"f32[1,{width}]" in text
        assert not re.search(rf"= f32\[1,{width}\]\S* copy\(", text)


def test_a_pair_of_axes():
    world = harness.local_world(4, ("node", "data"), num_nodes=2)
    tx = OPTIMIZERS["clip by global norm"]
    expected, _ = harness.train_alone(PARAMS, BATCHES, tx)
    found, *_ = _train(jdp.zero1(tx, axis_name=("node", "data"), world=world), world)
    _expect(found, expected)


@pytest.mark.parametrize("halves", ["PSUM", "RING", "HALVING_DOUBLING"])
def test_halves_of_any_all_reduce(halves):
    world = harness.local_world(4)
    tx = jdp.zero1(
        optax.adam(0.01), halves=getattr(jdp.collectives, halves), world=world
    )
    expected, _ = harness.train_alone(PARAMS, BATCHES, optax.adam(0.01))
    found, *_ = _train(tx, world)
    _expect(found, expected)


def test_norms_of_all_parameters_take_one_small_collective():
    world = harness.local_world(4)
    for name, count in (("adam", 0), ("clip by global norm", 1), ("lamb", 2)):
        *state, step = _train(jdp.zero1(OPTIMIZERS[name], world=world), world)
        text = step.lower(tuple(state), BATCHES[0]).as_text()
        # One for the loss; of each of the halves one.
        assert text.count("stablehlo.all_reduce") == 1 + count, name
        assert text.count("stablehlo.reduce_scatter") == 1
        assert text.count('"stablehlo.all_gather') == 1


@pytest.mark.parametrize(
    "hook", [hooks.none(), hooks.top_k(1.0)], ids=lambda hook: hook.name
)
def test_with_a_hook(hook):
    world = harness.local_world(4)
    expected, _ = harness.train_alone(PARAMS, BATCHES, optax.adam(0.01))
    found, state, _ = _train(jdp.zero1(optax.adam(0.01), hook=hook, world=world), world)
    _expect(found, expected)
    assert bool(jax.tree.leaves(state.hook)) == (hook.name != "none")


@pytest.mark.parametrize("hook", [None, hooks.none()], ids=["no hook", "none"])
def test_gradients_of_integers_pass_through(hook):
    labels = {"w": "trained", "n": "frozen"}
    inner = {"trained": optax.sgd(0.5), "frozen": optax.set_to_zero()}
    world = harness.local_world(2)
    tx = jdp.zero1(optax.partition(inner, labels), hook=hook, world=world)

    @functools.partial(jdp.data_parallel, world=world)
    def step(state, batch):
        params, opt = state

        def loss_fn(params):
            return (params["w"] * batch).sum()

        grads = jax.grad(loss_fn, allow_int=True)(params)
        updates, opt = tx.update(grads, opt, params, weight=batch.sum())
        assert updates["n"].dtype == jax.dtypes.float0
        return ({**params, "w": params["w"] + updates["w"]}, opt), {}

    params = {"w": np.ones(3, np.float32), "n": np.arange(4)}
    state = jdp.replicate(world, (params, tx.init(params)))
    (params, _), _ = step(state, np.array([1.0, 3.0], np.float32))
    np.testing.assert_allclose(params["w"], 1 - 0.5 * (1 + 9) / 4, rtol=1e-6)


def test_a_hook_compresses_as_it_does_without():
    world, hook = harness.local_world(4), hooks.top_k(0.1)
    plain = jdp.distributed_optimizer(optax.adam(0.01), hook=hook, world=world)
    expected, *_ = _train(plain, world)
    found, *_ = _train(jdp.zero1(optax.adam(0.01), hook=hook, world=world), world)
    _expect(found, expected)


def test_accumulated_gradients_are_stepped_on():
    world, tx = (
        harness.local_world(4),
        jdp.zero1(optax.adam(0.01), world=harness.local_world(4)),
    )

    @jdp.data_parallel(world=world)
    def step(state, batch):
        params, opt = state
        grads = jax.tree.map(jnp.zeros_like, params)
        for k in range(2):
            part = jax.tree.map(lambda x, k=k: x[2 * k : 2 * k + 2], batch)
            _, more = jdp.local_gradients(harness.oracle_loss)(params, part)
            grads = jax.tree.map(lambda a, b: a + b / 2, grads, more)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {}

    expected, _ = harness.train_alone(PARAMS, BATCHES, optax.adam(0.01))
    state = (PARAMS, tx.init(PARAMS))
    for batch in BATCHES:
        state, _ = step(state, batch)
    _expect(state[0], expected)


def _one_update(weights, n=4):
    world = harness.local_world(n)
    tx = jdp.zero1(optax.adam(0.1), world=world)
    x = np.random.default_rng(0).normal(size=(n, 6)).astype(np.float32)
    given = np.where(np.array(weights)[:, None] > 0, x, np.nan)
    params = np.zeros(6, np.float32)

    @jdp.data_parallel(world=world, donate_state=False)
    def step(state, x, weight):
        updates, opt = tx.update(x[0], state[1], state[0], weight=weight[0])
        return (updates, opt), {}

    before = jdp.replicate(world, (params, tx.init(params)))
    after, _ = step(before, given, np.array(weights, np.float32))
    return x, before, after


def test_a_replica_without_data_does_not_count():
    weights = np.array([3.0, 0.0, 1.0, 4.0])
    x, _, (updates, state) = _one_update(weights)
    mean = (weights[:, None] * x).sum(0) / weights.sum()
    np.testing.assert_allclose(updates, -0.1 * np.sign(mean), rtol=0, atol=1e-5)
    moments = np.asarray(state.own.value[0]).reshape(-1)[:6]
    np.testing.assert_allclose(moments, 0.1 * mean, rtol=0, atol=1e-7)


def test_without_any_data_nothing_changes():
    _, (_, before), (updates, after) = _one_update([0] * 4)
    assert (np.asarray(updates) == 0).all() and np.signbit(updates).all()
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_in_a_join_it_steps_as_without():
    world = harness.local_world(4)
    expected, *_ = _train(jdp.zero1(optax.adam(0.01), world=world), world)
    tx = jdp.zero1(optax.adam(0.01), world=world)

    @jdp.data_parallel(world=world)
    def step(state, batch):
        loss, grads = jdp.local_gradients(harness.oracle_loss)(state[0], batch)
        updates, opt = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), loss

    state = (PARAMS, tx.init(PARAMS))
    with jdp.Join([step]):
        for batch in BATCHES:
            state, _ = step(state, batch)
    _expect(state[0], expected)


def test_without_parameters_it_says_so():
    world = harness.local_world(2)
    tx = jdp.zero1(optax.sgd(0.1), world=world)

    def step(state, x):
        return tx.update(x.sum(), state)[1], {}

    with pytest.raises(ValueError, match="`params` is missing"):
        jdp.data_parallel(step, world=world)(tx.init(np.float32(0)), np.ones(2))


@pytest.mark.parametrize(
    ("params", "kind", "message"),
    [
        ({"w0": np.zeros((5, 16), np.float32)}, ValueError, "`.*b0.*`"),
        (
            {**PARAMS, "w1": np.zeros((16, 5), np.float32)},
            ValueError,
            r"missing: `.*\['w1'\] \[16, 5\]`(.|\n)*too much: `.*'w1'\] \[16, 3\]`",
        ),
    ],
    ids=["removed", "reshaped"],
)
def test_a_state_of_other_parameters_is_named(params, kind, message):
    world = harness.local_world(4)
    tx = jdp.zero1(optax.adam(0.1), world=world)

    def step(state, batch):
        grads = jax.tree.map(lambda x: x + batch.sum(), params)
        return tx.update(grads, state, params)[1], {}

    with pytest.raises(kind, match=message):
        jdp.data_parallel(step, world=world)(tx.init(PARAMS), np.ones(4))


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_any_replica_used_is_stepped_on(check_vma):
    """Every replica decides alike, or each would update its piece alone."""
    world = harness.local_world(2)
    params = {k: np.ones(4, np.float32) for k in "ab"}
    tx = optax.adam(0.1)
    wrapped = jdp.zero1(jdp.skip_unused(tx), world=world)

    def loss_fn(params, x):
        first, second = ((params[k] ** 2).sum() for k in "ab")
        return jax.lax.cond(x.sum() < 1, lambda: first, lambda: second)

    @jdp.data_parallel(world=world, check_vma=check_vma, donate_state=False)
    def step(state, x):
        (_, grads), used = jdp.local_gradients(loss_fn, find_unused=True)(state[0], x)
        updates, opt = wrapped.update(grads, state[1], state[0], used=used)
        return (optax.apply_updates(state[0], updates), opt), {}

    start = params, wrapped.init(params)
    (found, _), _ = step(start, np.array([[0.0], [2.0]], np.float32))
    for k in "ab":  # The mean gradient is 1, from one replica alone.
        np.testing.assert_allclose(found[k], np.full(4, 0.9), rtol=0, atol=1e-6)
    # What no replica used stays.
    (found, _), _ = step(start, np.zeros((2, 1), np.float32))
    np.testing.assert_array_equal(found["b"], params["b"])
    np.testing.assert_allclose(found["a"], np.full(4, 0.9), rtol=0, atol=1e-6)


def test_what_a_replica_used_counts_where_it_has_data():
    world = harness.local_world(2)
    params = {k: np.ones(4, np.float32) for k in "ab"}
    tx = jdp.zero1(jdp.skip_unused(optax.sgd(0.1)), world=world)

    @jdp.data_parallel(world=world)
    def step(state, weight):
        is_first = jax.lax.axis_index("data") == 0
        used = {"a": is_first, "b": ~is_first}
        grads = jax.tree.map(lambda x: x + weight[0], state[0])
        updates, _ = tx.update(grads, state[1], state[0], used=used, weight=weight[0])
        return (updates, state[1]), {}

    (updates, _), _ = step((params, tx.init(params)), np.array([3, 0], np.float32))
    np.testing.assert_allclose(updates["a"], np.full(4, -0.4), rtol=1e-6)
    np.testing.assert_array_equal(updates["b"], np.zeros(4))


def _update_with(make_extra, wrapper, check_vma=True):
    world = harness.local_world(2)

    def update(grads, state, params=None, *, value, packing=1, halves=1, **extra_args):
        del state, extra_args
        return jax.tree.map(lambda g: -g * value * max(packing, halves), grads), ()

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = wrapper(tx, world=world)

    @jdp.data_parallel(world=world, check_vma=check_vma)
    def step(state, x):
        loss, grads = jdp.local_gradients(lambda p, x: (p * x).sum())(state[0], x)
        updates, opt = tx.update(grads, state[1], state[0], **make_extra(loss))
        return (updates, opt), {}

    params = np.ones(4, np.float32)
    return step((params, tx.init(params)), np.ones((2, 4), np.float32))[0][0]


@pytest.mark.parametrize("wrapper", [jdp.zero1, jdp.distributed_optimizer])
def test_an_extra_argument_of_one_replica_is_named(wrapper):
    with pytest.raises(ValueError, match="extra argument `value` of `update` may"):
        _update_with(lambda loss: {"value": loss}, wrapper)
    message = r"extra argument `more\['x'\]` of `update`"
    with pytest.raises(ValueError, match=message):
        _update_with(lambda loss: {"value": 1, "more": {"x": loss}}, wrapper)


@pytest.mark.parametrize("wrapper", [jdp.zero1, jdp.distributed_optimizer])
@pytest.mark.parametrize("name", ["divide_by", "axis_name", "plan", "hook", "world"])
def test_an_option_that_update_is_given_is_refused(wrapper, name):
    message = rf"`{name}` is an option of `jdp\.{wrapper.__name__}`"
    with pytest.raises(TypeError, match=message):
        _update_with(lambda loss: {"value": 1, name: None}, wrapper)


@pytest.mark.parametrize("wrapper", [jdp.zero1, jdp.distributed_optimizer])
def test_an_optimizer_may_name_what_is_called_as_an_option(wrapper):
    found = _update_with(lambda loss: {"value": 1, "packing": 3, "halves": 3}, wrapper)
    np.testing.assert_array_equal(found, np.full(4, -3.0))


@pytest.mark.parametrize("wrapper", [jdp.zero1, jdp.distributed_optimizer])
def test_multi_steps_that_hand_nothing_on_to_skip_unused_are_named(wrapper):
    world = harness.local_world(2)
    tx = wrapper(optax.MultiSteps(jdp.skip_unused(optax.sgd(1.0)), 2), world=world)
    state = {"a": np.ones(2, np.float32)}

    @jdp.data_parallel(world=world)
    def step(state, x):
        grads = jax.tree.map(lambda p: p * x.sum(), state[0])
        return tx.update(grads, state[1], state[0], used={"a": True}), {}

    with pytest.raises(ValueError, match="`used` is missing.* `optax.MultiSteps` aro"):
        step((state, tx.init(state)), np.ones(2, np.float32))


def test_a_name_near_that_of_an_own_argument_is_suggested():
    for name, own in (("weights", "weight"), ("wieght", "weight"), ("use", "used")):
        with pytest.raises(ValueError, match=f"Did you mean `{own}`"):
            _update_with(
                lambda loss, name=name: {"value": 1, name: loss},
                jdp.distributed_optimizer,
            )


@pytest.mark.parametrize("wrapper", [jdp.zero1, jdp.distributed_optimizer])
def test_extra_arguments_may_be_functions_flags_and_means(wrapper):
    def make_extra(loss):
        return {
            "value": jdp.average(loss),
            "value_fn": lambda p: p.sum(),
            "is_last": True,
            "name": "text",
            "nothing": None,
        }

    np.testing.assert_allclose(_update_with(make_extra, wrapper), np.full(4, -4.0))


def test_a_function_of_a_replicas_own_samples_is_refused_unless_it_averages():
    world = harness.local_world(2)
    search = optax.scale_by_backtracking_linesearch(3)
    tx = jdp.zero1(optax.chain(optax.sgd(0.1), search), world=world)

    def loss_fn(params, x):
        return ((x * params["w"]) ** 2).mean()

    def train(value_fn_of):
        @jdp.data_parallel(world=world)
        def step(state, x):
            loss, grads = jdp.local_gradients(loss_fn)(state[0], x)
            updates, opt = tx.update(
                grads,
                state[1],
                state[0],
                value=jdp.average(loss),
                grad=jdp.sync_gradients(grads),
                value_fn=value_fn_of(x),
            )
            return (optax.apply_updates(state[0], updates), opt), {}

        params = {"w": np.ones(3, np.float32)}
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        return step((params, tx.init(params)), x)[0][0]["w"]

    with pytest.raises(ValueError, match="such as a `value_fn`, closes over"):
        train(lambda x: lambda params: loss_fn(params, x))
    found = np.asarray(train(lambda x: lambda params: jdp.average(loss_fn(params, x))))
    grads = (np.arange(6).reshape(2, 3) ** 2).mean(0) * 2 / 3
    step_size = (1 - found) / (0.1 * grads + (grads == 0))
    assert step_size[1] == pytest.approx(step_size[2], rel=1e-4) and step_size[1] > 0


def test_an_update_may_print_sums_beside_what_a_replica_has():
    world, heard, inner = harness.local_world(2), [], optax.adam(0.1)

    def update(updates, state, params=None, *, own, **extra_args):
        total = optax.tree.sum(updates)
        jax.debug.callback(lambda *xs: heard.append([*map(float, xs)]), total, own())
        return inner.update(updates, state, params)

    tx = jdp.zero1(
        optax.GradientTransformationExtraArgs(inner.init, update), world=world
    )

    @jdp.data_parallel(world=world)
    def step(state, x):
        params, opt = state
        _, grads = jdp.local_gradients(lambda p, x: (p * x.mean()).sum())(params, x)
        updates, opt = tx.update(grads, opt, params, own=lambda: x.sum())
        return (optax.apply_updates(params, updates), opt), {}

    params = np.ones(7, np.float32)
    step((params, tx.init(params)), np.float32([1, 3]))
    jax.effects_barrier()
    assert sorted(heard) == [[14.0, 1.0], [14.0, 3.0]]


WRONG_ORDERS = {
    "steps": lambda tx: optax.MultiSteps(tx, 2),
    "if finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@pytest.mark.parametrize("order", WRONG_ORDERS)
@pytest.mark.parametrize("wrapper", [jdp.zero1, jdp.distributed_optimizer])
def test_what_looks_at_gradients_goes_inside(wrapper, order):
    world = harness.local_world(2)
    tx = WRONG_ORDERS[order](wrapper(optax.adam(0.1), world=world))
    with pytest.raises(ValueError, match="function that averages:|goes inside, where"):
        _train(tx, world)


OUTSIDE = {
    "chain": lambda tx: optax.chain(tx, optax.clip(0.01)),
    "injected": lambda tx: optax.inject_hyperparams(lambda k: tx)(k=1),
    "labels": lambda tx: optax.partition({"matrix": tx, "vector": tx}, _labels),
    "free of schedules": lambda tx: optax.contrib.schedule_free(tx, 0.01),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_other_wrappers_go_around_too(name):
    world, inner = harness.local_world(2), optax.adam(0.01)
    expected, _ = harness.train_alone(PARAMS, BATCHES, OUTSIDE[name](inner))
    found, *_ = _train(OUTSIDE[name](jdp.zero1(inner, world=world)), world)
    _expect(found, expected)


def test_the_state_of_flax_nnx():
    world = harness.local_world(2)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    found = {}
    for wrapper in (jdp.distributed_optimizer, jdp.zero1):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        tx = wrapper(optax.adam(0.1), world=world)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @jdp.flax_nnx.data_parallel(world=world, donate_state=False)
        def step(model, optimizer, x):
            graph, params = nnx.split(model)
            _, grads = jdp.local_gradients(
                lambda p, x: (nnx.merge(graph, p)(x) ** 2).mean()
            )(params, x)
            optimizer.update(model, grads)

        for _ in range(2):
            step(model, optimizer, x)
        found[wrapper] = jax.tree.map(np.asarray, nnx.state(model))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6),
        *found.values(),
    )


@pytest.mark.parametrize("kind", ["zero1", "top_k"])
def test_an_optimizer_of_flax_nnx_that_was_split_is_refused_with_advice(kind):
    world = harness.local_world(2)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    inner = optax.adam(0.1)
    tx = jdp.zero1(inner, world=world)
    if kind == "top_k":
        tx = jdp.distributed_optimizer(inner, hook=hooks.top_k(0.5), world=world)
    graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    @jdp.data_parallel(world=world)
    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        grads = jax.tree.map(jnp.ones_like, nnx.state(model))
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {}

    message = "It has 2 rows, one per replica.*`nnx.split`.*`jdp.flax_nnx.data_par"
    with pytest.raises(ValueError, match=message):
        step(state, np.ones((4, 3), np.float32))


# Two processes, with the numbers of torch


def _train_in_two_processes():
    """Returns what is to be that of torch, and parameters of two optimizers."""
    case = np.load(harness.REFERENCE / "torch_2_13_zero.npz")
    world = jdp.init()
    rank = world.process_index
    params = [(case[f"init.W{i}"], case[f"init.b{i}"]) for i in range(3)]

    def make(tx):
        @jdp.data_parallel
        def step(state, x, y):
            params, opt = state
            _, grads = jdp.local_gradients(harness.torch_loss)(params, (x, y))
            updates, opt = tx.update(grads, opt, params)
            return (optax.apply_updates(params, updates), opt), {}

        return jdp.replicate(world, (params, tx.init(params))), step

    def flat(tree):
        leaves = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(tree)]
        return np.concatenate([x.ravel() for x in leaves])

    def train_unevenly(tx):
        state, step = make(tx)
        with jdp.Join([step]):
            for k in range(7 if rank == 0 else 3):
                state, _ = step(state, case["X"][rank, k], case["Y"][rank, k])
        jdp.check_replicas(step.last_state, world=world)
        return flat(step.last_state[0])

    adam = optax.adam(0.01)
    joined = [train_unevenly(jdp.zero1(adam))]
    joined.append(train_unevenly(jdp.distributed_optimizer(adam)))
    state, step = make(jdp.zero1(adam))
    trajectory = [flat(state[0])]
    for k in range(10):
        state, _ = step(state, case["X"][rank, k], case["Y"][rank, k])
        trajectory.append(flat(state[0]))
    jdp.check_replicas(state, world=world)
    own = [np.asarray(x.addressable_data(0))[0] for x in state[1].own.value]
    return trajectory, own, joined


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_step_as_those_of_torch_and_join_as_plain_adam():
    case = np.load(harness.REFERENCE / "torch_2_13_zero.npz")
    found = harness.run_checked(_train_in_two_processes, 2)
    (trajectory, first, joined), (also, second, joined_too) = found
    np.testing.assert_array_equal(trajectory, also)
    np.testing.assert_array_equal(joined, joined_too)
    np.testing.assert_allclose(*joined, rtol=0, atol=1e-6)
    assert np.abs(joined[0] - trajectory[3]).max() > 0.01  # It went on without one.
    np.testing.assert_allclose(trajectory, case["adam.traj"], rtol=0, atol=1e-5)
    sizes = [160, 16, 128, 8, 8, 1]
    moments = [
        np.concatenate([a, b])[:size]
        for a, b, size in zip(first, second, sizes * 2, strict=True)
    ]
    for name, parts in (("exp_avg", moments[:6]), ("exp_avg_sq", moments[6:])):
        np.testing.assert_allclose(
            np.concatenate(parts), case[f"adam.{name}"], rtol=0, atol=1e-5
        )


def test_a_rematerialised_optimizer_works_on_its_part():
    inner = optax.adam(0.01)
    tx = optax.GradientTransformation(inner.init, jax.checkpoint(inner.update))
    world = harness.local_world(4)
    expected, _ = harness.train_alone(PARAMS, BATCHES, tx)
    *state, step = _train(jdp.zero1(tx, world=world), world)
    _expect(state[0], expected)
    text = step.lower(tuple(state), BATCHES[0]).as_text()
    assert text.count('"stablehlo.all_gather') == 1  # Of the new parameters.


def test_many_leaves_are_traced_as_one():
    """Leaves of one shape share the program of their shards."""
    world = harness.local_world(2)
    params = {f"w{i}": np.full((3, 5), float(i), np.float32) for i in range(40)}
    params["b"] = np.ones(7, np.float32)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = jdp.zero1(inner, world=world)
    opt = tx.init(params)

    def step(state, batch):
        params, opt = state
        grads = jax.tree.map(lambda x: x * batch.mean(), params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {}

    lowered = jdp.data_parallel(step, world=world).lower(
        (params, opt), np.ones(2, np.float32)
    )
    # The square roots of Adam, per kind of leaf, and the root of the norm.
    assert lowered.as_text().count("stablehlo.sqrt") == 3


def test_equal_moments_have_memory_of_their_own():
    world = harness.local_world(2)
    params = {f"w{i}": np.full((3, 5), float(i), np.float32) for i in range(3)}
    state = jdp.zero1(optax.adam(0.1), world=world).init(params)
    plain = jdp.consolidate(state, like=optax.adam(0.1).init(params))
    for x in jax.tree.leaves(plain):
        np.testing.assert_array_equal(x, 0)
    addresses = {
        shard.data.unsafe_buffer_pointer()
        for x in state.own.value
        for shard in x.addressable_shards
    }
    assert len(addresses) == 2 * 6


def test_state_that_starts_from_the_parameters():
    world, tx = harness.local_world(2), optax.contrib.schedule_free_sgd(0.1)
    params = {f"w{i}": np.full((3, 5), float(i), np.float32) for i in range(3)}
    state = jdp.zero1(tx, world=world).init(params)
    expected = tx.init(params)
    found = jdp.consolidate(state, like=expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
