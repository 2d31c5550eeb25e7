"""Fault table: who is blamed, and how soon, for every fault at every moment.

    python -m tests.launch.fault_table [--processes 2] [--faults kill] [--moments step]

The launcher must name the process that met the fault, with an exit code that is not 0,
unless the fault is no failure: an end with 0 when all steps are done.
"""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import NamedTuple

PROGRAM = pathlib.Path(__file__).with_name("fault_program.py")
ROOT = PROGRAM.parent.parent.parent
FAULTS = ("raise", "exit3", "exit0", "_exit3", "segv", "abrt", "kill", "oom")
MOMENTS = (
    *("import", "before_init", "in_init", "after_init", "compile"),
    *("loader", "step", "end", "atexit"),
)
LONGEST_S = 20.0  # from the fault to the end of the job.
_CODES = {"raise": 1, "exit3": 3, "_exit3": 3, "oom": 1}
_SIGNALS = {"segv": signal.SIGSEGV, "abrt": signal.SIGABRT, "kill": signal.SIGKILL}


class Found(NamedTuple):
    """What a job did with one fault."""

    wrong: str | None  # what is wrong with it.
    took_s: float | None = None  # from the fault to the end; None: it did not happen.


def is_harmless(fault: str, when: str) -> bool:
    """Whether the job may end well."""
    # Python ignores exceptions of exit handlers, also SystemExit.
    is_ignored = when == "atexit" and fault in ("raise", "exit3", "oom")
    return is_ignored or (fault == "exit0" and when in ("end", "atexit"))


def check(
    fault: str, when: str, process: int, *, num_processes: int, is_joined: bool = False
) -> Found:
    """Runs one cell in a job of its own."""
    arguments = [fault, when, str(process)] + ["join"] * is_joined
    try:
        job = subprocess.run(
            [
                *(sys.executable, "-m", "jdp.cli.main", "launch"),
                *("-n", str(num_processes), "--grace-s", "2", str(PROGRAM)),
                *arguments,
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
    except subprocess.TimeoutExpired as error:
        return Found(f"it did not end:\n{(error.stdout or b'')[-2000:]!r}")
    end_s = time.time()
    text = job.stdout + job.stderr
    begun = re.search(r"fault \w+ at \w+ ([\d.]+)", text)
    if begun is None:
        return Found(f"the fault did not happen:\n{text[-2000:]}")
    took_s = end_s - float(begun[1])
    return Found(_judge(fault, when, process, job, took_s), took_s)


def _judge(
    fault: str,
    when: str,
    process: int,
    job: "subprocess.CompletedProcess[str]",
    took_s: float,
) -> str | None:
    """Returns what is wrong with the end of a job."""
    text = job.stdout + job.stderr
    said = re.findall(r"^jdp launch: (.*)", job.stderr, re.MULTILINE)
    if is_harmless(fault, when):
        if job.returncode == 0 and not said:
            return None
        return f"exit code {job.returncode}, {said}\n{text[-3000:]}"
    if took_s > LONGEST_S:
        return f"it took {took_s:.1f} s\n{text[-3000:]}"
    codes = {_CODES.get(fault, 1)}
    if fault in _SIGNALS:
        codes = {128 + _SIGNALS[fault]}
    elif fault == "exit3":
        codes = {1, 3}
    if job.returncode not in codes:
        return f"exit code {job.returncode}, {said}\n{text[-3000:]}"
    if not said or not said[0].startswith(f"process {process} "):
        return f"{said}\n{text[-3000:]}"
    return None


def main() -> None:
    """Runs the cells that the command line names; by default all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--faults", nargs="*", default=FAULTS)
    parser.add_argument("--moments", nargs="*", default=MOMENTS)
    options = parser.parse_args()
    num_wrong = 0
    for num_processes in options.processes:
        for fault in options.faults:
            for when in options.moments:
                for process in (0, 1):
                    for is_joined in (False, True)[: 1 + (when in ("loader", "step"))]:
                        cell = f"-n {num_processes} {fault} {when} {process}"
                        cell += " join" * is_joined
                        found = check(
                            *(fault, when, process),
                            num_processes=num_processes,
                            is_joined=is_joined,
                        )
                        num_wrong += found.wrong is not None
                        took = "" if found.took_s is None else f"{found.took_s:.1f} s"
                        print(cell, took, found.wrong or "right", flush=True)
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
