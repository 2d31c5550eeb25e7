"""Batch specs: what must be equal on all processes, and how a batch is padded to it."""

import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jdp.types import PyTree

Signature = tuple[Any, tuple[Any, ...]]  # the treedef; per leaf dtype, trailing shape.


class LeafSpec(msgspec.Struct, frozen=True, array_like=True):
    """One leaf, but for its number of samples."""

    path: str
    dtype: str
    shape: tuple[int, ...]  # without dimension 0.


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """A batch, but for its number of samples."""

    structure: str  # the treedef, as text.
    nodes: bytes | None  # the treedef, as JSON; None where a node is of another type.
    leaves: tuple[LeafSpec, ...]


class Batch(NamedTuple):
    """What a process has read."""

    tree: PyTree
    leaves: list[Any]
    signature: Signature
    num_samples: int


def inspect_batch(tree: PyTree, index: int) -> Batch:
    """Looks at what was read, batch `index` of this process.

    Raises:
      ValueError: there is no leaf, or one has no dimension 0, another number of
        samples than the rest, a dtype that is not numeric, or is a global array.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        raise ValueError(
            f"Batch {index} (counted from 0) has no leaves: {tree!r}. A batch is a "
            "pytree with at least one array."
        )
    if not all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves):
        leaves = [
            leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves
        ]
        tree = jax.tree.unflatten(treedef, leaves)
    for i, leaf in enumerate(leaves):
        problem = _find_problem(leaf, leaves[0])
        if problem:
            path = _leaf_paths(treedef)[i]
            raise ValueError(
                f"The leaf `{path}` of batch {index} (counted from 0) {problem}."
            )
    kinds = tuple((leaf.dtype, leaf.shape[1:]) for leaf in leaves)
    return Batch(tree, leaves, (treedef, kinds), leaves[0].shape[0])


def make_spec(signature: Signature) -> Spec:
    """Describes a batch so that another process can compare it, or make zeros."""
    treedef, kinds = signature
    paths = _leaf_paths(treedef)
    leaves = [
        LeafSpec(path, str(jnp.dtype(dtype)), tuple(shape))
        for path, (dtype, shape) in zip(paths, kinds, strict=True)
    ]
    return Spec(_as_text(treedef), _encode_treedef(treedef), tuple(leaves))


def find_treedef(spec: Spec, candidates: Sequence[Any]) -> Any | None:
    """Returns the treedef of `spec`, or None where this process cannot know it.

    Args:
      spec: that of a batch of another process.
      candidates: treedefs that this process has seen, for nodes that are not of the
        types that JAX knows by itself.
    """
    for treedef in candidates:
        if _as_text(treedef) == spec.structure:
            return treedef
    return None if spec.nodes is None else _decode_treedef(spec.nodes)


def describe_difference(first: Spec, second: Spec, names: tuple[str, str]) -> str:
    """Says in which leaf two specs differ, or that their structures do."""
    for a, b in zip(first.leaves, second.leaves, strict=False):
        if a != b and a.path == b.path:
            shapes = [f"{x.dtype}(samples{''.join(f', {n}' for n in x.shape)})"
                      for x in (a, b)]  # fmt: skip
            return (
                f"the leaf `{a.path}` is {shapes[0]} on {names[0]} and {shapes[1]} on "
                f"{names[1]}"
            )
    return (
        f"the structure is {first.structure} on {names[0]} and {second.structure} on "
        f"{names[1]}"
    )


def make_zeros(spec: Spec, num_samples: int) -> list[np.ndarray]:
    """Makes the leaves of a batch that is nothing but padding; read-only."""
    leaves = []
    for leaf in spec.leaves:
        zeros = np.zeros((num_samples, *leaf.shape), jnp.dtype(leaf.dtype))
        zeros.setflags(write=False)
        leaves.append(zeros)
    return leaves


def pad_batch(batch: Batch, num_samples: int) -> PyTree:
    """Returns the batch with zeros at the end, or as it is where it is full."""
    if batch.num_samples == num_samples:
        return batch.tree
    padded = []
    for leaf in map(np.asarray, batch.leaves):
        whole = np.zeros((num_samples, *leaf.shape[1:]), leaf.dtype)
        whole[: len(leaf)] = leaf
        padded.append(whole)
    return jax.tree.unflatten(batch.signature[0], padded)


def _find_problem(leaf: Any, first: Any) -> str | None:
    dtype = leaf.dtype
    if not isinstance(dtype, np.dtype) or not (
        dtype.kind in "biufc" or jnp.issubdtype(dtype, np.number)
    ):
        return f"has dtype {dtype}, which is not numeric; encode it, or leave it out"
    if leaf.ndim == 0:
        return (
            "is a scalar; a batch is split on its first dimension. Put what is not "
            "per sample into the state"
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return (
            "is a global array; it must be this process' own samples. Pass host "
            "arrays, and call `jdp.global_batch` on what the loop yields"
        )
    if leaf.shape[0] != first.shape[0]:
        return (
            f"has {leaf.shape[0]} samples, the first leaf {first.shape[0]}; all must "
            "have the same dimension 0"
        )
    return None


def _as_text(treedef: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(treedef))  # Not the same everywhere.


def _leaf_paths(treedef: Any) -> list[str]:
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) or "(root)" for path, _ in paths]


def _encode_treedef(treedef: Any) -> bytes | None:
    try:
        nodes = msgspec.json.encode(_encode_node(treedef))
    except _UnknownNodeError:
        return None
    # Decoded here first: whatever would come back otherwise is not sent.
    return nodes if _decode_treedef(nodes) == treedef else None


def _decode_treedef(nodes: bytes) -> Any | None:
    """Returns the treedef, or None where a namedtuple is not known here."""
    try:
        return jax.tree.structure(_decode_node(msgspec.json.decode(nodes)))
    except _UnknownNodeError:
        return None


class _UnknownNodeError(Exception):
    """A node of a type that is not sent, or not found."""


def _encode_node(treedef: Any) -> Any:
    data = treedef.node_data()
    if data is None:
        return "*"
    kind, keys = data
    children = [_encode_node(child) for child in treedef.children()]
    if kind is type(None):
        return None
    if kind is list or kind is tuple:
        return [kind.__name__, *children]
    if kind is dict and all(type(key) in (str, int) for key in keys):
        return ["dict", keys, *children]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return ["namedtuple", kind.__module__, kind.__qualname__, *children]
    raise _UnknownNodeError


def _decode_node(node: Any) -> Any:
    match node:
        case "*":
            return 0
        case None:
            return None
        case ["list", *children]:
            return [_decode_node(child) for child in children]
        case ["tuple", *children]:
            return tuple(_decode_node(child) for child in children)
        case ["dict", keys, *children]:
            return {
                key: _decode_node(child)
                for key, child in zip(keys, children, strict=True)
            }
        case ["namedtuple", module, qualname, *children]:
            kind = _find_namedtuple(module, qualname, len(children))
            return kind(*map(_decode_node, children))
    raise _UnknownNodeError


def _find_namedtuple(module: str, qualname: str, num_fields: int) -> Any:
    """Finds a namedtuple among what is imported already; nothing else is called."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if (
        isinstance(found, type)
        and issubclass(found, tuple)
        and len(getattr(found, "_fields", ())) == num_fields
        and isinstance(getattr(found, "_field_defaults", None), dict)
    ):
        return found
    raise _UnknownNodeError
