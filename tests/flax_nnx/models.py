"""A model of nnx with all that a step changes, and its training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    """Layers with parameters, statistics and rng streams."""

    def __init__(self, rngs, norm=nnx.BatchNorm):
        self.first = nnx.Linear(3, 8, use_bias=False, rngs=rngs)
        self.norm = norm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.last = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss_fn(model, batch):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), logits


def make_metrics():
    return nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(),
        loss=nnx.metrics.Average("loss"),
    )


def make(tx=None):
    """A model, its optimizer and metrics."""
    model = Net(nnx.Rngs(0))
    tx = tx or optax.sgd(0.1, momentum=0.9)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), make_metrics()


def batches(num_batches, size=16):
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(size, 3)).astype(np.float32),
            "y": rng.integers(0, 4, size).astype(np.int32),
        }
        for _ in range(num_batches)
    ]


def arrays(*objects):
    """The values of objects, on the host; PRNG keys as their data."""

    def on_host(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return [
        jax.tree.map(on_host, nnx.to_pure_dict(nnx.state(node))) for node in objects
    ]
