"""Sown values: what a model keeps of a replica's samples is taken out in the loss."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdp import flax_nnx
from tests import harness


class _Sowing(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "kept", x * self.w[...])
        return x @ self.w[...]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("is_popped", [False, True])
def test_what_a_model_has_sown_is_popped_in_the_loss(is_popped):
    def loss_fn(model, x):
        y = model(x)
        kept = nnx.pop(model, nnx.Intermediate) if is_popped else {}
        return y.mean(), {k: v[0].mean() for k, v in kept.items()}

    @functools.partial(flax_nnx.data_parallel, world=harness.local_world(4))
    def step(model, x):
        (_, kept), _ = flax_nnx.value_and_grad(loss_fn, has_aux=True)(model, x)
        return kept

    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    if is_popped:
        assert float(step(_Sowing(), x)["kept"]) == x.mean()
        return
    with pytest.raises(ValueError, match="model.kept.*nnx.Intermediate") as info:
        step(_Sowing(), x)
    assert "Average the gradients" not in str(info.value)
