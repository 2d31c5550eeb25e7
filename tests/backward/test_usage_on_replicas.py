"""Random programs on replicas of which each takes its own path."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import jdp
from tests import harness
from tests.backward import test_usage


@pytest.mark.filterwarnings("ignore:.*can never receive:UserWarning")
@settings(max_examples=12, deadline=None)
@given(
    st.lists(test_usage.statements(2, has_while=False), min_size=1, max_size=3),
    st.tuples(test_usage.FLAGS, test_usage.FLAGS),
)
def test_the_mask_unites_the_paths_and_gradients_are_their_mean(program, flags):
    params, lanes = test_usage.start()

    def loss(params, flags):
        # Like the branches, the lanes differ between replicas, by JAX's types.
        own = tuple(x + 0 * flags[0] for x in lanes)
        return test_usage.run_compiled(program, params, flags, own)[0].sum()

    def one_path(params, flags):
        return test_usage.run_python(program, params, flags, lanes)[0].sum()

    def fn(params, flags):
        grad_fn = jdp.value_and_grad(loss, find_unused=True)
        (_, grads), used = grad_fn(params, flags[0])
        return grads, jax.tree.map(jnp.asarray, used)

    mapped = jax.shard_map(
        fn,
        mesh=harness.local_world(2).mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    grads, used = harness.jit_fast(mapped)(params, np.array(flags))
    each = [jax.grad(one_path)(params, own) for own in flags]
    for name in params:
        # A chain of tanh of numbers near 0.8 has a derivative that is not zero.
        assert bool(used[name]) == any(np.any(g[name] != 0) for g in each)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *each)
    chex.assert_trees_all_close(grads, mean, atol=1e-5, rtol=1e-5)
