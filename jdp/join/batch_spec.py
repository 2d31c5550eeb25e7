"""Batch specs: what must be equal on all processes, and how is a batch padded?"""

import math
import re
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jdp.replicas import host_arrays, wire
from jdp.trees import tree_paths
from jdp.types import PyTree

_KEY = "key<"
_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
_MOST_SHOWN = 200  # characters of text from another process.
_MOST_ELEMENTS = 1 << 48
_MOST_DEPTH = 100  # of nodes in nodes.

Signature = tuple[Any, tuple[Any, ...]]  # the treedef; per leaf dtype, trailing shape.


class BatchLeafSpec(msgspec.Struct, frozen=True, array_like=True):
    """One leaf, without its number of samples."""

    path: str
    dtype: str
    shape: tuple[int, ...]  # without dimension 0.


class BatchSpec(msgspec.Struct, frozen=True, array_like=True):
    """A batch, without its number of samples."""

    structure: str  # the treedef, as text.
    nodes: bytes | None  # the treedef, as JSON; None where a node is of another type.
    leaves: tuple[BatchLeafSpec, ...]


class ReadBatch(NamedTuple):
    """Structure, shapes and dtypes of the batch that a process has read."""

    tree: PyTree
    leaves: list[Any]
    signature: Signature
    num_samples: int


def inspect_batch(tree: PyTree, index: int) -> ReadBatch:
    """Looks at what was read, batch `index` of this process, and copies host memory.

    A loader may write its next batch to the same memory while this one waits in the
    queue. Arrays of JAX do not change, and are taken as they are.

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
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, np.ma.MaskedArray):
            path = tree_paths.leaf_paths(tree)[i]
            name = f"The leaf `{path}` of batch {index} (counted from 0)"
            host_arrays.check_has_no_mask(leaf, name)
    leaves = [
        leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves
    ]
    for i, leaf in enumerate(leaves):
        problem = _find_problem(leaf, leaves[0])
        if problem:
            path = tree_paths.leaf_paths(tree)[i]
            raise ValueError(
                f"The leaf `{path}` of batch {index} (counted from 0) {problem}."
            )
    kinds = tuple((_dtype_of(leaf), leaf.shape[1:]) for leaf in leaves)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        leaves = [
            host_arrays.own_copy(leaf) if isinstance(leaf, np.ndarray) else leaf
            for leaf in leaves
        ]
        tree = jax.tree.unflatten(treedef, leaves)
    return ReadBatch(tree, leaves, (treedef, kinds), leaves[0].shape[0])


def make_spec(batch: ReadBatch) -> BatchSpec:
    """Describes a batch for other processes, which compare it or make zeros."""
    treedef, kinds = batch.signature
    leaves = [
        BatchLeafSpec(path, _name_of(dtype), tuple(shape))
        for path, (dtype, shape) in zip(
            tree_paths.leaf_paths(batch.tree), kinds, strict=True
        )
    ]
    return BatchSpec(_as_text(treedef), _encode_treedef(treedef), tuple(leaves))


def _name_of(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) else str(jnp.dtype(dtype))


def find_treedef(spec: BatchSpec, candidates: Sequence[Any]) -> Any | None:
    """Returns the treedef of `spec`, or None where this process cannot know it.

    Args:
      spec: spec of a batch of another process.
      candidates: treedefs that this process has seen, for nodes that are not of the
        types that JAX knows.
    """
    for treedef in candidates:
        if _as_text(treedef) == spec.structure:
            return treedef
    found = None if spec.nodes is None else _decode_treedef(spec.nodes)
    if found is None or found.num_leaves != len(spec.leaves):
        return None
    return found


def find_fault(spec: BatchSpec) -> str | None:
    """Returns why no process has such batches, as "with a leaf ..."; or None."""
    if not spec.leaves:
        return "without leaves"
    for leaf in spec.leaves:
        path = leaf.path[:_MOST_SHOWN]
        if not _is_dtype(leaf.dtype):
            return f"with a leaf `{path}` of dtype {leaf.dtype[:_MOST_SHOWN]!r}"
        # One sample fits into the memory of no host.
        if min(leaf.shape, default=0) < 0 or math.prod(leaf.shape) >= _MOST_ELEMENTS:
            return f"with a leaf `{path}` of an impossible shape"
    return None


def _is_dtype(name: str) -> bool:
    try:
        if _key_impl_of(name) is not None:
            return True
        dtype = jnp.dtype(name)
    # jax and numpy raise errors of many classes for text that names no dtype.
    except (TypeError, ValueError, AttributeError, SyntaxError, KeyError):
        return False
    return str(dtype) == name and _is_numeric(dtype)


def _is_numeric(dtype: Any) -> bool:
    return dtype.kind in "biufc" or jnp.issubdtype(dtype, np.number)


def _key_impl_of(name: str) -> str | None:
    """Returns the implementation of keys that a leaf's dtype names; None: no keys."""
    if not name.startswith(_KEY) or not name.endswith(">"):
        return None
    impl = name[len(_KEY) : -1]
    return impl if impl in _KEY_IMPLS else None


def _dtype_of(leaf: Any) -> Any:
    """Returns a dtype of numpy, or text for an array of keys."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return f"{_KEY}{jax.random.key_impl(leaf)}>"
    return leaf.dtype


def describe_difference(
    first: BatchSpec, second: BatchSpec, names: tuple[str, str]
) -> str:
    """Says in which leaf two specs differ, or that their structures do."""
    # Where one has more leaves, it is the structure that differs.
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


def make_zeros(spec: BatchSpec, num_samples: int) -> list[Any]:
    """Makes the leaves of a batch that is nothing but padding; read-only.

    Of PRNG keys, those whose data is 0: they are keys as any other.
    """
    leaves = []
    for leaf in spec.leaves:
        shape = (num_samples, *leaf.shape)
        if (impl := _key_impl_of(leaf.dtype)) is not None:
            data = np.zeros((*shape, *_key_shape(impl)), np.uint32)
            leaves.append(jax.random.wrap_key_data(jnp.asarray(data), impl=impl))
            continue
        zeros = np.zeros(shape, jnp.dtype(leaf.dtype))
        zeros.setflags(write=False)
        leaves.append(zeros)
    return leaves


def pad_batch(batch: ReadBatch, num_samples: int) -> PyTree:
    """Returns the batch with zeros at the end, or as it is where it is full."""
    if batch.num_samples == num_samples:
        return batch.tree
    padded = []
    for leaf in batch.leaves:
        is_key = isinstance(_dtype_of(leaf), str)
        values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        whole = np.zeros((num_samples, *values.shape[1:]), values.dtype)
        whole[: len(values)] = values
        if is_key:
            impl = jax.random.key_impl(leaf)
            padded.append(jax.random.wrap_key_data(jnp.asarray(whole), impl=impl))
        else:
            padded.append(whole)
    return jax.tree.unflatten(batch.signature[0], padded)


def _key_shape(impl: str) -> tuple[int, ...]:
    """Returns the shape of the data of one key."""
    make = lambda: jax.random.key_data(jax.random.key(0, impl=impl))  # noqa: E731
    return jax.eval_shape(make).shape


def _find_problem(leaf: Any, first: Any) -> str | None:
    dtype = _dtype_of(leaf)
    if isinstance(dtype, str):
        if _key_impl_of(dtype) is None:
            return f"has keys of {dtype}, which another process cannot make"
    elif not isinstance(dtype, np.dtype) or not _is_numeric(dtype):
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


def _encode_treedef(treedef: Any) -> bytes | None:
    try:
        nodes = msgspec.json.encode(_encode_node(treedef))
    except _UnknownNodeError:
        return None
    # Decoded here first: whatever would come back otherwise is not sent. A treedef
    # cannot be compared with None.
    found = _decode_treedef(nodes)
    return nodes if found is not None and found == treedef else None


def _decode_treedef(nodes: bytes) -> Any | None:
    """Returns the treedef; None if it is invalid or has an unknown namedtuple."""
    try:
        found = wire.decode_with(msgspec.json.decode, nodes)
        return jax.tree.structure(_decode_node(found))
    # Keys of one dict that cannot be sorted are a ValueError or TypeError of JAX's.
    except (_UnknownNodeError, ValueError, TypeError):
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


def _decode_node(node: Any, depth: int = 0) -> Any:
    if depth > _MOST_DEPTH:
        raise _UnknownNodeError
    match node:
        case "*":
            return 0
        case None:
            return None
        case ["list", *children]:
            return [_decode_node(child, depth + 1) for child in children]
        case ["tuple", *children]:
            return tuple(_decode_node(child, depth + 1) for child in children)
        case ["dict", list(keys), *children]:
            if not all(type(key) in (str, int) for key in keys):
                raise _UnknownNodeError
            return {
                key: _decode_node(child, depth + 1)
                for key, child in zip(keys, children, strict=True)
            }
        case ["namedtuple", str(module), str(qualname), *children]:
            kind = _find_namedtuple(module, qualname, len(children))
            # Not by its own `__new__`, which could be any code.
            return tuple.__new__(kind, [_decode_node(c, depth + 1) for c in children])
    raise _UnknownNodeError


def _find_namedtuple(module: str, qualname: str, num_fields: int) -> Any:
    """Finds a namedtuple among what is imported already; nothing else is called."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        # Not `getattr`: some modules import others then.
        is_open = isinstance(found, types.ModuleType | type)
        found = vars(found).get(name) if is_open else None
    if (
        isinstance(found, type)
        and issubclass(found, tuple)
        and isinstance(fields := getattr(found, "_fields", None), tuple)
        and len(fields) == num_fields
        and isinstance(getattr(found, "_field_defaults", None), dict)
    ):
        return found
    raise _UnknownNodeError
