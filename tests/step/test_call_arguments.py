"""Arguments by name, static ones, ones that are the same on all; and methods."""

import functools
import gc
import re
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdp
from jdp.step import call_arguments
from tests import harness

X = np.arange(4, dtype=np.float32)


def _world(n=2):
    return harness.local_world(n)


def _scaled(traces=None, **options):
    """A step that adds `rate` times the mean of x."""
    options = {"replicated_argnames": "rate", "world": _world(), **options}

    @jdp.data_parallel(**options)
    def step(state, x, rate=1.0, *, train=True):
        if traces is not None:
            traces.append((x.shape, train))
        change = rate * jdp.average(x.mean()) if train else 0 * rate
        return state + change, {"rate": rate}

    return step


# --- By name -------------------------------------------------------------------------


def test_batches_by_name_and_by_position_are_one_program():
    traces = []
    step = _scaled(traces)
    by_position, _ = step(np.float32(0), X)
    by_name, _ = step(np.float32(0), x=X)
    chex.assert_trees_all_equal(by_position, by_name, np.float32(1.5))
    assert traces == [((2,), True)]


@pytest.mark.parametrize("option", [{}, {"replicated_argnames": "x"}])
def test_the_state_goes_by_its_name_too(option):
    @jdp.data_parallel(world=_world(), **option)
    def step(params, x):
        return params + jdp.average(x.mean()), {}

    for call in (step, lambda **named: step(**dict(reversed(named.items())))):
        assert float(call(params=np.float32(0), x=X)[0]) == 1.5
    shapes = {"params": jax.ShapeDtypeStruct((), np.float32), "x": X}
    assert step.fingerprint(**shapes) == step.fingerprint(shapes["params"], x=X)
    step.lower(**shapes)
    jdp.describe(step, **shapes)
    with pytest.raises(TypeError, match=r"was called without a state"):
        step(x=X)
    with pytest.raises(TypeError, match="multiple values for argument 'params'"):
        step(np.float32(0), X, params=np.float32(0))


def test_a_python_number_is_placed_anew_with_64_bits():
    step, rate = _scaled(), 0.1
    step(np.float32(0), X, rate=rate)
    with jax.enable_x64(True):
        state, _ = step(np.float64(0), X.astype(np.float64), rate=rate)
        assert float(state) == 1.5 * 0.1


@pytest.mark.parametrize("options", [{}, {"static_argnames": ()}])
def test_a_step_without_named_options_takes_batches_by_name(options):
    @jdp.data_parallel(world=_world(), **options)
    def step(state, x, *more, y, **others):
        z = sum(m.sum() for m in more) + y.sum() + others["z"]["deep"].sum()
        return state + jdp.average(x.sum() + z), {}

    state, _ = step(np.float32(0), X, X, X, y=X, z={"deep": X})
    assert float(state) == 5 * 3


@pytest.mark.parametrize(
    "args,named,message",
    [
        (
            (X,),
            {"rat": 1.0},
            r"`step\(state, x, rate=1.0, \*, train=True\)` .*: got an une",
        ),
        ((), {}, "missing a required argument: 'x'. With the state, it got 1 by pos"),
        ((X,), {"x": X}, "multiple values for argument 'x'.* 2 by position and 1 by n"),
        (
            (X, 1.0, True),
            {},
            "too many positional arguments. With the state, it got 4 by position; it "
            "takes from 2 to 4",
        ),
    ],
)
def test_arguments_that_the_step_does_not_take_are_named(args, named, message):
    with pytest.raises(TypeError, match=message):
        _scaled()(np.float32(0), *args, **named)


def test_a_scalar_batch_by_name_is_named():
    step = jdp.data_parallel(lambda state, x: (state, {}), world=_world())
    for call in (step, step.lower, step.trace):
        with pytest.raises(ValueError, match=r"`\['x'\]` is a scalar.*replicated_arg"):
            call(np.float32(0), x=np.float32(1))


@pytest.mark.parametrize(
    "batches, leaves",
    [
        ((np.ones((8, 2)), np.zeros(2, np.uint32)), r"`batch\[0\]` 8, `batch\[1\]` 2"),
        (({"x": np.ones((8, 2)), "y": np.ones((6, 2))},), r"'x'\]` 8, .*'y'\]` 6"),
    ],
)
def test_a_step_that_fails_names_batches_of_different_lengths(batches, leaves):
    def step(state, *batches):
        (*_, x), (*_, y) = jax.tree.leaves(batches)[:1], jax.tree.leaves(batches)[1:]
        if y.dtype == np.uint32:
            return state, jax.random.bernoulli(y, 0.5, x.shape).mean()
        return state, (x * y).mean()

    with pytest.raises((TypeError, ValueError)) as caught:
        jdp.data_parallel(step, world=_world())(np.float32(0), *batches)
    notes = " ".join(caught.value.__notes__)
    assert re.search(f"{leaves}.*random key, name it in `replicated_argnames`", notes)


def test_a_list_of_numbers_as_a_batch_is_to_be_an_array():
    step = jdp.data_parallel(lambda state, x: (state, {}), world=_world())
    with pytest.raises(ValueError, match="is a scalar; .* Turn lists into arrays"):
        step(np.float32(0), [1.0, 2.0])


@pytest.mark.parametrize("option", ["static_argnames", "replicated_argnames"])
def test_names_are_checked_where_the_step_is_decorated(option):
    with pytest.raises(
        ValueError, match=rf"`{option}` has 'lrr', which is not a param"
    ):
        _scaled(**{option: ("lrr",)})
    with pytest.raises(ValueError, match=rf"`{option}` has 'state', the state of"):
        _scaled(**{option: "state"})


def test_a_name_is_not_static_and_replicated():
    with pytest.raises(ValueError, match="`rate` is in `static_argnames` and in"):
        _scaled(static_argnames="rate")


# --- The same on all replicas ---------------------------------------------------------


def test_a_replicated_argument_changes_without_a_new_trace():
    traces = []
    step = _scaled(traces)
    state = np.float32(0)
    for rate in (0.5, 1.5, 2.0, np.float64(3), jnp.float32(4), 0.0, -0.0):
        before = float(state)
        state, metrics = step(state, X, rate=rate)
        assert float(state) == before + 1.5 * float(rate)
        assert np.signbit(metrics["rate"]) == np.signbit(rate)
    assert len(traces) == 2  # a Python number gives way to other dtypes, others do not.


def test_a_python_number_keeps_the_dtype_of_the_state():
    step = jdp.data_parallel(
        lambda state, x, rate: (state * rate, {}),
        world=_world(),
        replicated_argnames="rate",
    )
    state, _ = step(jnp.ones(2, jnp.bfloat16), X, 0.5)
    assert state.dtype == jnp.bfloat16
    assert step(state, X, np.float32(0.5))[0].dtype == jnp.float32


def test_keys_and_trees_of_any_shape_are_replicated():
    @jdp.data_parallel(world=_world(), replicated_argnames=("key", "teacher"))
    def step(state, x, key, teacher):
        noise = jax.random.normal(key, (3,))
        own = jax.random.normal(jax.random.fold_in(key, lax.axis_index("data")))
        loss = (teacher["w"] * x[0]).sum() + own
        return state + noise, {"loss": loss}

    teacher = {"w": np.ones((3, 5), np.float32)}
    for key in (jax.random.key(1), jax.random.key(2)):
        state, _ = step(np.zeros(3, np.float32), X, key=key, teacher=teacher)
        chex.assert_trees_all_close(state, jax.random.normal(key, (3,)), rtol=1e-6)
    with pytest.raises(TypeError, match=r"argument `teacher\['w'\]` is a str, not an"):
        step(np.zeros(3, np.float32), X, key, {"w": "wrong"})


def test_an_array_of_a_donated_state_may_be_an_argument():
    world = _world()

    @jdp.data_parallel(world=world, replicated_argnames="rate")
    def step(state, x, rate):
        return jax.tree.map(lambda s: s + rate, state), {}

    state = {"w": np.zeros(2, np.float32), "rate": np.float32(1)}
    for _ in range(3):
        state, _ = step(state, X, rate=state["rate"])
    assert float(state["rate"]) == 8
    assert np.asarray(state["w"]).tolist() == [7, 7]


def test_a_caller_may_write_to_an_argument_after_the_call():
    step = _scaled()
    rate = np.ones((), np.float32)
    state, metrics = step(np.float32(0), X, rate)
    rate[...] = 7
    assert float(metrics["rate"]) == 1


# --- Static ---------------------------------------------------------------------------


def test_another_static_value_is_another_program():
    traces = []
    step = _scaled(traces, static_argnames="train")
    state = np.float32(0)
    for train in (True, False, True, False):
        state, _ = step(state, X, train=train)
    assert [train for _, train in traces] == [True, False]
    assert float(state) == 3


def test_static_values_are_told_apart_by_type():
    seen = []

    @jdp.data_parallel(world=_world(), static_argnames="n")
    def step(state, x, n):
        seen.append(n)
        return state, {}

    for n in (1, True, 1.0, 1):
        step(np.float32(0), X, n)
    assert [(type(n), n) for n in seen] == [(int, 1), (bool, True), (float, 1.0)]


def test_a_static_value_without_a_hash_is_named():
    step = _scaled(static_argnames="train")
    with pytest.raises(
        TypeError, match="static argument `train` must have a hash.*list"
    ):
        step(np.float32(0), X, train=[1])


def test_a_static_value_may_change_the_structure_of_the_state():
    @jdp.data_parallel(world=_world(), static_argnames="nests")
    def step(state, x, nests):
        leaf = jax.tree.leaves(state)[0] + 1
        return {"a": [leaf]} if nests else {"a": leaf}, {}

    state = {"a": np.float32(0)}
    for i in range(6):
        state, _ = step(state, X, nests=i % 2 == 0)
    assert float(jax.tree.leaves(state)[0]) == 6


# --- Looking at a step ----------------------------------------------------------------


def test_a_step_is_looked_at_with_shapes_and_names():
    step = _scaled(static_argnames="train")
    aval = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)
    named = {"x": aval((4,)), "rate": aval(()), "train": False}
    lowered = step.lower(aval(()), **named)
    assert "f32" in lowered.as_text()
    assert step.fingerprint(aval(()), **named) != step.fingerprint(
        aval(()), **{**named, "train": True}
    )
    assert step.trace(aval(()), **named).synchronizations == []
    assert str(jdp.describe(step, aval(()), **named)).startswith("step on 2 replicas")


def test_a_lowered_step_runs_on_arrays_in_their_places():
    world = _world()
    step = _scaled(world=world)
    shape = jax.ShapeDtypeStruct((), np.float32)
    compiled = step.lower(shape, jax.ShapeDtypeStruct((4,), np.float32)).compile()
    batches = step._binder.place(world, step._binder.bind((X,), {}))
    state, _ = compiled(jdp.replicate(world, np.float32(2)), *batches)
    assert float(state) == 3.5


# --- Methods --------------------------------------------------------------------------


@functools.cache
def _trainer_class():
    class Trainer:
        def __init__(self, rate):
            self.rate = rate
            self.traces = 0

        @jdp.data_parallel(replicated_argnames="key", world=_world())
        def step(self, state, x, key=0):
            """Adds."""
            self.traces += 1
            return state + self.rate * jdp.average(x.mean()), {}

        @classmethod
        @jdp.data_parallel(world=_world())
        def of_class(cls, state, x):
            return state + jdp.average(x.mean()), {"name": len(cls.__name__)}

        @jdp.data_parallel(world=_world())
        @classmethod
        def inside_of_class(cls, state, x):
            return state + jdp.average(x.mean()), {"name": len(cls.__name__)}

        @staticmethod
        @jdp.data_parallel(world=_world())
        def static(state, x):
            return state + jdp.average(x.mean()), {}

        @jdp.data_parallel(world=_world())
        @staticmethod
        def inside_static(state, x):
            return state + jdp.average(x.mean()), {}

    return Trainer


def test_a_method_is_compiled_once_for_each_object():
    one, two = _trainer_class()(1.0), _trainer_class()(2.0)
    for trainer in (one, two):
        state = np.float32(0)
        for key in range(3):
            state, _ = trainer.step(state, X, key=key)
        assert float(state) == 3 * 1.5 * trainer.rate
        assert trainer.traces == 1
    assert (one.step.__name__, one.step.__doc__) == ("step", "Adds.")
    handle = one.step
    assert handle is one.step and handle is not two.step
    assert float(_trainer_class()(3.0).step(np.float32(0), X)[0]) == 4.5


def test_a_step_keeps_no_object_alive():
    trainer = _trainer_class()(1.0)
    trainer.step(np.float32(0), X)
    with jdp.Join([trainer.step]):
        trainer.step(np.float32(0), X)
    assert float(trainer.step.last_state) == 1.5
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None


def test_methods_of_classes_and_static_methods():
    for owner in (_trainer_class(), _trainer_class()(1.0)):
        for method in (owner.of_class, owner.inside_of_class):
            state, metrics = method(np.float32(0), X)
            assert (float(state), int(metrics["name"])) == (1.5, 7)
        for method in (owner.static, owner.inside_static):
            assert float(method(np.float32(0), x=X)[0]) == 1.5


def test_an_object_without_weak_references_is_named():
    class Slotted:
        __slots__ = ()
        step = jdp.data_parallel(lambda self, state, x: (state, {}), world=_world())

    with pytest.raises(
        TypeError, match="method of Slotted, whose objects take no weak"
    ):
        Slotted().step(np.float32(0), X)


def test_a_partial_function_and_a_partial_call():
    def add(factor, state, x, rate):
        return state + factor * rate * jdp.average(x.mean()), {}

    step = jdp.data_parallel(
        functools.partial(add, 2.0), world=_world(), replicated_argnames="rate"
    )
    call = functools.partial(step, rate=3.0)
    assert float(call(np.float32(0), X)[0]) == 9


# --- In a Join, and on several processes ----------------------------------------------


@pytest.mark.parametrize("enable", [True, False])
def test_a_join_takes_all_arguments_and_notes_the_last_state(enable):
    step = _scaled(static_argnames="train")
    with jdp.Join([step], enable=enable):
        state, _ = step(np.float32(0), x=X, rate=2.0, train=True)
        state, _ = step(state, X, 4.0)
    chex.assert_trees_all_equal(step.last_state, state, np.float32(9))
    assert step.join_context is None
    with jdp.Join([step], enable=enable):
        pass
    chex.assert_trees_all_equal(step.last_state, np.float32(9))
    step(state, X)
    with jdp.Join([step], enable=enable):
        pass
    assert step.last_state is None  # The state before was donated.
    with jdp.Join([step], enable=enable, example=(np.float32(3), X, 1.0)):
        pass
    assert float(step.last_state) == 3


def _call_in_two():
    world = jdp.init(timeout_s=60)
    index = world.process_index

    @jdp.data_parallel(replicated_argnames=("rate", "key"), static_argnames="sign")
    def step(state, x, *, rate, key, sign=1):
        noise = jax.random.uniform(key, dtype=state.dtype)
        mean = jdp.average(x.mean()).astype(state.dtype)
        return state + sign * rate * mean, {"noise": noise}

    x = np.ones(2, np.float32)
    found = {"states": [], "noise": [], "join": []}
    state = jnp.zeros((), jnp.bfloat16)
    for i in range(3):  # Other rates and keys on the two processes.
        state, metrics = step(
            state, x, rate=0.5 + i + index, key=jax.random.key(i + 7 * index)
        )
        found["states"].append(float(state.addressable_data(0)))
        found["noise"].append(float(metrics["noise"].addressable_data(0)))
    found["dtype"] = str(state.dtype)
    # Process 0 joins after one step; then the rate of process 1 counts.
    state = jdp.replicate(world, np.float32(0))
    with jdp.Join([step]):
        for i in range(1 + 2 * index):
            key = jax.random.key(i)
            state, _ = step(state, x=x, rate=float(10**i), key=key, sign=2)
            found["join"].append(float(state.addressable_data(0)))
    found["last"] = float(step.last_state.addressable_data(0))
    text, _ = harness.error_text(
        lambda: step(step.last_state, x, rate=np.ones(1 + index), key=jax.random.key(0))
    )
    found["refused"] = text
    return found


@pytest.mark.multiprocess
def test_processes_take_the_arguments_of_process_0_or_of_one_with_data():
    first, second = harness.run_checked(_call_in_two, 2)
    for found in (first, second):
        assert found["states"] == [0.5, 2, 4.5]
        expected = [
            float(jax.random.uniform(jax.random.key(i), dtype=jnp.bfloat16))
            for i in range(3)
        ]
        assert found["noise"] == expected
        assert found["dtype"] == "bfloat16"
        assert found["last"] == 2 * 111
        assert (
            "`argument['rate']` is not the same on all processes: float32[1]"
            in (found["refused"])
        )
    assert (first["join"], second["join"]) == ([2], [2, 22, 222])


def test_other_trees_are_batches_as_they_are():
    assert not call_arguments.is_call(())
    assert call_arguments.by_name((1, 2)) == {"batch[0]": 1, "batch[1]": 2}


def test_batches_of_different_lengths_are_warned_of_once():
    @jdp.data_parallel(world=_world())
    def step(state, x, class_weights):
        return state, {"y": x.mean() * class_weights.mean()}

    arguments = np.float32(0), np.ones((8, 2), np.float32), np.ones(4, np.float32)
    with pytest.warns(UserWarning, match=r"`batch\[0\]` 8, `batch\[1\]` 4"):
        step(*arguments)
    step(*arguments)


def test_an_axis_that_the_step_has_not_is_named_with_its_own():
    @jdp.data_parallel(world=_world())
    def step(state, x):
        return state, {"y": jax.lax.pmean(x, "batch")}

    with pytest.raises(NameError) as caught:
        step(np.float32(0), np.ones((8, 2), np.float32))
    note = "\n".join(caught.value.__notes__)
    assert "along the axis 'data'" in note and "jdp.init(axis_name=...)" in note


# --- Lengths -------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "is_warned"), [(8, False), (2, False), (4, True)])
def test_batches_of_unequal_lengths_are_warned_of(length, is_warned, recwarn):
    # Of two replicas; what has two rows has one per replica.
    @jdp.data_parallel(world=_world())
    def step(state, x, y):
        return state + jdp.average(x.mean() + y.mean()), {}

    step(jnp.float32(0), np.ones(8, np.float32), np.ones(length, np.float32))
    found = ["`batch[0]` 8, `batch[1]` 4" in str(w.message) for w in recwarn.list]
    assert found == [True] * is_warned


@pytest.mark.parametrize("name", ["state", "x", "rate"])
def test_what_is_no_array_is_refused_alike_by_a_call_and_a_look(name):
    step, refusals = _scaled(replicated_argnames="rate"), set()
    given = {"state": np.float32(1), "x": X, "rate": 1.0, name: {"a": "text"}}
    for look in (step, functools.partial(jdp.describe, step), step.fingerprint):
        with pytest.raises(TypeError, match=r"\['a'\]` is a str") as caught:
            look(given["state"], x=given["x"], rate=given["rate"])
        refusals.add(str(caught.value))
    assert len(refusals) == 1
