"""Records: what a run writes, what of it counts, and where two runs part."""

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jdp
import jdp.flax_nnx
from jdp.fingerprints import divergence, record
from tests import harness


def _states(num_steps, seed=0):
    rng = np.random.default_rng(seed)
    return [{"w": rng.normal(size=3), "n": i} for i in range(num_steps + 1)]


def _write(path, states, *, first=0, every=2):
    """Records steps as a loop of the user's does, from `states[first]` on."""
    found = jdp.FingerprintRecord(path, every=every, step=first)
    found.begin(states[first])
    for state in states[first + 1 :]:
        found.after_step(state)


def _steps(path):
    return [each.step for each in record.read(path)]


def _parts(a, b):
    found = divergence.find_divergence(record.read(a), record.read(b))
    return found.step, [each.path for each in found.differences]


@pytest.fixture
def files(tmp_path):
    return tmp_path / "a", tmp_path / "b"


def test_the_first_state_and_each_period_are_recorded(files):
    states = _states(7)
    _write(files[0], states, every=3)
    found = record.read(files[0])
    assert [each.step for each in found] == [0, 3, 6]
    for each in found:
        expected = jdp.fingerprint_state(states[each.step])
        assert each.digest == str(expected)
        short = [digest[:16] for digest in expected.leaves.values()]
        assert each.leaves == short
        assert [outline.path for outline in each.outlines] == [*expected.leaves]
    lines = files[0].read_text().splitlines()
    assert json.loads(lines[0]) == {
        "format": 1,
        "step": 0,
        "leaves": [["['n']", "Python int", False], ["['w']", "float64[3]", False]],
    }
    assert len(lines) == 4


def test_runs_part_at_the_first_other_leaf(files):
    states = _states(8)
    _write(files[0], states)
    states[5] = states[5] | {"w": np.nextafter(states[5]["w"], 1)}  # is not recorded.
    _write(files[1], states)
    assert _parts(*files) == (None, [])
    states[6] = states[6] | {"w": np.nextafter(states[6]["w"], 1)}
    files[1].unlink()
    _write(files[1], states)
    assert _parts(*files) == (6, ["['w']"])
    found = divergence.find_divergence(*map(record.read, files))
    assert (found.num_steps, found.last_same_step, found.num_leaves) == (4, 4, 2)


def test_a_run_that_goes_on_replaces_what_came_after(files):
    states = _states(10)
    others = states[:5] + _states(10, seed=1)[5:]
    _write(files[0], others[:9])  # killed after step 8,
    _write(files[0], states, first=4)  # and continued from step 4.
    assert _steps(files[0]) == [0, 2, 4, 6, 8, 10]
    _write(files[1], states)
    assert _parts(*files) == (None, [])


def test_a_run_that_begins_again_replaces_all(files):
    _write(files[0], _states(8, seed=1))
    _write(files[0], _states(4))
    _write(files[1], _states(4))
    assert _steps(files[0]) == [0, 2, 4] and _parts(*files) == (None, [])


def test_a_run_may_go_on_between_two_periods(files):
    states = _states(10)
    _write(files[0], states[:6], every=4)
    _write(files[0], states, first=5, every=4)
    assert _steps(files[0]) == [0, 4, 8]


@pytest.mark.parametrize("kind", [int, np.int32, jnp.int32])
def test_the_step_may_be_set_after_a_checkpoint_was_read(files, kind):
    found = jdp.FingerprintRecord(files[0], every=5)
    found.step = kind(9)
    found.begin(_states(0)[0])
    found.after_step(_states(0)[0])
    assert _steps(files[0]) == [10] and found.step == 10


def test_a_line_that_was_not_written_to_its_end_is_left_out(files):
    states = _states(8)
    _write(files[0], states[:5])
    data = files[0].read_bytes()
    files[0].write_bytes(data[:-20])
    assert _steps(files[0]) == [0, 2]
    _write(files[0], states, first=3)
    assert _steps(files[0]) == [0, 2, 4, 6, 8]
    files[0].write_bytes(b'{"format')
    _write(files[0], states)
    assert _steps(files[0]) == [0, 2, 4, 6, 8]


def test_leaves_that_come_later_have_a_line_of_their_own(files):
    states = _states(8)
    states[5:] = [state | {"v": np.zeros(2)} for state in states[5:]]
    _write(files[0], states)
    assert [len(each.leaves) for each in record.read(files[0])] == [2, 2, 2, 3, 3]
    _write(files[1], _states(8))
    assert _parts(*files) == (6, ["['v']"])


def test_leaves_of_other_shapes_and_dtypes_differ(files):
    _write(files[0], [{"w": np.zeros(2), "v": np.zeros(2), "u": 1}])
    _write(files[1], [{"w": np.zeros(3), "v": np.zeros(2, int), "u": 1}])
    found = divergence.find_divergence(*map(record.read, files))
    assert found.differences == [
        ("['v']", "float64[2]", "int64[2]"),
        ("['w']", "float64[2]", "float64[3]"),
    ]


def test_rows_of_other_numbers_of_replicas_are_not_compared(files):
    for path, num_rows in zip(files, (2, 3), strict=True):
        own = jdp.PerReplica({"m": np.zeros((num_rows, 2))})
        _write(path, [{"own": own, "w": np.ones(2)}])
    found = divergence.find_divergence(*map(record.read, files))
    assert found.step is None and found.num_leaves == 1
    assert found.not_compared == ["['own'].value['m']"]


def test_runs_without_a_common_step_cannot_be_compared(files):
    states = _states(9)
    _write(files[0], states, first=1, every=2)
    _write(files[1], states, first=1, every=5)
    with pytest.raises(ValueError, match="has steps 2 to 8, the second step 5. Record"):
        divergence.find_divergence(*map(record.read, files))


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "it has no line"),
        ("{}\n", "line 1: .*missing required field `step`"),
        ('{"step": 0, "digest": "", "leaves": []}\n', "line 1: it has other leaves"),
        ('{"step": 0, "format": 2, "leaves": []}\n', "line 1: .*Invalid enum value 2"),
        ("\xff\xfe\n", "line 1: "),
    ],
)
def test_other_files_are_refused_by_line(files, text, says):
    files[0].write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=f"a' is not a record of fingerprints: {says}"):
        record.read(files[0])


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ({"path": 3}, TypeError, "`path` must be the name of a file, got 3"),
        ({"every": 0}, ValueError, "`every` must be at least 1, got 0"),
        ({"step": -1}, ValueError, "`step` must be at least 0, got -1"),
    ],
)
def test_arguments_of_a_record_are_checked(arguments, error, says):
    with pytest.raises(error, match=says):
        jdp.FingerprintRecord(**{"path": "a", **arguments})


# --- Steps ---------------------------------------------------------------------


def _make_step(world, path, *, flips_at=None, **options):
    """A step with momentum; step `flips_at` changes the last bit of one gradient."""

    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]) @ params["v"])

    @jdp.data_parallel(world=world, record_fingerprints=path, **options)
    def step(state, x):
        loss, grads = jdp.value_and_grad(loss_fn)(state["params"], x)
        if flips_at is not None:
            bits = lax.bitcast_convert_type(grads["w"][1, 2], jnp.uint32)
            bits = bits ^ (state["count"] + 1 == flips_at).astype(jnp.uint32)
            grads["w"] = grads["w"].at[1, 2].set(lax.bitcast_convert_type(bits, "f4"))
        moments = jax.tree.map(lambda m, g: 0.5 * m + g, state["moments"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
        count = state["count"] + 1
        return {"count": count, "moments": moments, "params": params}, {"loss": loss}

    return step


def _train(step, num_steps, state=None, first=0):
    rng = np.random.default_rng(0)
    params = {
        "v": rng.normal(size=3).astype("f4"),
        "w": rng.normal(size=(4, 3)).astype("f4"),
    }
    batches = [rng.normal(size=(12, 4)).astype("f4") for _ in range(num_steps)]
    if state is None:
        zeros = jax.tree.map(np.zeros_like, params)
        state = {"count": np.int32(0), "moments": zeros, "params": params}
    for batch in batches[first:]:
        state, _ = step(state, batch)
    return state


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_gradient_with_another_last_bit_is_found(files, num_replicas):
    world = harness.local_world(num_replicas)
    for path, flips_at in zip(files, (0, 7), strict=True):
        found = jdp.FingerprintRecord(path, every=1)
        _train(_make_step(world, found, flips_at=flips_at), 9)
    step, paths = _parts(*files)
    assert (step, paths[0]) == (7, "['moments']['w']")
    assert set(paths) <= {"['moments']['w']", "['params']['w']"}


@pytest.mark.parametrize("donates", [True, False])
def test_a_file_name_records_every_100_steps(files, donates):
    world = harness.local_world(2)
    step = _make_step(world, str(files[0]), donate_state=donates)
    state = _train(step, 101)
    found = record.read(files[0])
    assert [each.step for each in found] == [0, 100]
    _train(_make_step(world, None), 101)
    assert found[1].digest != str(jdp.fingerprint_state(state))


def test_a_continued_run_has_the_record_of_a_run_that_was_not_interrupted(files):
    world = harness.local_world(2)
    _train(_make_step(world, jdp.FingerprintRecord(files[0], every=2)), 9)
    found = jdp.FingerprintRecord(files[1], every=2)
    state = _train(_make_step(world, found), 5)
    found = jdp.FingerprintRecord(files[1], every=2, step=int(state["count"]))
    _train(_make_step(world, found), 9, jax.device_get(state), first=5)
    assert _steps(files[1]) == [0, 2, 4, 6, 8]
    assert _parts(*files) == (None, [])


def test_steps_of_modules_are_recorded(files):
    world = harness.local_world(2)
    for path, seed in zip(files, (0, 0), strict=True):
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        @jdp.flax_nnx.data_parallel(
            world=world, record_fingerprints=jdp.FingerprintRecord(path, every=1)
        )
        def step(model, optimizer, x):
            grad_fn = jdp.flax_nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))
            loss, grads = grad_fn(model, x)
            optimizer.update(model, grads)
            return loss

        for i in range(3):
            step(model, optimizer, np.full((4, 4), 1.0 + i, "f4"))
            model.bias[...] += path.name == "b" and i == 1
    step, paths = _parts(*files)
    assert step == 3
    assert "['model.bias']" in paths and "['model.kernel']" in paths


def test_the_option_takes_a_file_or_a_record():
    with pytest.raises(TypeError, match="`record_fingerprints` must be the name of a"):
        jdp.data_parallel(lambda state, x: (state, {}), record_fingerprints=3)


# --- Several processes ---------------------------------------------------------


def _record_in_processes(path, num_steps, first, dies_at):
    world = jdp.init()
    found = jdp.FingerprintRecord(path, every=2, step=first)
    tx = jdp.zero1(optax.adam(0.1))

    @jdp.data_parallel(num_states=2, record_fingerprints=found)
    def step(params, opt_state, x):
        def loss_fn(params, x):
            return jnp.mean(jnp.tanh(x @ params["w"]))

        grads = jax.grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    params = {"w": np.linspace(-1, 1, 8, dtype="f4").reshape(4, 2)}
    opt_state = tx.init(params)
    x = np.ones((2, 4), "f4")
    for i in range(num_steps):
        params, opt_state, _ = step(params, opt_state, x * (1 + i))
        if i + 1 == dies_at and world.is_main_process:
            os.kill(os.getpid(), signal.SIGKILL)
    return found.step


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_job_keeps_its_lines(files):
    killed, whole = files
    outcome = harness.run_processes(_record_in_processes, 2, killed, 9, 0, 5)
    assert outcome.exit_code != 0
    assert _steps(killed) == [0, 2, 4]
    assert harness.run_checked(_record_in_processes, 2, whole, 9, 0, None) == [9, 9]
    assert _steps(whole) == [0, 2, 4, 6, 8]
    found = divergence.find_divergence(record.read(killed), record.read(whole))
    assert found.step is None and found.num_steps == 3
    assert found.num_leaves == len(record.read(whole)[0].leaves) > 2
    assert any(outline.is_own for outline in record.read(whole)[0].outlines)
