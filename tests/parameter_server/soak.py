"""Soak: pushes of workers that are killed at random, and a server that is, too.

python -m tests.parameter_server.soak --pushes 20000 --server-deaths 5

Every push is one step down of all parameters, so parameters say how many updates they
have: each pull compares them with its version, so that nothing was applied twice.
"""

import argparse
import pathlib
import random
import signal
import tempfile
import time

from tests.parameter_server.test_processes import LaunchedJob, check_steps


def run(pushes: int, server_deaths: int, seed: int) -> None:
    rng = random.Random(seed)
    rounds, done, num_killed, worst = 0, 0, 0, 0
    start_s = time.monotonic()
    while done < pushes or server_deaths > 0:
        with tempfile.TemporaryDirectory() as folder:
            job = LaunchedJob(pathlib.Path(folder), "async", 1, 4, restarts=1000)
            job.timeout_s = 600.0
            deaths = -(-server_deaths // 2)
            try:
                job.go_on(0, 1, 2, 3)
                # Worker 0 stays: it sees all epochs.
                for victim in rng.sample((1, 2, 3), 3):
                    job.go_on(0, steps=rng.randrange(100, 600))
                    job.signal(f"worker-{victim}", signal.SIGKILL)
                    num_killed += 1
                    if deaths:
                        deaths -= 1
                        server_deaths -= 1
                        job.signal("server-0", signal.SIGKILL)
                job.go_on(0, steps=pushes // 20)
            finally:
                found, text = job.end()
            assert job.exit_code == 0, text
            check_steps(found, [0], least_epoch=1)
            done += sum(job.num_steps(i) for i in range(4))
            worst = max(worst, found["worker-0"]["steps"][-1][0])
        rounds += 1
        print(
            f"{done} pushes, {num_killed} workers killed, up to epoch {worst}, "
            f"{time.monotonic() - start_s:.0f} s: none was applied twice",
            flush=True,
        )
    assert server_deaths <= 0, "more servers were to be killed"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pushes", type=int, default=20_000)
    parser.add_argument("--server-deaths", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    run(arguments.pushes, arguments.server_deaths, arguments.seed)
