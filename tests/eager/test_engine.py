"""The engine in real processes: order, programs, failures, tuning."""

import csv
import glob
import pathlib
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp import eager
from jdp.eager import session
from jdp.eager.diagnosis import flight_recorder
from tests import harness, rarely
from tests.eager import engine_soak

pytestmark = pytest.mark.multiprocess


def _wait_for_all(handles):
    return [eager.synchronize(handle, timeout_s=30.0) for handle in handles]


def _error(fn):
    return harness.error_text(fn)[0]


def _programs(folder):
    """What two processes see of submitted programs; one job for many tests."""
    world = jdp.init(timeout_s=60.0)
    options = eager.EagerOptions(stall_warning_s=1.0, flight_recorder_dir=folder)
    eager.init(world, options)
    rank, found = eager.rank(), {}

    @jdp.data_parallel
    def step(params, batch):
        loss, grads = jdp.value_and_grad(lambda p, b: jnp.mean((b - p) ** 2))(
            params, batch
        )
        return params - 0.5 * grads, {"loss": loss}

    batch = np.full((2, 3), float(rank), np.float32)
    params = np.full(3, 4.0, np.float32)
    # A step and tensors, in another order on each process, five times.
    for number in range(5):
        calls = [
            lambda: eager.submit_async(step, params, batch),  # noqa: B023
            lambda: eager.all_reduce_async(np.float32(rank), name="m", op="sum"),
            lambda: eager.all_reduce_async(np.ones(10**5), name="n", op="sum"),
        ]
        order = np.random.default_rng([number, rank]).permutation(3)
        handles = dict(sorted((int(i), calls[i]()) for i in order))
        (params, metrics), total, many = _wait_for_all(handles.values())
        assert total == 1 and many[0] == 2
    found["params"] = np.asarray(params)
    found["loss"] = float(metrics["loss"])
    # Programs that differ, by their text and by their shapes.
    factor = 2.0 + rank
    found["other program"] = _error(
        lambda: eager.submit(jax.jit(lambda x: x * factor), np.ones(2), name="p")
    )
    found["other shape"] = _error(
        lambda: eager.submit(jax.jit(jnp.sin), np.ones(2 + rank), name="q")
    )
    # What a program raises is for its caller alone.
    found["raises"] = _error(lambda: eager.submit(_Raises(), np.ones(1), name="r"))
    found["not compiled"] = _error(lambda: eager.submit(np.sin, np.ones(1)))
    # Process 1 is late with a program.
    eager.barrier()
    if rank == 1:
        time.sleep(2.5)
    handle = eager.submit_async(jax.jit(jnp.cos), np.zeros(1), name="late step")
    if rank == 0:
        found["late"] = _error(lambda: eager.synchronize(handle, timeout_s=0.5))
    found["at last"] = float(eager.synchronize(handle, timeout_s=30.0)[0])
    # What is under way when one process shuts down fails on the others.
    if rank == 0:
        handle = eager.all_reduce_async(np.ones(1), name="alone")
        found["alone"] = _error(lambda: eager.synchronize(handle, timeout_s=30.0))
    else:
        time.sleep(0.3)
    eager.shutdown()
    found["ended"] = _error(eager.barrier)
    return found


class _Raises:
    """A program whose run fails."""

    __name__ = "raises"

    def fingerprint(self, *args):
        return "the same"

    def __call__(self, *args):
        raise KeyError("from the program")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("flight"))
    values = harness.run_processes(_programs, 2, folder)
    assert values.exit_code == 0, values.output
    return values._replace(output=(values.output, folder))


def test_steps_mixed_with_tensors_train_as_one_device_does(programs):
    params = np.full(3, 4.0, np.float32)
    for _ in range(5):
        mean = 0.5  # of the samples of both processes, in each column.
        params = params - 0.5 * (2.0 / 3.0) * (params - mean)
    for value in programs.values:
        np.testing.assert_allclose(value["params"], params, rtol=1e-5)
    assert programs.values[0]["loss"] == programs.values[1]["loss"]


@pytest.mark.parametrize("case", ["other program", "other shape"])
def test_programs_that_differ_are_refused_on_every_rank(programs, case):
    for value in programs.values:
        assert "Mismatched programs" in value[case], value[case]
        assert "rank 0" in value[case] and "rank 1" in value[case]


def test_what_a_program_raises_its_caller_gets(programs):
    for value in programs.values:
        assert "from the program" in value["raises"]
        assert "`step` must be compiled" in value["not compiled"]


def test_a_late_process_is_named_to_who_waits_and_in_the_log(programs):
    output, _ = programs.output
    assert "late step: not done within 0.5 s" in programs.values[0]["late"]
    assert "1: [late step]" in programs.values[0]["late"]
    assert "[0] 1: [late step]" in output
    assert [value["at last"] for value in programs.values] == [1.0, 1.0]


def test_a_time_out_writes_the_last_requests(programs):
    _, folder = programs.output
    (path,) = glob.glob(f"{folder}/*.rank0.json")
    dump = flight_recorder.read_dump(path)
    assert "alone" in [record.name for record in dump.records]


def test_a_shutdown_fails_what_others_wait_for(programs):
    assert "rank 1 has shut the engine down" in programs.values[0]["alone"]
    for value in programs.values:
        assert "rank 1 has shut the engine down" in value["ended"]


def test_random_operations_in_random_orders_are_exact():
    wrong = harness.run_checked(engine_soak.run_randomly, 3, 1000, 7)
    assert wrong == [[], [], []]


@pytest.mark.parametrize(
    "victim, signum",
    rarely.cases(
        [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)],
        often=[(1, signal.SIGKILL)],
    ),
)
def test_all_others_raise_when_a_process_is_gone(victim, signum):
    seconds = engine_soak.check_death(victim, signum, 0.2)
    assert seconds < (2.0 if signum == signal.SIGKILL else 8.0)


def _refuse_options(rank_of_other):
    world = jdp.init(timeout_s=20.0)
    is_other = world.process_index == rank_of_other
    options = eager.EagerOptions(fusion_bytes=1000 if is_other else 2000)
    return _error(lambda: eager.init(world, options))


def test_options_that_differ_are_refused_on_every_process():
    texts = harness.run_checked(_refuse_options, 3, 2)
    assert len(set(texts)) == 1
    assert "`fusion_bytes` is 2000 on process 0 and 1000 on process 2" in texts[0]


def _tune(path):
    world = jdp.init(timeout_s=60.0)
    log = path if world.is_main_process else ""
    options = eager.EagerOptions(
        autotune=True,
        autotune_log=log,
        autotune_warmup_samples=1,
        autotune_steps_per_sample=1,
        autotune_max_samples=8,
    )
    eager.init(world, options)
    x = np.ones(1000, np.float32)
    for _ in range(60):
        total = eager.all_reduce(x, name="x", op="sum")
        assert total[0] == world.process_count
    eager.barrier()
    engine = session.current_engine()
    is_done = engine.lead is not None and engine.lead.is_tuned
    eager.shutdown()
    return engine.cycle_time_s, is_done


def test_all_processes_go_by_what_the_coordinator_tunes(tmp_path):
    path = str(tmp_path / "tuned.csv")
    (mine, is_done), (theirs, _) = harness.run_checked(_tune, 2, path)
    assert is_done
    assert mine == theirs
    rows = list(csv.DictReader(pathlib.Path(path).read_text().splitlines()))
    assert len(rows) >= 4 and all(float(row["score"]) > 0 for row in rows)
    best = max(rows, key=lambda row: float(row["score"]))
    assert float(best["cycle_time_s"]) == pytest.approx(mine, rel=1e-6)
