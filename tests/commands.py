"""Commands: `jdp` and `jdp launch`, started as a user starts them."""

import os
import subprocess
import sys
import tempfile

from jdp.launch import launch as launching
from tests import harness


def environ(compiled_as="fast"):
    """The variables of a command; warnings are errors."""
    base = harness.compile_fast_environ() if compiled_as == "fast" else os.environ
    return {**base, "PYTHONPATH": harness.python_path(), "PYTHONWARNINGS": "error"}


def jdp(*arguments, cwd=harness.ROOT):
    """Runs the command itself; returns its exit code, stdout and stderr."""
    result = subprocess.run(
        [sys.executable, "-m", "jdp.cli.main", *map(str, arguments)],
        cwd=cwd,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    return result.returncode, result.stdout, result.stderr


def launch(num_processes, script, *arguments, cwd=harness.ROOT, compiled_as="fast"):
    """Does what `jdp launch -n` does, in this process."""
    command = launching.Command(
        kind="script",
        target=str(cwd / script),
        arguments=tuple(map(str, arguments)),
    )
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = launching.launch(
            command,
            launching.LaunchOptions(num_processes=num_processes),
            environ=environ(compiled_as),
            stdout_fd=out.fileno(),
            stderr_fd=err.fileno(),
        )
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return code, *texts
