"""Steps whose state has several parts or no metrics; batches that all have whole."""

import re
from typing import NamedTuple

import chex
import jax
import numpy as np
import optax
import pytest

import jdp
from tests import harness

N = 2
PARAMS = harness.oracle_params()
BATCHES = harness.oracle_batches(3)
TX = optax.adam(0.01)


class TrainState(NamedTuple):
    params: dict
    opt_state: tuple


def _data_parallel(step, **options):
    options = {"world": harness.local_world(N), "donate_state": False, **options}
    return jdp.data_parallel(step, compiler_options=harness.fast_options(), **options)


def _update(params, opt_state, batch):
    loss, grads = jdp.value_and_grad(harness.oracle_loss)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def _expected():
    return harness.train_alone(PARAMS, BATCHES, TX)


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("tx", [TX, optax.sgd(0.1, momentum=0.9)], ids=["adam", "sgd"])
def test_an_optimizer_state_that_was_taken_for_a_batch_is_named(tx, split_batches):
    def update(params, opt_state, batch, rate):
        loss, grads = jdp.value_and_grad(harness.oracle_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = _data_parallel(
        update, split_batches=split_batches, replicated_argnames="rate"
    )
    message = "`opt_state` of `update` holds arrays as `params` does.*`num_states=2`"
    state, batch = tx.init(PARAMS), BATCHES[0]
    for arguments, named in (
        ((PARAMS, state, batch), {}),
        ((PARAMS,), {"opt_state": state, "batch": batch}),
    ):
        named["rate"] = PARAMS  # All replicas have it whole.
        with pytest.raises((TypeError, ValueError)) as caught:
            step(*arguments, **named)
        assert re.search(message, " ".join(caught.value.__notes__))


def test_an_error_says_nothing_of_states_where_no_argument_is_like_the_state():
    step = _data_parallel(lambda params, batch, rate: (params, {}))
    with pytest.raises(ValueError, match=r"is a scalar.*\(`num_states`\)") as caught:
        step(PARAMS, BATCHES[0], 0.1)
    assert not any("num_states" in x for x in getattr(caught.value, "__notes__", ()))


def test_parts_of_a_state_are_arguments_and_results():
    step = _data_parallel(_update, num_states=2)
    params, opt_state, losses = PARAMS, TX.init(PARAMS), []
    for batch in BATCHES:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    expected, expected_losses = _expected()
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


def test_a_state_without_metrics_is_returned_alone():
    def step(state: TrainState, batch) -> TrainState:
        return TrainState(*_update(*state, batch)[:2])

    state = TrainState(PARAMS, TX.init(PARAMS))
    step = _data_parallel(step)
    for batch in BATCHES:
        state = step(state, batch)
    assert isinstance(state, TrainState)
    chex.assert_trees_all_close(state.params, _expected()[0], rtol=1e-5, atol=1e-6)


def test_parts_without_metrics_or_with_several_are_returned_as_they_are():
    def bare(a, b, x):
        return a, b

    a, b = _data_parallel(bare, num_states=2)(1.0, np.ones(3), np.ones(4))
    assert float(a) == 1 and b.shape == (3,)

    def two(a, b, x):
        return a, b, x.sum(), {"n": jdp.sum_over_replicas(1)}

    a, b, mean, more = _data_parallel(two, num_states=2)(1.0, 2.0, np.ones(4))
    assert (float(b), float(mean), int(more["n"])) == (2, 2, N)


def test_a_pair_that_is_the_state_is_told_from_state_and_metrics():
    def alone(state, x):
        return state[0], state[1] + 1

    state = (np.zeros(2), np.zeros(3))
    first, second = _data_parallel(alone)(state, np.ones(4))
    assert first.shape == (2,) and float(second.sum()) == 3

    def with_metrics(state, x):
        return (state[0], state[1] + 1), {"loss": x.sum()}

    new, metrics = _data_parallel(with_metrics)(state, np.ones(4))
    assert float(new[1].sum()) == 3 and float(metrics["loss"]) == 2

    # A state whose structure changes comes with metrics.
    def grown(state, x):
        return {"a": state, "b": state}, {}

    new, metrics = _data_parallel(grown)(np.zeros(2), np.ones(4))
    assert set(new) == {"a", "b"} and metrics == {}


def test_metrics_before_the_state_are_refused():
    def parts(params, opt_state, batch):
        params, opt_state, loss = _update(params, opt_state, batch)
        return loss, params, opt_state

    opt_state = TX.init(PARAMS)
    with pytest.raises(TypeError, match=r"first\. Return `\(params, opt_state, metr"):
        _data_parallel(parts, num_states=2)(PARAMS, opt_state, BATCHES[0])

    def pair(state, batch):
        *state, loss = _update(*state, batch)
        return {"loss": loss}, tuple(state)

    with pytest.raises(TypeError, match=r"metrics first\. Return `\(state, metrics"):
        _data_parallel(pair)((PARAMS, opt_state), BATCHES[0])

    # Numbers and metrics of the same shapes may be either.
    new, metrics = _data_parallel(lambda a, x: (a + 1, a))(1.0, np.ones(4))
    assert (float(new), float(metrics)) == (2, 1)


def test_parts_of_a_state_are_passed_by_name_too():
    step = _data_parallel(_update, num_states=2)
    opt_state = TX.init(PARAMS)
    by_place = step(PARAMS, opt_state, BATCHES[0])
    for named in (
        step(PARAMS, batch=BATCHES[0], opt_state=opt_state),
        step(batch=BATCHES[0], opt_state=opt_state, params=PARAMS),
    ):
        chex.assert_trees_all_equal(named, by_place)


def test_parts_of_a_state_go_with_names_of_other_arguments():
    def step(a, b, x, *, rate, scale=1):
        return a + rate * scale, b, x.mean()

    step = _data_parallel(
        step, num_states=2, replicated_argnames="rate", static_argnames="scale"
    )
    a, _, mean = step(np.zeros(()), np.ones(2), np.ones(4), rate=0.5, scale=3)
    assert (float(a), float(mean)) == (1.5, 1)


def test_parts_of_the_state_of_a_method_follow_self():
    class Trainer:
        rate = 2.0

        @jdp.data_parallel(num_states=2, world=harness.local_world(N))
        def step(self, a, b, x):
            return a + self.rate, b, x.sum()

    a, b, total = Trainer().step(np.zeros(()), np.zeros(()), np.ones(4))
    assert (float(a), float(b), float(total)) == (2, 0, 2)


def test_a_step_of_parts_is_described_and_lowered_with_the_same_arguments():
    step = _data_parallel(_update, num_states=2)
    arguments = PARAMS, TX.init(PARAMS), BATCHES[0]
    assert "w0" in str(jdp.describe(step, *arguments))
    assert step.lower(*arguments).compile() is not None


def test_a_part_that_differs_between_replicas_is_named():
    def step(params, count, x):
        return params, x.sum()

    with pytest.raises(ValueError, match=r"leaf `\.count` may differ"):
        _data_parallel(step, num_states=2)(PARAMS, 0.0, np.ones(4))


def test_what_is_missing_is_named():
    step = _data_parallel(_update, num_states=2)
    with pytest.raises(TypeError, match="without `opt_state`.*`params`, `opt_state`"):
        step(PARAMS, batch=BATCHES[0])
    wrong = _data_parallel(lambda a, b, x: a, num_states=2)
    with pytest.raises(TypeError, match=r"must return `\(a, b, metrics\)`.*got dict"):
        wrong({"a": 1.0}, 2.0, np.ones(4))
    with pytest.raises(ValueError, match="`num_states=3` needs a step whose first 3"):
        _data_parallel(lambda a, b: (a, b), num_states=3)
    with pytest.raises(ValueError, match="`num_states` must be at least 1, got 0"):
        _data_parallel(_update, num_states=0)
    with pytest.raises(TypeError, match="`num_states` must be an integer, got 'two'"):
        _data_parallel(_update, num_states="two")


def test_results_of_another_kind_in_another_trace_are_refused():
    def step(state, x, has_metrics):
        return (state, {"n": 1}) if has_metrics else state

    step = _data_parallel(step, static_argnames="has_metrics")
    step({"a": 1.0}, np.ones(4), has_metrics=True)
    with pytest.raises(ValueError, match="returned 1 results .* now a state alone"):
        step({"a": 1.0}, np.ones(4), has_metrics=False)


def test_a_join_keeps_the_state_in_parts():
    step = _data_parallel(_update, num_states=2)
    params, opt_state = PARAMS, TX.init(PARAMS)
    with jdp.Join([step], example=(params, opt_state, BATCHES[0])):
        for batch in BATCHES:
            params, opt_state, _ = step(params, opt_state, batch)
    last_params, last_opt_state = step.last_state
    chex.assert_trees_all_equal(last_params, params)
    chex.assert_trees_all_equal(last_opt_state, opt_state)


def _train_on_whole_batches():
    """The same batches on all processes; each takes its part, also of named ones."""
    world = jdp.init()

    @jdp.data_parallel(num_states=2, split_batches=True)
    def step(params, opt_state, batch, scale):
        params, opt_state, loss = _update(params, opt_state, batch)
        return params, opt_state, {"loss": loss, "n": jdp.sum_over_replicas(len(scale))}

    params, opt_state = PARAMS, TX.init(PARAMS)
    for batch in BATCHES:
        placed = jdp.global_batch(world, np.ones(2 * world.num_local_replicas))
        params, opt_state, metrics = step(params, opt_state, batch, scale=placed)
    errors = []
    for call in (
        lambda: step(params, opt_state, {"x": BATCHES[0]["x"][:5]}, np.ones(5)),
        lambda: step.lower(
            params, opt_state, jax.tree.map(lambda x: x[:5], BATCHES[0]), np.ones(4)
        ),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    step.lower(params, opt_state, BATCHES[0], placed)
    return jax.device_get(params), int(metrics["n"]), errors


@pytest.mark.multiprocess
def test_processes_take_their_parts_of_whole_batches():
    values = harness.run_checked(_train_on_whole_batches, 2, devices_per_process=2)
    expected, _ = _expected()
    for params, count, errors in values:
        chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
        assert count == 8
        assert len(errors) == 2
        for error in errors:
            assert "5 samples, of all processes together" in error


def test_alone_a_whole_batch_is_the_own():
    step = _data_parallel(lambda state, x: (state, x.sum()), split_batches=True)
    assert float(step(0.0, np.ones(4))[1]) == 2
    with pytest.raises(TypeError, match="`split_batches` must be True or False"):
        _data_parallel(_update, split_batches=1)
