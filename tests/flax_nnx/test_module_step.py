"""Steps of nnx objects: those of `nnx.jit` on one device with all samples."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
from jdp import flax_nnx
from tests import harness
from tests.flax_nnx import models

N = 4
FAST = {"compiler_options": harness.fast_options()}


def _data_parallel(step=None, **options):
    options = {"world": harness.local_world(N), **FAST, **options}
    return flax_nnx.data_parallel(step, **options)


def _train_step(jit, value_and_grad, **options):
    @jit
    def train_step(model, optimizer, metrics, batch):
        grad_fn = value_and_grad(models.loss_fn, has_aux=True, **options)
        (loss, logits), grads = grad_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["y"])
        optimizer.update(model, grads)
        return {"loss": loss}

    return train_step


def _train(step, objects, batches):
    found = []
    for i, batch in enumerate(batches):
        objects[0].train()
        found.append((step(*objects, batch), objects[2].compute()))
        if i == 1:
            objects[2].reset()
    return jax.device_get(found)


@functools.cache
def _alone():
    objects = models.make()
    found = _train(_train_step(nnx.jit, nnx.value_and_grad), objects, models.batches(3))
    return found, models.arrays(*objects)


def _assert_as_alone(found, objects):
    expected, arrays = _alone()
    chex.assert_trees_all_close(found, expected, atol=1e-6)
    chex.assert_trees_all_close(models.arrays(*objects), arrays, atol=1e-6)


@pytest.mark.parametrize("donate_state", [False, True])
def test_a_loop_of_nnx_trains_as_on_one_device(donate_state):
    model, optimizer, metrics = objects = models.make()
    flax_nnx.convert_batch_norm(model)
    jit = functools.partial(_data_parallel, donate_state=donate_state)
    step = _train_step(jit, flax_nnx.value_and_grad)
    before = nnx.state(model)  # keeps the arrays, as `nnx.clone` does
    kernel = before["last"]["kernel"].get_raw_value()
    found = _train(step, objects, models.batches(3))
    _assert_as_alone(found, objects)
    assert not kernel.is_deleted()  # It had to be copied to the replicas.
    copied = nnx.state(model)["last"]["kernel"].get_raw_value()
    step(*objects, models.batches(1)[0])
    assert copied.is_deleted() is donate_state
    jdp.check_replicas(nnx.state(model), world=harness.local_world(N))


def test_it_can_average_in_the_optimizer():
    tx = jdp.distributed_optimizer(optax.sgd(0.1, momentum=0.9))
    model, *_ = objects = models.make(tx)
    flax_nnx.convert_batch_norm(model)
    step = _train_step(_data_parallel, nnx.value_and_grad)
    found = _train(step, objects, models.batches(3))
    _assert_as_alone(found, objects)


def test_an_optimizer_whose_state_is_split_over_the_replicas_trains_alike():
    world = harness.local_world(N)
    tx = jdp.zero1(optax.sgd(0.1, momentum=0.9), world=world)
    model, optimizer, _ = objects = models.make(tx)
    flax_nnx.convert_batch_norm(model)
    step = _train_step(_data_parallel, nnx.value_and_grad)
    found = _train(step, objects, models.batches(3))
    expected, arrays = _alone()
    chex.assert_trees_all_close(found, expected, atol=1e-6)
    chex.assert_trees_all_close(models.arrays(model), arrays[:1], atol=1e-6)
    own = jax.tree.leaves(nnx.as_pure(optimizer.opt_state).own)
    assert own and all(x.sharding == world.split for x in own)


def test_it_is_compiled_once_and_finds_its_arrays_again():
    model, *_ = objects = models.make()
    flax_nnx.convert_batch_norm(model)
    calls = []

    @_data_parallel
    def step(model, optimizer, metrics, batch):
        calls.append(len(batch["x"]))
        (loss, logits), grads = flax_nnx.value_and_grad(models.loss_fn, has_aux=True)(
            model, batch
        )
        metrics.update(loss=loss, logits=logits, labels=batch["y"])
        optimizer.update(model, grads)

    for batch in models.batches(3):
        assert step(*objects, batch) is None
    # The second finds which draws, and which arguments of metrics, belong to samples.
    assert calls == [4, 16, 4]
    model.eval()  # Another graph is another program.
    step(*objects, batch)
    assert calls == 2 * [4, 16, 4]
    model.train()
    step(*objects, batch)
    assert calls == 2 * [4, 16, 4]


class _Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))


def test_new_attributes_and_shared_objects_come_back():
    inner = _Counter()

    class Outer(nnx.Module):
        def __init__(self):
            self.a = self.b = inner

    outer, rows = Outer(), np.arange(8.0, dtype=np.float32)

    @_data_parallel
    def step(outer, again, x):
        assert outer.a is outer.b is again["inner"]
        again["inner"].count[...] += 1
        outer.note = "seen"
        outer.mean = nnx.Variable(jdp.average(x.mean()))
        return jdp.PerReplica(x)

    found = step(outer, {"inner": inner}, rows)
    assert int(inner.count[...]) == 1 and outer.a is outer.b is inner
    assert outer.note == "seen"
    np.testing.assert_allclose(outer.mean[...], rows.mean())
    np.testing.assert_array_equal(found.value, rows.reshape(N, 2))
    step(again={"inner": inner}, x=rows, outer=outer)  # by name, with the new variable
    assert int(inner.count[...]) == 2


def test_arguments_are_named_static_or_replicated():
    counter = _Counter()

    @_data_parallel(static_argnames="by", replicated_argnames="start")
    def step(counter, x, /, start, *, by=1):
        counter.count[...] = start + by
        return x.mean()

    x = np.arange(4.0, dtype=np.float32)
    assert float(step(counter, x, 3)) == 1.5
    assert int(counter.count[...]) == 4
    step(counter, x, start=3, by=5)
    assert int(counter.count[...]) == 8


def _train_on_whole_batches():
    jdp.init()
    objects = models.make()
    flax_nnx.convert_batch_norm(objects[0])
    jit = functools.partial(flax_nnx.data_parallel, split_batches=True, **FAST)
    step = _train_step(jit, flax_nnx.value_and_grad)
    found = _train(step, objects, models.batches(3))
    step.lower(*objects, models.batches(1)[0])
    try:
        step(*objects, jax.tree.map(lambda x: x[:5], models.batches(1)[0]))
    except ValueError as error:
        return found, models.arrays(*objects), str(error)


def test_one_process_takes_a_whole_batch():
    with pytest.raises(TypeError, match="`split_batches` must be True or False"):
        _data_parallel(lambda model, x: x.sum(), split_batches=1)
    step = _data_parallel(lambda model, x: x.sum(), split_batches=True)
    assert float(step(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), np.ones(8)) * N) == 8


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_take_their_parts_of_whole_batches():
    values = harness.run_checked(_train_on_whole_batches, 2)
    expected, arrays = _alone()
    for found, ours, error in values:
        chex.assert_trees_all_close(found, expected, atol=1e-6)
        chex.assert_trees_all_close(ours, arrays, atol=1e-6)
        assert "5 samples, of all processes together" in error


def test_methods_of_plain_objects_and_of_modules_are_steps():
    class Trainer:
        factor = 3

        @_data_parallel
        def step(self, counter, x):
            counter.count[...] += self.factor
            return x.sum()

    class Model(_Counter):
        @_data_parallel
        def step(self, x):
            self.count[...] += 1
            return x.sum()

    x, counter, model = np.ones(N, np.float32), _Counter(), Model()
    trainer = Trainer()
    assert float(trainer.step(counter, x)) == 1.0
    assert int(counter.count[...]) == 3 and trainer.step is trainer.step
    model.step(x)
    assert int(model.count[...]) == 1


def test_a_partial_with_cached_objects_works():
    model, *_ = objects = models.make()
    flax_nnx.convert_batch_norm(model)
    step = nnx.cached_partial(
        _train_step(_data_parallel, flax_nnx.value_and_grad), *objects
    )
    found = []
    for i, batch in enumerate(models.batches(3)):
        found.append(jax.device_get((step(batch), objects[2].compute())))
        if i == 1:
            objects[2].reset()
    _assert_as_alone(found, objects)


def test_a_step_describes_itself():
    model, *_ = objects = models.make()
    flax_nnx.convert_batch_norm(model)
    step = _train_step(_data_parallel, flax_nnx.value_and_grad)
    (batch,) = models.batches(1)
    text = str(jdp.describe(step, *objects, batch))
    assert "train_step on 4 replicas" in text
    assert "['first']['kernel']" in text and "float32[3,8]" in text
    assert model.norm.mean.get_raw_value().sum() == 0  # Nothing has run.
    assert "all_reduce" in step.lower(*objects, batch).as_text()


# --- bad input ----------------------------------------------------------------------


def _objects():
    model, *rest = models.make()
    return flax_nnx.convert_batch_norm(model), *rest


def _trace(fn, *arguments, **options):
    return _data_parallel(fn, **options).trace(*arguments)


(BATCH,) = models.batches(1)


def test_gradients_of_nnx_that_are_not_averaged_are_refused_by_name():
    step = _train_step(_data_parallel, nnx.value_and_grad)
    message = (
        r"leaf `\['model\.\w+\.\w+'\]` may differ .* `jdp.flax_nnx.value_and_grad` in "
        "place of `nnx.value_and_grad`"
    )
    model, optimizer, metrics = _objects()
    before = models.arrays(model, optimizer, metrics)
    with pytest.raises(ValueError, match=message):
        step(model, optimizer, metrics, BATCH)
    chex.assert_trees_all_equal(models.arrays(model, optimizer, metrics), before)


def test_statistics_of_flax_are_refused_by_name():
    model, *rest = models.make()

    @_data_parallel
    def step(model, batch):
        model(batch["x"])

    message = r"`\['model.norm.mean'\]` may differ .*It is a statistic of a layer.*conv"
    with pytest.raises(ValueError, match=message):
        step.trace(model, BATCH)


def test_an_object_that_the_step_captures_is_named_and_stays_whole():
    model, optimizer, metrics = _objects()

    def step(optimizer, batch):
        grad_fn = flax_nnx.value_and_grad(models.loss_fn, has_aux=True)
        _, grads = grad_fn(model, batch)
        optimizer.update(model, grads)

    message = (
        r"The step `step` changes an nnx object that it captures \(`model`\) .*Pass it "
        r"as an argument: `step\(model, optimizer, metrics, batch\)`"
    )
    before = models.arrays(model)
    with pytest.raises(ValueError, match=message):
        _trace(step, optimizer, BATCH)
    chex.assert_trees_all_equal(models.arrays(model), before)

    def within_loss(model, batch):
        jax.grad(lambda scale: scale * models.loss_fn(model, batch)[0])(1.0)

    with pytest.raises(ValueError, match="in a function that JAX transforms, such as"):
        _trace(within_loss, model, BATCH)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda x: x, r"No argument of the step `<lambda>\(x\)` is an nnx object"),
        (lambda x, y: x, "missing a required argument: 'y'"),
    ],
)
def test_a_step_without_objects_is_refused(fn, message):
    with pytest.raises(TypeError, match=message):
        _data_parallel(fn)(np.ones(N))


def test_what_a_step_of_objects_cannot_do_is_named():
    model = _objects()[0]
    with pytest.raises(TypeError, match=r"returns an nnx object, `\['m'\]` \(Net\)"):
        _trace(lambda model, x: {"m": model}, model, BATCH["x"])
    with pytest.raises(TypeError, match=r"cannot take `\*rest`: every argument needs"):
        _data_parallel(lambda model, *rest: None)
    with pytest.raises(ValueError, match="has 'flag', which is not a parameter"):
        _data_parallel(lambda model, x: None, static_argnames="flag")
    with pytest.raises(TypeError, match="must be a function, got a classmethod. Put"):
        _data_parallel(classmethod(lambda cls, x: None))
    with pytest.raises(TypeError, match=r"parameters have an nnx object, `\(root\)`"):
        _trace(
            lambda model, batch: jdp.value_and_grad(models.loss_fn, has_aux=True)(
                model, batch
            )[0],
            model,
            BATCH,
        )
    ref = nnx.with_vars(model, ref=True)
    with pytest.raises(
        TypeError, match=r"`m.dropout.rngs.count` holds a mutable reference"
    ):
        _trace(lambda m, x: None, ref, BATCH["x"])


@pytest.mark.parametrize(
    "arguments, name",
    [
        (lambda model: ((model, 1.0), np.ones(N)), r"state .*`\[0\]`"),
        (lambda model: (1.0, {"model": model}), r"batch\[0\] .*`\['model'\]`"),
    ],
)
def test_a_plain_step_refuses_objects_and_names_the_remedy(arguments, name):
    @jdp.data_parallel(world=harness.local_world(N))
    def step(state, batch):
        return state, {}

    message = rf"The {name} \(Net\).*with `@jdp.flax_nnx.data_parallel`"
    for call in (step, step.trace):
        with pytest.raises(TypeError, match=message):
            call(*arguments(models.Net(nnx.Rngs(0))))


def test_a_plain_step_names_the_remedy_for_an_object_that_it_captures():
    model = models.Net(nnx.Rngs(0))

    @jdp.data_parallel(world=harness.local_world(N))
    def step(state, x):
        return state, {"y": model(x).mean()}

    message = (
        "The step `step` changes an nnx object that was made outside .*Decorate the "
        "step with `@jdp.flax_nnx.data_parallel`"
    )
    with pytest.raises(ValueError, match=message):
        step(1.0, BATCH["x"])


def test_a_plain_step_takes_states_of_nnx_and_merges_copies():
    model = models.Net(nnx.Rngs(0), flax_nnx.SyncBatchNorm)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, batch):
        model = nnx.merge(graph, params, rest, copy=True)
        loss, _ = models.loss_fn(model, batch)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    @jdp.data_parallel(world=harness.local_world(N), **FAST)
    def step(state, batch):
        grad_fn = jdp.value_and_grad(loss_fn, has_aux=True)
        (loss, rest), grads = grad_fn(*state, batch)
        return (grads, rest), {"loss": loss}

    (_, rest), metrics = step((params, rest), BATCH)
    assert int(rest["dropout"]["rngs"]["count"].get_raw_value()) == 1
    expected = models.loss_fn(models.make()[0], BATCH)[0]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
