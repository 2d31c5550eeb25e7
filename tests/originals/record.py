"""Record: the numbers of the scripts from which the migration pages start.

`python -m tests.originals.record torch_ddp` runs a script in this Python, which has the
packages of the script, and writes tests/reference/digits_torch_ddp.npz.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import numpy as np

HERE = pathlib.Path(__file__).parent


class Run(NamedTuple):
    """Result of a training script."""

    history: np.ndarray  # loss and accuracy per epoch, (epochs, 2).
    params: dict[str, np.ndarray]  # the last ones, by path.


class Original(NamedTuple):
    """A training script that does not know jdp, and how two of its processes start."""

    words: tuple[str, ...]  # what starts it, after the interpreter.
    options: tuple[str, ...]  # with which it can be compared.
    file: str  # which it saves, by default.
    packages: tuple[str, ...]
    environ: dict[str, str] = {}

    def saving_to(self, path: pathlib.Path) -> tuple[str, ...]:
        """Returns the options of a run that saves to `path`."""
        return (*self.options, f"--{path.stem}", str(path))


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_HOROVODRUN = ("-m", "horovod.runner.launch", "-np", "2", "--gloo", sys.executable)
# One order of samples: torch's generator and jdp's draw different ones.
_NO_SHUFFLE = ("--no-shuffle",)
ORIGINALS = {
    "torch_ddp": Original(_TORCHRUN, _NO_SHUFFLE, "snapshot.npz", ("torch", "numpy")),
    "horovod": Original(
        _HOROVODRUN, _NO_SHUFFLE, "checkpoint.npz", ("horovod", "torch", "numpy")
    ),
    # The two devices of one process.
    "flax_pmap": Original(
        *((), (), "checkpoint.msgpack", ("jax", "flax", "optax", "numpy")),
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    ),
}


def script(name: str) -> pathlib.Path:
    """Returns the path of an original."""
    return HERE / f"{name}_digits.py"


def reference(name: str) -> pathlib.Path:
    """Returns the path of its numbers."""
    return HERE.parent / f"reference/digits_{name}.npz"


def read(output: str, path: pathlib.Path) -> Run:
    """Reads what a script has printed and saved."""
    lines = re.findall(r"epoch (\d+) \| loss ([\d.]+) \| accuracy ([\d.]+)", output)
    assert [int(line[0]) for line in lines] == [*range(10)], output
    history = np.array([line[1:] for line in lines], np.float64)
    if path.suffix == ".npz":
        with np.load(path) as saved:
            return Run(history, dict(saved))
    from flax import serialization

    state = serialization.msgpack_restore(path.read_bytes())
    return Run(history, _flatten({k: state[k] for k in ("params", "batch_stats")}))


def _flatten(tree: Any, path: str = "") -> dict[str, np.ndarray]:
    if not isinstance(tree, dict):
        return {path: np.asarray(tree)}
    parts = [_flatten(v, f"{path}.{k}" if path else k) for k, v in tree.items()]
    return {path: leaf for part in parts for path, leaf in part.items()}


def run(name: str, environ: dict[str, str], timeout_s: float = 110) -> Run:
    """Runs an original, in two processes or on two devices."""
    original = ORIGINALS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, original.file)
        words = (*original.words, str(script(name)), *original.saving_to(path))
        done = subprocess.run(
            [sys.executable, *words],
            env={**environ, **original.environ},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stderr
        return read(done.stdout, path)


def load(name: str) -> Run:
    """Reads the recorded numbers of an original."""
    with np.load(reference(name)) as saved:
        arrays = dict(saved)
    arrays.pop("versions")
    return Run(arrays.pop("history"), arrays)


def main(name: str) -> None:
    """Runs an original and writes its numbers, with the versions that made them."""
    found = run(name, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout_s=900)
    packages = (*ORIGINALS[name].packages, "scikit-learn")
    versions = {each: importlib.metadata.version(each) for each in packages}
    versions["python"] = sys.version.split()[0]
    np.savez_compressed(
        reference(name),
        history=found.history,
        versions=json.dumps(versions),
        **found.params,
    )
    print(versions, found.history, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
