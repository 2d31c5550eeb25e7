import copy
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdp
from jdp import eager
from tests import harness, rarely

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")


def _sgd_step(params, batch):
    loss, grads = jdp.value_and_grad(harness.oracle_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}


def _compiled(step, *args):
    return step.lower(*args).compile()


def test_a_decorator_with_and_without_arguments():
    world = harness.local_world(2)

    @jdp.data_parallel(world=world)
    def with_arguments(state, batch):
        """Adds."""
        return state + 1, {"n": batch.sum()}

    @jdp.data_parallel
    def without(state, batch):
        return state, {}

    assert (with_arguments.__name__, with_arguments.__doc__) == (
        "with_arguments",
        "Adds.",
    )
    state, metrics = with_arguments(np.float32(1.0), np.ones(4, np.float32))
    assert (float(state), float(metrics["n"])) == (2.0, 2.0)
    with pytest.raises(RuntimeError, match=r"Call `jdp.init\(\)` once"):
        without(1.0, np.ones(4))


@pytest.mark.filterwarnings("ignore:The batches have different first dimensions")
def test_each_replica_sees_its_samples_and_metrics_are_averaged():
    @jdp.data_parallel(world=harness.local_world(4))
    def step(state, batch, extra):
        metrics = {
            "rank": lax.axis_index("data"),
            "size": batch["x"].shape[0],
            "first": batch["x"][0],
            "all": lax.pmean(extra.sum(), "data"),
        }
        return state, metrics

    batch = {"x": np.arange(8.0, dtype=np.float32)}
    _, metrics = step({}, batch, np.ones((4, 2), np.float32))
    got = jax.tree.map(float, metrics)
    assert got == {"rank": 1.5, "size": 2.0, "first": 3.0, "all": 2.0}


def test_the_state_is_replicated_and_donated():
    world = harness.local_world(4)
    step = jdp.data_parallel(_sgd_step, world=world)
    params, (batch,) = harness.oracle_params(), harness.oracle_batches(1)
    first, _ = step(params, batch)
    second, _ = step(first, batch)
    for old, new in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert old.is_deleted()
        assert new.sharding == world.replicated
    jdp.check_replicas(second, world=world)


def test_a_state_that_is_not_donated_can_be_used_again():
    step = jdp.data_parallel(
        _sgd_step, world=harness.local_world(2), donate_state=False
    )
    (batch,) = harness.oracle_batches(1)
    first, _ = step(harness.oracle_params(), batch)
    chex.assert_trees_all_equal(step(first, batch)[0], step(first, batch)[0])


@pytest.mark.parametrize("n", [1, 2])
def test_a_donated_state_is_refused(n):
    step = jdp.data_parallel(_sgd_step, world=harness.local_world(n))
    (batch,) = harness.oracle_batches(1)
    first, _ = step(harness.oracle_params(), batch)
    step(first, batch)
    with pytest.raises(RuntimeError, match="donated to an earlier call of `_sgd_step`"):
        step(first, batch)


def test_the_caller_keeps_the_arrays_of_the_first_state():
    params = jax.tree.map(jnp.asarray, harness.oracle_params())
    (batch,) = harness.oracle_batches(1)
    for n in (1, 2):
        jdp.data_parallel(_sgd_step, world=harness.local_world(n))(params, batch)
    chex.assert_trees_all_equal(params, harness.oracle_params())


def test_global_arrays_and_host_arrays_give_the_same():
    world = harness.local_world(4)
    step = jdp.data_parallel(_sgd_step, world=world)
    (batch,) = harness.oracle_batches(1)
    on_host = step(harness.oracle_params(), batch)
    on_device = step(harness.oracle_params(), jdp.global_batch(world, batch))
    chex.assert_trees_all_equal(on_host, on_device)


@pytest.mark.parametrize("axis_name,num_nodes", [("data", 1), (("node", "data"), 1)])
def test_one_replica_has_no_collective(axis_name, num_nodes):
    world = harness.local_world(1, axis_name, num_nodes)

    @jdp.data_parallel(world=world)
    def step(params, batch):
        grad_fn = jdp.value_and_grad(harness.oracle_loss, axis_name=axis_name)
        loss, grads = grad_fn(params, batch)
        mean = lax.pmean(batch["x"].mean(), axis_name)  # a user's own
        return jax.tree.map(lambda p, g: p - g, params, grads), (loss, mean)

    (batch,) = harness.oracle_batches(1)
    text = _compiled(step, harness.oracle_params(), batch).as_text()
    assert not [name for name in COLLECTIVES if name in text]
    state, _ = step(harness.oracle_params(), batch)
    expected = jax.grad(harness.oracle_loss)(harness.oracle_params(), batch)
    moved = jax.tree.map(lambda p, s: p - s, harness.oracle_params(), state)
    chex.assert_trees_all_close(moved, expected, atol=1e-6)


def test_several_replicas_have_one_collective_for_loss_and_gradients():
    step = jdp.data_parallel(_sgd_step, world=harness.local_world(4))
    (batch,) = harness.oracle_batches(1)
    text = _compiled(step, harness.oracle_params(), batch).as_text()
    assert text.count(" all-reduce(") == 1


def test_a_state_that_differs_between_replicas_is_refused_by_path():
    @jdp.data_parallel(world=harness.local_world(2))
    def step(state, batch):
        loss, grads = jdp.local_gradients(harness.oracle_loss)(state["params"], batch)
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, {}

    (batch,) = harness.oracle_batches(1)
    with pytest.raises(ValueError, match=r"`\['params'\]\['b0'\]` may differ"):
        step({"params": harness.oracle_params()}, batch)


def test_unchecked_types_allow_a_reduction_that_types_cannot_follow():
    def all_reduce(x, axis_name):
        # A ring of two: what the neighbour sent, plus one's own.
        return x + lax.ppermute(x, axis_name, [(0, 1), (1, 0)])

    @jdp.data_parallel(world=harness.local_world(2), check_vma=False)
    def step(params, batch):
        grad_fn = jdp.value_and_grad(harness.oracle_loss, all_reduce=all_reduce)
        loss, grads = grad_fn(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    (batch,) = harness.oracle_batches(1)
    state, _ = step(harness.oracle_params(), batch)
    jdp.check_replicas(state, world=step.world)
    reference = jdp.data_parallel(_sgd_step, world=harness.local_world(2))
    expected, _ = reference(harness.oracle_params(), batch)
    chex.assert_trees_all_close(state, expected, atol=1e-6)


def test_a_batch_that_does_not_divide_is_named_at_the_call():
    step = jdp.data_parallel(_sgd_step, world=harness.local_world(4))
    (batch,) = harness.oracle_batches(1, batch_size=6)
    with pytest.raises(ValueError, match=r"`\[0\]\['x'\]` has 6 samples"):
        step(harness.oracle_params(), batch)


def test_a_step_must_return_a_pair():
    @jdp.data_parallel(world=harness.local_world(2))
    def step(state, batch):
        return {"loss": batch.sum()}

    with pytest.raises(TypeError, match=r"pair `\(state, metrics\)`, got dict"):
        step({"w": np.ones(2)}, np.ones(4))


_TRACED_CALLS = {
    "state": lambda step, state, batch: jax.jit(lambda s: step(s, batch))(state),
    "batch": lambda step, state, batch: jax.jit(lambda b: step(state, b))(batch),
    "batch in vmap": lambda step, state, batch: jax.vmap(lambda b: step(state, b))(
        np.stack([batch] * 2)
    ),
    "neither": lambda step, state, batch: jax.jit(lambda: step(state, batch))(),
    "scan": lambda step, state, batch: jax.lax.scan(step, state, np.stack([batch] * 2)),
    "grad": lambda step, state, batch: jax.grad(lambda b: step(state, b)[1].sum())(
        batch
    ),
    "eval_shape": lambda step, state, batch: jax.eval_shape(step, state, batch),
}


@pytest.mark.parametrize("call", _TRACED_CALLS)
@pytest.mark.parametrize("state_of", ["host", "replicas", "step"])
@pytest.mark.parametrize("is_placed", rarely.cases([False, True], often=(True,)))
@pytest.mark.parametrize("n", rarely.cases([1, 2], often=(2,)))
def test_a_step_is_not_called_inside_jit(n, is_placed, state_of, call):
    world = harness.local_world(n)

    @functools.partial(jdp.data_parallel, world=world, donate_state=False)
    def step(state, batch):
        return state + jdp.average(batch.mean()), batch.mean()

    batch = np.ones((4, 3), np.float32)
    state = np.zeros(3, np.float32)
    if state_of == "replicas":
        state = jdp.replicate(world, state)
    if state_of == "step":
        state, _ = step(state, batch)
    if is_placed and call not in ("batch in vmap", "scan"):
        batch = jdp.global_batch(world, batch)
    with pytest.raises(TypeError, match="`step` was called while JAX traces"):
        _TRACED_CALLS[call](step, state, batch)
    new_state, _ = step(state, np.ones((4, 3), np.float32))
    np.testing.assert_array_equal(new_state, np.asarray(state) + 1)


def test_a_batch_is_not_placed_inside_jit():
    world = harness.local_world(2)
    with pytest.raises(TypeError, match="`.'x'.` is a value that JAX traces"):
        jax.jit(lambda x: jdp.global_batch(world, {"x": x}))(np.ones(4))


_MESHES = {
    "explicit": lambda: jax.make_mesh((4,), ("data",)),
    "other name": lambda: jax.make_mesh((2, 2), ("a", "b")),
    "one device": lambda: jax.make_mesh((1,), ("a",), devices=jax.devices()[1:2]),
}


@pytest.mark.parametrize("make_mesh", _MESHES.values(), ids=_MESHES)
def test_a_step_does_not_see_the_mesh_that_is_set_around_it(make_mesh):
    world = harness.local_world(2)
    num_traces = []

    @functools.partial(jdp.data_parallel, world=world)
    def step(state, batch):
        num_traces.append(1)
        return state + jdp.average(batch.mean()), {}

    batch = np.ones((4, 3), np.float32)
    with jax.set_mesh(make_mesh()):
        state = jdp.replicate(world, np.zeros(3, np.float32))
        state, _ = step(state, batch)
        jdp.check_replicas(state, world=world)
    state, _ = step(state, batch)
    with jax.set_mesh(make_mesh()):
        state, _ = step(state, batch)
        assert jax.sharding.get_abstract_mesh().axis_names  # It is still set.
        np.testing.assert_array_equal(np.asarray(state), 3)
        assert len(num_traces) <= 2  # Not one for each mesh that is set.
        jdp.describe(step, state, batch)
        step.lower(state, batch)
        step.trace(state, batch)
        step.fingerprint(state, batch)


class _Trainer:
    rate = 2.0

    @functools.partial(jdp.data_parallel, world=harness.local_world(2))
    def step(self, state, batch):
        return state + self.rate * jdp.average(batch.mean()), {}


class _SlowTrainer(_Trainer):
    rate = 1.0

    @functools.partial(jdp.data_parallel, world=harness.local_world(2))
    def step(self, state, batch):
        return state + self.rate, {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Model:
    value: jax.Array

    @functools.partial(jdp.data_parallel, world=harness.local_world(2))
    def step(self, batch):
        return _Model(self.value + jdp.average(batch.mean())), {}


def test_a_method_is_called_through_its_class():
    batch = np.ones((4, 3), np.float32)
    trainer, slow = _Trainer(), _SlowTrainer()
    state, _ = _Trainer.step(trainer, np.zeros(3, np.float32), batch)
    state, _ = _Trainer.step(slow, state, batch=batch)
    state, _ = _SlowTrainer.step(slow, state, batch)
    np.testing.assert_array_equal(np.asarray(state), 4)
    assert _Trainer.step.__get__(trainer) is trainer.step
    model, _ = _Model.step(_Model(np.zeros(3, np.float32)), batch)  # It is the state.
    np.testing.assert_array_equal(np.asarray(model.value), 1)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"world": 3}, "`world` must be what `jdp.init` returned, got int"),
        ({"donate_state": "yes"}, "`donate_state` must be True or False, got 'yes'"),
        ({"check_vma": None}, "`check_vma` must be True or False, got None"),
        ({"static_graph": 1}, "`static_graph` must be True or False, got 1"),
        ({"static_argnames": 3}, "`static_argnames` must hold names.* got 3"),
        ({"replicated_argnames": [1]}, "`replicated_argnames` must hold names.* got 1"),
        ({"compiler_options": "x"}, "`compiler_options` must be a dict.* got str"),
    ],
)
def test_an_option_of_another_type_is_named(options, message):
    with pytest.raises(TypeError, match=message):
        jdp.data_parallel(_sgd_step, **options)


@pytest.mark.parametrize("step", [3, harness.local_world(1), {}])
def test_what_is_no_function_is_no_step(step):
    with pytest.raises(TypeError, match="`step` must be a function"):
        jdp.data_parallel(step)


_WITH_WORLD = {
    "replicate": lambda x: jdp.replicate(x, harness.local_world(1)),
    "check_replicas": lambda x: jdp.check_replicas(x, world=x),
    "global_batch": lambda x: jdp.global_batch(x, harness.local_world(1)),
    "join_batches": lambda x: jdp.join_batches([], world=x),
    "check_same_program": lambda x: jdp.check_same_program(len, world=x),
    "eager.init": lambda x: eager.init(x),
}


@pytest.mark.parametrize("call", _WITH_WORLD.values(), ids=_WITH_WORLD)
def test_what_is_no_world_is_named(call):
    with pytest.raises(TypeError, match="`world` must be what `jdp.init` returned"):
        call(np.ones(3))


def test_numbers_of_another_type_are_named():
    state = np.zeros(3, np.float32)
    world = harness.local_world(1)
    with pytest.raises(TypeError, match="`process` must be an integer, got '0'"):
        jdp.replicate(world, state, process="0")
    with pytest.raises(TypeError, match="`num_replicas` must be an integer, got 2.5"):
        jdp.checkpoint_template(state, num_replicas=2.5)
    with pytest.raises(ValueError, match="`num_replicas` must be at least 1, got 0"):
        jdp.checkpoint_template(state, num_replicas=0)
    with pytest.raises(TypeError, match="`options` must be .*EagerOptions.* got dict"):
        eager.init(world, {"timeout_s": 3})


def test_other_batch_sizes_compile_again():
    traces = []

    @jdp.data_parallel(world=harness.local_world(2))
    def step(state, batch):
        traces.append(batch.shape)
        return state + 1, batch.mean()

    state = np.float32(0)
    for size in (4, 4, 8, 4):
        state, _ = step(state, np.ones(size, np.float32))
    assert traces == [(2,), (4,)]
    assert float(state) == 4.0


def test_on_cpu_buckets_are_not_merged_and_an_option_can_change_that():
    plan = jdp.plan_buckets(
        harness.oracle_params(), bucket_bytes=64, first_bucket_bytes=64
    )

    def step(params, batch):
        grad_fn = jdp.value_and_grad(harness.oracle_loss, plan=plan)
        loss, grads = grad_fn(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    (batch,) = harness.oracle_batches(1)
    wrap = functools.partial(jdp.data_parallel, world=harness.local_world(2))
    apart = wrap(step)
    merged = wrap(step, compiler_options={"xla_disable_hlo_passes": ""})
    counts = [
        _compiled(s, harness.oracle_params(), batch).as_text().count(" all-reduce(")
        for s in (apart, merged)
    ]
    assert counts == [len(plan.buckets), 1]


def test_memory_is_that_of_the_hand_written_step():
    from jdp.bench import overhead

    memory = overhead.measure_memory(harness.local_world(2))
    assert memory["jdp"] <= memory["flat shard_map"] + memory["bucket_plan"]


# --- In a Join, of one process ------------------------------------------------------


def _mean_step(**options):
    @jdp.data_parallel(world=harness.local_world(4), **options)
    def step(state, x):
        loss, grads = jdp.value_and_grad(lambda p, x: (p * x).mean())(state, x)
        return state - grads, {"loss": loss, "mine": x.mean()}

    return step


def test_a_step_in_a_join_is_the_same_step():
    x = np.arange(8, dtype=np.float32)
    for donate_state in (True, False):
        step = _mean_step(donate_state=donate_state)
        expected, metrics = step(jnp.ones(()), x)
        with jdp.Join([step]):
            state, in_join = step(jnp.ones(()), x)
        chex.assert_trees_all_equal((state, in_join), (expected, metrics))
        chex.assert_trees_all_equal(step.last_state, expected)


def test_a_replica_that_has_joined_does_not_count():
    step = _mean_step()
    with jdp.Join([step]):
        step(jnp.ones(()), np.arange(8, dtype=np.float32))
        hook = step._join_hook
        out, metrics = hook.run(
            jnp.ones(()), (np.full(8, np.nan, np.float32),), has_data=False
        )
    assert (float(out), float(metrics["loss"]), float(metrics["mine"])) == (1, 0, 0)


def test_a_join_adds_no_collective():
    step, x = _mean_step(), np.arange(8, dtype=np.float32)
    amounts = np.ones(4, np.float32)
    texts = [
        step._program.compiled(divide_by)
        .lower(*step._place(jnp.ones(()), batches))
        .compile()
        .as_text()
        for divide_by, batches in ((None, (x,)), ("weight", (amounts, x)))
    ]
    assert [text.count(" all-reduce(") for text in texts] == [2, 2]


@pytest.mark.parametrize("example", [5, ()])
def test_an_example_that_is_no_call_is_refused_by_the_join(example):
    with pytest.raises(TypeError, match=r"`example` must be the arguments of a call"):
        jdp.Join([_mean_step()], example=example)


def test_a_divisor_that_is_none_is_refused_by_the_join():
    with pytest.raises(ValueError, match="or 'world', got 'wieght'"):
        jdp.Join([_mean_step()], divide_by="wieght")


def test_an_object_that_holds_a_step_can_be_copied_before_and_after_a_call():
    step = jdp.data_parallel(lambda w, x: (w + 1, {}), world=harness.local_world(2))
    holder = {"step": step}
    for _ in range(2):
        copied = copy.deepcopy(holder)["step"]
        assert float(copied(np.float32(1), np.ones(2, np.float32))[0]) == 2
