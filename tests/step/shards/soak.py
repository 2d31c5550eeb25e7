"""Soak: 500 steps of every kind, on 1, 2, 4 and 8 replicas, as devices and processes.

python -m tests.step.shards.soak [--steps N]
"""

import argparse
import importlib
import sys

import jdp
from tests import harness
from tests.step.shards import training
from tests.step.shards.training import KINDS, NUM_SHARDS

JOBS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1), (8, 1), (2, 2))


def _run(names, num_steps):
    world = jdp.init(num_shards=NUM_SHARDS)
    steps = range(num_steps)
    return {name: training.run(KINDS[name], world, steps)[1] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    num_steps = parser.parse_args().steps
    names, alone, num_wrong = [*KINDS], {}, 0
    for processes, devices in JOBS:
        found = harness.run_checked(
            _run, processes, names, num_steps, devices_per_process=devices
        )
        alone = alone or found[0]
        for process, digests in enumerate(found):
            for name, digest in digests.items():
                if digest != alone[name]:
                    num_wrong += 1
                    print(f"{name}: process {process} of {processes} x {devices}")
        print(f"{processes} processes x {devices} devices: {len(names)} kinds compared")
    print(f"{num_steps} steps: {num_wrong} digests differ")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    # The processes import this module by its name.
    importlib.import_module("tests.step.shards.soak").main()
