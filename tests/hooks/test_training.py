"""Training with hooks: every entry takes them, and they leave the rest as it is."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jdp
from jdp import hooks
from jdp.replicas import per_replica
from tests import harness

pytestmark = pytest.mark.slow

STATELESS = {
    "int8": hooks.int8(),
    "cast": hooks.cast(jnp.bfloat16),
    "rows": hooks.rows(1),
}
STATEFUL = {
    "top_k": hooks.top_k(0.2),
    "power_sgd": hooks.power_sgd(2, min_compression_rate=1),
    "chain": hooks.chain(
        hooks.power_sgd(1, start_step=1, min_compression_rate=1),
        hooks.cast(jnp.bfloat16),
    ),
}
ALL = {**STATELESS, **STATEFUL}
PARAMS = harness.oracle_params()


def _descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def _train(hook, world, batches, way, **kwargs):
    """Trains with a hook; returns parameters, state and losses."""
    plan = jdp.plan_buckets(PARAMS)  # Chunks of int8 are the same then.
    init = hooks.init_state(hook, PARAMS, plan=plan, world=world)
    # A hook without a state needs none.
    has_state = bool(jax.tree.leaves(init))
    tx = jdp.distributed_optimizer(optax.sgd(0.1), hook=hook, plan=plan, world=world)
    if way == "distributed_optimizer":
        init = tx.init(PARAMS)

    @jdp.data_parallel(world=world)
    def step(state, batch):
        params, kept = state
        options = {
            "hook": hook,
            "hook_state": kept if has_state else None,
            "plan": plan,
        }
        if way == "value_and_grad":
            out = jdp.value_and_grad(harness.oracle_loss, **options)(params, batch)
        elif way == "accumulate_gradients":
            grad_fn = jdp.accumulate_gradients(harness.oracle_loss, 2, **options)
            out = grad_fn(params, batch)
        else:
            loss, grads = jdp.local_gradients(harness.oracle_loss)(params, batch)
            if way == "distributed_optimizer":
                updates, kept = tx.update(grads, kept, params)
                return (optax.apply_updates(params, updates), kept), loss
            out = jdp.sync_gradients(grads, **options)
            out = ((loss, out[0]), out[1]) if has_state else (loss, out)
        if has_state:
            out, kept = out
        loss, grads = out
        return (_descend(params, grads), kept), loss

    state, losses = (PARAMS, init), []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return *state, losses


@pytest.mark.parametrize("name", ALL)
def test_every_entry_sends_through_the_hook(name):
    world, batches = harness.local_world(4), harness.oracle_batches(3)
    expected, _, losses = _train(ALL[name], world, batches, "value_and_grad")
    alone, _ = harness.train_alone(PARAMS, batches, optax.sgd(0.1))
    assert any((alone[k] != expected[k]).any() for k in alone)
    for way in ("sync_gradients", "accumulate_gradients", "distributed_optimizer"):
        found, _, also = _train(ALL[name], world, batches, way)
        for k, x in expected.items():
            # Micro-batches are added up in another order, from which the hook rounds.
            atol = 2e-3 if way == "accumulate_gradients" else 1e-7
            np.testing.assert_allclose(found[k], x, rtol=0, atol=atol)
        np.testing.assert_allclose(also, losses, rtol=0, atol=2e-3)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_none_trains_as_one_device(n):
    batches = harness.oracle_batches(5)
    expected, _ = harness.train_alone(PARAMS, batches, optax.sgd(0.1))
    found, *_ = _train(hooks.none(), harness.local_world(n), batches, "value_and_grad")
    for k, x in expected.items():
        np.testing.assert_allclose(found[k], x, rtol=0, atol=5e-7)


@pytest.mark.parametrize("name", STATEFUL)
def test_one_replica_sends_nothing_and_is_exact(name):
    world, batches = harness.local_world(1), harness.oracle_batches(2)
    expected, _ = harness.train_alone(PARAMS, batches, optax.sgd(0.1))
    found, *_ = _train(STATEFUL[name], world, batches, "value_and_grad")
    for k, x in expected.items():
        np.testing.assert_allclose(found[k], x, rtol=0, atol=2e-7)


def _weighted(hook, n, divide_by, weights, poison=False):
    """One gradient of the mean of x, weighted; and the state after it."""
    world = harness.local_world(n)
    plan = jdp.plan_buckets(np.zeros(8, np.float32))
    kept = hooks.init_state(hook, np.zeros(8, np.float32), plan=plan, world=world)
    x = np.random.default_rng(0).normal(size=(n, 8)).astype(np.float32)
    given = np.where(np.array(weights)[:, None] > 0, x, np.nan) if poison else x

    @jdp.data_parallel(world=world)
    def step(state, x, weight):
        grads, state = jdp.sync_gradients(
            x[0],
            weight=weight[0],
            divide_by=divide_by,
            plan=plan,
            hook=hook,
            hook_state=state,
        )
        return state, {"grads": grads}

    before = jax.tree.map(np.asarray, kept)
    kept, out = step(kept, given, np.array(weights, np.float32))
    return x, out["grads"], before, kept


@pytest.mark.parametrize("divide_by", ["weight", "active", "world"])
@pytest.mark.parametrize("name", ["none", "top_k"])
def test_weights_are_those_of_a_plain_mean(name, divide_by):
    hook = {"none": hooks.none(), "top_k": hooks.top_k(1.0)}[name]
    weights = [3, 0, 1, 4]
    x, found, *_ = _weighted(hook, 4, divide_by, weights, poison=True)
    w = np.array(weights, np.float64)
    if divide_by != "weight":
        w = (w > 0).astype(np.float64)
    divisor = 4 if divide_by == "world" else w.sum()
    expected = (w[:, None] * x).sum(0) / divisor
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_without_any_data_gradients_are_zero_and_the_state_stays():
    hook = hooks.top_k(0.25)
    _, found, before, after = _weighted(hook, 4, "weight", [0] * 4, poison=True)
    np.testing.assert_array_equal(found, 0.0)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_large_weights_do_not_overflow_float16():
    hook = hooks.cast("float16")
    x, found, *_ = _weighted(hook, 4, "weight", [1e6, 1e6, 1e6, 1e6])
    np.testing.assert_allclose(found, x.mean(0), rtol=0, atol=2e-3)


def test_float16_gradients_reach_a_hook_in_float32():
    world = harness.local_world(8)
    x = np.full((8, 5), 60000, np.float16)

    @jdp.data_parallel(world=world)
    def step(state, x):
        return state, jdp.sync_gradients(x[0], hook=hooks.none())

    _, found = step(0.0, x)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, x[0])


def test_what_was_used_and_the_loss_stay_exact():
    def loss_fn(params, batch):
        h = jax.lax.cond(
            batch.sum() > 0, lambda: params["a"] * 1.0, lambda: params["b"] * 1.0
        )
        return (h * batch.mean()).sum()

    params = {k: np.full(4, 0.1, np.float32) for k in "abc"}
    world = harness.local_world(2)
    hook = hooks.top_k(0.5)

    @jdp.data_parallel(world=world)
    def step(state, batch):
        grad_fn = jdp.value_and_grad(
            loss_fn, find_unused=True, hook=hook, hook_state=state
        )
        ((loss, grads), used), state = grad_fn(params, batch)
        return state, {"loss": loss, "used": used}

    state = hooks.init_state(hook, params, world=world)
    with pytest.warns(UserWarning, match="can never receive a gradient: `\\['c'\\]`"):
        _, found = step(state, np.array([1.0, 2.0], np.float32))
    assert float(found["loss"]) == pytest.approx(4 * 0.1 * 1.5, rel=1e-6)
    assert [bool(found["used"][k]) for k in "abc"] == [True, False, False]


def test_a_joined_process_sends_zeros_through_the_hook():
    world, hook = harness.local_world(4), STATEFUL["top_k"]
    (batch,) = harness.oracle_batches(1)

    @jdp.data_parallel(world=world, donate_state=False)
    def step(state, batch):
        params, kept = state
        grad_fn = jdp.value_and_grad(harness.oracle_loss, hook=hook, hook_state=kept)
        (loss, grads), kept = grad_fn(params, batch)
        return (_descend(params, grads), kept), loss

    state = (PARAMS, hooks.init_state(hook, PARAMS, world=world))
    plain, _ = step(state, batch)
    with jdp.Join([step]):
        joined, _ = step(state, batch)
    for k, x in plain[0].items():
        np.testing.assert_allclose(joined[0][k], x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_checkpoint_goes_on_bit_for_bit(name, tmp_path):
    import orbax.checkpoint as ocp

    world, batches = harness.local_world(4), harness.oracle_batches(4)
    hook = STATEFUL[name]

    @jdp.data_parallel(world=world, donate_state=False)
    def step(state, batch):
        grad_fn = jdp.value_and_grad(
            harness.oracle_loss, hook=hook, hook_state=state["hook"]
        )
        (loss, grads), kept = grad_fn(state["params"], batch)
        return {"params": _descend(state["params"], grads), "hook": kept}, loss

    state = {"params": PARAMS, "hook": hooks.init_state(hook, PARAMS, world=world)}
    for batch in batches[:2]:
        state, _ = step(state, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    for batch in batches[2:]:
        state, _ = step(state, batch)
        restored, _ = step(restored, batch)
    jax.tree.map(np.testing.assert_array_equal, state, restored)


def test_a_hand_written_shard_map_takes_a_hook():
    world, hook = harness.local_world(4), STATEFUL["top_k"]
    batches = harness.oracle_batches(3)
    expected, _, _ = _train(hook, world, batches, "value_and_grad")
    kept = hooks.init_state(hook, PARAMS, world=world)
    specs = jax.tree.unflatten(
        jax.tree.structure(kept), per_replica.specs(kept, world.axis_names)
    )

    def step(params, kept, batch):
        grad_fn = jdp.value_and_grad(
            harness.oracle_loss, hook=hook, hook_state=per_replica.enter(kept)
        )
        (_, grads), kept = grad_fn(params, batch)
        return _descend(params, grads), per_replica.leave(kept)

    run = harness.jit_fast(
        jax.shard_map(
            step,
            mesh=world.mesh,
            in_specs=(PartitionSpec(), specs, PartitionSpec("data")),
            out_specs=(PartitionSpec(), specs),
        )
    )
    params = PARAMS
    for batch in batches:
        params, kept = run(params, kept, batch)
    for k, x in expected.items():
        np.testing.assert_allclose(params[k], x, rtol=0, atol=1e-6)


def _sync(hook, hook_state, grads=PARAMS, **kwargs):
    world = harness.local_world(2)

    @jdp.data_parallel(world=world)
    def step(state, batch):
        grads = jax.tree.map(lambda x: x * batch.sum(), state[0])
        found = jdp.sync_gradients(grads, hook=hook, hook_state=state[1], **kwargs)
        return state, jax.tree.map(jnp.sum, found)

    return step((grads, hook_state), np.ones(2, np.float32))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: _sync(STATEFUL["top_k"], None),
            ValueError,
            "`top_k\\(0.2\\)` has a state, and `hook_state` is missing",
        ),
        (
            lambda: _sync(
                STATEFUL["power_sgd"],
                hooks.init_state(
                    STATEFUL["top_k"], PARAMS, world=harness.local_world(2)
                ),
            ),
            ValueError,
            "`hook_state` does not belong to the hook `power_sgd\\(2\\)`",
        ),
        (
            lambda: _sync(
                STATEFUL["top_k"],
                hooks.init_state(
                    STATEFUL["top_k"],
                    {"w": np.zeros(7, np.float32)},
                    world=harness.local_world(2),
                ),
            ),
            ValueError,
            r"float32\[7\], but the hook `top_k\(0.2\)` has float32\[147\]",
        ),
        (lambda: _sync("int8", None), TypeError, "must be a `jdp.hooks.CommHook`"),
        (
            lambda: _sync(hooks.int8(), None, packing="tuple"),
            ValueError,
            "a hook takes flat buffers",
        ),
        (lambda: _sync(None, ()), ValueError, "is given, but no `hook`"),
    ],
    ids=["missing", "other hook", "other model", "no hook", "tuple", "state alone"],
)
def test_what_does_not_fit_is_named(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


class _Kept(NamedTuple):
    seen: jax.Array


NONSENSE = {
    "nothing": (
        lambda xs, s: None,
        TypeError,
        "a pair `\\(buckets, state\\)`, got None",
    ),
    "sums alone": (lambda xs, s: xs, TypeError, "got a list"),
    "a dict": (lambda xs, s: {"sums": xs, "state": s}, TypeError, "got a dict"),
    "three": (lambda xs, s: (xs, s, 0), TypeError, "got a tuple of 3"),
    "an array": (lambda xs, s: (xs[0], s), TypeError, "instead of the list it"),
    "no sums": (lambda xs, s: (None, s), TypeError, "instead of the list.* None"),
    "sums by name": (lambda xs, s: ({"0": xs[0]}, s), TypeError, "returned a dict"),
    "None among them": (lambda xs, s: ([None], s), TypeError, "arrays, got None"),
    "a number": (lambda xs, s: ([1.0], s), TypeError, "arrays, got a float"),
    "too many": (lambda xs, s: (xs * 2, s), ValueError, "returned: .*, 'float32"),
    "too few": (lambda xs, s: ([], s), ValueError, r"returned: \[\]"),
    "cut": (lambda xs, s: ([xs[0][:3]], s), ValueError, r"returned: .*float32\[3\]"),
    "another dtype": (
        lambda xs, s: ([xs[0].astype(jnp.bfloat16)], s),
        ValueError,
        r"returned: .*bfloat16",
    ),
    "no state": (lambda xs, s: (xs, None), ValueError, r"seen` of nothing"),
    "a list as state": (
        lambda xs, s: (xs, [s.seen]),
        ValueError,
        "a state like the state it was",
    ),
    "a longer state": (
        lambda xs, s: (xs, _Kept(jnp.zeros(4))),
        ValueError,
        r"given: .*`.seen` of float32\[\]\n.*`.seen` of float32\[4\]",
    ),
    "a state of another dtype": (
        lambda xs, s: (xs, _Kept(s.seen.astype(jnp.int32))),
        ValueError,
        r"returned: `.seen` of int32\[\]",
    ),
}


@pytest.mark.parametrize("case", NONSENSE)
@pytest.mark.parametrize("call", ["sync_gradients", "zero1"])
def test_a_hook_that_returns_nonsense_is_named(case, call):
    returned, kind, message = NONSENSE[case]
    hook = hooks.CommHook(
        lambda avals: _Kept(jnp.zeros(())),
        lambda xs, s, all_reduce: returned([all_reduce(x) for x in xs], s),
        "mine",
    )
    world = harness.local_world(2)
    if call == "sync_gradients":
        state = hooks.init_state(hook, PARAMS, world=world)
        run = functools.partial(_sync, hook, state)
    else:
        tx = jdp.zero1(optax.sgd(0.1), hook=hook, world=world)

        @jdp.data_parallel(world=world)
        def step(state, batch):
            grads = jax.tree.map(lambda x: x * batch.sum(), PARAMS)
            return tx.update(grads, state, PARAMS)[1], {}

        run = functools.partial(step, tx.init(PARAMS), np.ones(2, np.float32))
    with pytest.raises(kind, match=f"(?s)hook `mine` must return.*{message}"):
        run()


def test_reducing_in_the_backward_pass_leaves_no_place_for_a_state():
    hook = STATEFUL["top_k"]

    def loss_fn(params, batch):
        return harness.oracle_loss(jdp.sync_in_backward(params), batch)

    def step(state, batch):
        return state, jdp.value_and_grad(loss_fn, hook=hook, hook_state=state)(
            PARAMS, batch
        )

    world = harness.local_world(2)
    state = hooks.init_state(hook, PARAMS, world=world)
    with pytest.raises(
        ValueError, match="reduces the gradient of .* in the backward pass"
    ):
        jdp.data_parallel(step, world=world)(state, *harness.oracle_batches(1))


def test_outside_of_a_step_a_state_needs_a_world(monkeypatch):
    monkeypatch.setattr(jdp.replicas.mesh._CurrentWorld, "world", None)
    with pytest.raises(RuntimeError, match="There is no world yet"):
        hooks.init_state(hooks.top_k(0.5), PARAMS)


def test_a_description_shows_the_hook_and_its_bytes():
    world, hook = harness.local_world(4), hooks.cast(jnp.bfloat16)

    def step(params, batch):
        loss, grads = jdp.value_and_grad(harness.oracle_loss, hook=hook)(params, batch)
        return _descend(params, grads), loss

    (batch,) = harness.oracle_batches(1)
    found = jdp.describe(jdp.data_parallel(step, world=world), PARAMS, batch)
    num_elements = sum(x.size for x in PARAMS.values())
    # And the loss, exact.
    assert found.wire_bytes == round(2 * 3 / 4 * 2 * num_elements) + 6
    assert "hook cast(bfloat16)" in " ".join(str(found).split())


# Numbers of torch


def _train_as_torch(world, name):
    case = np.load(harness.REFERENCE / "torch_2_13_hooks.npz")
    rank = world.process_index
    params = [(case[f"init.W{i}"], case[f"init.b{i}"]) for i in range(3)]
    is_power_sgd = name == "powersgd_rank1"
    hook = hooks.power_sgd(1, start_step=2) if is_power_sgd else hooks.cast("float16")
    kept = hooks.init_state(hook, params)
    if is_power_sgd:
        first = {
            q.size: q for q in (case[f"qinit.{name}.draw0.param{i}"] for i in (0, 2))
        }
        (shapes,) = kept.leaf_shapes
        found = [first[s[1]].ravel() for s in shapes if len(s) == 2 and s[1] in first]
        factors = [np.concatenate(found)]
        assert factors[0].shape == kept.factors[0].shape
        kept = jdp.replicate(world, kept._replace(factors=factors))

    @jdp.data_parallel
    def step(state, x, y):
        params, kept = state
        grad_fn = jdp.value_and_grad(harness.torch_loss, hook=hook, hook_state=kept)
        (_, grads), kept = grad_fn(params, (x, y))
        return (_descend(params, grads), kept), grads

    def flat(tree):
        leaves = jax.tree.leaves(tree)
        return np.concatenate(
            [np.asarray(x.addressable_data(0)).ravel() for x in leaves]
        )

    state = jdp.replicate(world, (params, kept))
    trajectory, gradients, errors = [flat(state[0])], [], []
    for k in range(10):
        state, grads = step(state, case["X"][rank, k], case["Y"][rank, k])
        trajectory.append(flat(state[0]))
        gradients.append(flat(grads))
        if is_power_sgd and k >= 2:
            (residual,) = state[1].residuals.value
            errors.append(np.asarray(residual.addressable_data(0))[0])
    jdp.check_replicas(state, world=world)
    plan = jdp.plan_buckets(params)
    return trajectory, gradients, [_unpacked(plan, x) for x in errors]


def _unpacked(plan, buffer):
    leaves = jax.tree.leaves(jdp.unflatten_buckets(plan, [jnp.asarray(buffer)]))
    return np.concatenate([np.asarray(x).ravel() for x in leaves])


HOOKS_OF_TORCH = ("fp16_compress_hook", "powersgd_rank1")


def _train_with_each():
    world = jdp.init()
    return {name: _train_as_torch(world, name) for name in HOOKS_OF_TORCH}


@pytest.fixture(scope="module")
def trained_as_torch():
    return harness.run_checked(_train_with_each, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", HOOKS_OF_TORCH)
def test_two_processes_train_as_torch_does(trained_as_torch, name):
    case = np.load(harness.REFERENCE / "torch_2_13_hooks.npz")
    for rank, found in enumerate(trained_as_torch):
        trajectory, gradients, errors = found[name]
        np.testing.assert_allclose(trajectory, case[f"{name}.traj"], rtol=0, atol=1e-5)
        # A gradient that lies between two numbers of float16 may go either way.
        unit = 2.0**-10 if name == "fp16_compress_hook" else 0.0
        np.testing.assert_allclose(
            gradients, case[f"{name}.grads"], rtol=unit, atol=1e-5
        )
        if name == "powersgd_rank1":
            # W0 and W1; of what travels as it is torch keeps how far this rank is from
            # the mean, which adds up to nothing.
            expected = case[f"{name}.error_feedback"][rank]
            for part in (slice(0, 160), slice(176, 304)):
                np.testing.assert_allclose(
                    np.array(errors)[:, part], expected[:, part], rtol=0, atol=1e-5
                )
