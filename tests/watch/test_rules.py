"""Is the process named for which the others wait, and no other one?"""

import pytest
from msgspec.structs import replace

from jdp.watch import rules, words
from jdp.watch.process_report import Awaited, ProcessReport
from jdp.watch.rules import WatchOptions
from tests.watch import simulation

STALL_S = 10.0


def waits(process, kind, number, waited_s, *, begun=0, **fields):
    """A process that waits in a step, meeting or iteration."""
    place = {"step": "program"}.get(kind, kind)
    reached = {"step": "reached", "meeting": "meeting", "iteration": "iteration"}
    if kind in reached:
        fields.setdefault(reached[kind], number)
    wait = Awaited(kind, number, f"the {kind}", waited_s)
    return ProcessReport(
        process, 0, place, waited_s, wait=wait, begun=begun, name="train", **fields
    )


def works(process, place="python", place_s=100.0, **fields):
    """A process that waits for nothing."""
    return ProcessReport(process, 0, place, place_s, **fields)


def judge(*reports, num_processes=None, ticks=1):
    """The stalls that are found in a constant situation, and the excused."""
    options = WatchOptions(STALL_S, num_processes or len(reports))
    state = rules.start(options, now_s=100.0)
    excused = []
    for i in range(ticks):
        now_s = 100.0 + i
        aged = [_aged(report, i) for report in reports]
        state = rules.receive(state, aged, now_s=now_s)
        state, findings = rules.tick(state, now_s=now_s)
        excused += findings.excused
    return findings.lasting, excused


def _aged(report, by_s):
    wait = report.wait and replace(report.wait, waited_s=report.wait.waited_s + by_s)
    return replace(
        report,
        place_s=report.place_s + by_s,
        state_s=report.state_s + by_s,
        wait=wait,
    )


def named(*reports, **options):
    return [stall.process for stall in judge(*reports, **options)[0]]


def test_a_process_in_python_for_which_others_wait_is_named():
    reports = [
        waits(0, "step", 5, 11.0),
        works(1, reached=4),
        waits(2, "step", 5, 10.9),
    ]
    (stall,), _ = judge(*reports)
    assert (stall.process, stall.waited_s) == (1, 11.0)
    assert [q.process for q in stall.waiting] == [0, 2]


def test_a_host_that_is_lost_while_it_compiles_is_excused_until_it_was_heard_last():
    compiling = works(1, "compile", is_busy=True)
    state = rules.start(WatchOptions(STALL_S, 2), now_s=100.0)
    state = rules.receive(state, [compiling], now_s=100.0)
    named_s = None
    for i in range(60):
        now_s = 100.0 + i / 4
        waiting = waits(0, "step", 5, 30.0 + i / 4)
        state = rules.receive(state, [waiting], now_s=now_s)
        state, findings = rules.tick(state, now_s=now_s)
        if findings.begun:
            named_s = now_s
            assert findings.begun[0].report.state == "unheard"
    assert named_s == 100.0 + STALL_S + 0.25


def test_until_the_limit_no_process_is_named():
    reports = waits(0, "step", 5, 9.9), works(1, reached=4)
    assert named(*reports) == []


def test_the_limit_comes_after_a_usual_step():
    slow = {"step_s": 8.0}
    reports = waits(0, "step", 5, 17.0, **slow), works(1, reached=4, **slow)
    assert named(*reports) == []
    reports = waits(0, "step", 5, 19.0, **slow), works(1, reached=4, **slow)
    assert named(*reports) == [1]


def test_the_last_of_a_chain_is_named():
    """Process 0 waits in a step for 1, which waits in a meeting for 2."""
    reports = [
        waits(0, "step", 5, 30.0, begun=5, meeting=3),
        waits(1, "meeting", 3, 20.0, begun=4, reached=4),
        works(2, meeting=2, reached=4),
    ]
    assert named(*reports) == [2]


def test_of_processes_that_wait_for_each_other_the_fewer_are_named():
    reports = [
        waits(0, "step", 5, 12.0, begun=5, meeting=2),
        waits(1, "meeting", 3, 12.0, begun=4, reached=4),
        waits(2, "step", 5, 12.0, begun=5, meeting=2),
    ]
    (stall,), _ = judge(*reports)
    assert stall.process == 1
    assert "1 step fewer than they have" in words.describe(stall)


@pytest.mark.parametrize("short", [0, 1])
def test_of_two_the_process_with_fewer_steps_is_named(short):
    reports = [
        waits(1 - short, "step", 5, 12.0, begun=5, meeting=2),
        waits(short, "meeting", 3, 12.0, begun=4, reached=4),
    ]
    assert named(*reports) == [short]


def test_a_process_that_compiles_is_named_once_without_an_alarm():
    compiling = works(1, "compile", is_busy=True, reached=4, name="jit_step")
    stalls, excused = judge(waits(0, "step", 5, 30.0), compiling, ticks=5)
    assert stalls == ()
    assert [stall.process for stall in excused] == [1]
    assert "has compiled `jit_step`" in words.describe_excused(excused[0])


def test_a_process_that_hangs_while_it_compiles_is_named():
    compiling = works(1, "compile", is_busy=False, reached=4)
    assert named(waits(0, "step", 5, 30.0), compiling) == [1]


def test_after_a_compilation_the_wait_counts_from_its_end():
    options = WatchOptions(STALL_S, 2)
    state = rules.start(options, now_s=0.0)
    found = []
    for i in range(60):
        place = ("compile", True) if i < 30 else ("python", False)
        other = works(1, place[0], is_busy=place[1], reached=4)
        reports = [waits(0, "step", 5, float(i)), other]
        state = rules.receive(state, reports, now_s=float(i))
        state, findings = rules.tick(state, now_s=float(i))
        found += [(stall.process, i) for stall in findings.begun]
    assert found == [(1, 29 + 10 + 1)]


@pytest.mark.parametrize("state", ["stopped", "traced", "deaf"])
def test_a_process_that_cannot_run_is_named_where_all_have_come(state):
    ill = waits(1, "step", 5, 50.0, state=state, state_s=11.0)
    assert named(waits(0, "step", 5, 50.0), ill) == [1]
    ill = waits(1, "step", 5, 50.0, state=state, state_s=9.0)
    assert named(waits(0, "step", 5, 50.0), ill) == []


def test_a_process_that_is_gone_is_named():
    gone = works(1, state="gone", state_s=12.0, reached=5, end="ended")
    assert named(waits(0, "step", 5, 50.0), gone) == [1]


def test_a_process_that_reads_from_the_keyboard_is_not_named():
    at_prompt = works(1, state="prompt", reached=4)
    assert named(waits(0, "step", 5, 500.0), at_prompt, ticks=3) == []


def test_a_process_whose_loader_reads_is_named_in_join_batches():
    reading = works(1, "loader", iteration=6)
    stalls, _ = judge(waits(0, "iteration", 7, 12.0), reading)
    assert [stall.process for stall in stalls] == [1]
    assert "has been in its loader for" in words.describe(stalls[0])


def test_processes_that_all_wait_in_one_program_are_not_named_soon():
    assert named(waits(0, "step", 5, 50.0), waits(1, "step", 5, 50.0)) == []
    reports = [waits(i, "step", 5, 61.0) for i in range(2)]
    (stall,), _ = judge(*reports)
    assert stall.process == -1
    assert "look at the network" in words.describe(stall)
    # Of some processes alone it is not known.
    assert named(*reports, num_processes=3) == []


def test_operations_of_the_eager_engine_blame_no_healthy_process():
    assert named(waits(0, "eager", 0, 50.0), works(1)) == []
    ill = works(1, state="stopped", state_s=12.0)
    assert named(waits(0, "eager", 0, 50.0), ill) == [1]


def test_a_host_that_does_not_report_is_named():
    options = WatchOptions(STALL_S, 2)
    state = rules.start(options, now_s=0.0)
    there = replace(waits(1, "step", 5, 0.0), host=1)
    state = rules.receive(state, [there], now_s=0.0)
    found = []
    for i in range(1, 20):
        state = rules.receive(state, [waits(0, "step", 5, float(i))], now_s=float(i))
        state, findings = rules.tick(state, now_s=float(i))
        found += [(stall.process, i) for stall in findings.begun]
    assert found == [(1, 11)]
    (stall,) = findings.lasting
    text = words.describe(stall, {0: "0 (alpha)", 1: "1 (beta)"})
    assert "process 1 on host 1 (beta) has not been heard for 19 s" in text


def test_a_watcher_that_slept_blames_no_process_for_that_time():
    options = WatchOptions(STALL_S, 2)
    state = rules.start(options, now_s=0.0)
    situation = waits(0, "step", 5, 1.0), works(1, reached=4)
    state = rules.receive(state, situation, now_s=0.0)
    state, _ = rules.tick(state, now_s=0.0)
    later = waits(0, "step", 5, 61.0), works(1, reached=4)
    state = rules.receive(state, later, now_s=60.0)
    state, findings = rules.tick(state, now_s=60.0)
    assert findings.begun == ()
    begun = []
    for i in range(1, 15):
        state = rules.receive(state, later, now_s=60.0 + i)
        state, findings = rules.tick(state, now_s=60.0 + i)
        begun += [i for _ in findings.begun]
    assert begun == [11]


def test_an_alarm_begins_once_and_is_over_when_the_process_goes_on():
    options = WatchOptions(STALL_S, 2)
    state = rules.start(options, now_s=0.0)
    situation = waits(0, "step", 5, 11.0), works(1, reached=4)
    begun, resumed = [], []
    for i in range(4):
        state = rules.receive(state, situation, now_s=float(i))
        state, findings = rules.tick(state, now_s=float(i))
        begun += findings.begun
    state = rules.receive(state, [works(0, reached=5)], now_s=4.0)
    state, findings = rules.tick(state, now_s=4.0)
    resumed += findings.resumed
    assert [stall.process for stall in begun] == [1]
    assert [each.process for each in resumed] == [1]


@pytest.mark.parametrize("num_processes", [2, 12])
def test_no_schedule_makes_a_wrong_name_or_misses_a_stall(num_processes):
    num_named = 0
    for seed in range(150):
        wrong, count = simulation.run(seed, num_processes)
        assert wrong == []
        num_named += count
    assert num_named > 20


def test_many_processes_are_told_apart():
    wrong = [text for seed in range(3) for text in simulation.run(seed, 256)[0]]
    assert wrong == []
