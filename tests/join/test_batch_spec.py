import collections
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp.join import batch_spec

Pair = collections.namedtuple("Pair", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    x: np.ndarray


X = np.ones((3, 2), np.float32)


def _spec(tree):
    return batch_spec.make_spec(batch_spec.inspect_batch(tree, 0))


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
    "tree",
    [
        Node(X),
        collections.OrderedDict(a=X),
        {(1, 2): X},
        {True: X},
        # Of no module, as in a script that `runpy.run_path` runs.
        collections.namedtuple("Lost", "x", module="__gone__")(X),
    ],
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
        b'["namedtuple","tests.join.test_batch_spec","Pair","*"]',
        b'["namedtuple","builtins","tuple"]',
        b'["set","*"]',
        b'["namedtuple","sys","path"]',
        b'["namedtuple",1,2,"*"]',
        b'["dict",["a"]]',
        b'["dict",[["a"]],"*"]',
        b'["dict",["a",1],"*","*"]',
        b'["list",' * 300 + b'"*"' + b"]" * 300,
        b"[" * 100_000,
        b'"\xff"',
        b"",
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
    assert batch_spec.pad_batch(batch, 3) is batch.tree
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


def test_keys_of_random_numbers_are_padded_as_keys():
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 3)
    batch = batch_spec.inspect_batch({"key": keys, "x": X}, 0)
    spec = batch_spec.make_spec(batch)
    assert [leaf.dtype for leaf in spec.leaves] == ["key<rbg>", "float32"]
    assert batch_spec.find_fault(spec) is None
    padded = batch_spec.pad_batch(batch, 5)["key"]
    assert padded.shape == (5,) and padded.dtype == keys.dtype
    assert (padded[:3] == keys).all()
    zeros, _ = batch_spec.make_zeros(spec, 5)
    assert (padded[3:] == zeros[3:]).all() and zeros.dtype == keys.dtype
    jax.random.normal(zeros[0])


@pytest.mark.parametrize(
    "leaves,message",
    [
        ([], "without leaves"),
        ([("a", "O", ())], "with a leaf `a` of dtype 'O'"),
        ([("a", "datetime64[s]", ())], "of dtype 'datetime64"),
        ([("a", "key<mine>", ())], "of dtype 'key<mine>'"),
        ([("a", "f4", ())], "of dtype 'f4'"),
        ([("a", "x" * 10_000, ())], "of dtype 'xxx"),
        ([("a", "float32", (-1,))], "of an impossible shape"),
        ([("a", "float32", (1 << 40, 1 << 40))], "of an impossible shape"),
    ],
)
def test_a_spec_that_no_batch_has_is_named(leaves, message):
    leaves = tuple(batch_spec.BatchLeafSpec(*leaf) for leaf in leaves)
    fault = batch_spec.find_fault(batch_spec.BatchSpec("PyTreeDef(*)", None, leaves))
    assert message in fault and len(fault) < 1000


def test_a_structure_with_other_leaves_than_the_spec_is_not_known():
    spec = _spec({"a": X})
    wrong = batch_spec.BatchSpec(spec.structure, b'["list","*","*"]', spec.leaves)
    assert batch_spec.find_treedef(wrong, []) is None
