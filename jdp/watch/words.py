"""Words: how does the watch describe a stall?"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from jdp.watch.process_report import ProcessReport
from jdp.watch.rules import Resumed, Stall
from jdp.watch.stragglers import Straggler

_MOST_NAMED = 8


def describe(
    stall: Stall,
    hosts: Mapping[int, str] | None = None,
    *,
    has_launchers: bool = True,
) -> str:
    """Describes a stall in two or three sentences.

    Args:
      stall: the stall.
      hosts: label of each host, by index; a single host is not named.
      has_launchers: whether launchers watch the processes.
    """
    waiting = _list_processes(stall.waiting)
    where = _describe_wait(stall.waiting)
    if stall.process < 0:
        return (
            f"all processes have waited for {stall.waited_s:.0f} s in {where}. All of "
            "them have come to it, and none is stopped: look at the network, or at "
            "what the program computes."
        )
    report = stall.report
    who = f"process {report.process}"
    if hosts and len(hosts) > 1:
        who += f" on host {hosts.get(report.host, 'unknown')}"
    begun = " before its first step"
    report = _correct(stall)
    if report.place in ("call", "trace", "compile", "program"):
        begun = f" at step {report.begun}"
    elif report.begun:
        begun = f" after step {report.begun}"
    text = (
        f"{who} {_describe_place(report, has_launchers)}{begun}; {waiting} "
        f"{_have(stall.waiting)} waited {stall.waited_s:.0f} s for it, in {where}."
    )
    if report.failed:
        text += (
            f" Its call of step {report.failed} has raised, and its program went on "
            "without that step."
        )
    elif report.wait is not None and report.state == "well":
        text += _describe_difference(report, stall.waiting)
    if report.frame:
        text += f" Its main thread is at {report.frame}."
    return text


def describe_excused(stall: Stall) -> str:
    """Describes a process that others wait for, and that may take long."""
    report = stall.report
    what = "been starting" if report.place == "start" else f"compiled `{report.name}`"
    return (
        f"process {report.process} has {what} for {report.place_s:.0f} s; "
        f"{_list_processes(stall.waiting)} {_have(stall.waiting)} waited "
        f"{stall.waited_s:.0f} s for it. It is not an alarm while that goes on."
    )


def describe_resumed(resumed: Resumed) -> str:
    """Describes a process that has gone on after an alarm."""
    if resumed.process < 0:
        return f"the processes go on after {resumed.waited_s:.0f} s."
    return f"process {resumed.process} goes on; others waited {resumed.waited_s:.0f} s."


def describe_straggler(straggler: Straggler) -> str:
    """Describes a process that is slower than the others."""
    shares = straggler.shares
    work_ms, others_ms = shares.work_s * 1e3, straggler.others_s * 1e3
    text = (
        f"process {straggler.process} has been slower than the others since step "
        f"{straggler.since_step}: {work_ms:.3g} ms of work per step, and theirs takes "
        f"{others_ms:.3g} ms. This costs {straggler.cost:.0%} of the time of the job."
    )
    more_ms = (shares.loading_s - straggler.others_loading_s) * 1e3
    if more_ms > (work_ms - others_ms) / 2:
        text += f" Its loader takes {more_ms:.3g} ms more than theirs."
    return text


def _correct(stall: Stall) -> ProcessReport:
    """Returns a report that knows that the step has ended, as others have seen."""
    report = stall.report
    has_ended = any(other.finished >= report.reached for other in stall.waiting)
    if report.place == "program" and has_ended:
        return replace(report, place="tail")
    return report


def _describe_place(report: ProcessReport, has_launchers: bool) -> str:
    """Describes where a process is, with the reason if that is known."""
    place_s, state_s = f"{report.place_s:.0f} s", f"{report.state_s:.0f} s"
    inside = _PLACES[report.place].format(name=report.name)
    match report.state:
        case "stopped":
            return f"has been stopped for {state_s} (SIGSTOP or Ctrl-Z), {inside},"
        case "traced":
            return f"has been held by a debugger for {state_s}, {inside},"
        case "gone":
            end = report.end or "it has ended"
            return f"has been gone for {state_s} ({end}), {inside},"
        case "unheard":
            why = "its launcher is stopped"
            if not has_launchers:
                why = "it is stopped or in C code that holds Python's lock"
            return (
                f"has not been heard for {state_s} (its host or the network failed, or "
                f"{why}), {inside},"
            )
        case "deaf":
            return (
                f"has run no Python code for {state_s} (C code holds Python's lock), "
                f"{inside},"
            )
    if report.place in ("python", "loader", "call", "trace", "start"):
        is_busy = report.is_main_busy
        if report.place == "loader":  # Maybe in the thread of `jdp.join_batches`.
            is_busy = report.is_busy
        how = "computing" if is_busy else "sleeping or blocked"
        return f"has been {inside} for {place_s} ({how}),"
    return f"has been {inside} for {place_s},"


_PLACES = {
    "start": "before `jdp.init`",
    "init": "in `jdp.init`",
    "python": "in Python between steps",
    "loader": "in its loader",
    "call": "in the call of the step `{name}` before its program",
    "trace": "tracing the step `{name}`",
    "compile": "compiling `{name}`",
    "program": "in the program of the step `{name}`",
    "tail": "at the end of the program of the step `{name}` or after it",
    "meeting": "in a meeting of all processes",
    "iteration": "in `jdp.join_batches`",
    "eager": "in an operation of `jdp.eager`",
    "end": "at the end of its program",
}


def _describe_wait(waiting: Sequence[ProcessReport]) -> str:
    """Describes the last collective that processes are in."""
    longest = max(waiting, key=lambda q: q.wait.waited_s if q.wait else 0.0)
    wait = longest.wait
    assert wait is not None
    match wait.kind:
        case "step":
            return f"the program of step {wait.number} (`{wait.name}`)"
        case "meeting":
            return f"the {wait.name}"
        case "iteration":
            return "`jdp.join_batches`"
        case "eager":
            return f"the operation `{wait.name}` of `jdp.eager`"
    return "`jdp.init`"


def _describe_difference(
    report: ProcessReport, waiting: Sequence[ProcessReport]
) -> str:
    """Explains that processes wait in different places."""
    most = max(other.begun for other in waiting)
    if report.begun == most:
        return (
            f" It waits for them too, in {_describe_wait([report])}: the processes do "
            "not call the same things in the same order."
        )
    count = abs(most - report.begun)
    few = "fewer" if most > report.begun else "more"
    return (
        f" It waits for them too, in {_describe_wait([report])}: it has begun {count} "
        f"step{'s' * (count != 1)} {few} than they have."
    )


def _list_processes(reports: Sequence[ProcessReport]) -> str:
    """Returns a list of processes, such as "processes 0, 2 and 3"."""
    names = [str(report.process) for report in reports]
    if len(names) == 1:
        return f"process {names[0]}"
    if len(names) > _MOST_NAMED:
        return f"processes {', '.join(names[:3])} and {len(names) - 3} others"
    return f"processes {', '.join(names[:-1])} and {names[-1]}"


def _have(reports: Sequence[ProcessReport]) -> str:
    return "have" if len(reports) > 1 else "has"


def with_frame(stall: Stall, frame: str) -> Stall:
    """Returns a stall whose report names the place of the main thread.

    Args:
      stall: the stall.
      frame: such as "train.py:12 in `load`"; "": not known.
    """
    return stall._replace(report=replace(stall.report, frame=frame))
