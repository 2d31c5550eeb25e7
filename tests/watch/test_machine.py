"""Does Linux tell what a process does?"""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from jdp.watch import machine, stacks
from jdp.watch.machine import ProcessPulse

_LOOP = "print('ready', flush=True)\nwhile True: pass"
_SLEEP = "import time; print('ready', flush=True); time.sleep(100)"


@contextlib.contextmanager
def started(code):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def look_until(pulse, is_right, **given):
    """The first facts that are as wanted; fails after a minute."""
    deadline_s = time.monotonic() + 60
    while True:
        facts = pulse.look(now_ns=time.monotonic_ns(), **given)
        if is_right(facts):
            return facts
        assert time.monotonic() < deadline_s, facts
        time.sleep(0.1)


def test_cpu_time_tells_a_loop_from_a_process_that_is_blocked():
    with started(_LOOP) as process:
        pulse = ProcessPulse(process.pid, now_ns=time.monotonic_ns())
        facts = look_until(pulse, lambda facts: facts.is_main_busy)
        assert facts.state == "well" and facts.is_busy
    with started(_SLEEP) as process:
        pulse = ProcessPulse(process.pid, now_ns=time.monotonic_ns())
        for _ in range(5):
            facts = pulse.look(now_ns=time.monotonic_ns())
            time.sleep(0.1)
        assert facts.state == "well"
        assert not facts.is_busy and not facts.is_main_busy


def test_a_process_that_is_stopped_or_gone_is_so_since_it_was_seen():
    with started(_SLEEP) as process:
        pulse = ProcessPulse(process.pid, now_ns=0)
        assert pulse.look(now_ns=5).since_ns == 0
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert pulse.look(now_ns=10)[:2] == ("stopped", 10)
        assert pulse.look(now_ns=20)[:2] == ("stopped", 10)
        process.send_signal(signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert pulse.look(now_ns=30)[:2] == ("well", 30)
        process.kill()
        process.wait()
        assert pulse.look(now_ns=40)[:2] == ("gone", 40)


def test_a_process_that_reads_from_the_keyboard_is_at_a_prompt():
    pulse = ProcessPulse(os.getpid(), now_ns=0)
    assert pulse.look(now_ns=1, has_keyboard=True).state == "prompt"


def test_an_end_that_was_seen_needs_no_process():
    pulse = ProcessPulse(os.getpid(), now_ns=0)
    facts = pulse.look(now_ns=1, end="ended")
    assert (facts.state, facts.end) == ("gone", "ended")


def test_only_a_process_with_a_handler_has_one():
    number = signal.SIGRTMAX - 3
    assert not machine.has_handler(os.getpid(), number)
    old = signal.signal(number, lambda *_: None)
    try:
        assert machine.has_handler(os.getpid(), number)
    finally:
        signal.signal(number, old)
    assert not machine.has_handler(1 << 30, number)


def test_kills_for_lack_of_memory_are_counted_in_groups_too(tmp_path):
    before = machine.count_oom_kills(())
    text = "low 0\nhigh 3\nmax 9\noom 1\noom_kill 2\noom_group_kill 0\n"
    (tmp_path / "memory.events").write_text(text)
    assert machine.count_oom_kills((str(tmp_path), "/nowhere")) == before + 2


def _inner(file):
    faulthandler.dump_traceback(file, all_threads=True)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_place_of_the_main_thread_is_in_the_code_of_the_user(is_first):
    with tempfile.TemporaryFile("w+") as file:
        _inner(file)
        file.seek(0)
        text = file.read()
    # faulthandler lists the newest thread first.
    other = 'Thread 0x00007f (most recent call first):\n  File "a.py", line 3 in run\n'
    found = stacks.find_frame(f"{other}\n{text}" if is_first else text)
    line = _inner.__code__.co_firstlineno + 1
    assert found == f"{__file__}:{line} in `_inner`"


def test_frames_of_libraries_are_left_out():
    text = (
        "Current thread 0x00007f (most recent call first):\n"
        f'  File "{os.__file__}", line 5 in wait\n'
        '  File "/home/me/train.py", line 12 in load\n'
    )
    assert stacks.find_frame(text) == "/home/me/train.py:12 in `load`"
    assert stacks.find_frame("") == ""
    only = text.splitlines(keepends=True)[:2]
    assert stacks.find_frame("".join(only)) == f"{os.__file__}:5 in `wait`"
