"""What every replica has for itself, in a state that is replicated otherwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jdp
from jdp.replicas import initial_state, replication
from jdp.replicas.per_replica import PerReplica
from tests import harness


def _state(n):
    keys = jax.random.split(jax.random.key(0), n)
    own = {"x": np.arange(3.0 * n, dtype=np.float32).reshape(n, 3), "key": keys}
    return {"shared": np.float32(1), "own": PerReplica(own)}


def _count(state, batch):
    own = state["own"].value
    assert own["x"].shape == (3,) and own["key"].shape == ()
    new = {"x": own["x"] + batch.sum(), "key": jax.random.split(own["key"])[0]}
    return {"shared": state["shared"] + 1, "own": PerReplica(new)}, {}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("donate_state", [True, False])
def test_each_replica_has_its_own_from_step_to_step(n, donate_state):
    world = harness.local_world(n)
    step = jdp.data_parallel(_count, world=world, donate_state=donate_state)
    state, expected = _state(n), _state(n)["own"].value["x"]
    for _ in range(3):
        batch = np.arange(2 * n, dtype=np.float32)
        state, _ = step(state, batch)
        expected = expected + batch.reshape(n, 2).sum(1, keepdims=True)
    np.testing.assert_array_equal(state["own"].value["x"], expected)
    assert float(state["shared"]) == 4.0
    x = state["own"].value["x"]
    assert all(s.data.shape == (1, 3) for s in x.addressable_shards)
    if n > 1:
        assert x.sharding == world.split
        keys = jax.random.key_data(state["own"].value["key"])
        assert len({tuple(k) for k in keys.tolist()}) == n


def test_what_was_placed_is_not_copied_again():
    world = harness.local_world(2)
    placed = jdp.replicate(world, _state(2))
    again = jdp.replicate(world, placed)
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(again), strict=True):
        assert a is b


def test_rows_without_elements_are_in_place_wherever_they_come_from():
    world = harness.local_world(2)
    step = jdp.data_parallel(lambda state, batch: (state, {}), world=world)
    batch, none = np.zeros(2, np.float32), np.zeros((2, 0, 3), np.float32)
    placed = jdp.replicate(world, PerReplica([none, batch]))
    copied = jdp.copy_per_replica([none[0]], world=world)
    returned, of_copied = (step(state, batch)[0] for state in (placed, copied))
    for own in (placed, returned, copied, of_copied):
        assert replication.place_own_rows(world, own).value[0] is own.value[0]
    # Else the step would be compiled twice.
    assert returned.value[0].sharding == placed.value[0].sharding
    with pytest.raises(ValueError, match=r"must be 2, .* got shape \(0, 3\)"):
        step(PerReplica([jdp.replicate(world, none[0])]), batch)


def test_a_pair_of_axes():
    world = harness.local_world(4, ("node", "data"), num_nodes=2)
    step = jdp.data_parallel(_count, world=world)
    state, _ = step(_state(4), np.arange(4, dtype=np.float32))
    expected = np.arange(12).reshape(4, 3) + np.arange(4)[:, None]
    np.testing.assert_array_equal(state["own"].value["x"], expected)


def test_rows_that_are_not_one_for_each_replica_are_named():
    step = jdp.data_parallel(_count, world=harness.local_world(4))
    message = r"`\['own'\].value\['key'\]` is in a `jdp.PerReplica`.* must be 4"
    with pytest.raises(ValueError, match=message):
        step(_state(2), np.zeros(4, np.float32))


def test_what_is_not_held_in_one_must_still_be_the_same():
    def step(state, batch):
        return {**state, "shared": batch.sum()}, {}

    with pytest.raises(ValueError, match=r"`\['shared'\]` may differ .*PerReplica"):
        jdp.data_parallel(step, world=harness.local_world(2))(
            _state(2), np.zeros(2, np.float32)
        )


def test_it_may_appear_in_a_step_and_be_gone_after_another():
    world = harness.local_world(2)

    @jdp.data_parallel(world=world)
    def begin(state, batch):
        return {"own": PerReplica(batch.sum()), "shared": state}, {}

    @jdp.data_parallel(world=world)
    def end(state, batch):
        return lax.psum(state["own"].value, "data") + state["shared"], {}

    batch = np.array([1, 2], np.float32)
    state, _ = begin(np.float32(10), batch)
    np.testing.assert_array_equal(state["own"].value, batch)
    assert float(end(state, batch)[0]) == 13.0


def test_init_on_replicas_runs_on_each():
    def init(x):
        rank = lax.axis_index("data").astype(jnp.float32)
        return {"own": PerReplica(x * rank), "shared": x}

    world = harness.local_world(4)
    made = initial_state.init_on_replicas(
        init, np.ones(3, np.float32), axis_name="data", world=world
    )
    expected = np.broadcast_to(np.arange(4.0)[:, None], (4, 3))
    np.testing.assert_array_equal(made["own"].value, expected)
    assert made["own"].value.sharding == world.split
    assert made["shared"].sharding == world.replicated
    with pytest.raises(
        ValueError, match="`axis_name='batch'` is not the axis of the world"
    ):
        initial_state.init_on_replicas(init, 1.0, axis_name="batch", world=world)


def _train_apart():
    """Real processes: own parts stay apart, in a `Join` and in a comparison too."""
    world = jdp.init()
    rank, n = world.process_index, world.process_count

    @jdp.data_parallel
    def step(state, batch):
        own = state["own"].value + lax.axis_index("data") + 1
        total = lax.psum(batch.sum(), "data")
        new = {"own": PerReplica(own), "shared": state["shared"] + total}
        return {**new, "none": state["none"]}, {}

    state = {"own": PerReplica(np.zeros((n, 2))), "shared": np.float32(0)}
    state["none"] = jdp.copy_per_replica(np.zeros((0, 3), np.float32))
    with jdp.Join([step], example=(state, np.zeros(1, np.float32))):
        for _ in range(1 + rank):
            state, _ = step(state, np.ones(1, np.float32))
    state = step.last_state
    jdp.check_replicas(state, world=world)
    own = state["own"].value
    return np.asarray(own.addressable_data(0)), float(state["shared"])


@pytest.mark.multiprocess
def test_processes_keep_their_own_through_a_join():
    for rank, (own, shared) in enumerate(harness.run_checked(_train_apart, 3)):
        # Every process takes part in each of the three steps.
        np.testing.assert_array_equal(own, np.full((1, 2), 3 * (rank + 1)))
        assert shared == 3 + 2 + 1


def _go_on_from_gathered_rows():
    """Real processes: own parts that `replicate` gathered are split again."""
    world = jdp.init()

    @jdp.data_parallel
    def step(state, batch):
        assert state["own"].value["x"].shape == (3,)
        return _count(state, batch)

    state, _ = step(_state(world.num_replicas), np.ones(2, np.float32))
    # Arrays alone, as in the `nnx.state` of an optimizer: not known as own parts.
    arrays = jdp.replicate(world, jax.tree.leaves(state))
    gathered = jax.tree.unflatten(jax.tree.structure(state), arrays)
    assert replication.is_replicated(world, gathered["own"].value["x"])
    found = []
    for start in (state, gathered, jdp.replicate(world, gathered)):
        start = jax.tree.map(jnp.copy, start)
        own = step(start, np.ones(2, np.float32))[0]["own"].value
        assert own["x"].sharding == world.split
        data = own["x"], jax.random.key_data(own["key"])
        found.append([np.asarray(x.addressable_data(0)) for x in data])
    return found


@pytest.mark.multiprocess
def test_gathered_rows_are_split_again():
    for rank, found in enumerate(harness.run_checked(_go_on_from_gathered_rows, 2)):
        x = np.arange(6.0).reshape(2, 3)[rank : rank + 1] + 4
        np.testing.assert_array_equal(found[0][0], x)
        for other in found[1:]:
            for before, after in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(before, after)


def _make_different_states():
    """Real processes: what each says of a state that they would make differently."""
    world = jdp.init(timeout_s=20.0)
    index = world.process_index
    params = jdp.replicate(world, {"w": np.zeros(4, np.float32)})
    rate = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1 * (1 + index))
    seeded = optax.chain(optax.add_noise(0.1, 0.5, index), optax.sgd(0.1))

    def captures(value):
        return optax.GradientTransformation(
            lambda params: {"kept": jnp.asarray(value) + 1}, lambda g, s, p=None: (g, s)
        )

    hook = jdp.hooks.CommHook(
        lambda avals: jnp.full(2, 0.5 + index), lambda b, s, all_reduce: (b, s)
    )
    makes = {
        "rate": lambda: jdp.zero1(rate).init(params),
        "seed": lambda: jdp.zero1(seeded).init(params),
        "array": lambda: jdp.zero1(captures(np.full((5, 2), index))).init(params),
        "outer": lambda: jdp.diloco(optax.sgd(1.0), period=1, outer=rate).init(params),
        "inner": lambda: jdp.local_sgd(rate, period=2).init(params),
        "hook": lambda: jdp.hooks.init_state(hook, params),
        "shape": lambda: jdp.copy_per_replica({"w": np.zeros(2 + index, "f4")}),
    }
    found = {name: harness.error_text(make)[0] for name, make in makes.items()}
    own = jdp.copy_per_replica({"w": np.full(2, index, np.float32)}).value["w"]
    zero = jdp.zero1(optax.trace(0.9)).init({"w": np.full(4, index, np.float32)})
    saved = jax.tree.map(lambda x: np.full(x.shape, 3, x.dtype), zero)
    found["own"] = np.asarray(own.addressable_data(0)).tolist()
    same = jdp.reshard(saved, like=zero)
    found["same"] = np.asarray(same.own.value[0].addressable_data(0)).tolist()
    plain = optax.trace(0.9).init({"w": np.full(4, 3 + index, np.float32)})
    saved = jax.tree.map(lambda x: x + index, saved)
    changed = jax.eval_shape(optax.trace(0.9).init, {"w": np.zeros(4, "f2")})
    for name, call in {
        "reshard": lambda: jdp.reshard(saved, like=zero),
        "spread": lambda: jdp.spread(
            jax.tree.map(lambda x: x + index, plain), like=zero
        ),
        "consolidate": lambda: jdp.consolidate(
            {"opt": zero} if index else zero,
            like={"opt": changed} if index else changed,
        ),
    }.items():
        found[name] = harness.error_text(call)[0]
    return found


@pytest.mark.multiprocess
def test_a_state_that_processes_would_make_differently_is_refused_on_all():
    for found in harness.run_checked(_make_different_states, 2):
        for name, texts in {
            "rate": ("0.10000000149011612:f32[]", "0.20000000298023224:f32[]"),
            "seed": ("random_seed[impl=fry] 0:i32[]", "random_seed[impl=fry] 1:i32[]"),
            "array": ("`captured value [", "0 on process 0, 1 on process 1"),
            "outer": ("0.10000000149011612:f32[]", "0.20000000298023224:f32[]"),
            "inner": ("0.10000000149011612:f32[]", "0.20000000298023224:f32[]"),
            "hook": ("0.5:f32[]", "1.5:f32[]"),
        }.items():
            for text in (*texts, "the same hyperparameters and seeds"):
                assert text in found[name], (name, found[name])
        assert "`argument[0]['w']` is not the same on all processes" in found["shape"]
        assert found["own"] == [[0, 0]]
        assert found["same"] == [[3, 3]]
        assert "differs between the replicas" in found["reshard"]
        assert "differs between the replicas" in found["spread"]
        assert "only process 1 has `state['opt'].own" in found["consolidate"]


@jax.tree_util.register_pytree_with_keys_class
class _Checked:
    """As a train state that checks its fields whenever it is made."""

    def __init__(self, w, b):
        for x in (w, b):
            if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
                raise TypeError(f"no array: {x!r}")
            if len(x.shape) > 2:
                raise TypeError(f"more than rows: {x!r}")
        self.w, self.b = w, b

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(k), vars(self)[k]) for k in "wb"], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_class_that_refuses_rows_of_all_replicas_is_told_so():
    world = harness.local_world(2)
    params = {"a": _Checked(np.ones((3, 2)), np.ones(2))}  # with rows of rank 3.
    with pytest.raises(
        TypeError, match="a row for each replica.* TypeError: more than"
    ):
        jdp.copy_per_replica(params, world=world)
    step = jdp.data_parallel(lambda p, x: (p, PerReplica(p)), world=world)
    with pytest.raises(
        TypeError, match="a row for each replica.* TypeError: more than"
    ):
        step(params, np.ones(2))


def test_classes_are_made_of_arrays_alone():
    world = harness.local_world(2)
    tx = jdp.zero1(optax.adam(0.1), world=world)

    def loss_fn(params, batch):
        loss = jnp.mean((batch.w @ params.w + params.b - batch.b) ** 2)
        return loss, PerReplica(batch)

    def synced_loss(params, batch):
        return loss_fn(jdp.sync_in_backward(params), batch)[0]

    @functools.partial(jdp.data_parallel, world=world)
    def accumulate(params, batch):
        (loss, _), grads = jdp.accumulate_gradients(loss_fn, 2, has_aux=True)(
            params, batch
        )
        return jax.tree.map(jnp.subtract, params, grads), loss

    @functools.partial(jdp.data_parallel, world=world)
    def step(state, batch):
        params, opt, own = state
        _, grads = jdp.value_and_grad(synced_loss)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt, own), {"own": own, "p": own}

    params = _Checked(np.ones(3, np.float32), np.zeros((), np.float32))
    rows = _Checked(np.ones((4, 3), np.float32), np.ones(4, np.float32))
    state = params, tx.init(params), PerReplica(_Checked(np.ones((2, 1)), np.ones(2)))
    assert ".w" in str(jdp.describe(accumulate, params, rows))
    assert ".w" in str(jdp.describe(step, state, rows))
    (params, *_), metrics = step(state, rows)
    np.testing.assert_allclose(params.w, 0.9, rtol=1e-6)
    assert metrics["own"].value.w.shape == (2, 1)
    (batch, _), *_ = jdp.join_batches([rows], world=world)
    assert batch.w is not None
