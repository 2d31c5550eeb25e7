"""Real processes: training, wrong runs, deaths."""

import functools
import os
import signal
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from tests import harness, rarely

pytestmark = pytest.mark.multiprocess


# --- The numbers of torch ------------------------------------------------------


def _flat(params):
    return np.concatenate([np.ravel(leaf) for layer in params for leaf in layer])


def _train_as_torch(world, optimizer):
    data = np.load(harness.REFERENCE / "torch_2_13_ddp.npz")
    case = {key.split("__", 1)[1]: data[key] for key in data.files}
    params = [(case[f"init.W{i}"], case[f"init.b{i}"]) for i in range(3)]
    tx = optax.sgd(0.1) if optimizer == "sgd" else optax.sgd(0.05, momentum=0.9)

    @jdp.data_parallel
    def step(carry, batch):
        params, state = carry
        loss, grads = jdp.value_and_grad(harness.torch_loss)(params, batch)
        local, _ = jdp.local_gradients(harness.torch_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        ranks = jax.lax.axis_index("data")
        metrics = {"grads": grads, "losses": 2 * local * jnp.array([1 - ranks, ranks])}
        return (optax.apply_updates(params, updates), state), metrics

    carry = jdp.replicate(world, (params, tx.init(params)))
    rank = world.process_index
    trajectory, grads, losses = [_flat(params)], [], []
    for k in range(10):
        batch = case["w2.X"][rank, k], case["w2.Y"][rank, k]
        carry, metrics = step(carry, batch)
        local = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), carry[0])
        trajectory.append(_flat(local))
        grads.append(_flat(jax.tree.map(np.asarray, metrics["grads"])))
        losses.append(np.asarray(metrics["losses"]))
    jdp.check_replicas(carry, world=world)
    expected = {key: case[f"w2.{optimizer}.{key}"] for key in ("traj", "losses")}
    if optimizer == "sgd":
        expected["grads"] = case["w2.sgd.grads"]
    found = {"traj": trajectory, "losses": np.transpose(losses), "grads": grads}
    return {
        key: float(np.abs(np.asarray(found[key]) - value).max())
        for key, value in expected.items()
    }


OPTIMIZERS = ("sgd", "momentum")


def _in_two():
    """What two processes find, of one device each; one job for many tests."""
    world = jdp.init(timeout_s=20.0)
    return {
        "trained": {name: _train_as_torch(world, name) for name in OPTIMIZERS},
        "divergence": _find_divergence(world),
        "faults": _commit_faults(world),
        "another batch": _another_batch_on_one_process(world),
    }


@pytest.fixture(scope="module")
def in_two():
    return harness.run_checked(_in_two, 2)


def _with_two_devices():
    """What two processes find, of two devices each."""
    world = jdp.init(timeout_s=20.0)
    return {"trained": _train_oracle(world), "failures": _fail_on_one_process(world)}


@pytest.fixture(scope="module")
def with_two_devices():
    return harness.run_checked(_with_two_devices, 2, devices_per_process=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_processes_train_as_torch_does(in_two, optimizer):
    for errors in (found["trained"] for found in in_two):
        assert errors[optimizer] and max(errors[optimizer].values()) < 1e-5, errors


# --- The oracle ----------------------------------------------------------------


def _train_oracle(world):
    # Other values in every process; process 0 has the ones that count.
    params = jax.tree.map(
        lambda p: p + np.float32(world.process_index), harness.oracle_params()
    )
    key = jax.random.key(world.process_index)

    @jdp.data_parallel
    def step(state, batch):
        grad_fn = jdp.value_and_grad(harness.oracle_loss, axis_name=world.axis_name)
        loss, grads = grad_fn(state["params"], batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "key": state["key"]}, loss

    state = {"params": params, "key": key}
    for batch in harness.oracle_batches(3):
        mine = jax.tree.map(
            lambda x: np.split(x, world.process_count)[world.process_index], batch
        )
        state, loss = step(state, mine)
    jdp.check_replicas(state, world=world)
    assert jax.random.key_data(state["key"]).tolist() == [0, 0]
    return (
        world.num_replicas,
        dict(world.mesh.shape),
        float(loss),
        jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), state["params"]),
    )


def _check_trained(values, shape):
    expected, losses = harness.train_alone(
        harness.oracle_params(), harness.oracle_batches(3), optax.sgd(0.1)
    )
    for num_replicas, mesh_shape, loss, params in values:
        assert (num_replicas, mesh_shape) == (4, shape)
        assert abs(loss - losses[-1]) < 1e-5
        chex.assert_trees_all_close(params, expected, atol=1e-5)


def test_processes_of_two_devices_train_as_one_device(with_two_devices):
    _check_trained([found["trained"] for found in with_two_devices], {"data": 4})


def _train_on_nodes():
    return _train_oracle(jdp.init(axis_name=("node", "data")))


@pytest.mark.slow
def test_processes_of_a_node_train_as_one_device():
    _check_trained(harness.run_checked(_train_on_nodes, 4), {"node": 1, "data": 4})


# --- Wrong runs ----------------------------------------------------------------


def _update(state, batch, *, rate=0.1, order=(0, 1)):
    def loss_fn(params, batch):
        weights = jax.tree.leaves(params)
        first, second = (weights[i] for i in order)
        return jnp.sum((jnp.tanh(batch @ first) @ second) ** 2)

    loss, grads = jdp.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - rate * g, state, grads), loss


def _square(name="b", n=3, dtype=np.float32, **more):
    weights = {"a": np.ones((n, n), dtype), name: np.ones((n, n), dtype)}
    return weights | more


FAULTS = {
    "number": (_square(), _square(z=np.ones(2, np.float32)), {}),
    "shape": (_square(n=3), _square(n=4), {}),
    "dtype": (_square(), _square(dtype=np.float16), {}),
    "order": (_square("b"), _square("_b"), {}),
    "order in a list": (
        list(_square().values()),
        list(_square().values()),
        {"order": (1, 0)},
    ),
    "program": (_square(), _square(), {"rate": 0.2}),
    "batch": (_square(), _square(), {}),  # Of other sizes.
}
EXPECTED = {
    "number": "Only process 1 has `state['z']` (float32[2])",
    "shape": "`state['a']` is not the same on all processes: float32[3,3] on process "
    "0, float32[4,4] on process 1",
    "dtype": "`state['a']` is not the same on all processes: float32[3,3] on process "
    "0, float16[3,3] on process 1",
    "order": "Only process 0 has `state['b']` (float32[3,3]), only process 1 has "
    "`state['_b']` (float32[3,3])",
    "order in a list": "traced different programs",
    "program": "traced different programs",
    "batch": "`batch[0]` is not the same on all processes: float32[4,3] on process 0, "
    "float32[8,3] on process 1 (shapes over all processes). Pass an array",
}


def _commit_faults(world):
    """Tries every fault in one job; each is refused before anything is sent."""
    found = {}
    for name, (good, bad, options) in FAULTS.items():
        state = bad if world.process_index == 1 else good
        kwargs = options if world.process_index == 1 else {}
        step = jdp.data_parallel(functools.partial(_update, **kwargs))
        leaf = jax.tree.leaves(state)[0]
        is_longer = name == "batch" and world.process_index == 1
        batch = np.ones((4 if is_longer else 2, leaf.shape[0]), leaf.dtype)
        # As it comes, and as an already replicated state.
        found[name] = harness.error_text(lambda: step(state, batch))  # noqa: B023
        device_state = _replicate_alone(world, state)
        found[f"{name}, on the devices"] = harness.error_text(
            lambda: step(device_state, batch)  # noqa: B023
        )
    state, _ = jdp.data_parallel(_update)(_square(), np.ones((2, 3), np.float32))
    jdp.check_replicas(state, world=world)  # the job is none the worse for it.
    return found


def _replicate_alone(world, tree):
    """A replicated tree made without asking the other process."""

    def place(x):
        shards = [jax.device_put(x, device) for device in world.local_devices]
        return jax.make_array_from_single_device_arrays(
            x.shape, world.replicated, shards
        )

    return jax.tree.map(place, tree)


def test_each_wrong_run_raises_on_every_process_with_both_values(in_two):
    first, second = (found["faults"] for found in in_two)
    assert first.keys() == second.keys() and len(first) == 2 * len(FAULTS)
    for name, (text, seconds) in first.items():
        assert second[name][0] == text
        assert max(seconds, second[name][1]) < 10.0
        assert text.startswith("RuntimeError: ")
        fault = name.partition(", ")[0]
        assert EXPECTED[fault] in text, f"{name}: {text}"


def _fail_on_one_process(world):
    """What two processes see of calls that fail on process 1."""

    @jdp.data_parallel
    def raises(state, batch):
        if world.process_index == 1:
            raise KeyError("no weight 'q'")
        return state, {}

    size = 3 if world.process_index else 4
    odd = np.ones((size, 3), np.float32)
    replicated = jdp.replicate(world, _square())
    calls = {
        "raises": lambda: raises(np.ones(2), np.ones(2)),
        "odd batch": lambda: jdp.data_parallel(_update)(_square(), odd),
        "odd batch, replicated": lambda: jdp.data_parallel(_update)(replicated, odd),
    }
    return {name: harness.error_text(call) for name, call in calls.items()}


def test_a_step_that_cannot_be_traced_on_one_process_fails_on_all(with_two_devices):
    failures = [found["failures"] for found in with_two_devices]
    (text0, seconds0), (text1, _) = (each["raises"] for each in failures)
    assert text1.startswith("KeyError")
    assert "process 1 failed: KeyError" in text0
    assert seconds0 < 10.0


@pytest.mark.parametrize("case", ["odd batch", "odd batch, replicated"])
def test_a_batch_that_does_not_divide_on_one_process_is_told_to_all(
    with_two_devices, case
):
    failures = [found["failures"] for found in with_two_devices]
    (text0, seconds0), (text1, _) = (each[case] for each in failures)
    assert text1.startswith("ValueError: The batch's leaf `[0]` has 3 samples")
    assert "process 1 failed: ValueError: The batch's leaf `[0]` has 3" in text0
    assert seconds0 < 10.0


def _another_batch_on_one_process(world):
    step = jdp.data_parallel(_update)
    state = _square()
    size = 4 if world.process_index else 2
    return harness.error_text(lambda: step(state, np.ones((size, 3), np.float32)))


def test_batches_of_different_sizes_are_named_on_every_process(in_two):
    for text, seconds in (found["another batch"] for found in in_two):
        assert "`batch[0]`" in text
        assert "float32[4,3] on process 0, float32[8,3] on process 1" in text
        assert seconds < 10.0


def _find_divergence(world):
    state = {"a": np.ones(3, np.float32), "w": np.arange(6.0, dtype=np.float32)}
    if world.process_index == 1:
        state["w"][4] = 0.5
    return harness.error_text(
        lambda: jdp.check_replicas(_replicate_alone(world, state), world=world)
    )


def test_check_replicas_names_the_first_leaf_whose_bits_differ(in_two):
    for text, _ in (found["divergence"] for found in in_two):
        assert text.startswith(
            "RuntimeError: `['w']` differs between the replicas: at (4,) 4.0 on "
            "process 0, 0.5 on process 1. Give all processes the same"
        )


# --- Deaths --------------------------------------------------------------------


def _train_until_killed(victim, how, mark=None):
    jdp.init()
    step = jdp.data_parallel(_update)
    state, _ = step(_square(), np.ones((2, 3), np.float32))
    if how == "kill":
        # From a thread, while the main thread is in the middle of a step.
        def fire():
            time.sleep(0.3)
            if jax.process_index() == victim:
                mark.write_text(str(time.monotonic()))
            harness.die(victim)

        harness.threading.Thread(target=fire, name="fault", daemon=True).start()
    for k in range(100_000):
        state, _ = step(state, np.ones((2, 3), np.float32))
        jax.block_until_ready(state)
        if k == 5 and jax.process_index() == victim:
            if how == "raise":
                raise ValueError("no more data")
            if how == "exit":
                raise SystemExit(3)


@pytest.mark.parametrize("victim", rarely.cases([0, 1], often=(0,)))
def test_a_kill_in_mid_step_ends_the_job_within_the_grace_time(victim, tmp_path):
    mark = tmp_path / "killed_at_s"
    outcome = harness.run_processes(
        _train_until_killed, 2, victim, "kill", mark, grace_s=2.0
    )
    # The grace time, and a second for what the launcher does around it.
    assert time.monotonic() - float(mark.read_text()) < 2.0 + 1.0
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert f"process {victim} was killed by SIGKILL" in outcome.output


@pytest.mark.parametrize(
    "how,code", rarely.cases([("raise", 1), ("exit", 3)], often=[("exit", 3)])
)
def test_a_failure_in_one_process_ends_the_job(how, code):
    outcome = harness.run_processes(_train_until_killed, 2, 1, how)
    assert outcome.exit_code == code, outcome.output
    assert f"process 1 failed with exit code {code}" in outcome.output
    assert outcome.seconds < 20.0


def test_the_harness_reports_what_a_process_returned():
    assert harness.run_checked(os.getcwd, 1) == [os.getcwd()]


def _fail_one_after_another():
    """Processes 0 and 1 raise one error while they trace, and handle it."""
    world = jdp.init(timeout_s=30.0)
    rank = world.process_index

    @jdp.data_parallel
    def step(state, x):
        if rank == 0:
            time.sleep(3.5)  # Process 1 has ended long before.
        if rank < 2:
            raise ValueError("a model that is wrong")
        return state, {"mean": x.mean()}

    state = jdp.replicate(world, np.float32(0))
    return harness.error_text(lambda: step(state, np.ones(4, np.float32)))


@pytest.mark.slow
def test_processes_that_handle_one_error_do_not_end_each_other():
    outcome = harness.run_processes(
        _fail_one_after_another, 3, devices_per_process=1, ends_as_usual=True
    )
    assert outcome.exit_code == 0, outcome.output
    texts = [text for text, _ in outcome.values]
    for text in texts[:2]:
        assert text.startswith("ValueError: a model that is wrong")
    assert "process 1 failed: ValueError: a model that is wrong" in texts[2]
    seconds = [seconds for _, seconds in outcome.values]
    assert seconds[0] < 6.0 and max(seconds[1:]) < 3.0
