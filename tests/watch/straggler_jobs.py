"""Straggler jobs: is a slow process of a real job named, within thirty steps?

python -m tests.watch.straggler_jobs [--runs 5]
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
PROGRAM = ROOT / "tests" / "watch" / "straggler_program.py"
KINDS = "gloo", "shared memory", "loader", "ahead"
ONSET = 40


class Found(NamedTuple):
    """What came of a job.

    Attributes:
      lines: the lines of the launcher about a slow process.
      step: the last step that the program has printed before the first of them.
      since: since which step that line says that the process is slow.
      output: the whole output.
    """

    lines: list[str]
    step: int
    since: int
    output: str


def run(
    kind: str,
    *,
    factor: float,
    process: int = 1,
    num_processes: int = 2,
    num_steps: int = 100,
    options: tuple[str, ...] = (),
) -> Found:
    """Trains; one process takes `factor` times as long from step `ONSET` on."""
    command = [sys.executable, "-m", "jdp.cli.main", "launch", "-n", str(num_processes)]
    command += [*options, str(PROGRAM), kind, str(factor), str(process), str(num_steps)]
    job = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert job.returncode == 0, job.stdout
    lines = re.findall(r"^jdp launch: (.*slower than.*)$", job.stdout, re.MULTILINE)
    step = since = 0
    if lines:
        before, _, _ = job.stdout.partition(lines[0])
        step = max(map(int, re.findall(r"at step (\d+)$", before, re.MULTILINE)))
        found = re.search(r"since step (\d+)", lines[0])
        assert found is not None
        since = int(found[1])
    return Found(lines, step, since, job.stdout)


def judge(found: Found, process: int = 1) -> str | None:
    """Returns what is wrong with the lines about a process slowed by a fifth."""
    if len(found.lines) != 1:
        return f"{len(found.lines)} lines: {found.lines}"
    if not found.lines[0].startswith(f"process {process} has been slower"):
        return f"another process: {found.lines[0]}"
    if found.step >= ONSET + 30:
        return f"after step {found.step}"
    return None


def main() -> None:
    """Runs each kind several times, slow and not slow."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    num_wrong = 0
    for kind in KINDS:
        for i in range(parser.parse_args().runs):
            for num_processes in (2, 3):
                process = i % num_processes
                place = {"process": process, "num_processes": num_processes}
                found = run(kind, factor=1.2, **place)
                wrong = judge(found, process)
                num_wrong += wrong is not None
                text = wrong or f"step {found.step}: {found.lines[0]}"
                print(kind, num_processes, text, flush=True)
                alike = run(kind, factor=1.0, **place).lines
                num_wrong += bool(alike)
                print(kind, num_processes, "alike:", alike, flush=True)
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
