"""Processes of `jdp bench step` that run torch: what do they time?"""

import os
import sys

import numpy as np
import torch
import torch.distributed
from torch import nn

from jdp.bench import channel
from jdp.bench.channel import StepConfig


class Blocks(nn.Module):
    """Stack of blocks, as in `jax_step.loss_fn`."""

    def __init__(self, config: StepConfig):
        super().__init__()
        rng = np.random.default_rng(0)
        d = config.width
        weights = [
            rng.normal(size=(d, d)) / np.sqrt(d) for _ in range(config.num_blocks)
        ]
        as_parameter = lambda x: nn.Parameter(torch.tensor(x, dtype=torch.float32))  # noqa: E731
        self.w = nn.ParameterList([as_parameter(w) for w in weights])
        self.b = nn.ParameterList([as_parameter(np.zeros(d)) for _ in weights])
        self.s = nn.ParameterList([as_parameter(np.ones(d)) for _ in weights])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Returns the output of the last block, (batch_size, d)."""
        for w, b, s in zip(self.w, self.b, self.s, strict=True):
            h = h + torch.tanh(h @ w + b) * s * 0.1
        return h


def main(port: int, rank: int, size: int, rendezvous: int, config: StepConfig) -> None:
    """Runs one process."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{rendezvous}", rank=rank, world_size=size
    )
    torch.manual_seed(0)
    rng = np.random.default_rng(1 + rank)
    shape = (config.batch_size, config.width)
    x, y = torch.tensor(rng.normal(size=(2, *shape)), dtype=torch.float32)

    def runner(model: nn.Module) -> channel.RunSteps:
        optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)

        def once() -> None:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()

        for _ in range(3):  # DDP rebuilds its buckets after the first step.
            once()
        return lambda num_steps: channel.time_steps(once, num_steps)

    variants = {
        "torch DDP": runner(nn.parallel.DistributedDataParallel(Blocks(config))),
        "torch, no communication": runner(Blocks(config)),
    }
    channel.serve(port, "torch", rank, variants)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    driver, own_rank, num_processes, meeting, *sizes = map(int, sys.argv[1:])
    main(driver, own_rank, num_processes, meeting, StepConfig(*sizes))
