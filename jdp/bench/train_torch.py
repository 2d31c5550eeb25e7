"""Processes of `jdp bench train` that run torch: what do they time?"""

import os
import sys
import time

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.nn import functional

from jdp.bench import channel, train_setup
from jdp.bench.train_setup import Params, TrainConfig


class Block(nn.Module):
    """Block of the GPT, as in `train_jax.loss_fn`."""

    def __init__(self, params: Params):
        super().__init__()
        self.norm_1, self.norm_2 = _norm(params["norm_1"]), _norm(params["norm_2"])
        self.attend = _linear(params["attend"])
        self.project = _linear(params["project"])
        self.widen = _linear(params["widen"])
        self.narrow = _linear(params["narrow"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the block, (n, context, width)."""
        n, context, width = x.shape
        q, k, v = (
            part.view(n, context, -1, train_setup.HEAD_WIDTH).transpose(1, 2)
            for part in self.attend(self.norm_1(x)).split(width, dim=-1)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(heads.transpose(1, 2).reshape(x.shape))
        hidden = functional.gelu(self.widen(self.norm_2(x)), approximate="tanh")
        return x + self.narrow(hidden)


class Gpt(nn.Module):
    """Mean cross-entropy of the next token, as `train_jax.loss_fn`."""

    def __init__(self, params: Params):
        super().__init__()
        self.tokens = nn.Parameter(torch.tensor(params["tokens"]))
        self.positions = nn.Parameter(torch.tensor(params["positions"]))
        self.blocks = nn.Sequential(*map(Block, params["blocks"]))
        self.norm = _norm(params["norm"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the loss of tokens (n, context + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = functional.embedding(inputs, self.tokens) + self.positions
        logits = self.norm(self.blocks(x)) @ self.tokens.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _norm(params: Params) -> nn.LayerNorm:
    layer = nn.LayerNorm(len(params["scale"]), eps=1e-5)
    layer.load_state_dict(
        {"weight": torch.tensor(params["scale"]), "bias": torch.tensor(params["bias"])}
    )
    return layer


def _linear(params: Params) -> nn.Linear:
    layer = nn.Linear(*params["w"].shape)
    layer.load_state_dict(
        {"weight": torch.tensor(params["w"].T), "bias": torch.tensor(params["b"])}
    )
    return layer


class Trainer:
    """One system in training."""

    def __init__(self, model: nn.Module, config: TrainConfig, process: int):
        """Trains for `train_setup.WARM_UP_STEPS` steps."""
        data = train_setup.make_data()
        self._model = model
        # Fused, Adam takes half as long as by default.
        self._optimizer = torch.optim.Adam(
            model.parameters(), lr=train_setup.LEARNING_RATE, fused=True
        )
        self._batches = train_setup.draw_batches(config, data.training, process)
        self._held_out = train_setup.held_out_batch(config, data.held_out)
        self.train(train_setup.WARM_UP_STEPS)

    def train(self, num_steps: int) -> list[float]:
        """Trains; returns the seconds of the mean step."""
        start_s = time.perf_counter()
        for _ in range(num_steps):
            self._optimizer.zero_grad()
            self._model(_as_tokens(next(self._batches))).backward()
            self._optimizer.step()
        return [(time.perf_counter() - start_s) / num_steps]

    def find_loss(self) -> float:
        """Returns the loss on the held-out text, of this process alone."""
        with torch.no_grad():
            return self._model(_as_tokens(self._held_out)).item()


def _as_tokens(batch: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(batch).long()


def main(port: int, rank: int, size: int, rendezvous: int, config: TrainConfig) -> None:
    """Runs one process."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{rendezvous}", rank=rank, world_size=size
    )
    params = train_setup.init_params(config)
    models = {
        "torch DDP": nn.parallel.DistributedDataParallel(Gpt(params)),
        "torch, no communication": Gpt(params),
    }
    trainers = {name: Trainer(model, config, rank) for name, model in models.items()}
    channel.serve(
        port,
        "torch",
        rank,
        {name: trainer.train for name, trainer in trainers.items()},
        losses={name: trainer.find_loss for name, trainer in trainers.items()},
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    driver, own_rank, num_processes, meeting, *sizes = map(int, sys.argv[1:])
    main(driver, own_rank, num_processes, meeting, TrainConfig(*sizes))
