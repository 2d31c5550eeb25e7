"""Every example runs, as a user would start it; so does the one in README."""

import os
import re
import subprocess
import sys

import pytest

from tests import harness

pytestmark = pytest.mark.multiprocess


def _launch(*arguments, cwd=harness.ROOT):
    result = subprocess.run(
        [sys.executable, "-m", "jdp.cli.main", "launch", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(harness.ROOT), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    return result.returncode, result.stdout, result.stderr


def test_digits_trains_to_97_percent_on_equal_replicas():
    code, out, err = _launch("-n", 2, "examples/digits.py")
    assert code == 0, err
    (final,) = re.findall(r"2 replicas, bitwise equal; test accuracy (.*)%", out)
    assert float(final) > 97.0
    epochs = re.findall(
        r"\[0\] epoch +\d+  loss [\d.]+ +\d+ images/s  test accuracy [\d.]+%", out
    )
    assert len(epochs) == 25
    # The progress bar and all else is the main process' alone.
    assert not [s for s in out.splitlines() if s.startswith("[1]") and "Gloo" not in s]
    assert re.search(r"\[0\] training .*100%", out)


def test_digits_names_a_batch_size_that_does_not_divide():
    code, _, err = _launch("-n", 2, "examples/digits.py", "--batch-size", 63)
    assert code == 1
    assert "must be a multiple of the 2 replicas, from 1 to 1500; got 63" in err


def test_digits_names_a_typo():
    code, _, err = _launch("-n", 1, "examples/digits.py", "--epoch", "x")
    assert code == 2
    assert "argument --epochs: invalid int value: 'x'" in err


def test_the_first_example_of_the_readme_runs(tmp_path):
    text = (harness.ROOT / "README.md").read_text()
    first, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(first)
    code, out, err = _launch("-n", 2, "train.py", cwd=tmp_path)
    assert code == 0, err
    (loss,) = re.findall(r"loss ([\d.]+) on 2 replicas", out)
    assert float(loss) < 0.2  # of a sine whose variance is about 0.5


def _newest(path, *version):
    result = subprocess.run(
        [harness.ROOT / "tools/newest-python", *version],
        env={
            "PATH": f"{path}:/usr/bin:/bin",
            "HOME": str(path),
            "PYENV_ROOT": str(path),
        },
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout.strip()


def test_the_newest_python_is_one_that_runs(tmp_path):
    def install(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    install("python3", "echo 3 11")
    install("python3.14", "echo 'pyenv: python3.14: command not found' >&2; exit 127")
    assert _newest(tmp_path, "3", "12") == (1, "")
    install("python3.12", "echo 3 12")
    assert _newest(tmp_path, "3", "12") == (0, "python3.12")
    (tmp_path / "versions/3.13.0/bin").mkdir(parents=True)
    install("versions/3.13.0/bin/python3", "echo 3 13")
    code, found = _newest(tmp_path, "3", "12")
    assert (code, found) == (0, str(tmp_path / "versions/3.13.0/bin/python3"))
    install("python3.14", "echo 3 9")  # as numbers, not as text
    assert _newest(tmp_path, "3", "12")[1] == found
