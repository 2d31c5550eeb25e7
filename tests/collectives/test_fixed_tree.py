"""The fixed tree: any cut of its leaves gives the same sum."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.collectives import fixed_tree
from jdp.collectives.fixed_tree import Subtree
from tests import harness


def _sum_in_order(xs):
    return fixed_tree.reduce_in_order(list(xs), lambda a, b: a + b)


def test_the_tree_splits_at_powers_of_two():
    text = fixed_tree.reduce_in_order(list("abcdefg"), lambda a, b: f"({a}{b})")
    assert text == "(((ab)(cd))((ef)g))"


@given(st.integers(1, 40), st.data())
def test_cover_has_each_leaf_once_and_only_whole_nodes(n, data):
    first = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(first + 1, n))
    subtrees = fixed_tree.whole_tree(n).cover(first, end)
    assert [i for subtree in subtrees for i in range(subtree.first, subtree.end)] == [
        *range(first, end)
    ]
    known = {Subtree(i, i + 1): str(i) for i in range(n)}
    for subtree in subtrees:
        subtree.reduce(
            known, lambda a, b: f"({a} {b})"
        )  # Each is a subtree of the tree.


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 1000), st.data())
def test_any_number_of_replicas_gives_the_same_bits(num_shards, size, seed, data):
    divisors = [n for n in range(1, num_shards + 1) if num_shards % n == 0]
    n = data.draw(st.sampled_from(divisors))
    rng = np.random.default_rng(seed)
    leaves = rng.normal(size=(num_shards, size)).astype(np.float32)
    leaves *= 10.0 ** rng.integers(-6, 6, size=(num_shards, 1))
    leaves = leaves.astype(np.float32)
    k, tree = num_shards // n, fixed_tree.whole_tree(num_shards)
    blocks = [tree.cover(r * k, (r + 1) * k) for r in range(n)]
    known = {Subtree(i, i + 1): x for i, x in enumerate(leaves)}
    terms = [
        [subtree.reduce(known, np.add) for subtree in subtrees] for subtrees in blocks
    ]
    longest = max(map(len, terms))
    padded = [xs + xs[:1] * (longest - len(xs)) for xs in terms]
    found = jax.vmap(
        lambda *xs: fixed_tree.reduce_blocks(xs, "data", blocks), axis_name="data"
    )(*(np.stack(column) for column in zip(*padded, strict=True)))
    for row in np.asarray(found):
        np.testing.assert_array_equal(row, _sum_in_order(leaves))


def test_devices_reduce_in_the_order_of_the_tree():
    world = harness.local_world(8)
    xs = np.random.default_rng(3).normal(size=(8, 1001)).astype(np.float32)
    spec = jax.sharding.PartitionSpec
    run = harness.jit_fast(
        jax.shard_map(
            lambda x: fixed_tree.fixed_tree_all_reduce(x[0], "data")[None],
            mesh=world.mesh,
            in_specs=spec("data"),
            out_specs=spec("data"),
        )
    )
    for row in np.asarray(run(xs)):
        np.testing.assert_array_equal(row, _sum_in_order(xs))
