"""Shards: which server has which parameters, and how are they laid out?"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp.replicas import host_arrays
from jdp.trees import buckets, tree_paths
from jdp.trees.buckets import BucketAval, BucketPlan
from jdp.types import PyTree

_ALIGNMENT = 64  # bytes; the alignment of XLA's own buffers.
_BUCKETS_PER_SERVER = 8  # small enough to give all servers about the same bytes.


@dataclasses.dataclass(frozen=True)
class MemoryLayout:
    """Layout of arrays in one block of memory, one after the other."""

    avals: tuple[jax.ShapeDtypeStruct, ...]
    offsets: tuple[int, ...]  # of each array, in bytes.
    num_bytes: int  # of the block.

    def views(self, memory: Any) -> list[np.ndarray]:
        """Returns the arrays in `memory`, without a copy."""
        return [
            np.frombuffer(memory, aval.dtype, math.prod(aval.shape), offset).reshape(
                aval.shape
            )
            for aval, offset in zip(self.avals, self.offsets, strict=True)
        ]


def make_layout(avals: Sequence[Any]) -> MemoryLayout:
    """Places arrays of given shapes and dtypes one after the other."""
    offsets, end = [], 0
    for aval in avals:
        offsets.append(end)
        size = math.prod(aval.shape) * aval.dtype.itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    plain = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return MemoryLayout(tuple(plain), tuple(offsets), end)


def make_memory(num_bytes: int) -> np.ndarray:
    """Returns bytes, shape (num_bytes,), aligned for XLA on CPU.

    XLA copies arrays that are not aligned, which takes a millisecond for 12.7 MB.
    """
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Parameters of one server."""

    buckets: tuple[tuple[int, ...], ...]  # leaf indices, in packing order.
    avals: tuple[BucketAval, ...]  # of the packed buckets.
    layout: MemoryLayout  # of the buckets.

    @property
    def leaves(self) -> tuple[int, ...]:
        """Leaf indices in packing order."""
        return tuple(i for bucket in self.buckets for i in bucket)


@dataclasses.dataclass(frozen=True)
class Shards:
    """Division of a tree among servers."""

    plan: BucketPlan
    of_server: tuple[Shard, ...]

    def find_parts(self, tree: PyTree, server: int) -> PyTree:
        """Returns `tree` without the leaves of other servers.

        An `optax.MaskedNode` replaces each of them, so the tree keeps its structure,
        and masks by path still work.
        """
        own = set(self.of_server[server].leaves)
        leaves = [
            x if i in own else optax.MaskedNode()
            for i, x in enumerate(jax.tree.leaves(tree))
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def plan_shards(params: PyTree, num_servers: int) -> Shards:
    """Divides parameters among servers, by bucket, with about the same bytes each.

    The same arguments give the same shards in every process. A leaf stays whole.

    Args:
      params: pytree of arrays; values are not read. Dtypes are canonicalized as in JAX:
        float64 is float32 unless `jax_enable_x64` is set.
      num_servers: number of servers.

    Raises:
      TypeError: a leaf does not have a floating dtype.
      ValueError: there are fewer leaves than servers.
    """
    paths, leaves = tree_paths.leaf_paths(params), jax.tree.leaves(params)
    for path, leaf in zip(paths, leaves, strict=True):
        host_arrays.check_has_no_mask(leaf, f"`params{path}`")
        is_number = isinstance(leaf, int | float | complex)
        if not is_number and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"`params{path}` must be an array, got {type(leaf).__name__}."
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"`params{path}` is {jnp.result_type(leaf)}; parameters must be of a "
                "floating dtype. Keep what is not trained out of them."
            )
    if not leaves:
        raise ValueError("`params` must have an array, got none.")
    if len(leaves) < num_servers:
        raise ValueError(
            f"`params` has {len(leaves)} leaves, too few for {num_servers} servers: "
            "a leaf is not split. Start fewer servers."
        )
    params = jax.tree.map(_canonicalize, params)
    num_bytes = buckets.plan_buckets(params).num_bytes
    most = max(1, num_bytes // (num_servers * _BUCKETS_PER_SERVER))
    most = buckets.DEFAULT_BUCKET_BYTES if num_servers == 1 else most
    plan = buckets.plan_buckets(params, bucket_bytes=most, first_bucket_bytes=most)
    if len(plan.buckets) < num_servers:
        plan = buckets.plan_buckets(params, bucket_bytes=0, first_bucket_bytes=0)
    sizes = [sum(plan.leaves[i].num_bytes for i in b) for b in plan.buckets]
    owned: list[list[int]] = [[] for _ in range(num_servers)]
    load = [0] * num_servers
    # Largest first, each to the least loaded server: within 4/3 of optimal (Graham).
    for index in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        server = min(range(num_servers), key=lambda k: (load[k], len(owned[k]), k))
        owned[server].append(index)
        load[server] += sizes[index]
    avals = plan.bucket_avals()
    shards = []
    for indices in owned:
        indices.sort()
        of_server = [avals[k] for k in indices]
        shards.append(
            Shard(
                tuple(plan.buckets[k] for k in indices),
                tuple(of_server),
                make_layout(of_server),
            )
        )
    return Shards(plan, tuple(shards))


def check_gradient(plan: BucketPlan, grads: PyTree) -> list[Any]:
    """Returns the leaves of `grads`, which must match the parameters of `plan`.

    Raises:
      ValueError: structure, a shape or a dtype differs; the message names the leaf.
      TypeError: a leaf is not an array.
    """
    leaves, treedef = jax.tree.flatten(grads)
    if treedef != plan.treedef:
        difference = tree_paths.first_difference(
            plan.leaf_paths(), tree_paths.leaf_paths(grads), "the parameters", "`grads`"
        )
        raise ValueError(
            "`grads` must have the structure of the parameters.\n"
            f"{difference}  parameters: {plan.treedef}\n  `grads`: {treedef}\n"
            "Push the gradient at what `pull` has returned."
        )
    paths = plan.leaf_paths()
    for path, spec, leaf in zip(paths, plan.leaves, leaves, strict=True):
        if not hasattr(leaf, "shape") and not isinstance(leaf, int | float | complex):
            raise TypeError(
                f"`grads{path}` must be an array, got {type(leaf).__name__}."
            )
        host_arrays.check_has_no_mask(leaf, f"`grads{path}`")
        host_arrays.check_has_known_dtype(leaf, f"`grads{path}`")
        shape, dtype = np.shape(leaf), jnp.result_type(leaf)
        if (shape, dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"`grads{path}` is {dtype}[{','.join(map(str, shape))}], and the "
                f"parameter is {spec}. Push a gradient of the shape and dtype of each "
                "parameter, such as `jax.grad` makes at what `pull` has returned."
            )
    return leaves


def _canonicalize(leaf: Any) -> Any:
    """Returns the shape of an array, and its dtype as JAX canonicalizes it."""
    if not hasattr(leaf, "shape"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(leaf))


def describe_leaves(plan: BucketPlan) -> list[tuple[str, str]]:
    """Returns the path of each leaf, and its dtype and shape as text."""
    return list(zip(plan.leaf_paths(), map(str, plan.leaves), strict=True))


def find_difference(
    own: list[tuple[str, str]], theirs: list[tuple[str, str]], who: str
) -> str:
    """Describes the first difference of two descriptions of parameters; "" if equal."""
    # Lengths are compared once all common entries are equal.
    for (path, kind), (other_path, other_kind) in zip(own, theirs, strict=False):
        if path != other_path:
            return f"`{path}` on the server is `{other_path}` on {who}"
        if kind != other_kind:
            return f"`{path}` is {kind} on the server and {other_kind} on {who}"
    if len(own) != len(theirs):
        more, where = (own, "the server") if len(own) > len(theirs) else (theirs, who)
        path = more[min(len(own), len(theirs))][0]
        return f"`{path}` is only on {where}"
    return ""


def copy_leaves(shard: Shard, leaves: Sequence[Any], into: Sequence[np.ndarray]):
    """Copies leaves of a tree into the buffers of a shard's buckets, shape (n,) each.

    Args:
      shard: the leaves of a server, by bucket.
      leaves: leaves of the whole tree, in `jax.tree.leaves` order; leaves of other
        servers may be None.
      into: buffer of each bucket.
    """
    for bucket, buffer in zip(shard.buckets, into, strict=True):
        end = 0
        for i in bucket:
            flat = np.asarray(leaves[i]).reshape(-1)
            buffer[end : end + flat.size] = flat
            end += flat.size


def is_finite(x: np.ndarray) -> bool:
    """Whether no element is NaN or infinite; integers are finite."""
    # A finite sum proves it in one pass; a sum of finite elements may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(x.sum())) or bool(np.isfinite(x).all())
