import atexit
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed

import jdp
from jdp.compat import jax_distributed
from jdp.launch import ports
from jdp.replicas import progress
from jdp.replicas.progress import Snapshot
from jdp.runtime import coordination, environment
from jdp.runtime.lifeline import jax_end, process_lines, rules
from jdp.runtime.lifeline.rules import Gone
from tests import harness, rarely

BUSY = Snapshot({"step": 6}, None, None, 0.0)
IN_STEP = Snapshot({"step": 6}, "step", None, 0.0)
WAITS = Snapshot({}, None, 3.0, 3.0)


@pytest.mark.parametrize(
    ("has_ended", "now", "gone", "now_s", "culprit"),
    [
        # It ended after as many steps: a long step, or anything else, may go on.
        (False, IN_STEP, [Gone(1, 10.0, {"step": 6})], 1e9, None),
        (False, IN_STEP, [Gone(1, 10.0, {"step": 7})], 1e9, None),
        (False, BUSY, [Gone(1, 10.0, {"step": 5})], 1e9, None),
        # It will never come to this step.
        (False, IN_STEP, [Gone(1, 10.0, {"step": 5})], 12.0, None),
        (False, IN_STEP, [Gone(1, 10.0, {"step": 5})], 12.1, 1),
        (False, IN_STEP, [Gone(1, 10.0, {"other": 9})], 12.1, 1),
        (False, IN_STEP, [Gone(2, 9.0, {"step": 6}), Gone(1, 10.0, {})], 12.1, 1),
        # The step began after it was known.
        (False, IN_STEP._replace(since_s=11.0), [Gone(1, 1.0, {})], 12.9, None),
        # A wait on the host is for all processes.
        (False, WAITS, [Gone(1, 10.0, {"step": 9})], 12.1, 1),
        # It died, and what it had begun is not known.
        (False, IN_STEP, [Gone(1, 10.0)], 13.0, None),
        (False, IN_STEP, [Gone(1, 10.0)], 14.1, 1),
        (False, BUSY, [Gone(1, 10.0)], 1e9, None),
        # It said that it failed.
        (False, BUSY, [Gone(1, 10.0, {"step": 6}, "ValueError: no")], 13.5, None),
        (False, BUSY, [Gone(1, 10.0, {"step": 6}, "ValueError: no")], 13.6, 1),
        # It died, and JAX would abort this process soon.
        (False, BUSY, [Gone(1, 10.0, has_died=True)], 50.0, None),
        (False, BUSY, [Gone(1, 10.0, has_died=True)], 50.1, 1),
        # At the end of the program, JAX waits for all.
        (True, IN_STEP, [Gone(1, 10.0, {"step": 5})], 1e9, None),
        (True, BUSY, [Gone(1, 10.0)], 12.1, 1),
        (True, BUSY, [Gone(1, 10.0, {}, "ValueError: no")], 12.1, 1),
        (True, BUSY, [Gone(1, 10.0, {}, "RuntimeError: of 0", 0)], 10.0, 0),
    ],
)
def test_only_a_process_that_waits_in_vain_is_ended(
    has_ended, now, gone, now_s, culprit
):
    verdict = rules.judge(0, has_ended, now, gone, now_s=now_s)
    assert (verdict and verdict.culprit) == culprit


@pytest.mark.parametrize(
    ("gone", "now_s", "culprit"),
    [
        (Gone(1, 10.0), 13.0, None),
        (Gone(1, 10.0), 13.1, 1),
        (Gone(1, 10.0, {}, "ValueError: no"), 13.1, 1),
        # Its end is no reason, and the launcher ends the job for another one.
        (Gone(1, 10.0, {"step": 6}), 1e9, None),
    ],
)
def test_a_process_ends_before_its_launcher_kills_it(gone, now_s, culprit):
    verdict = rules.judge(0, False, BUSY, [gone], now_s=now_s, ends_by_s=13.0)
    assert (verdict and verdict.culprit) == culprit


@pytest.mark.parametrize(
    ("launcher_s", "own_s"), [(None, 3.5), (30.0, 29.5), (1.0, 0.5), (0.5, 0.25)]
)
def test_a_process_keeps_a_share_of_the_grace_time_for_its_files(launcher_s, own_s):
    assert rules.failed_grace_s(launcher_s) == own_s


@pytest.mark.parametrize(
    ("broke_s", "ended_s", "now_s", "culprit"),
    [(None, 5.0, 1e9, None), (1.0, 5.0, 9.0, None), (6.0, 5.0, 10.1, 1)],
)
def test_a_process_that_is_killed_in_its_exit_handlers_is_not_waited_for(
    broke_s, ended_s, now_s, culprit
):
    gone = [Gone(2, 0.0, {}), Gone(1, 0.0, {"step": 5}, broke_s=broke_s)]
    verdict = rules.judge_end(0, ended_s, gone, now_s=now_s)
    assert (verdict and verdict.culprit) == culprit


@pytest.mark.parametrize(
    ("gone", "culprit"),
    [
        ([Gone(1, 0.0, {}, "ValueError: boom")], 1),
        ([Gone(1, 0.0, {}, "RuntimeError: process 2 failed", culprit=2)], 2),
        ([Gone(1, 0.0, {}, "RuntimeError: process 0 failed", culprit=0)], None),
        ([Gone(1, 0.0, {}, "RuntimeError", culprit=0), Gone(2, 0.0)], 2),
        ([Gone(1, 0.0, {"step": 5})], None),
    ],
)
def test_a_process_does_not_blame_one_that_failed_because_of_it(gone, culprit):
    assert rules.find_first(0, gone) == culprit


@pytest.mark.parametrize(
    ("gone", "culprit"),
    [
        ([Gone(1, 0.0, {}, "RuntimeError: process 0 did not come", culprit=0)], 1),
        ([Gone(1, 0.0, {}, "RuntimeError", culprit=0), Gone(2, 0.0)], 2),
        ([Gone(1, 0.0, {}, "Gloo", culprit=2), Gone(2, 0.0, {}, "x", culprit=0)], 2),
        ([Gone(1, 0.0, {"step": 5})], None),
        ([], None),
    ],
)
def test_a_process_whose_links_broke_blames_one_that_says_more(gone, culprit):
    assert rules.find_first(0, gone, is_consequence=True) == culprit


def end_in_an_exit_handler():
    """Leaves by `os._exit` in an exit handler, between jdp's and JAX's."""
    atexit.register(_exit_if_second)
    jdp.init(timeout_s=60)


def _exit_if_second():
    if os.environ["JDP_PROCESS_ID"] == "1":
        os._exit(0)


@pytest.mark.multiprocess
def test_an_end_between_the_exit_handlers_is_found_soon():
    got = harness.run_processes(end_in_an_exit_handler, 2, ends_as_usual=True)
    assert got.exit_code == 1
    assert "before its exit handlers had run; process 0 waits" in got.output
    assert got.seconds < 60


def never_end(process):
    """One process has an exit handler that never ends, and JAX waits for little."""
    process_lines._WAITS_AT_END_S = 0.5
    coordination._SHUTDOWN_TIMEOUT_S = 4
    atexit.register(_sleep_if, process)
    jdp.init(timeout_s=60)


def _sleep_if(process):
    if os.environ["JDP_PROCESS_ID"] == str(process):
        time.sleep(1000)


@pytest.mark.multiprocess
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.slow
def test_an_exit_handler_that_never_ends_is_named_and_ends_with_the_limit(process):
    got = harness.run_processes(never_end, 2, process, ends_as_usual=True)
    assert (
        f"jdp: process {1 - process} came to the end of its program 0.5 s ago, and JAX "
        f"waits for process {process}, whose exit handlers or threads have not ended."
    ) in got.output
    assert "Shutdown" in got.output and got.exit_code not in (0, None)  # JAX's limit.
    assert got.seconds < 100


def test_a_process_may_end_long_after_another():
    assert coordination._SHUTDOWN_TIMEOUT_S > 3600 * 24 * 365
    asked = {}

    def make_client(*args, **options):
        asked.update(options)

    with pytest.MonkeyPatch.context() as patch:
        module = jax_distributed._jax
        patch.setattr(module, "get_distributed_runtime_client", make_client)
        with jax_distributed.patient_client(7):
            module.get_distributed_runtime_client("address", 0, init_timeout=5)
        assert module.get_distributed_runtime_client is make_client
    assert asked == {"init_timeout": 5, "shutdown_timeout": 7}


def leave_in_a_step(process):
    """One process leaves by `os._exit(0)` while the other is in a step."""
    world = jdp.init(timeout_s=60)

    @jdp.data_parallel
    def step(w, x):
        return w + jdp.average(x.mean()), {}

    w = jnp.zeros(())
    for i in range(500):
        w, _ = step(w, np.ones((2,), np.float32))
        if world.process_index == process and i == 4:
            os._exit(0)
        np.asarray(w)


@pytest.mark.multiprocess
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.slow
def test_the_process_that_skips_its_exit_handlers_is_blamed(process):
    got = harness.run_processes(leave_in_a_step, 2, process)
    text = f"jdp launch: process {process} ended with exit code 0, but without its exit"
    assert text in got.output
    assert got.exit_code not in (0, None)


def test_both_counts_and_the_remedy_are_named():
    gone = [Gone(0, 0.0, {"step": 5})]
    verdict = rules.judge(1, False, IN_STEP, gone, now_s=9.0)
    assert verdict.text == (
        "process 0 ended after 5 calls of the step `step`, and process 1 is in call 6 "
        "of the step `step`. A step needs all processes. Give each the same number of "
        "steps, or use `jdp.join_batches` or `jdp.Join` where they have different "
        "amounts of data. If process 0 called `sys.exit`, look at what it wrote last."
    )


def test_a_wait_outside_of_steps_is_told_to_need_all_processes():
    waiting = IN_STEP._replace(step=None, waits_since_s=0.0)
    verdict = rules.judge(1, False, waiting, [Gone(0, 0.0, {"step": 5})], now_s=9.0)
    assert "process 1 waits for it on the host. Steps, evaluations, ch" in verdict.text
    assert "none may be under `if world.is_main_process:`" in verdict.text


def train(num_steps, after_s=0.0):
    """Takes as many steps as `num_steps` has for this process."""
    world = jdp.init(timeout_s=60)
    assert os.environ[environment.JOINED] == str(os.getpid())  # For its children.

    @jdp.data_parallel
    def step(w, x):
        loss, grads = jdp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)
        return w - 0.1 * grads, {"loss": loss}

    w = jnp.zeros(4)
    for _ in range(num_steps[world.process_index]):
        w, _ = step(w, np.ones((2, 4), np.float32))
    if world.process_index == 0:
        time.sleep(after_s)
    return float(w[0])


@pytest.mark.multiprocess
def test_an_end_that_is_early_is_told_to_all_and_blamed():
    got = harness.run_processes(train, 2, (5, 6))
    text = (
        "process 0 ended after 5 calls of the step `step`, and process 1 is in call 6"
    )
    assert f"[0] jdp: {text}" in got.output
    assert f"[1] jdp: {text}" in got.output
    assert "jdp launch: process 0 failed with exit code 1." in got.output
    assert got.exit_code == 1
    assert got.seconds < 60


def train_until_refused():
    """The third call is refused in process 1, which takes that for the end of data."""
    world = jdp.init(timeout_s=60)

    @jdp.data_parallel
    def step(w, x):
        return w + jdp.average(x.mean()), {}

    w = np.zeros(2, np.float32)
    for n in (2, 2, 2 - 2 * world.process_index):
        try:
            w, _ = step(w, np.ones(n, np.float32))
        except ValueError as error:
            assert "has no samples" in str(error)
    return np.asarray(w).tolist()


@pytest.mark.multiprocess
def test_a_call_that_was_refused_does_not_count():
    got = harness.run_processes(train_until_refused, 2)
    text = (
        "process 1 ended after 2 calls of the step `step`, and process 0 is in call 3"
    )
    assert f"[0] jdp: {text}" in got.output
    assert got.exit_code == 1
    assert got.seconds < 60


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, FloatingPointError])
def test_a_call_counts_if_its_program_has_run(monkeypatch, error):
    monkeypatch.setattr(
        progress,
        "_MainThread",
        type("_MainThread", (progress._MainThread,), {"steps": {}}),
    )

    class Step:
        name = "step"
        world = types.SimpleNamespace(process_count=2)

        @progress.counted
        def run(self, error=None):
            if error is not None:
                raise error("no")
            return {}, {}

    step = Step()
    step.run()
    with pytest.raises(error):
        step.run(error)
    is_counted = error is FloatingPointError  # of `jax_debug_nans`.
    assert progress.snapshot().steps == {"step": 1 + is_counted}
    step.run()
    assert progress.snapshot().steps == {"step": 2 + is_counted}
    assert progress.snapshot().step is None


@pytest.mark.multiprocess
@pytest.mark.slow
def test_after_as_many_steps_a_process_may_take_its_time():
    after_s = rules.ENDED_GRACE_S + 2.0
    got = harness.run_processes(train, 2, (3, 3), after_s, ends_as_usual=True)
    assert got.exit_code == 0, got.output
    assert "jdp:" not in got.output


PROGRAM = """
import os, signal, sys, threading, time
import jdp
world = jdp.init(timeout_s=100)
if world.process_index == PROCESS:
    FAULT
jdp.replicate(world, {"w": 1.0})
"""

ENDS = [
    (
        "sys.exit(3)",
        *(1, 3),
        "process 1 ended after no step, and process 0 waits for it",
    ),
    (  # A thread that Python waits for.
        "threading.Thread(target=time.sleep, args=(100,)).start(); 1 / 0",
        *(1, 1),
        "process 1 failed (ZeroDivisionError: division by zero)",
    ),
    (  # Threads of a pool, whose module is imported after `jdp.init`.
        "from concurrent.futures import ThreadPoolExecutor; "
        "ThreadPoolExecutor().submit(time.sleep, 100); raise KeyboardInterrupt",
        *(1, -signal.SIGINT),
        "process 1 failed (KeyboardInterrupt)",
    ),
    (
        "sys.excepthook = lambda *_: None; raise KeyboardInterrupt",
        *(0, -signal.SIGINT),
        "process 0 failed (KeyboardInterrupt)",
    ),
    (
        "os.kill(os.getpid(), signal.SIGKILL)",
        *(1, -signal.SIGKILL),
        "process 1 ended without a word",
    ),
    ("os._exit(3)", 0, 3, "process 0 ended without a word"),
    (
        "sys.excepthook = lambda *_: sys.exit(5); 1 / 0",
        *(1, 5),
        "process 1 failed (ZeroDivisionError: division by zero)",
    ),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "process", "code", "text"), rarely.cases(ENDS, often=ENDS[:1])
)
def test_without_a_launcher_all_end_soon_and_the_others_name_it(
    fault, process, code, text
):
    program = PROGRAM.replace("PROCESS", str(process)).replace("FAULT", fault)
    took_s, codes, said = run_by_hand(program, process)
    assert took_s < 10 and codes[process] == code and codes[1 - process] != 0
    assert f"jdp: {text}" in said, said


# A process that fails does so once all have written.
WRITE = """
file = open(f"{FOLDER}/{world.process_index}", "w")
file.write("last line")
open(f"{FOLDER}/wrote.{world.process_index}", "w").close()
if world.process_index == PROCESS:
    while len(os.listdir("{FOLDER}")) < 2 * world.process_count:
        time.sleep(0.01)
"""


def writing(program, folder, process):
    """`program` with its placeholders filled in."""
    program = program.replace("{WRITE}", WRITE).replace("{FOLDER}", str(folder))
    return program.replace("PROCESS", str(process))


OPEN_FILES = """
import atexit, os, sys, time
import jdp
world = jdp.init(timeout_s=100)
{WRITE}
atexit.register(time.sleep, 100 * (world.process_index == 0))
if world.process_index == 1:
    raise ValueError("boom")
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_files_left_open_hold_what_was_written_where_a_process_fails(tmp_path):
    """Also those of a process that had come to its end."""
    _, codes, _ = run_by_hand(writing(OPEN_FILES, tmp_path, 1), 1)
    assert codes == [1, 1]
    assert [(tmp_path / f"{i}").read_text() for i in range(2)] == ["last line"] * 2


HOST_CODE = """
import os, signal, sys, threading, time
import jdp
world = jdp.init(timeout_s=100)
{WRITE}
if world.process_index == PROCESS:
    FAULT
if world.process_index:
    time.sleep(60)
jdp.replicate(world, {"w": 1.0})
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "process", "code", "text"),
    [
        ("raise ValueError('boom')", 0, 1, "process 0 failed (ValueError: boom)"),
        # Process 0 is ended because it waits for process 1 in vain.
        pytest.param(
            "sys.exit(3)",
            *(1, 3),
            "process 1 ended after no step, and process 0 waits",
            marks=pytest.mark.slow,
        ),
        # A signal for all comes to process 0 while it stays.
        pytest.param(
            "t = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)); "
            "t.daemon = True; t.start(); raise ValueError('boom')",
            *(0, 1),
            "process 0 failed (ValueError: boom)",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_the_end_of_process_0_aborts_none_that_is_in_host_code(
    tmp_path, monkeypatch, fault, process, code, text
):
    monkeypatch.setenv(environment.GRACE_S, "60")  # Of a launcher around all.
    monkeypatch.setenv(environment.LAUNCH_ID, "x")
    program = writing(HOST_CODE, tmp_path, process).replace("FAULT", fault)
    took_s, codes, said = run_by_hand(program, process, count=3)
    assert took_s < 12
    assert codes == [code if i == process else 1 for i in range(3)]
    assert f"jdp: {text}" in said, said
    assert [(tmp_path / f"{i}").read_text() for i in range(3)] == ["last line"] * 3


DIES = """
import os, signal, time
import jdp
from jdp.runtime.lifeline import rules
rules.DIED_GRACE_S = 3.0
world = jdp.init(timeout_s=100)
{WRITE}
if world.process_index == PROCESS:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("process", "text"),
    [
        pytest.param(
            1,
            "process 1 ended without a word: it was killed, crashed, or called ",
            marks=pytest.mark.slow,
        ),
        (0, "process 0 ended without a word: it was killed, crashed, or called "),
    ],
)
def test_files_hold_what_was_written_before_another_process_died(
    tmp_path, process, text
):
    program = writing(DIES, tmp_path, process)
    took_s, codes, said = run_by_hand(program, process, count=3)
    assert took_s < 12
    left = [i for i in range(3) if i != process]
    # JAX aborts the others where process 0 has died.
    assert {codes[i] for i in left} == {1 if process else -signal.SIGABRT}
    assert f"jdp: {text}" in said, said
    for i in left:
        assert (tmp_path / f"{i}").read_text() == "last line"


def test_process_0_aborts_the_others_where_it_leaves_its_exit_handlers():
    """Its line breaks after its message; files are flushed then."""
    left = rules.Gone(0, 1.0, {})
    assert not left.aborts_others
    assert left._replace(broke_s=2.0).aborts_others
    assert rules.Gone(0, 1.0, has_died=True).aborts_others


SLOW_EXIT = """
import atexit, sys, time
atexit.register(time.sleep, 7)
import jdp
world = jdp.init(timeout_s=100)
file = open(f"{FOLDER}/{world.process_index}", "w")
file.write("last line")
if world.process_index == 1:
    sys.exit(75)
time.sleep(1.0)
raise ValueError("boom")
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_exit_handlers_take_their_time_though_process_0_has_failed(tmp_path):
    """Handlers from before `jdp.init` run after JAX's end."""
    _, codes, _ = run_by_hand(SLOW_EXIT.replace("{FOLDER}", str(tmp_path)), 0)
    assert codes == [1, 75]
    assert [(tmp_path / f"{i}").read_text() for i in range(2)] == ["last line"] * 2


CAUGHT = """
import os, sys
import jax.numpy as jnp, numpy as np
import jdp
world = jdp.init(timeout_s=100)

@jdp.data_parallel
def step(w, x):
    return w + jdp.average(x.mean()), {}

def main():
    w = jnp.zeros(())
    for i in range(10):
        if world.process_index == 1 and i == 5:
            END
        w, _ = step(w, np.ones((2,), np.float32))
        np.asarray(w)

try:
    main()
except Exception as error:
    print(error)
    sys.exit(1)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("end", "code"),
    rarely.cases([("sys.exit(75)", 75), ("return", 0)], often=[("return", 0)]),
)
@pytest.mark.slow
def test_an_early_end_keeps_its_code_where_the_others_handle_their_errors(end, code):
    """Python finalises there while JAX could not end: no thread may be inside it."""
    _, codes, said = run_by_hand(CAUGHT.replace("END", end), 1)
    assert codes == [1, code], said
    assert "process 1 ended after 5 calls of the step `step`" in said


def test_jax_ends_only_once_all_processes_have_run_their_exit_handlers(monkeypatch):
    calls = []
    monkeypatch.setattr(jax_distributed, "is_connected", lambda: True)
    monkeypatch.setattr(jax_distributed, "end", lambda: calls.append("end"))
    monkeypatch.setattr(
        jax_distributed, "abandon_at_end", lambda: calls.append("abandon")
    )
    for last, expected in ((1, ["end"]), (None, ["abandon"])):
        end = jax_end.JaxEnd(0, 3)
        waiting = threading.Thread(target=end.wait, args=(_run_in_thread,))
        waiting.start()
        end.note(2, may_begin=False)
        waiting.join(0.2)
        assert calls == [] and waiting.is_alive()
        if last is None:
            assert end.give_up()
        else:
            end.note(last, may_begin=False)
        waiting.join(10.0)
        assert calls == expected and not waiting.is_alive()
        calls.clear()
    assert not jax_end.JaxEnd(0, 3).give_up()  # Nothing waits.


def _run_in_thread(fn):
    threading.Thread(target=fn, daemon=True).start()


@pytest.mark.parametrize("is_given_up", [False, True])
def test_jax_s_service_ends_only_once_all_others_have_left_it(monkeypatch, is_given_up):
    calls = []
    state = distributed.State()
    state.client = types.SimpleNamespace(shutdown=lambda: calls.append("client"))
    state.service = types.SimpleNamespace(shutdown=lambda: calls.append("service"))
    monkeypatch.setattr(jax_distributed.distributed, "global_state", state)
    end = jax_end.JaxEnd(0, 3)
    jax_distributed.call_between_ends(end.wait_for_clients)
    waiting = threading.Thread(target=end.wait, args=(_run_in_thread,))
    waiting.start()
    for process in (1, 2):
        end.note(process, may_begin=False)
    end.note_left(2)
    _wait_until(lambda: calls == ["client"])
    time.sleep(0.2)
    assert calls == ["client"] and waiting.is_alive()
    if is_given_up:
        assert end.give_up()
    else:
        end.note_left(1)
    waiting.join(10.0)
    assert not waiting.is_alive()
    _wait_until(lambda: calls == ["client", "service"])


def _wait_until(is_so):
    deadline_s = time.monotonic() + 10.0
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _leave_late(folder):
    """Process 1 is slow to leave JAX's service, which process 0 ends."""
    world = jdp.init(timeout_s=30.0)
    state, folder = distributed.global_state, pathlib.Path(folder)

    class Late:
        """A client or service that writes when its end has begun."""

        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def shutdown(self):
            if self._inner is client:
                self._inner.shutdown()
                time.sleep(1.0)
            path = folder / f"process_{world.process_index}_s"
            path.write_text(str(time.monotonic()))
            if self._inner is not client:
                self._inner.shutdown()

    client = state.client
    if world.is_main_process:
        state.service = Late(state.service)
    else:
        state.client = Late(client)


@pytest.mark.multiprocess
def test_process_0_ends_jax_s_service_after_the_slowest_process_has_left(tmp_path):
    outcome = harness.run_processes(
        _leave_late, 2, str(tmp_path), devices_per_process=1, ends_as_usual=True
    )
    assert outcome.exit_code == 0, outcome.output
    ended_s, left_s = (float((tmp_path / f"process_{i}_s").read_text()) for i in (0, 1))
    assert left_s < ended_s < left_s + 2.0


NEVER_RETURNS = """
import atexit, sys, threading, time
from jdp.compat import jax_distributed
from jdp.runtime.lifeline import jax_end
jax_distributed.end = lambda: time.sleep(60)
jax_distributed.abandon_at_end = lambda: None
end = jax_end.JaxEnd(0, 1)
def run_beside(fn):
    started = threading.Thread(target=fn, daemon=True)
    beside.append(started)
    started.start()
    end.give_up()
beside = []
file = open(sys.argv[1], "w")
file.write("last line")
end.wait(run_beside)
print("finalises")
"""


def test_a_process_does_not_finalise_while_a_thread_is_inside_jax(tmp_path):
    path = tmp_path / "log"
    got = subprocess.run(
        [sys.executable, "-c", NEVER_RETURNS, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": harness.python_path()},
    )
    assert (got.returncode, got.stdout) == (1, ""), got.stderr
    assert path.read_text() == "last line"


SURVIVOR = """
import os, signal, time
import jax, jax.numpy as jnp, numpy as np
import jdp
world = jdp.init(timeout_s=100)

def loss_fn(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - 1.0) ** 2)

@jdp.data_parallel
def step(p, x):
    # Over gloo, which does not notice that a peer has ended.
    loss, grads = jdp.value_and_grad(loss_fn, all_reduce=None)(p, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss

p = jdp.replicate(world, {"w": np.ones((4, 32)), "v": np.ones(32)})
for i in range(1000):
    if i == 5 and world.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    p, loss = step(p, np.ones((64, 4)))
    time.sleep(0.3)
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_process_whose_steps_cannot_end_does_not_go_on_for_long():
    """JAX runs the steps later, and says of no failure before a result is read."""
    took_s, codes, said = run_by_hand(SURVIVOR, 1)
    assert took_s < rules.LOST_GRACE_S + 10 and codes[0] != 0
    assert "jdp: process 1 ended without a word" in said, said
    assert "process 0 has begun a step since, which cannot end" in said, said


@pytest.mark.parametrize(
    ("calls", "since_s"),
    [
        # Times, calls begun, and whether the last has ended well.
        ([(0.0, 5, False), (9.0, 5, False), (9.1, 5, True)], None),
        ([(0.0, 5, False), (1.0, 6, False), (2.0, 7, False)], 1.0),
        ([(0.0, 5, True), (1.0, 6, False), (1.1, 6, False)], 1.0),
        # A step that ends did not need what is gone.
        ([(0.0, 5, False), (1.0, 6, False), (2.0, 6, True)], None),
        ([(0.0, 5, False), (1.0, 6, True), (2.0, 7, False)], 2.0),
    ],
)
def test_steps_begun_after_a_loss_are_told_by_their_number(calls, since_s):
    found = None
    for now_s, num_begun, has_result in calls:
        found = rules.count_after_loss(found, num_begun, has_result, now_s=now_s)
    assert found.since_s == since_s


@pytest.mark.parametrize(
    ("gone", "now_s", "culprit"),
    [
        (Gone(1, 10.0), 15.0, None),
        (Gone(1, 10.0), 15.1, 1),
        (Gone(1, 10.0, {"step": 9}), 1e9, None),
    ],
)
def test_a_step_begun_after_a_loss_never_ends(gone, now_s, culprit):
    verdict = rules.judge(0, False, BUSY, [gone], now_s=now_s, after_loss_s=11.0)
    assert (verdict and verdict.culprit) == culprit


def diverge():
    """One process compares replicas, the other takes one more step."""
    world = jdp.init(timeout_s=60)

    @jdp.data_parallel
    def step(w, x):
        loss, grads = jdp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)
        return w - 0.1 * grads, loss

    w = jdp.replicate(world, np.ones(4, np.float32))
    for _ in range(2 + (world.process_index == 0)):
        w, _ = step(w, np.ones((2, 4), np.float32))
    soon = dataclasses.replace(world, timeout_s=3.0)
    jdp.check_replicas(w, world=soon if world.process_index == 1 else world)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_process_that_waited_says_why_not_the_one_whose_link_broke():
    got = harness.run_processes(diverge, 2, ends_as_usual=True)
    assert "process 1 failed with exit code 1, because of process 0" in got.output
    last = got.output[got.output.index("its last lines were") :]
    assert "Process 0 did not come to the comparison of replicas" in last
    assert got.exit_code == 1


def run_by_hand(program, process, *, count=2):
    """Runs processes without a launcher, of which one ends early.

    Returns:
      How long the others took from then on, all exit codes, and the output of the
      last of the others.
    """
    with ports.held("127.0.0.1") as port:
        return _run_at(port, program, process, count)


def _run_at(port, program, process, count):
    place = {
        environment.COORDINATOR_ADDRESS: f"127.0.0.1:{port}",
        environment.NUM_PROCESSES: str(count),
        environment.NUM_LOCAL_PROCESSES: str(count),
        environment.NODE_RANK: "0",
        "PYTHONPATH": harness.python_path(),
        "JAX_PLATFORMS": "cpu",
    }
    started = []
    for i in range(count):
        own = {environment.PROCESS_ID: str(i), environment.LOCAL_PROCESS_ID: str(i)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, **place, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        started[process].wait(60)
        start_s = time.monotonic()
        for other in started[:process] + started[process + 1 :]:
            said, _ = other.communicate(timeout=60)
        codes = [each.returncode for each in started]
        return time.monotonic() - start_s, codes, said
    finally:
        for each in started:
            each.kill()
            each.communicate()


# --- Lines that strangers keep from coming about --------------------------------------


class _NoLine:
    """A star whose lines never come about."""

    def __init__(self, *args, **options):
        self.num_wakes = 0
        if options["listener"] is not None:
            options["listener"].close()

    def wait_until_whole(self, *, timeout_s):
        return False

    def say(self, body):
        pass

    def flush(self, *, timeout_s):
        return False

    def wake(self):
        self.num_wakes += 1


def test_an_end_is_heard_through_the_store_where_there_is_no_line(monkeypatch):
    monkeypatch.setattr(process_lines.star, "Star", _NoLine)
    monkeypatch.setattr(process_lines.by_store, "_PERIOD_S", 0.1)

    def run(world):
        made = process_lines.ProcessLines(world, bytes(32))
        if world.process_index == 1:
            made.leave("ValueError: boom", None)
            assert made._ends is not None
            made._ends.close()
            return None
        deadline_s = time.monotonic() + 30.0
        while not made._gone:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        made._ends.close()
        return [(g.process, g.error) for g in made._gone], made._star.num_wakes

    assert harness.run_threads(run, 2)[0] == ([(1, "ValueError: boom")], 1)


@pytest.mark.parametrize(
    ("own", "ended", "at_end", "words"),
    [
        (0, [], [], "JAX waits for process 1, 2, which still runs"),
        (0, [1], [], "JAX waits for process 2, which still runs"),
        (0, [1, 2], [0, 1], "JAX waits for process 2, whose exit handlers"),
        (2, [0, 1], [0, 1], "and an exit handler or a thread of it has not ended"),
    ],
)
def test_a_wait_at_the_end_names_the_process_whose_exit_handlers_hang(
    own, ended, at_end, words
):
    end = jax_end.JaxEnd(own, 3)
    for process in at_end:
        end.note(process, may_begin=False)
    gone = [Gone(process, 1.0, {}) for process in ended]
    text = rules.describe_waiting(own, 3, gone, end.running, 60.0)
    assert text.startswith(f"process {own} came to the end of its program 60 s ago")
    assert words in text
