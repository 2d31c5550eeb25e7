import collections
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp.runtime import batch_spec

Pair = collections.namedtuple("Pair", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    x: np.ndarray


X = np.ones((3, 2), np.float32)


def _spec(tree):
    return batch_spec.make_spec(batch_spec.inspect_batch(tree, 0).signature)


@pytest.mark.parametrize(
    "tree",
    [
        X,
        {"b": X, "a": [X, (X, None)]},
        {1: X, 0: {}},
        Pair([X], {"k": Pair(X, ())}),
        [],
    ],
)
def test_known_structures_travel_as_data(tree):
    treedef = jax.tree.structure(tree)
    nodes = batch_spec._encode_treedef(treedef)
    assert nodes is not None
    assert batch_spec._decode_treedef(nodes) == treedef


@pytest.mark.parametrize(
    "tree", [Node(X), collections.OrderedDict(a=X), {(1, 2): X}, {True: X}]
)
def test_other_structures_do_not_travel(tree):
    spec = _spec(tree)
    assert spec.nodes is None
    assert batch_spec.find_treedef(spec, []) is None
    treedef = jax.tree.structure(tree)
    assert batch_spec.find_treedef(spec, [treedef]) == treedef


@pytest.mark.parametrize(
    "nodes",
    [
        b'["namedtuple","os","system","*"]',
        b'["namedtuple","antigravity","x"]',
        b'["namedtuple","tests.runtime.test_batch_spec","Pair","*"]',
        b'["namedtuple","builtins","tuple"]',
        b'["set","*"]',
    ],
)
def test_nothing_but_namedtuples_is_looked_up(nodes):
    assert batch_spec._decode_treedef(nodes) is None
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_zeros_have_the_dtype(dtype):
    spec = _spec({"a": np.ones((3, 2), jnp.dtype(dtype))})
    (zeros,) = batch_spec.make_zeros(spec, 4)
    assert zeros.dtype == jnp.dtype(dtype) and zeros.shape == (4, 2)
    assert not zeros.astype(np.complex64).any()


def test_padding_is_at_the_end_and_a_full_batch_is_kept():
    tree = {"a": X, "b": jnp.arange(3)}
    batch = batch_spec.inspect_batch(tree, 0)
    assert batch_spec.pad_batch(batch, 3) is tree
    padded = batch_spec.pad_batch(batch, 5)
    np.testing.assert_array_equal(padded["a"], [[1, 1]] * 3 + [[0, 0]] * 2)
    np.testing.assert_array_equal(padded["b"], [0, 1, 2, 0, 0])


def test_lists_of_numbers_are_leaves_of_no_dimension():
    with pytest.raises(ValueError, match=r"leaf `\['x'\]\[0\]` of batch 4 .* scalar"):
        batch_spec.inspect_batch({"x": [1, 2]}, 4)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, r"Batch 7 \(counted from 0\) has no leaves: \{\}"),
        ({"a": X, "b": X[:2]}, r"leaf `\['b'\]` of batch 7 .* has 2 samples, .* 3"),
        ({"a": "text"}, r"leaf `\['a'\]` .* dtype <U4, which is not numeric"),
        ([np.array([None])], r"leaf `\[0\]` .* dtype object, which is not numeric"),
        (np.float32(1), r"leaf `\(root\)` .* is a scalar"),
        (np.array(["2020-01-01"], "datetime64[D]"), r"which is not numeric"),
    ],
)
def test_what_cannot_be_padded_is_named(tree, message):
    with pytest.raises(ValueError, match=message):
        batch_spec.inspect_batch(tree, 7)


def test_differences_name_the_leaf_or_the_structures():
    names = ("process 0", "process 2")
    text = batch_spec.describe_difference(
        _spec({"a": X}), _spec({"a": np.ones((3, 4), np.int8)}), names
    )
    assert text == (
        "the leaf `['a']` is float32(samples, 2) on process 0 and int8(samples, 4) on "
        "process 2"
    )
    text = batch_spec.describe_difference(_spec({"a": X}), _spec([X]), names)
    assert text == (
        "the structure is PyTreeDef({'a': *}) on process 0 and PyTreeDef([*]) on "
        "process 2"
    )
