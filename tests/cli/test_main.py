"""Command line: what do all commands of `jdp` have in common?"""

import os
import subprocess
import sys

import pytest

from tests import harness


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["completion", "bash"]])
def test_a_full_disk_is_an_error_of_one_line(words):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "jdp.cli.main", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": harness.python_path()},
            timeout=60,
        )
    assert process.returncode == 1
    assert process.stderr == (
        "jdp: output cannot be written (No space left on device).\n"
    )
