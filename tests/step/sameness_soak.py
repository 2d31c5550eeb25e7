"""A long run of `tests.step.test_sameness`: random programs against what replicas do.

python -m tests.step.sameness_soak --programs 1000
"""

import argparse
import collections

import numpy as np

import jdp
from tests.step import test_sameness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jdp.init(num_cpu_devices=test_sameness.N)
    counts: collections.Counter = collections.Counter()
    for seed in range(options.seed, options.seed + options.programs):
        rng = np.random.default_rng(seed)
        for found in test_sameness.follow(test_sameness.random_program(rng)):
            said = "differs" if found.spread.axes else "same"
            counts[said, "same" if found.is_same else "differs"] += 1
            assert found.spread.axes or found.is_same, f"--seed {seed} --programs 1"
    for (said, is_so), count in sorted(counts.items()):
        print(f"said to be {said:7}, is {is_so:7}: {count}")


if __name__ == "__main__":
    main()
