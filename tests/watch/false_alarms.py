"""False alarms: is a job without a fault never alarmed?

    python -m tests.watch.false_alarms [--steps 10000] [--starts 100]

The times of loaders have a heavy tail, up to just below the limit.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent.parent
STALL_S = 3.0
_LONGEST_S = 2.5  # of a loader: a busy machine adds to it.


def run(num_steps: int, *, seed: int = 0) -> "subprocess.CompletedProcess[str]":
    """Trains in two processes, and returns what the launcher printed."""
    command = [sys.executable, "-m", "jdp.cli.main", "launch", "-n", "2"]
    command += ["--stall-s", str(STALL_S), "-m", "tests.watch.false_alarms"]
    return subprocess.run(
        [*command, "train", str(num_steps), str(seed)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def find_alarms(job: "subprocess.CompletedProcess[str]") -> list[str]:
    """Returns the lines of the launcher; a job without a fault has no line."""
    assert job.returncode == 0, job.stderr[-2000:]
    return [line for line in job.stderr.splitlines() if line.startswith("jdp launch")]


def _train(num_steps: int, seed: int) -> None:
    import jax.numpy as jnp

    import jdp

    world = jdp.init(timeout_s=120)

    @jdp.data_parallel
    def train(w, x):
        loss, grads = jdp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)
        return w - 0.01 * grads, {"loss": loss}

    rng = np.random.default_rng((seed, world.process_index))
    w = jdp.replicate(world, jnp.ones(8))
    x = np.ones((4, 8), np.float32)
    for i in range(num_steps):
        # Of 10,000 some 20 take longer than a second.
        time.sleep(min(_LONGEST_S, 0.0005 * rng.pareto(0.8)))
        w, metrics = train(w, x)
        if i % 100 == 99:
            float(metrics["loss"])
    jdp.check_replicas(w, world=world)


def main() -> None:
    """Runs the jobs, or one process of a job."""
    if sys.argv[1:2] == ["train"]:
        _train(int(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--starts", type=int, default=100)
    options = parser.parse_args()
    alarms = find_alarms(run(options.steps))
    print(f"{options.steps} steps, {len(alarms)} alarms", *alarms, sep="\n")
    for seed in range(options.starts):
        found = find_alarms(run(3, seed=seed))
        alarms += found
        if found:
            print(f"start {seed}", *found, sep="\n", flush=True)
    print(f"{options.starts} starts, {len(alarms)} alarms in all")
    sys.exit(bool(alarms))


if __name__ == "__main__":
    main()
