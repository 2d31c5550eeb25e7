"""Trains a convolutional network of Flax nnx on handwritten digits."""

import argparse
from functools import partial

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()


class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(128, 64, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.1, rngs=rngs)
        self.linear2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x)))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)  # flatten
        x = nnx.relu(self.dropout2(self.linear1(x)))
        return self.linear2(x)


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits=logits, labels=batch["label"]
    ).mean()
    return loss, logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
test_batch = {"image": images[1500:], "label": labels[1500:]}

model = CNN(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(5e-3, eps=1e-4), wrt=nnx.Param)
metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(),
    loss=nnx.metrics.Average("loss"),
)
history = []
for epoch in range(args.epochs):
    order = np.random.default_rng(epoch).permutation(1500)
    model.train()
    for start in range(0, 1500 - args.batch_size + 1, args.batch_size):
        batch = order[start : start + args.batch_size]
        train_step(
            model, optimizer, metrics, {"image": images[batch], "label": labels[batch]}
        )
    train = metrics.compute()
    metrics.reset()
    model.eval()
    eval_step(model, metrics, test_batch)
    test = metrics.compute()
    metrics.reset()
    history.append((train, test))
    print(
        f"epoch {epoch}: loss {train['loss']:.4f}, accuracy {train['accuracy']:.2%}; "
        f"test loss {test['loss']:.4f}, accuracy {test['accuracy']:.2%}"
    )
