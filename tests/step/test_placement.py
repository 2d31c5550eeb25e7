"""Each leaf of a state, at each call: in its place, alive, with memory of its own."""

import dataclasses
import gc
import re
import threading
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp.step import placement
from tests import harness, rarely


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Nested:
    first: object
    second: object


def _double(world, **options):
    @jdp.data_parallel(world=world, **options)
    def step(state, x):
        def double(leaf):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return leaf
            return leaf * 2

        return jax.tree.map(double, state), {"n": x.sum()}

    return step


X = np.ones((4, 2), np.float32)


def _leaf(world, value=1.0, n=3):
    return jdp.replicate(world, np.full(n, value, np.float32))


# --- Memory that two leaves share ----------------------------------------------------


def _same_memory(x):
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("alias", [lambda x: x, _same_memory], ids=["same", "view"])
def test_an_array_may_be_two_leaves_of_a_donated_state(n, alias):
    world = harness.local_world(n)
    step = _double(world)
    p = _leaf(world)
    state, _ = step({"params": p, "ema": alias(p)}, X)
    # Again once the state is known: a target network is set to the trained one.
    for _ in range(2):
        state["ema"] = alias(state["params"])
        state, _ = step(state, X)
    chex.assert_trees_all_equal(state, {k: np.full(3, 8.0, "f4") for k in state})
    assert p.is_deleted()
    with pytest.raises(RuntimeError, match=r"donated to an earlier .*`\['ema'\]`"):
        step({"params": p, "ema": p}, X)


def test_arrays_of_replicas_and_keys_may_be_aliases():
    world = harness.local_world(2)
    own = jdp.replicate(world, jdp.PerReplica(np.arange(2, dtype=np.float32))).value
    key = jdp.replicate(world, jax.random.key(3))
    state = {"a": jdp.PerReplica(own), "b": jdp.PerReplica(own), "k": key, "l": key}
    state, _ = _double(world)(state, X)
    for name in "ab":
        assert np.asarray(state[name].value).tolist() == [0, 2]
    for name in "kl":
        data = jax.random.key_data(state[name])
        assert data.tolist() == jax.random.key_data(jax.random.key(3)).tolist()


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_may_be_an_array_of_the_state(n):
    world = harness.local_world(n)

    @jdp.data_parallel(world=world)
    def step(state, x):
        return jax.tree.map(lambda s: s + 1, state), {"sum": jdp.average(x.sum())}

    state = {"own": jdp.PerReplica(np.ones(n, np.float32)), "w": np.ones(2, "f4")}
    state, _ = step(state, np.ones(n, np.float32))
    for expected in (2, 3):
        state, metrics = step(state, state["own"].value)
        assert float(metrics["sum"]) == expected
    if n == 1:
        state, metrics = step(state, state["w"])
        assert float(metrics["sum"]) == 8


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_may_be_an_array_of_a_state_that_is_still_computed(n):
    world = harness.local_world(n)

    @jdp.data_parallel(world=world)
    def step(state, x):
        w = jax.lax.fori_loop(0, 100, lambda _, w: jnp.tanh(w @ w), state["w"])
        own = state["own"].value + 1 + (w.sum() > 1e9)
        return {"w": w, "own": jdp.PerReplica(own)}, {"sum": jdp.average(x.sum())}

    state = {"w": np.eye(200, dtype="f4"), "own": jdp.PerReplica(np.ones((n, 3), "f4"))}
    state, _ = step(state, np.ones((n, 3), np.float32))
    sums, were_ready = [], []
    for _ in range(6):
        were_ready.append(state["own"].value.is_ready())
        state, metrics = step(state, _same_memory(state["own"].value))
        sums.append(metrics["sum"])
    assert list(map(float, sums)) == [6, 9, 12, 15, 18, 21]
    assert not all(were_ready), "The step is too short for this test."


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_may_be_an_array_that_the_state_had_not_at_first(n):
    world = harness.local_world(n)

    @jdp.data_parallel(world=world)
    def step(state, x):
        total = state["own"].value + x[0] if "own" in state else x[0]
        state = {"w": state["w"] + 1, "own": jdp.PerReplica(total)}
        return state, {"sum": jdp.average(x.sum())}

    state, _ = step({"w": np.ones(2, np.float32)}, np.ones((n, 3), np.float32))
    for expected in (3, 6):
        state, metrics = step(state, state["own"].value)
        assert float(metrics["sum"]) == expected
    # The program of other shapes is known, and returns to them.
    other = {"w": state["w"], "own": jdp.PerReplica(np.ones((n, 5), np.float32))}
    step(other, np.ones((n, 5), np.float32))
    state, _ = step({"w": np.ones(2, np.float32)}, np.ones((n, 3), np.float32))
    for expected in (3, 6):
        state, metrics = step(state, state["own"].value)
        assert float(metrics["sum"]) == expected


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_may_be_an_array_of_a_state_that_has_the_shape_of_the_batch(n):
    world = harness.local_world(n)

    @jdp.data_parallel(world=world)
    def step(state, x):
        return {"last": jdp.PerReplica(x + 1)}, {"sum": jdp.average(x.sum())}

    state = {"last": jdp.PerReplica(np.ones((n, 3), np.float32))}
    for width in (3, 5, 3, 7, 5):
        state, _ = step(state, np.ones((n, width), np.float32))
        state, metrics = step(state, state["last"].value)
        assert float(metrics["sum"]) == 2 * width


@pytest.mark.parametrize("argument", [np.float32(0.5), jax.random.key_data])
def test_a_call_does_not_wait_for_the_step_before(argument):
    # Small arguments, such as a learning rate or a key, have sizes of leaves.
    world = harness.local_world(2)

    @jdp.data_parallel(world=world, replicated_argnames="more")
    def step(state, x, *, more):
        w = jax.lax.fori_loop(0, 300, lambda _, w: jnp.tanh(w @ w), state["w"])
        count = state["count"] + 1 + (w.sum() > 1e9)
        pair = state["pair"] + more.sum().astype(jnp.int32)
        return {"w": w, "count": count, "pair": pair}, {"sum": jdp.average(x.sum())}

    if callable(argument):
        argument = argument(jax.random.key(0))
    state = {
        "w": np.eye(200, dtype="f4"),
        "count": np.int32(0),
        "pair": np.ones(2, "i4"),
    }
    state = jdp.replicate(world, state)
    argument = jdp.replicate(world, argument)
    for _ in range(2):  # Compiles.
        state, _ = step(state, X, more=argument)
    jax.block_until_ready(state)
    state, first = step(state, X, more=argument)
    assert not state["count"].is_ready(), "The step is too short for this test."
    state, _ = step(state, X, more=argument)
    assert not first["sum"].is_ready()


@pytest.mark.parametrize("n", [1, 2])
def test_an_argument_may_have_memory_of_the_state_in_another_shape(n):
    world = harness.local_world(n)

    @jdp.data_parallel(world=world, replicated_argnames="more")
    def step(state, x, *, more):
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(more))
        return {**state, "w": state["w"] + 1}, {"sum": total}

    own = np.ones((n, 3), np.float32)
    state = {
        "w": np.ones(3, "f4"),
        "key": jax.random.key(5),
        "own": jdp.PerReplica(own),
    }
    state, _ = step(state, X, more=0.0)
    for _ in range(2):
        more = {
            "key": jax.random.key_data(state["key"]),
            "row": state["own"].value.addressable_shards[0].data,
            "w": state["w"].addressable_shards[0].data,
        }
        expected = sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(more))
        state, metrics = step(state, X, more=more)
        assert float(metrics["sum"]) == expected


def test_a_step_that_returns_one_value_twice_can_go_on():
    @jdp.data_parallel(world=harness.local_world(2))
    def step(state, x):
        return {"a": state["a"], "b": state["a"]}, {}

    state = {"a": np.ones(3, np.float32), "b": np.zeros(3, np.float32)}
    for _ in range(3):
        state, _ = step(state, X)
    assert np.asarray(state["b"]).tolist() == [1, 1, 1]


def test_a_leaf_that_another_step_took_is_named():
    world = harness.local_world(2)
    both, one = _double(world), _double(world)
    state, _ = both({"a": np.ones(9, np.float32), "b": np.ones(3, np.float32)}, X)
    one({"b": state["b"]}, X)
    with pytest.raises(RuntimeError, match=r"donated .*`\['b'\]` is gone"):
        both(state, X)


# --- Leaves that are not in their places ---------------------------------------------


@pytest.mark.parametrize("donate_state", [True, False])
def test_every_leaf_is_looked_at_in_every_call(donate_state):
    world = harness.local_world(2)
    step = _double(world, donate_state=donate_state)
    split = jdp.global_batch(world, np.ones(2, np.float32))
    elsewhere = jax.device_put(np.ones(2, np.float32), jax.devices()[3])
    for swapped in (np.ones(2, np.float32), jnp.ones(2), split, elsewhere):
        state, _ = step({"a": _leaf(world), "b": [np.ones(2, np.float32)]}, X)
        state, _ = step(state, X)
        state["b"][0] = swapped
        state, _ = step(state, X)
        assert jax.tree.map(lambda x: x.sharding, state) == {
            "a": world.replicated,
            "b": [world.replicated],
        }
        assert np.asarray(state["b"][0]).tolist() == [2, 2]
        assert not isinstance(swapped, jax.Array) or not swapped.is_deleted()


def test_leaves_are_recognised_in_any_container():
    world = harness.local_world(2)
    placer = placement.StatePlacer("step", donates=True)
    tree = {
        "b": Nested([np.ones(1, np.float32)], None),
        "a": (np.ones(9, np.float32), {"c": np.ones(2, np.float32)}),
        "key": jax.random.key(0),
        "empty": {},
    }
    flat = placer.place(world, tree)
    assert placer.find_known(flat.to_tree()) is None
    state = placer.take_returned(world, flat)
    leaves, treedef = jax.tree.flatten(state)
    rebuilt = jax.tree.map(lambda x: x, state)
    for same in (state, rebuilt, {name: rebuilt[name] for name in state}):
        found = placer.find_known(same)
        assert all(a is b for a, b in zip(found.leaves, leaves, strict=True))
        assert found.structure is flat.structure
    for i in range(len(leaves)):
        others = [*leaves]
        (others[i],) = placer.place(world, np.ones(2, np.float32)).leaves
        assert placer.find_known(jax.tree.unflatten(treedef, others)) is None
    for other in (
        {**state, "more": leaves[0]},
        {**state, "a": state["a"][0]},
        dict(reversed(state.items())),
        dict(zip("bacd", state.values(), strict=True)),
        {**state, "b": Nested(state["b"].first, ())},
    ):
        assert placer.find_known(other) is None


def test_leaves_are_recognised_in_many_containers():
    world = harness.local_world(2)
    placer = placement.StatePlacer("step", donates=True)
    tree = {f"layer{i}": {"w": np.ones(2, np.float32)} for i in range(20)}
    state = placer.take_returned(world, placer.place(world, tree))
    found = placer.find_known(dict(reversed(state.items())))
    leaves = jax.tree.leaves(state)
    assert all(a is b for a, b in zip(found.leaves, leaves, strict=True))
    renamed = {f"other{name}": layer for name, layer in state.items()}
    assert placer.find_known(renamed) is None
    assert placer.find_known({**state, "layer3": state["layer4"]}) is None


def test_leaves_that_change_their_names_are_those_of_the_new_names():
    step = _double(harness.local_world(2))
    state = {"a": np.ones(2, np.float32), "b": {"c": np.full(2, 3, np.float32)}}
    state, _ = step(state, X)
    state, _ = step({"a": state["b"]["c"], "b": {"c": state["a"]}}, X)
    chex.assert_trees_all_equal(
        state, {"a": np.full(2, 12.0, "f4"), "b": {"c": np.full(2, 4.0, "f4")}}
    )
    state, _ = step({"z": state["a"], "b": state["b"]}, X)
    chex.assert_trees_all_equal(
        state, {"b": {"c": np.full(2, 8.0, "f4")}, "z": np.full(2, 24.0, "f4")}
    )


@pytest.mark.parametrize("donate_state", [True, False])
def test_arguments_of_the_program_have_the_names_of_the_state(donate_state):
    step = _double(harness.local_world(2), donate_state=donate_state)
    state = {"b": Nested([np.ones(1, np.float32)], None), "a": np.ones(2, np.float32)}
    flat = step._place(state, (X,))
    text = step._program.compiled(None).lower(*flat).as_text(debug_info=True)
    for name in ("state['a']", "state['b'].first[0]", "batches[0]"):
        assert f'"{name}"' in text, text


def test_a_state_that_goes_round_is_looked_at_once(monkeypatch):
    looks = []
    monkeypatch.setattr(
        placement.StatePlacer, "check", lambda self, state: looks.append(state)
    )
    for donate_state in (True, False):
        step = _double(harness.local_world(2), donate_state=donate_state)
        state = {"a": np.ones(9, np.float32), "b": [np.ones(3, np.float32)]}
        for _ in range(3):
            state, _ = step(state, X)
            state = jax.tree.map(lambda x: x, state)
    assert len(looks) == 2
    for _ in range(4):  # It is not donated, and comes again.
        step(state, X)
    assert len(looks) == 3


def test_a_state_that_is_dropped_is_freed():
    world = harness.local_world(2)
    step = _double(world)
    state, _ = step({"a": np.ones(9, np.float32), "b": np.ones(3, np.float32)}, X)
    references = [weakref.ref(x) for x in jax.tree.leaves(state)]
    del state
    gc.collect()
    assert [ref() for ref in references] == [None, None]


@pytest.mark.parametrize("kept", rarely.cases([0, 1], often=(1,)))
@pytest.mark.parametrize(
    "make", [lambda *parts: parts, lambda a, b: [{"p": a, "o": b}]]
)
def test_a_part_of_a_state_that_is_dropped_is_freed(make, kept):
    def part():
        return {"a": np.ones(9, np.float32), "b": np.ones(3, np.float32)}

    step = _double(harness.local_world(2))
    state, _ = step(make(part(), part()), X)
    parts = jax.tree.leaves(state)[:2], jax.tree.leaves(state)[2:]
    del state
    references = [weakref.ref(x) for x in parts[1 - kept]]
    kept_part = parts[kept]
    del parts
    gc.collect()
    assert [ref() for ref in references] == [None, None]
    assert len(kept_part) == 2


def test_none_in_place_of_an_array_that_is_gone_is_looked_at():
    step = _double(harness.local_world(2))
    state, _ = step({"w": np.ones(2, np.float32)}, X)
    del state
    assert step({"w": None}, X)[0] == {"w": None}


@jax.tree_util.register_pytree_node_class
class Layer(tuple):
    """A tuple with static data of its own."""

    rate = 1

    def tree_flatten(self):
        return tuple(self), self.rate

    @classmethod
    def tree_unflatten(cls, rate, children):
        layer = cls(children)
        layer.rate = rate
        return layer


def test_static_data_of_a_tuple_that_changes_is_seen():
    @jdp.data_parallel(world=harness.local_world(2))
    def step(state, x):
        layer = Layer([x * state.rate for x in state])
        layer.rate = state.rate
        return layer, {}

    state = Layer([np.ones(2, np.float32)] * 2)
    for rate in (2, 10):
        state.rate = rate
        state, _ = step(state, X)
    assert (float(state[0][0]), state.rate) == (20, 10)


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_in_the_memory_of_a_state_is_copied(n):
    world = harness.local_world(n)
    step = _double(world)
    state, _ = step({"t": np.ones((4, 2), np.float32), "u": np.ones(2, np.float32)}, X)
    for _ in range(2):
        shards = [shard.data for shard in state["t"].addressable_shards]
        batch = jax.make_array_from_single_device_arrays(
            (4 * n, 2), world.split, shards
        )
        state, metrics = step(state, batch)
    assert float(metrics["n"]) == 32 and float(state["t"][0, 0]) == 8


@pytest.mark.parametrize(
    "leaf,kind", [(jnp.tanh, "function|PjitFunction|custom_jvp"), ("relu", "str")]
)
def test_what_is_no_array_is_named(leaf, kind):
    state = {"model": {"w": np.ones(2, np.float32), "activation": leaf}}
    step = _double(harness.local_world(2))
    message = rf"`\['model'\]\['activation'\]` is a ({kind}), not.*eqx.partition"
    with pytest.raises(TypeError, match=message):
        step(state, X)
    message = r"batch's leaf `\[0\]` is a (\w+), not an array.* in `static_argnames`"
    with pytest.raises(TypeError, match=message):
        step({}, leaf)


@pytest.mark.parametrize("dtype", [object, "datetime64[s]", "S4", ">f4", "i4,f4"])
def test_arrays_in_a_dtype_that_jax_does_not_have_are_named(dtype):
    leaf, step = np.zeros(4, dtype), _double(harness.local_world(2))
    message = rf" leaf `\S+` has dtype {re.escape(str(leaf.dtype))}, which JAX does not"
    with pytest.raises(TypeError, match="batch's" + message):
        step({"w": X}, leaf)
    with pytest.raises(TypeError, match="state's" + message):
        step({"w": leaf}, X)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_state_that_numpy_has_saved_without_its_dtype_is_named(dtype, tmp_path):
    world = harness.local_world(2)
    np.savez(tmp_path / "state", w=np.ones(2, dtype))
    state = dict(np.load(tmp_path / "state.npz"))
    message = r"`\S*\['w'\]` has dtype \|V., .* `x.view\(jnp.bfloat16\)`"
    with pytest.raises(TypeError, match=f"The state's leaf {message}"):
        _double(world)(state, X)
    with pytest.raises(TypeError, match=message):
        jdp.replicate(world, state)
    with pytest.raises(TypeError, match=f"The batch's leaf {message}"):
        _double(world)({}, state)


def test_a_call_of_a_step_in_a_second_thread_is_refused():
    world = harness.local_world(2)
    errors = []

    @jdp.data_parallel(world=world)
    def step(state, x):
        if not errors:  # while it is traced, in the first call.
            thread = threading.Thread(target=call, name="second", daemon=True)
            thread.start()
            thread.join(60)
        return state, {"n": x.sum()}

    def call():
        errors.append(None)
        try:
            step({"w": np.ones(2, np.float32)}, X)
        except RuntimeError as error:
            errors[-1] = str(error)

    state, _ = step({"w": np.ones(2, np.float32)}, X)
    step(state, X)  # It goes on.
    (error,) = errors
    assert "The step `step` was called while another thread was in a call" in error


# --- Several processes ----------------------------------------------------------------


def _value(x):
    return np.asarray(x.addressable_data(0)).tolist()


def _place_in_two():
    world = jdp.init(timeout_s=60)
    index = world.process_index
    own = np.arange(3, dtype=np.float32) + 10 * index

    @jdp.data_parallel
    def step(state, x):
        loss, grads = jdp.value_and_grad(
            lambda p, x: (x * p["backbone"] * p["head"]).mean()
        )(state["p"], x)
        p = jax.tree.map(lambda p, g: p - 0 * g, state["p"], grads)
        return {**state, "p": p}, {"loss": loss}

    def make(head):
        backbone = jdp.replicate(world, np.ones(3, np.float32))
        return {"p": {"backbone": backbone, "head": head}, "count": index}

    x = np.ones((2, 3), np.float32)
    found = {}
    state, _ = step(make(own), x)
    found["first"] = _value(state["p"]["head"]), _value(state["count"])
    for name, head in {
        "host": own + 1,
        "device": jnp.asarray(own + 2),
        "spread": jdp.global_batch(world, own + 3),
    }.items():
        state["p"]["head"] = head
        if name == "spread":  # 6 values, 3 of each process.
            state["p"]["backbone"] = jdp.replicate(world, np.ones(6, np.float32))
            x = np.ones((2, 6), np.float32)
        state, _ = step(state, x)
        found[name] = _value(state["p"]["head"])
    found["process 1"] = _value(jdp.replicate(world, own, process=1))
    found["processes differ"], _ = harness.error_text(
        lambda: jdp.replicate(world, own, process=index)
    )
    placed = jdp.replicate(world, own)
    other = jdp.data_parallel(step.__wrapped__)
    found["refused"], _ = harness.error_text(
        lambda: other(make(own if index else placed), x[:, :3])
    )
    found |= _in_another_order(world)
    wide = jax.enable_x64(index == 1)
    with wide:
        found["wide in one"], _ = harness.error_text(
            lambda: jdp.replicate(world, np.ones(2))
        )
    return found


def _in_another_order(world):
    """Arrays on the devices of the replicas, the last one first."""
    order = jax.sharding.Mesh(world.mesh.devices.ravel()[::-1], ("data",))
    split = jax.NamedSharding(order, jax.P("data"))
    value = np.arange(4, dtype=np.float32)

    def place(sharding, value):
        return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

    whole = place(jax.NamedSharding(order, jax.P()), value)
    parts = place(split, value)
    placed = jdp.replicate(world, {"whole": whole, "parts": parts})
    moved = jdp.replicate(world, whole)
    moved.delete()  # The argument is another array.
    key = jax.random.wrap_key_data(place(split, np.ones((4, 2), np.uint32)))
    rows = jdp.PerReplica({"m": place(split, value[:2])})
    error, _ = harness.error_text(lambda: jdp.replicate(world, rows))
    return {
        "order": {k: _value(x) for k, x in placed.items()},
        "order kept": _value(whole),
        "order of keys": _value(jax.random.key_data(jdp.replicate(world, key))),
        "order of rows": error,
    }


@pytest.mark.multiprocess
def test_processes_get_the_leaves_of_process_0_one_by_one():
    for found in harness.run_checked(_place_in_two, 2):
        assert found["first"] == ([0, 1, 2], 0)
        assert found["host"] == [1, 2, 3]
        assert found["device"] == [2, 3, 4]
        assert found["spread"] == [3, 4, 5, 13, 14, 15]
        assert found["process 1"] == [10, 11, 12]
        assert (
            "`process` is 0 on process 0, is 1 on process 1"
            in (found["processes differ"])
        )
        assert (
            "`state['p']['head']` is on all replicas on process 0, is not yet on the "
            "replicas on process 1. Put the same leaves" in found["refused"]
        )
        assert found["order"] == {"whole": [0, 1, 2, 3], "parts": [0, 1, 2, 3]}
        assert found["order kept"] == [0, 1, 2, 3]
        assert found["order of keys"] == [[1, 1]] * 4
        assert (
            "`.value['m']` is in a `jdp.PerReplica` and lies on devices of several "
            "processes in another way" in found["order of rows"]
        )
        assert (
            "`jax_enable_x64` is False on process 0, is True on process 1. Enter "
            "`jax.enable_x64` in every process" in found["wide in one"]
        )


def _types(tree):
    return [(str(x.dtype), bool(x.weak_type)) for x in jax.tree.leaves(tree)]


# In float32 each product of `RATE` or `SHIFT` and bfloat16 would be float32.
BF16 = np.full(3, 0.5, jnp.bfloat16)
WEAK, WHOLE = ("float32", True), ("bfloat16", False)


def _compute_with_numbers(world):
    """Types of states and of what a step computes with numbers in them."""

    @jdp.data_parallel(world=world)
    def step(state, x):
        p = state["p"] * state["rate"] - state["shift"]
        own = jax.tree.map(lambda x: x * state["rate"], state["own"])
        return {**state, "p": p, "own": own}, {"y": (x * state["p"][0]).mean()}

    own = jdp.copy_per_replica(0.5, world=world)
    state = {"own": own, "p": BF16, "rate": 0.5, "shift": jnp.asarray(0.25)}
    batch = jnp.full((2 * world.num_local_replicas,), 0.5)
    state, metrics = step(state, batch)
    found = [_types(state), _types(metrics)]
    state, metrics = step(state, batch)
    return [*found, _types(state), _types(metrics)]


EXPECTED = [[WEAK, WHOLE, WEAK, WEAK], [WHOLE]] * 2


@pytest.mark.parametrize("n", [1, 2])
def test_a_number_in_a_state_computes_in_the_dtype_of_the_arrays(n):
    assert _compute_with_numbers(harness.local_world(n)) == EXPECTED


def _compute_with_numbers_in_two():
    world = jdp.init(timeout_s=60)
    # A process that has restored a checkpoint, and one that begins.
    mixed = 0.5 if world.process_index else np.float32(0.5)
    placed = [jdp.replicate(world, mixed, process=i) for i in range(2)]
    ahead = jdp.replicate(world, {"p": BF16, "rate": 0.5})
    return _compute_with_numbers(world), _types(placed), _types(ahead)


@pytest.mark.multiprocess
def test_a_number_in_a_state_does_so_in_several_processes():
    for computed, placed, ahead in harness.run_checked(_compute_with_numbers_in_two, 2):
        assert computed == EXPECTED
        assert placed == [("float32", False), WEAK]
        assert ahead == [WHOLE, WEAK]


def test_a_process_alone_with_a_new_leaf_names_it_in_time():
    def run(world):
        placer = placement.StatePlacer("step", donates=True)
        state = {"head": np.ones(3, np.float32)}
        placer._placed.add(jax.tree.structure(state))  # Both have run it before.
        if world.process_index == 1:
            placer.place(world, state)

    first, error = harness.run_threads(run, 2, timeout_s=1.0)
    assert first is None
    assert (
        "Process 0 did not come to the placement of the state's leaf `['head']`, not "
        "yet on the replicas, for the step `step`" in str(error)
    )
