"""A process of a job that `test_processes.py` starts, and that faults are made in.

`job_process.py FOLDER MODE` serves or works until the file FOLDER/stop is there.
"""

import json
import logging
import os
import pathlib
import sys

import numpy as np
import optax

from jdp import parameter_server

PARAMS = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}
GRADS = {k: x + 1 for k, x in PARAMS.items()}
MODES = {
    "sync": parameter_server.sync(),
    "async": parameter_server.asynchronous(),
    "bounded": parameter_server.bounded(staleness=4),
}


def serve(folder, mode, place):
    options = parameter_server.ServerOptions(
        lease_s=1.0, checkpoint_dir=folder / "checkpoints", checkpoint_every=7
    )
    server = parameter_server.Server(
        PARAMS, optax.sgd(1.0), mode=MODES[mode], options=options
    )
    write(folder / f"server-{place.index}.pid", str(os.getpid()))
    server.serve()
    write(folder / f"server-{place.index}.json", json.dumps(server.metrics))


def work(folder, place):
    """Every update is one step down: parameters say how many there were."""
    steps = []
    name = f"worker-{place.index}"
    with parameter_server.Worker(PARAMS) as worker:
        write(folder / f"{name}.pid", str(os.getpid()))
        while not (folder / "stop").exists():
            params = worker.pull()
            values = {float(x) for leaf in params.values() for x in np.ravel(leaf)}
            steps.append((*worker.version, sorted(values)))
            worker.push(GRADS)
            write(folder / f"{name}.steps", str(len(steps)))
        worker.flush()
        report = {"steps": steps, "counts": worker.counts}
        write(folder / f"{name}.json", json.dumps(report))


def write(path, text):
    half = path.with_suffix(".half")
    half.write_text(text)
    half.rename(path)


def main():
    logging.basicConfig(format="%(message)s")
    folder, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
    place = parameter_server.Place.from_environ()
    if place.role == "server":
        serve(folder, mode, place)
    else:
        work(folder, place)


if __name__ == "__main__":
    main()
