"""A state on another number of replicas: the pieces are cut anew."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jdp
from jdp import hooks
from jdp.replicas.per_replica import PerReplica
from tests import harness, rarely

PARAMS = harness.oracle_params()
BATCHES = harness.oracle_batches(6, batch_size=24)


def _make(n, hook=None):
    world = harness.local_world(n)
    tx = jdp.zero1(optax.adam(0.01), hook=hook, world=world)

    @jdp.data_parallel(world=world, donate_state=False)
    def step(state, batch):
        _, grads = jdp.local_gradients(harness.oracle_loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    return {"params": PARAMS, "opt": tx.init(PARAMS)}, step


def _saved(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def _restored(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


@pytest.mark.parametrize(
    ("before", "after"),
    rarely.cases(
        [(4, 3), (3, 8), (2, 1), (1, 4), (4, 4)], often=[(4, 3), (2, 1), (4, 4)]
    ),
)
def test_training_goes_on_as_on_one_device(before, after, tmp_path):
    expected, _ = harness.train_alone(PARAMS, BATCHES, optax.adam(0.01))
    state, step = _make(before)
    for batch in BATCHES[:3]:
        state, _ = step(state, batch)
    _saved(tmp_path / "state", state)
    new, step = _make(after)
    like = jdp.checkpoint_template(new, num_replicas=before)
    state = jdp.reshard(_restored(tmp_path / "state", like), like=new)
    for batch in BATCHES[3:]:
        state, _ = step(state, batch)
    for k, x in expected.items():
        np.testing.assert_allclose(state["params"][k], x, rtol=0, atol=5e-7)
    for x in state["opt"].own.value:
        assert x.shape[0] == after


def test_what_hooks_have_not_sent_is_the_same_in_the_mean():
    hook = hooks.top_k(0.1)
    state, step = _make(4, hook)
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
    new, _ = _make(3, hook)
    found = jdp.reshard(jax.tree.map(np.asarray, state), like=new)
    before = state["opt"].hook.residuals.value
    after = found["opt"].hook.residuals.value
    for a, b in zip(before, after, strict=True):
        assert b.shape == (3, *a.shape[1:]) and np.abs(a).max() > 0
        np.testing.assert_allclose(b.mean(0), a.mean(0), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            "w0",
            np.zeros((5, 17), np.float32),
            r"own.value\[2\]` was saved with shape \[4, 20\]",
        ),
        ("w0", np.zeros((5, 16), np.int32), "was saved as float32, but is int32"),
        ("w2", np.zeros(3, np.float32), "does not have the structure"),
    ],
)
def test_a_model_of_another_shape_is_named(name, array, message):
    state, _ = _make(4)
    world = harness.local_world(3)
    params = {**PARAMS, name: array}
    tx = jdp.zero1(optax.adam(0.01), world=world)
    new = {"params": params, "opt": tx.init(params)}
    with pytest.raises(ValueError, match=message):
        jdp.reshard(jax.tree.map(np.asarray, state), like=new)


def test_pieces_of_another_model_are_named_too():
    world = harness.local_world(3)
    tx = jdp.zero1(optax.adam(0.01), world=world)
    old = jax.tree.map(np.asarray, _make(4)[0]["opt"])
    new = tx.init({**PARAMS, "b0": np.zeros(23, np.float32)})
    with pytest.raises(ValueError, match=r"own.value\[0\]` was saved with .*\[4, 4\]"):
        jdp.reshard(old, like=new)
    # As many pieces of the same sizes.
    new = tx.init({**PARAMS, "w0": np.zeros((16, 5), np.float32)})
    with pytest.raises(ValueError, match="does not have the structure"):
        jdp.reshard(old, like=new)


def test_integers_of_replicas_are_not_averaged():
    saved = PerReplica(np.arange(4))
    found = jdp.reshard(saved, like=PerReplica(np.zeros(4, int)))
    assert found.value.tolist() == [0, 1, 2, 3]
    message = "differs between the 4 replicas that saved it; .* averaged for 3 others"
    with pytest.raises(TypeError, match=message):
        jdp.reshard(saved, like=PerReplica(np.zeros(3, int)))
    keys = PerReplica(jax.random.split(jax.random.key(0), 2))
    like = PerReplica(jnp.broadcast_to(jax.random.key(0), 3))
    with pytest.raises(TypeError, match="differs between the 2 replicas"):
        jdp.reshard(keys, like=like)


def test_what_all_replicas_had_alike_stays_bit_for_bit():
    third = np.float32(1) / 3
    value = {
        "count": np.full(3, 2**30 + 1, np.int32),
        "flag": np.array([[True, False]] * 3),
        "key": jnp.broadcast_to(jax.random.key(7), 3),
        "x": np.full((3, 2), third),
        "nan": np.full((3, 1), np.nan, np.float32),
        "none": np.zeros((3, 0), np.int32),
    }
    like = jax.tree.map(lambda x: jnp.repeat(x[:1], 5, axis=0), value)
    found = jdp.reshard(PerReplica(value), like=PerReplica(like)).value
    assert jnp.array_equal(found.pop("key"), like.pop("key"))
    jax.tree.map(np.testing.assert_array_equal, found, like)


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_states_with_a_count_of_steps_go_onto_other_replicas(kind):
    def make(n):
        world = harness.local_world(n)
        make_one = getattr(jdp, kind)
        local = make_one(optax.adam(0.01), period=2, world=world)

        @jdp.data_parallel(world=world)
        def step(state, batch):
            grad_fn = jdp.local_gradients(harness.oracle_loss)
            return local.update(grad_fn(state.params.value, batch)[1], state), {}

        return local.init(PARAMS), step

    state, step = make(4)
    for batch in BATCHES[:3]:
        state, _ = step(state, batch)
    new, step = make(3)
    resharded = jdp.reshard(jax.tree.map(np.asarray, state), like=new)
    assert resharded.inner.value[0].count.tolist() == [3, 3, 3]
    state, _ = step(resharded, BATCHES[3])
    assert state.inner.value[0].count.tolist() == [4, 4, 4]


@pytest.mark.parametrize("count", [3, np.int64(3), np.array(3), np.int32(3)])
def test_a_plain_state_may_hold_numbers_of_python(count):
    world, tx = harness.local_world(2), optax.adam(0.01)
    like = jdp.zero1(tx, world=world).init(PARAMS)
    plain = jax.tree.map(np.asarray, tx.init(PARAMS))
    plain = (plain[0]._replace(count=count), *plain[1:])
    (found,) = jdp.spread(plain, like=like).shared
    assert (found.dtype, int(found)) == (jnp.int32, 3)
    plain = (plain[0]._replace(count=2**31), *plain[1:])
    with pytest.raises(ValueError, match=r"count \[\]` is int64 and does not fit"):
        jdp.spread(plain, like=like)


def _keyed(n):
    """A state with keys of every kind: plain, of the optimizer, of each replica."""
    world = harness.local_world(n)
    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.adam(0.01))
    own = jdp.copy_per_replica(jax.random.key(7), world=world)
    state = {
        "params": jdp.replicate(world, PARAMS),
        "opt": jdp.zero1(tx, world=world).init(PARAMS),
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
        "own": own,
    }
    return state, tx


def _data_of(tree):
    """The leaves as numpy has them, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for _, x in leaves]
    return {
        (jax.tree_util.keystr(path), str(x.dtype)): np.asarray(
            jax.random.key_data(x) if key else x
        )
        for (path, x), key in zip(leaves, is_key, strict=True)
    }


def _assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, _data_of(a), _data_of(b))


def test_keys_come_back_as_they_were(tmp_path):
    state, tx = _keyed(4)
    like = jdp.checkpoint_template(state, num_replicas=4)
    for x, y in zip(jax.tree.leaves(like), jax.tree.leaves(state), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
    _saved(tmp_path / "state", state)
    found = jdp.reshard(_restored(tmp_path / "state", like), like=state)
    _assert_same(found, state)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    # On other replicas: all but keys that differ.
    fewer, _ = _keyed(2)
    different = {**state, "own": PerReplica(jax.random.split(jax.random.key(7), 4))}
    with pytest.raises(
        TypeError, match=r"`\['own'\].value`, key<fry>, differs between the 4"
    ):
        jdp.reshard(different, like=fewer)
    _assert_same(jdp.reshard(state, like=fewer), fewer)
    plain = jdp.consolidate(state["opt"], like=jax.eval_shape(tx.init, PARAMS))
    _assert_same(jdp.spread(plain, like=fewer["opt"]), fewer["opt"])


def test_the_data_of_a_key_is_not_taken_for_the_key():
    saved = {"key": np.zeros(2, np.uint32)}
    with pytest.raises(ValueError, match="uint32, but is key<fry> here. Wrap it with"):
        jdp.reshard(saved, like={"key": jax.random.key(0)})


@pytest.mark.parametrize(
    "restore",
    [
        lambda state: pickle.loads(pickle.dumps(state)),
        lambda state: jax.tree.map(jnp.asarray, jax.device_get(state)),
        lambda state: jax.tree.map(np.asarray, state),
    ],
    ids=["pickle", "jnp", "numpy"],
)
def test_a_state_that_was_saved_by_hand_is_consolidated(restore):
    opt = _make(4)[0]["opt"]
    like = jax.eval_shape(optax.adam(0.01).init, PARAMS)
    expected = jdp.consolidate(opt, like=like)
    found = jdp.consolidate(restore(opt), like=like)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def _trained(tx, n, params=PARAMS):
    world = harness.local_world(n)
    wrapped = jdp.zero1(tx, world=world)

    @jdp.data_parallel(world=world, donate_state=False)
    def step(state, batch):
        _, grads = jdp.local_gradients(harness.oracle_loss)(state[0], batch)
        updates, opt = wrapped.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), {}

    state = params, wrapped.init(params)
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
    return state


def _plain_state(tx, batches):
    params, state = PARAMS, tx.init(PARAMS)
    grad_fn = harness.jit_fast(jax.grad(harness.oracle_loss))
    for batch in batches:
        updates, state = tx.update(grad_fn(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return state


CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))


@pytest.mark.parametrize(("before", "after"), [(4, 3), (1, 2)])
def test_consolidated_it_is_that_of_plain_optax_and_spread_what_it_was(before, after):
    expected = _plain_state(CHAIN, BATCHES[:2])
    _, opt = _trained(CHAIN, before)
    like = jax.eval_shape(CHAIN.init, PARAMS)
    whole = jdp.consolidate({"opt": opt}, like={"opt": like})["opt"]
    assert jax.tree.structure(whole) == jax.tree.structure(like)
    for a, b in zip(*map(jax.tree.leaves, (whole, expected)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)
    # Of host arrays, as a checkpoint returns them.
    again = jdp.consolidate(jax.tree.map(np.asarray, opt), like=like)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    new = jdp.zero1(CHAIN, world=harness.local_world(after)).init(PARAMS)
    found = jdp.spread(whole, like=new)
    assert jax.tree.map(lambda x: (x.shape, x.sharding), found) == jax.tree.map(
        lambda x: (x.shape, x.sharding), new
    )
    back = jdp.consolidate(found, like=like)
    jax.tree.map(np.testing.assert_array_equal, back, whole)


@pytest.mark.parametrize(
    ("tx", "params", "message"),
    [
        (optax.sgd(0.1), PARAMS, r"it has no `\[0\].count \[\]`"),
        (
            optax.adam(0.1),
            {**PARAMS, "w0": np.zeros((16, 5), np.float32)},
            r"it has no `\[0\].mu\['w0'\] \[5, 16\]`",
        ),
        (optax.adam(0.1), {**PARAMS, "x": np.zeros(2)}, r"it has `.*\['x'\] \[2\]`"),
    ],
    ids=["optimizer", "reshaped", "added"],
)
def test_a_plain_state_of_something_else_is_named(tx, params, message):
    state = jdp.zero1(optax.adam(0.1), world=harness.local_world(2)).init(PARAMS)
    plain = tx.init(params)
    with pytest.raises(ValueError, match=message):
        jdp.consolidate(state, like=plain)
    with pytest.raises(ValueError, match=message):
        jdp.spread(plain, like=state)


def _settling():
    """An optimizer whose state has other dtypes after its first update."""
    half = jnp.bfloat16(0.5)

    def init(params):
        rate = params["b"][0]
        # A number of Python gives way to any dtype.
        return {"rate": rate, "sums": dict.fromkeys(params, 0.0), "mean": params}

    def update(grads, state, params=None):
        new = {
            "rate": state["rate"] * half + grads["w"].sum(),
            "sums": jax.tree.map(lambda s, x: s + x.sum(), state["sums"], grads),
            "mean": jax.tree.map(
                lambda m, x: m * half.astype(m.dtype) + x.astype(jnp.float32),
                state["mean"],
                grads,
            ),
        }
        updates = jax.tree.map(
            lambda m, x: (m * new["rate"]).astype(x.dtype), new["mean"], grads
        )
        return updates, new

    return optax.GradientTransformation(init, update)


def test_a_state_whose_dtypes_change_in_the_first_step():
    params = {"b": jnp.ones(3, jnp.bfloat16), "w": jnp.ones((2, 3))}
    tx = _settling()

    def make(n):
        world = harness.local_world(n)
        wrapped = jdp.zero1(tx, world=world)

        @jdp.data_parallel(world=world, donate_state=False)
        def step(state, batch):
            grads = jax.tree.map(lambda x: x * batch[0].astype(x.dtype), params)
            updates, opt = wrapped.update(grads, state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt), {}

        return (params, wrapped.init(params)), step

    expected = params, tx.init(params)
    for _ in range(3):
        updates, opt = tx.update(params, expected[1], expected[0])
        expected = optax.apply_updates(expected[0], updates), opt
    state, step = make(3)
    for _ in range(2):
        state, _ = step(state, np.ones(3, np.float32))
    # On other replicas, from what was saved and as plain optax has it.
    new, step = make(2)
    saved = jax.tree.map(np.asarray, state)
    like = jax.eval_shape(tx.init, params)
    plain = jdp.consolidate(saved[1], like=like)
    spread = new[0], jdp.spread(plain, like=new[1])
    resharded = jdp.reshard(saved, like=new)
    _assert_same(spread[1], resharded[1])
    found, _ = step(resharded, np.ones(2, np.float32))
    _assert_same((found[0], jdp.consolidate(found[1], like=like)), expected)


def _consolidate_in_processes():
    world = jdp.init()
    tx = optax.adam(0.01)
    wrapped = jdp.zero1(tx)
    params = jdp.replicate(world, PARAMS)

    @jdp.data_parallel
    def step(state, batch):
        _, grads = jdp.local_gradients(harness.oracle_loss)(state[0], batch)
        updates, opt = wrapped.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), {}

    rank, batch = world.process_index, BATCHES[0]
    mine = jax.tree.map(lambda x: np.split(x, 2)[rank], batch)
    state, _ = step((params, wrapped.init(params)), mine)
    whole = jdp.consolidate(state[1], like=jax.eval_shape(tx.init, PARAMS))
    again = jdp.spread(whole, like=wrapped.init(params))
    for a, b in zip(*map(jax.tree.leaves, (again, state[1])), strict=True):
        np.testing.assert_array_equal(a.addressable_data(0), b.addressable_data(0))
    return jax.tree.map(np.asarray, jax.tree.leaves(whole))


@pytest.mark.multiprocess
def test_processes_consolidate_and_spread():
    expected = _plain_state(optax.adam(0.01), BATCHES[:1])
    for found in harness.run_checked(_consolidate_in_processes, 2):
        for a, b in zip(found, jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)
