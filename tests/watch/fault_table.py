"""Fault table: is every hang named, with its process and its phase, and soon?

    python -m tests.watch.fault_table [--causes stop] [--moments compile]

A process hangs at a moment. The launcher must name it, and where it hangs, within
`stall_s` and 3 s, and end the job with an exit code of its own.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from jdp.watch import job_watch

PROGRAM = pathlib.Path(__file__).with_name("fault_program.py")
ROOT = PROGRAM.parent.parent.parent
CAUSES = ("stop", "loop", "blocked", "lock")
MOMENTS = ("start", "compile", "gloo", "shared memory", "join_batches", "checkpoint")
# Causes that have one moment.
OTHERS = (("fewer", "gloo"), ("swallowed", "gloo"), ("compiling", "gloo"))
STALL_S = 5.0
SOON_S = 3.0
_STATES = {
    "stop": r"has been stopped for",
    "loop": r"\(computing\)",
    "blocked": r"\(sleeping or blocked\)",
    "lock": r"has run no Python code for .* \(C code holds Python's lock\)",
}
_PLACES = {
    "start": r"before `jdp\.init`",
    "compile": r"tracing the step `train`",
    "join_batches": r"in its loader",
    # A process that stops at once has not seen the end of its last step.
    "checkpoint": r"(in Python between steps|at the end of the program of the step)",
}
_ANYWHERE = r"(the program of the step|in Python between steps|in the call of)"


class Found(NamedTuple):
    """What a job said about one fault.

    Attributes:
      wrong: what is wrong with it; None: nothing.
      took_s: from the fault to its name.
      alarm: the line that names it.
    """

    wrong: str | None
    took_s: float | None = None
    alarm: str = ""


def check(
    cause: str,
    moment: str,
    *,
    process: int = 1,
    num_processes: int = 2,
    stall_s: float = STALL_S,
    lasts_s: float = 600.0,
    on_stall: str = "log",
) -> Found:
    """Runs one cell in a job of its own, until the alarm."""
    command = [sys.executable, "-m", "jdp.cli.main", "launch", "-n", str(num_processes)]
    command += ["--grace-s", "1", "--stall-s", str(stall_s), "--on-stall", on_stall]
    command += [str(PROGRAM), cause, moment, str(process), str(lasts_s)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    lines: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,  # for the file about the stall.
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ | {"TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as job,
    ):
        assert job.stdout is not None
        begun_s = alarm_s = None
        alarm = ""
        for line in job.stdout:
            lines.append(line)
            if begun := re.search(r"fault [\w ]+ at [\w ]+? ([\d.]+)$", line):
                begun_s = float(begun[1])
            if begun_s is not None and _is_alarm(line) and alarm_s is None:
                alarm_s, alarm = time.time(), line.strip()
                if on_stall == "log":
                    job.terminate()
        code = job.wait()
    if begun_s is None:
        return Found(f"the fault did not happen:\n{''.join(lines)[-2000:]}")
    if alarm_s is None:
        return Found(f"no alarm, exit code {code}:\n{''.join(lines)[-2000:]}")
    took_s = alarm_s - begun_s
    wrong = _judge(cause, moment, process, alarm, took_s - stall_s)
    if wrong is None and on_stall == "raise" and code != job_watch.STALLED_CODE:
        wrong = f"exit code {code}"
    return Found(wrong, took_s, alarm)


def _is_alarm(line: str) -> bool:
    return re.search("^jdp launch: process.* ha(s|ve) waited ", line) is not None


def _judge(
    cause: str, moment: str, process: int, alarm: str, late_s: float
) -> str | None:
    """Returns what is wrong with an alarm."""
    if f"process {process} has " not in alarm:
        return f"another process is named: {alarm}"
    match cause:
        case "fewer":
            expected = [r"it has begun 1 step fewer than they have"]
        case "swallowed":
            expected = [r"Its call of step 11 has raised, and its program went on"]
        case "compiling":
            expected = [r"has compiled `.+` for .* not an alarm"]
        case "loop" if moment == "start":  # As imports do.
            expected = [r"has been starting for .* not an alarm"]
        case _:
            state, place = _STATES[cause], _PLACES.get(moment, _ANYWHERE)
            if cause in ("stop", "lock") and moment == "join_batches":
                place = _ANYWHERE  # All threads stand, wherever the main thread is.
            if cause == "lock" and moment == "start":
                state = _STATES["blocked"]  # It has no record yet.
            expected = [state, place]
    for pattern in expected:
        if not re.search(pattern, alarm):
            return f"no {pattern!r} in: {alarm}"
    # A start takes a while until the others wait, and the last step before a fault.
    if late_s > SOON_S + (10.0 if moment in ("start", "compile") else 1.0):
        return f"{late_s:.1f} s after the limit: {alarm}"
    return None


def main() -> None:
    """Runs the cells that the command line names; by default all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--causes", nargs="*", default=CAUSES)
    parser.add_argument("--moments", nargs="*", default=MOMENTS)
    parser.add_argument("--others", action="store_true", help="also single cells")
    options = parser.parse_args()
    cells = [(cause, moment) for cause in options.causes for moment in options.moments]
    num_wrong = 0
    for cause, moment in [*cells, *(OTHERS if options.others else ())]:
        lasts_s = 20.0 if cause == "compiling" else 600.0
        found = check(cause, moment, lasts_s=lasts_s)
        num_wrong += found.wrong is not None
        took = "" if found.took_s is None else f"{found.took_s:.1f} s"
        print(cause, moment, took, found.wrong or f"right: {found.alarm}", flush=True)
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
