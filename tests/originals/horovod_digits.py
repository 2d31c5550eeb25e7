"""Trains a multi-layer perceptron on handwritten digits."""

import argparse

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32, help="of one process")
parser.add_argument("--base-lr", type=float, default=0.025, help="of one process")
parser.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--checkpoint", default="checkpoint.npz")
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
    return train, TensorDataset(images[1500:], labels[1500:])


def metric_average(value, name):
    return hvd.allreduce(torch.as_tensor(value), name=name).item()


def train(epoch):
    train_sampler.set_epoch(epoch)
    losses = []
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return metric_average(np.mean(losses), "loss")


@torch.no_grad()
def test():
    correct = 0
    for data, target in test_loader:
        correct += (model(data).argmax(1) == target).sum()
    return hvd.allreduce(correct, name="correct", op=hvd.Sum).item() / 297


hvd.init()
train_data, test_data = load_data()
train_sampler = DistributedSampler(
    train_data, hvd.size(), hvd.rank(), shuffle=args.shuffle, drop_last=True
)
train_loader = DataLoader(
    train_data, batch_size=args.batch_size, sampler=train_sampler, drop_last=True
)
test_sampler = range(hvd.rank(), len(test_data), hvd.size())
test_loader = DataLoader(test_data, batch_size=100, sampler=test_sampler)
model = Net()
model.load_state_dict({k: torch.from_numpy(v) for k, v in make_params().items()})
# The learning rate grows with the number of processes.
optimizer = torch.optim.SGD(
    model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.9
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters()
)

for epoch in range(args.epochs):
    loss, accuracy = train(epoch), test()
    if hvd.rank() == 0:
        print(f"epoch {epoch} | loss {loss:.6f} | accuracy {accuracy:.4f}")
if hvd.rank() == 0:
    np.savez(args.checkpoint, **model.state_dict())
hvd.shutdown()
