"""Checks of an engine that starts, waits, is watched and ends; each starts its own."""

import contextlib
import json
import logging
import pathlib
import time
from collections.abc import Iterator

import numpy as np

from jdp import eager
from jdp.eager import EagerOptions, session
from jdp.replicas.mesh import World
from tests.eager.checks import Process

_NAMES = [f"layers.{i}" for i in range(5)]


@contextlib.contextmanager
def _engine(me: Process, **options) -> Iterator[list[str]]:
    """An engine, and what it logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("jdp").addHandler(handler)
    eager.init(
        me.world,
        EagerOptions(
            **{
                "flight_recorder_capacity": 0,
                "stall_warning_s": 30.0,
                "stall_shutdown_s": 40.0,
                **options,
            }
        ),
    )
    try:
        yield lines
    finally:
        eager.shutdown()
        logging.getLogger("jdp").removeHandler(handler)


def _wait_until(condition, *, deadline_s: float = 20.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError("what the test waits for did not come")
        time.sleep(0.02)


def _read(path: pathlib.Path, rank: int) -> list[dict]:
    return json.loads(path.with_name(f"{path.stem}.rank{rank}.json").read_text())


def _spans(events: list[dict]) -> dict[str, dict[str, dict]]:
    """By tensor and phase, the last span."""
    names = {
        each["tid"]: each["args"]["name"]
        for each in events
        if each["name"] == "thread_name"
    }
    found: dict[str, dict[str, dict]] = {}
    for each in events:
        if each["ph"] == "X":
            found.setdefault(names[each["tid"]], {})[each["name"]] = each
    return found


# Start and end


def without_an_engine_calls_say_what_to_do(me: Process, folder: pathlib.Path):
    x = np.ones((me.size, 2), np.float32)
    calls = {
        "all_reduce": lambda: eager.all_reduce(x),
        "all_gather": lambda: eager.all_gather(x),
        "broadcast": lambda: eager.broadcast(x),
        "all_to_all": lambda: eager.all_to_all(x),
        "reduce_scatter": lambda: eager.reduce_scatter(x),
        "grouped": lambda: eager.grouped_all_reduce([x]),
        "barrier": eager.barrier,
        "join": eager.join,
        "object": lambda: eager.broadcast_object(1),
        "objects": lambda: eager.all_gather_object(1),
        "parameters": lambda: eager.broadcast_parameters({"x": x}),
        "rank": eager.rank,
        "size": eager.size,
        "set": lambda: eager.add_process_set([0]),
        "timeline": lambda: eager.start_timeline("trace.json"),
    }
    me.expect(eager.is_initialized(), False)
    me.expect(eager.global_process_set.size(), None)
    me.expect(eager.global_process_set.rank(), None)
    for call in calls.values():
        me.expect_error(
            RuntimeError, ["does not run", "jdp.eager.init()", "jdp.init()"], call
        )
    for _ in range(2):
        with _engine(me):
            me.expect([eager.is_initialized(), eager.rank()], [True, me.rank])
            me.expect([eager.size(), eager.global_process_set.size()], [me.size] * 2)
            me.expect_it_works()
            eager.init()  # Nothing happens, where it is the same.
            me.expect_error(
                RuntimeError,
                ["was called before, with other `options`", "shutdown"],
                lambda: eager.init(options=EagerOptions(cycle_time_s=0.5)),
            )
            eager.barrier()  # The first to leave ends the engine of all.
        me.expect(eager.is_initialized(), False)
        for call in calls.values():
            words = ["has ended", "has shut the engine down", "`jdp.eager.init`"]
            me.expect_error(RuntimeError, words, call)
    eager.shutdown()  # Nothing happens.


def one_that_shuts_down_ends_the_others(me: Process, folder: pathlib.Path):
    last = me.size - 1
    with _engine(me):
        x = np.ones(3, np.float32)
        done = eager.all_reduce_async(x, op="sum", name=me.name("all have it"))
        if me.rank != last:
            waiting = eager.all_reduce_async(x, name=me.name("waits"))
        eager.barrier()
        if me.rank == last:
            eager.shutdown()
        words = [f"rank {last} has shut the engine down"]
        if me.rank != last:
            me.expect(eager.synchronize(done), x * me.size, "what all have submitted")
            me.expect_error(RuntimeError, words, lambda: eager.synchronize(waiting))
            me.expect_error(RuntimeError, words, lambda: eager.all_reduce(x))
            me.expect(eager.is_initialized(), True, "until its own shutdown")
    me.expect(eager.is_initialized(), False)
    with _engine(me):
        me.expect_it_works()


def process_sets_may_be_there_from_the_start(me: Process, folder: pathlib.Path):
    pair, alone = eager.ProcessSet([0, 2]), eager.ProcessSet([1])
    eager.init(me.world, EagerOptions(), process_sets=[pair, alone])
    me.expect([pair.process_set_id, alone.process_set_id], [1, 2])
    if pair.included():
        found = eager.all_reduce(np.ones(2), op="sum", name="x", process_set=pair)
        me.expect(found, np.full(2, 2.0))
    again = eager.ProcessSet([2, 0])
    eager.init(process_sets=[again, [0, 1]])
    me.expect(again.process_set_id, 1, "the one that is there")
    me.expect([eager.local_rank(), eager.local_size()], [me.rank, me.size])
    me.expect([eager.cross_rank(), eager.cross_size()], [0, 1], "on one host")
    eager.shutdown()
    for wrong in ([[0, 1], [1, 0]], [range(me.size)], [[0, me.size]]):
        me.expect_error(
            ValueError,
            ["anks" if wrong[0][-1] == me.size else "duplicate process set"],
            lambda w=wrong: eager.init(me.world, process_sets=w),
        )
        me.expect(eager.is_initialized(), False, "it does not run")
    with _engine(me):
        me.expect_it_works()


def a_barrier_may_give_up(me: Process, folder: pathlib.Path):
    last, told = me.size - 1, folder / "gave up"
    with _engine(me):
        if me.rank != last:
            me.expect_error(
                TimeoutError,
                ["barrier", "not done within 0.2 s", f"{last}: ["],
                lambda: eager.barrier(timeout_s=0.2),
            )
            told.with_suffix(f".{me.rank}").touch()
        else:
            _wait_until(lambda: len(list(folder.glob("gave up.*"))) == last)
            eager.barrier(timeout_s=20.0)  # The others have come to this one.
        eager.barrier(timeout_s=20.0)
        me.expect_it_works()


def a_rank_may_ask_in_a_loop(me: Process, folder: pathlib.Path):
    last, told = me.size - 1, folder / "asked"
    options = {"flight_recorder_capacity": 8, "flight_recorder_dir": str(folder)}
    with _engine(me, **options) as lines:
        if me.rank == last:
            _wait_until(lambda: len(list(folder.glob("asked.*"))) == last)
        handle = eager.all_reduce_async(np.ones(2), op="sum", name="asked for")
        if me.rank != last:
            for _ in range(3):
                me.expect_error(
                    TimeoutError,
                    ["asked for: not done within 0.1 s"],
                    lambda: eager.synchronize(handle, timeout_s=0.1),
                )
            me.expect(len([x for x in lines if "flight" in x]), 1, "one report")
            told.with_suffix(f".{me.rank}").touch()
        me.expect(eager.synchronize(handle), np.full(2, float(me.size)))


# Ranks that are late


def a_late_rank_is_named_with_what_it_is_waited_for(me: Process, folder: pathlib.Path):
    late, told = me.rank == me.size - 1, folder / "told"
    with _engine(me, stall_warning_s=1.0) as lines:
        x = np.ones(3, np.float32)
        for _ in range(2):  # So that this name is cached.
            eager.all_reduce(x, name="cached")
        handles = []
        if late:
            _wait_until(told.exists)
        handles = [eager.all_reduce_async(x, op="sum", name=name) for name in _NAMES]
        handles.append(eager.all_reduce_async(x, op="sum", name="cached"))
        if me.rank == 0:
            _wait_until(lambda: any("cached" in line for line in lines))
            told.touch()
        found = [eager.synchronize(handle) for handle in handles]
        me.expect(found, [x * me.size] * 6)
    if me.rank == 0:
        for line in lines:
            me.expect("more than 1 s" in line.splitlines()[0], True, line)
            me.expect("Missing ranks:" in line.splitlines(), True, line)
        shown = f"{me.size - 1}: [{', '.join(_NAMES)}, cached]"
        me.expect(shown in lines[-1].splitlines(), True, f"{shown} in {lines}")
    else:
        me.expect_equal(lines, [])


def without_stall_checks_nothing_is_said(me: Process, folder: pathlib.Path):
    with _engine(me, stall_warning_s=0.0) as lines:
        if me.rank == me.size - 1:
            time.sleep(2.5)
        me.expect_it_works()
    me.expect_equal(lines, [])


def a_rank_that_is_too_late_ends_the_engine_everywhere(
    me: Process, folder: pathlib.Path
):
    last = me.size - 1
    words = ["has waited for rank 2", "longer than 2 s; shutting down"]
    with _engine(me, stall_warning_s=1.0, stall_shutdown_s=2.0) as lines:
        x = np.ones(3, np.float32)
        start_s = time.monotonic()
        if me.rank != last:
            me.expect_error(
                RuntimeError,
                ["'lost'", *words],
                lambda: eager.all_reduce(x, name="lost"),
            )
            me.expect(1.5 < time.monotonic() - start_s < 20.0, True, "seconds")
        else:
            _wait_until(lambda: not session.is_running())
        me.expect_error(RuntimeError, words, lambda: eager.all_reduce(x, name="next"))
        me.expect_error(RuntimeError, words, eager.join)
        if me.rank == 0:
            me.expect(any(f"{last}!: [lost]" in line for line in lines), True, "marked")
            me.expect(any("Shutting down" in line for line in lines), True, f"{lines}")
    with _engine(me):
        me.expect_it_works()


def who_waits_too_long_is_told_for_whom(me: Process, folder: pathlib.Path):
    last = me.size - 1
    with _engine(me):
        x = np.ones(3, np.float32)
        handle = None
        if me.rank != last:
            handle = eager.all_reduce_async(x, op="sum", name="waits")
            me.expect_error(
                TimeoutError,
                [
                    "waits",
                    "not done within 0.2 s",
                    "Missing ranks:",
                    f"{last}: [waits]",
                ],
                lambda: eager.synchronize(handle, timeout_s=0.2),
            )
        eager.barrier()
        if me.rank == last:
            handle = eager.all_reduce_async(x, op="sum", name="waits")
        me.expect(eager.synchronize(handle), x * me.size, "it was still under way")


# Timeline


def a_timeline_shows_what_was_negotiated_and_run(me: Process, folder: pathlib.Path):
    path = folder / "trace.json"
    with _engine(me, timeline=str(path), timeline_mark_cycles=True):
        x = np.ones((me.size, 2), np.float32)
        for _ in range(2):
            eager.all_reduce(x, name="reduced")
        eager.all_gather(x, name="gathered")
        eager.broadcast(x, name="sent")
        eager.reduce_scatter(x, name="scattered")
        eager.all_to_all(x, name="exchanged")
        eager.all_reduce({"a": x, "b": x}, name="tree")
        eager.all_reduce(x)
        eager.barrier()
    events = _read(path, me.rank)
    spans = _spans(events)
    for tensor, phase in {
        "reduced": "ALL_REDUCE",
        "gathered": "ALL_GATHER",
        "sent": "BROADCAST",
        "scattered": "REDUCE_SCATTER",
        "exchanged": "ALL_TO_ALL",
        "tree['a']": "ALL_REDUCE",
        "unnamed all_reduce": "ALL_REDUCE",
    }.items():
        found = spans.get(tensor, {})
        order = [f"NEGOTIATE_{phase}", "QUEUE", phase]
        parts = ["MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"]
        parts = parts if tensor.startswith("tree") else []
        me.expect_equal(sorted(found), sorted([*order, *parts]), tensor)
        for part in parts:
            start, whole = found[part]["ts"], found[phase]
            end = start + found[part]["dur"]
            is_inside = whole["ts"] <= start and end <= whole["ts"] + whole["dur"]
            me.expect(is_inside, True, part)
        ends = [found[each]["ts"] for each in order]
        me.expect(ends == sorted(ends), True, f"{tensor}: {ends}")
    me.expect_equal(spans["tree['a']"]["ALL_REDUCE"]["args"]["fused"], 2, "fused")
    starts = [
        each["args"]["start_time_since_epoch_in_micros"]
        for each in events
        if "start_time_since_epoch_in_micros" in each.get("args", {})
    ]
    me.expect(len(starts) == 1 and abs(time.time() - starts[0] / 1e6) < 60, True)
    instants = {each["name"] for each in events if each["ph"] == "i"}
    ready = {f"rank {rank} is ready" for rank in me.ranks} if me.rank == 0 else set()
    me.expect_equal(instants, {"CYCLE_START"} | ready)


def a_timeline_can_be_started_and_stopped_while_it_runs(
    me: Process, folder: pathlib.Path
):
    x = np.ones(3, np.float32)
    paths = [folder / f"run{i}.json" for i in range(3)]
    with _engine(me):
        eager.all_reduce(x, name="before")
        for i, path in enumerate(paths[:2]):
            eager.start_timeline(str(path), mark_cycles=i == 1)
            eager.start_timeline(str(paths[2]))  # One is under way.
            eager.all_reduce(x, name=f"run {i}")
            eager.all_reduce(x, name="both")
            eager.barrier()  # What is written of the sum has been by then.
            time.sleep(0.05)
            eager.stop_timeline()
            eager.stop_timeline()
            eager.all_reduce(x, name="between")
        me.expect_it_works()
    for i, path in enumerate(paths[:2]):
        events = _read(path, me.rank)
        me.expect_equal(set(_spans(events)), {f"run {i}", "both"})
        has_cycles = any(each["name"] == "CYCLE_START" for each in events)
        me.expect_equal(has_cycles, i == 1, "cycles")
    me.expect(list(folder.glob("run2*")), [], "the one that was not begun")
    with _engine(me):
        where = str(folder / "no such folder" / "trace.json")
        me.expect_error(
            FileNotFoundError, ["trace.rank"], lambda: eager.start_timeline(where)
        )
        me.expect_it_works()


def an_idle_engine_writes_its_timeline(me: Process, folder: pathlib.Path):
    path = folder / "idle.json"
    with _engine(me):
        eager.all_reduce(np.ones(3), name="before")
        time.sleep(0.2)  # The engine sleeps.
        eager.start_timeline(str(path))
        eager.all_reduce(np.ones(3), name="once")
        mine = path.with_name(f"idle.rank{me.rank}.json")
        _wait_until(lambda: '"once"' in mine.read_text())
        eager.barrier()


def what_has_failed_says_why_after_the_end_too(me: Process, folder: pathlib.Path):
    with _engine(me):
        handle = eager.all_reduce_async(np.ones(2 + me.rank), name="x")
        _wait_until(lambda: eager.poll(handle))
    for _ in range(2):
        me.expect_error(
            RuntimeError,
            ["Mismatched all_reduce shapes of 'x'"],
            lambda: eager.synchronize(handle),
        )
    with _engine(me):
        me.expect_error(RuntimeError, ["Mismatched"], lambda: eager.synchronize(handle))


def an_engine_that_spins_hears_what_it_is_asked(me: Process, folder: pathlib.Path):
    with _engine(me):
        engine = session.current_engine()
        engine._spin_s = 1000.0  # More than options allow.
        eager.all_reduce(np.ones(2), name="x")
        eager.join()
        eager.barrier()
        begin_s = time.monotonic()
        eager.shutdown()
        took_s = time.monotonic() - begin_s
    me.expect_equal(took_s < 15.0, True, f"{took_s} s")


CHECKS = (
    without_an_engine_calls_say_what_to_do,
    what_has_failed_says_why_after_the_end_too,
    an_engine_that_spins_hears_what_it_is_asked,
    one_that_shuts_down_ends_the_others,
    process_sets_may_be_there_from_the_start,
    a_barrier_may_give_up,
    a_rank_may_ask_in_a_loop,
    an_idle_engine_writes_its_timeline,
    a_late_rank_is_named_with_what_it_is_waited_for,
    without_stall_checks_nothing_is_said,
    a_rank_that_is_too_late_ends_the_engine_everywhere,
    who_waits_too_long_is_told_for_whom,
    a_timeline_shows_what_was_negotiated_and_run,
    a_timeline_can_be_started_and_stopped_while_it_runs,
)


def run(world: World, folder: str) -> dict[str, str]:
    """Runs the checks; returns by check what was wrong on this rank."""
    found = {}
    for check in CHECKS:
        process = Process(world, check.__name__)
        try:
            check(process, pathlib.Path(folder))
        except Exception as error:
            process.problems.append(repr(error))
        found[check.__name__] = "\n".join(process.problems)
    return found
