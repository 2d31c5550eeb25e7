"""Training under the real launchers of MPI that are installed."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests import harness, rarely

pytestmark = pytest.mark.multiprocess

TRAIN = """
import sys
import numpy as np
import jdp

world = jdp.init()


@jdp.data_parallel
def step(w, x):
    loss, grad = jdp.value_and_grad(lambda w, x: ((x * w) ** 2).mean())(w, x)
    return w - 0.1 * grad, loss


w = jdp.replicate(world, np.float32(1))
for k in range(2):
    w, loss = step(w, np.full(4, 1.0 + world.process_index, np.float32))
    if k == 0 and sys.argv[1:] == [str(world.process_index)]:
        raise ValueError("no more data")
place = world.process_index, world.process_count, world.num_nodes
sys.stdout.write(f"place {place} weight {float(w)}\\n")
"""


def _find_launchers() -> list[str]:
    """Returns one launcher of each MPI on this machine."""
    folders = [sysconfig.get_path("scripts"), *os.environ.get("PATH", "").split(":")]
    found = {}
    for folder in folders:
        # Where Debian has several MPIs, each has names of its own.
        own = [shutil.which(f"mpirun.{x}", path=folder) for x in ("openmpi", "mpich")]
        for path in filter(None, own):
            found.setdefault(os.path.realpath(path), path)
        if not any(own) and (path := shutil.which("mpirun", path=folder)):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


LAUNCHERS = _find_launchers()
EACH = rarely.cases(LAUNCHERS, often=LAUNCHERS[:1]) or [None]


def _run(launcher: str, folder: pathlib.Path, *arguments: str):
    script = folder / "train.py"
    script.write_text(TRAIN)
    version = subprocess.run(
        [launcher, "--version"], capture_output=True, text=True, timeout=60
    )
    options = []
    if "open" in version.stdout.lower():
        options = ["--oversubscribe"]
        options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    environ = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    return subprocess.run(
        [launcher, *options, "-n", "2", sys.executable, str(script), *arguments],
        env={**environ, **harness.compile_fast_environ(), "JAX_PLATFORMS": "cpu"}
        | {"PYTHONPATH": harness.python_path()},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.skipif(not LAUNCHERS, reason="no mpirun is installed")
@pytest.mark.parametrize("launcher", EACH)
def test_processes_of_mpi_train_together(launcher, tmp_path):
    result = _run(launcher, tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [x for x in result.stdout.splitlines() if x.startswith("place")]
    # d/dw of the mean of (x w)^2 is 2 w times 2.5, the mean of 1 and 4.
    places = ["place (0, 2, 1) weight 0.25", "place (1, 2, 1) weight 0.25"]
    assert sorted(lines) == places


@pytest.mark.skipif(not LAUNCHERS, reason="no mpirun is installed")
@pytest.mark.parametrize("launcher", EACH)
def test_a_failure_under_mpi_ends_the_job(launcher, tmp_path):
    result = _run(launcher, tmp_path, "1")
    assert result.returncode != 0
    assert "no more data" in result.stdout + result.stderr
    assert "place" not in result.stdout
