"""Trains a multi-layer perceptron on handwritten digits."""

import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64, help="of all processes")
parser.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--snapshot", default="snapshot.npz")
args = parser.parse_args()


def make_params(widths=(64, 128, 64, 10)):
    rng, params = np.random.default_rng(0), {}
    for i, (n, m) in enumerate(zip(widths[:-1], widths[1:], strict=True), 1):
        weight = rng.normal(size=(m, n)) * np.sqrt(2 / n)
        params[f"fc{i}.weight"] = weight.astype(np.float32)
        params[f"fc{i}.bias"] = np.zeros(m, np.float32)
    return params


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 128)
        self.fc2 = nn.Linear(128, 64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def load_data():
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    images, labels = torch.from_numpy(images), torch.from_numpy(labels)
    train = TensorDataset(images[:1500], labels[:1500])
    return train, (images[1500:], labels[1500:])


def run_batch(model, optimizer, source, targets):
    optimizer.zero_grad()
    output = model(source)
    loss = F.cross_entropy(output, targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, images, labels):
    return (model(images).argmax(1) == labels).float().mean()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
train, test = load_data()
sampler = DistributedSampler(train, shuffle=args.shuffle, drop_last=True)
loader = DataLoader(
    train, batch_size=args.batch_size // world_size, sampler=sampler, drop_last=True
)
model = Net()
model.load_state_dict({k: torch.from_numpy(v) for k, v in make_params().items()})
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    losses = []
    for source, targets in loader:
        losses.append(run_batch(model, optimizer, source, targets))
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)
    loss /= world_size
    accuracy = evaluate(model.module, *test)
    if rank == 0:
        print(f"epoch {epoch} | loss {loss:.6f} | accuracy {accuracy:.4f}")
if rank == 0:
    np.savez(args.snapshot, **model.module.state_dict())
dist.destroy_process_group()
