"""Processes of `jdp bench collectives` that run torch: what do they time?"""

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed

from jdp.bench import channel

TORCH = "torch gloo"


def main(
    port: int, rank: int, size: int, rendezvous: int, sizes: Sequence[int]
) -> None:
    """Runs one process."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{rendezvous}", rank=rank, world_size=size
    )

    def runner(num_bytes: int) -> channel.RunSteps:
        x = torch.zeros(num_bytes // 4)

        def once() -> None:
            torch.distributed.all_reduce(x)

        once()
        return lambda num_steps: channel.time_steps(once, num_steps)

    variants = {f"{TORCH} {num_bytes}": runner(num_bytes) for num_bytes in sizes}
    channel.serve(port, "torch", rank, variants)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    driver, own_rank, num_processes, meeting, _, *buffers = map(int, sys.argv[1:])
    main(driver, own_rank, num_processes, meeting, buffers)
