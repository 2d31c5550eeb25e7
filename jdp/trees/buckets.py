"""Buckets: leaves of a tree that travel together, and how they are packed."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Generic, Literal

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import TypeVar

from jdp import compat, types
from jdp.trees.tree_paths import first_difference, leaf_paths
from jdp.types import PyTree

Packing = Literal["flat", "tuple"]
T = TypeVar("T", default=Any)

# The defaults of torch's DistributedDataParallel (reducer.hpp): a small first bucket,
# so that communication starts early, then large ones.
DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024
DEFAULT_FIRST_BUCKET_BYTES = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """Shape and dtype of one leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes; 0 for float0, which carries no data."""
        return 0 if self.dtype == jax.dtypes.float0 else self.size * self.dtype.itemsize

    def __str__(self) -> str:
        """Formats the leaf as `float32[3,2]`."""
        shape = ",".join(map(str, self.shape))
        return f"{self.dtype.name if self.dtype.names is None else 'float0'}[{shape}]"


class BucketAval(jax.ShapeDtypeStruct):
    """Shape (n,) and dtype of a packed bucket, and the shapes of its leaves."""

    __slots__ = ("leaf_shapes",)

    def __init__(self, leaf_shapes: Sequence[tuple[int, ...]], dtype: np.dtype):
        """Takes the shapes of leaves of one dtype, in packing order."""
        super().__init__((sum(map(math.prod, leaf_shapes)),), dtype)
        self.leaf_shapes = tuple(leaf_shapes)


@dataclasses.dataclass(frozen=True)
class BucketPlan(Generic[T]):
    """A static assignment of the leaves of a tree to buckets.

    Hashable, and equal for equal structures, shapes, dtypes and assignments, so that
    it can be a static argument and part of a program's fingerprint.
    """

    treedef: Hashable  # jax.tree_util.PyTreeDef
    leaves: tuple[LeafSpec, ...]  # in jax.tree.leaves order.
    buckets: tuple[tuple[int, ...], ...]  # indices into `leaves`, in packing order.

    @property
    def num_bytes(self) -> int:
        """The number of bytes in all buckets."""
        return sum(self.leaves[i].num_bytes for bucket in self.buckets for i in bucket)

    def bucket_avals(self) -> list[BucketAval]:
        """Returns the shape (n,), dtype and leaf shapes of each packed bucket."""
        return [
            BucketAval(
                [self.leaves[i].shape for i in bucket], self.leaves[bucket[0]].dtype
            )
            for bucket in self.buckets
        ]

    def leaf_paths(self) -> list[str]:
        """Returns the path of each leaf, for example `['dense']['kernel']`.

        If a class of the tree accepts only arrays, paths are indices, such as `[0]`.
        """
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.leaves]
        try:
            return leaf_paths(jax.tree.unflatten(self.treedef, avals))
        except Exception:
            return [f"[{i}]" for i in range(len(avals))]

    def describe(self) -> str:
        """Returns a table of the buckets: bytes, dtype and leaves, by path."""
        paths = self.leaf_paths()
        rows = [("bucket", "bytes", "leaf", "path")]
        for number, bucket in enumerate(self.buckets):
            num_bytes = sum(self.leaves[i].num_bytes for i in bucket)
            for position, i in enumerate(bucket):
                is_first = position == 0
                rows.append(
                    (
                        str(number) if is_first else "",
                        f"{num_bytes:,}" if is_first else "",
                        str(self.leaves[i]),
                        paths[i],
                    )
                )
        widths = [max(len(row[c]) for row in rows) for c in range(3)]
        lines = [
            f"{row[0]:>{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  "
            f"{row[3]}"
            for row in rows
        ]
        num_leaves = sum(map(len, self.buckets))
        bucket_noun = "bucket" if len(self.buckets) == 1 else "buckets"
        leaf_noun = "leaf" if num_leaves == 1 else "leaves"
        lines.append(
            f"{len(self.buckets)} {bucket_noun}, {num_leaves} {leaf_noun}, "
            f"{self.num_bytes:,} bytes"
        )
        return "\n".join(lines)


def plan_buckets(
    tree: T,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
    order: Sequence[int] | None = None,
) -> BucketPlan[T]:
    """Assigns the leaves of `tree`, taken in `order`, to buckets.

    Leaves of different dtypes never share a bucket. Neither do leaves that vary over
    different mesh axes by JAX's types, for example if only one has a model axis. A
    bucket is closed once it has reached its size, so its last leaf may exceed that. The
    first bucket of each dtype is closed at `first_bucket_bytes`, the others at
    `bucket_bytes`. torch's `_compute_bucket_assignment_by_size` assigns the same way.
    Buckets are ordered by the position of their last leaf in `order`.

    Args:
      tree: pytree of arrays, `jax.ShapeDtypeStruct`s or Python numbers; values are not
        read. Leaves of dtype float0 (gradients of integers) are in no bucket.
      bucket_bytes: size at which a bucket is closed, in bytes; at least 0.
      first_bucket_bytes: the same for the first bucket of each dtype; at least 0.
      order: leaf indices, each exactly once, in the order in which gradients become
        ready. None: the reverse of `jax.tree.leaves`, as in a backward pass.

    Returns:
      The plan.

    Raises:
      ValueError: `order` is not a permutation of the leaf indices, or a size is
        negative.
      TypeError: a leaf is neither an array nor a number, or is a PRNG key; a size is
        not a number; or `order` does not consist of integers.
    """
    types.check_number(bucket_bytes, "bucket_bytes")
    types.check_number(first_bucket_bytes, "first_bucket_bytes")
    if bucket_bytes < 0 or first_bucket_bytes < 0:
        raise ValueError(
            "`bucket_bytes` and `first_bucket_bytes` must be at least 0, got "
            f"{bucket_bytes} and {first_bucket_bytes}."
        )
    leaves, treedef = jax.tree.flatten(tree)
    specs = tuple(_leaf_spec(tree, i, leaf) for i, leaf in enumerate(leaves))
    num_leaves = len(specs)
    if order is None:
        order = range(num_leaves - 1, -1, -1)
    else:
        order = _as_indices(order)
        if sorted(order) != list(range(num_leaves)):
            raise ValueError(
                f"`order` must hold each of the {num_leaves} leaf indices exactly "
                f"once, got {order}."
            )
    kinds = [(s.dtype, _axes_of(x)) for s, x in zip(specs, leaves, strict=True)]
    buckets = _assign(specs, kinds, order, first_bucket_bytes, bucket_bytes)
    return BucketPlan(treedef, specs, buckets)


def _as_indices(order: Any) -> list[int]:
    try:
        return [operator.index(i) for i in order]
    except TypeError:
        raise TypeError(
            f"`order` must be a list of integers, the leaf indices, got {order!r}."
        ) from None


def check_plan(plan: Any) -> None:
    """Raises TypeError unless `plan` is a plan or None."""
    if plan is not None and not isinstance(plan, BucketPlan):
        raise TypeError(
            "`plan` must be what `jdp.plan_buckets` returns, or None, got "
            f"{plan!r}. Pass `jdp.plan_buckets(params, bucket_bytes=...)`."
        )


def default_plan(grads: PyTree, order: Sequence[int] | None = None) -> BucketPlan:
    """Returns the plan for gradients if the caller has none."""
    # The small first bucket starts communication early, except with XLA on CPU. There,
    # one more all-reduce over gloo costs 1 to 2 ms of a step of 25 ms (`jdp bench
    # step`, 12.7 MB of gradients, 2 processes).
    if jax.default_backend() == "cpu":
        return plan_buckets(grads, first_bucket_bytes=DEFAULT_BUCKET_BYTES, order=order)
    return plan_buckets(grads, order=order)


def fit_plan(
    plan: BucketPlan | None, grads: PyTree, order: Sequence[int] | None = None
) -> BucketPlan:
    """Returns the plan for `grads`: `plan`, or `default_plan` if it is None.

    Buckets of `plan` are split so that their leaves vary over the same mesh axes.
    Packed together, all leaves would vary over all axes, by JAX's types.
    """
    if plan is None:
        return default_plan(grads, order)
    axes = [_axes_of(x) for x in jax.tree.leaves(grads)]
    if len(set(axes)) <= 1 or len(axes) != len(plan.leaves):
        return plan
    cut = []
    for bucket in plan.buckets:
        groups: dict[frozenset[str], list[int]] = {}
        for i in bucket:
            groups.setdefault(axes[i], []).append(i)
        cut += map(tuple, groups.values())
    return dataclasses.replace(plan, buckets=tuple(cut))


def remaining_buckets(plan: BucketPlan, done: Collection[int]) -> list[tuple[int, ...]]:
    """Returns the buckets of `plan` without the leaf indices in `done`."""
    kept = [tuple(i for i in bucket if i not in done) for bucket in plan.buckets]
    return [bucket for bucket in kept if bucket]


def flatten_buckets(plan: BucketPlan[T], tree: T) -> list[jax.Array]:
    """Packs the leaves of `tree` into one buffer per bucket.

    Args:
      plan: a plan made for a tree of this structure, these shapes and dtypes.
      tree: pytree of arrays.

    Returns:
      A buffer of shape (n,) for each bucket of the plan.

    Raises:
      ValueError: the tree does not fit the plan; the message names a leaf.
    """
    leaves = check_fits(plan, tree)
    return [pack([leaves[i] for i in bucket]) for bucket in plan.buckets]


def unflatten_buckets(plan: BucketPlan[T], buffers: Sequence[jax.Array]) -> T:
    """The inverse of `flatten_buckets`.

    Args:
      plan: the plan that the buffers were packed with.
      buffers: one array of shape (n,) per bucket; its dtype may differ from the plan's.

    Returns:
      A pytree with the plan's structure and shapes and the buffers' dtypes.

    Raises:
      ValueError: the number or the sizes of the buffers differ from the plan's.
    """
    expected = [aval.shape for aval in plan.bucket_avals()]
    got = [tuple(buffer.shape) for buffer in buffers]
    if got != expected:
        raise ValueError(
            "`buffers` do not have the shapes of the plan's buckets.\n"
            f"  plan:    {expected}\n  buffers: {got}"
        )
    leaves: list = [np.zeros(spec.shape, jax.dtypes.float0) for spec in plan.leaves]
    for bucket, buffer in zip(plan.buckets, buffers, strict=True):
        parts = unpack(buffer, [plan.leaves[i].shape for i in bucket])
        for i, part in zip(bucket, parts, strict=True):
            leaves[i] = part
    return jax.tree.unflatten(plan.treedef, leaves)


def default_packing() -> Packing:
    """Returns how leaves are packed for XLA's all-reduce if no option tells.

    Where JAX partitions the program along another axis of the mesh, leaves are not
    packed: their parts are on different devices.
    """
    found = jax.sharding.get_abstract_mesh()
    if any(found.shape[n] > 1 for n in found.axis_names if n not in found.manual_axes):
        return "tuple"
    return "flat" if jax.default_backend() == "cpu" else "tuple"


def pack(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenates arrays of one dtype into a buffer of shape (n,)."""
    return jnp.concatenate([jnp.ravel(x) for x in arrays])


def unpack(buffer: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The inverse of `pack`: cuts `buffer`, shape (n,), into arrays of `shapes`."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [
        jax.lax.slice_in_dim(buffer, end - math.prod(shape), end).reshape(shape)
        for shape, end in zip(shapes, ends, strict=True)
    ]


def check_fits(plan: BucketPlan, tree: PyTree) -> list:
    """Returns the leaves of `tree`, after a check that it fits the plan.

    Raises:
      ValueError: the structure, a shape or a dtype differs; the message names the leaf.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if treedef != plan.treedef:
        difference = first_difference(
            plan.leaf_paths(), leaf_paths(tree), "the plan", "the tree"
        )
        raise ValueError(
            "The tree does not have the structure that the plan was made for.\n"
            f"{difference}"
            f"  plan: {plan.treedef}\n  tree: {treedef}\n"
            "Call `plan_buckets` again when parameters are added, removed or frozen."
        )
    for i, (spec, leaf) in enumerate(zip(plan.leaves, leaves, strict=True)):
        found = _leaf_spec(tree, i, leaf)
        if found != spec:
            raise ValueError(
                f"`{leaf_paths(tree)[i]}` is {found}, but the plan was made for "
                f"{spec}. Call `plan_buckets` again when parameters change."
            )
    return leaves


def _assign(
    specs: Sequence[LeafSpec],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    first_bucket_bytes: int,
    bucket_bytes: int,
) -> tuple[tuple[int, ...], ...]:
    """Fills buckets; leaves of different kinds never share a bucket."""
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    limits: dict[Hashable, int] = {}
    for i in order:
        kind = kinds[i]
        if specs[i].dtype == jax.dtypes.float0:
            continue
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(i)
        open_bytes[kind] = open_bytes.get(kind, 0) + specs[i].num_bytes
        if open_bytes[kind] >= limits.get(kind, first_bucket_bytes):
            closed.append(open_buckets.pop(kind))
            open_bytes[kind] = 0
            limits[kind] = bucket_bytes
    closed.extend(open_buckets.values())
    position = {i: p for p, i in enumerate(order)}
    return tuple(map(tuple, sorted(closed, key=lambda bucket: position[bucket[-1]])))


def _axes_of(leaf: object) -> frozenset[str]:
    """Returns the mesh axes over which a leaf may differ, by its type."""
    is_array = isinstance(leaf, jax.Array)
    return compat.varying_axes(leaf) if is_array else frozenset()


@functools.lru_cache(maxsize=1024)
def _cached_spec(shape: tuple[int, ...], dtype: np.dtype) -> LeafSpec:
    return LeafSpec(shape, dtype)


def _leaf_spec(tree: PyTree, index: int, leaf: object) -> LeafSpec:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        if not isinstance(leaf, bool | int | float | complex):
            raise TypeError(
                f"`{leaf_paths(tree)[index]}` must be an array or a number, "
                f"got {type(leaf).__name__}."
            )
        shape, dtype = (), jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"`{leaf_paths(tree)[index]}` is a PRNG key, which cannot be packed into a "
            "bucket. Leave it out, or pass `jax.random.key_data(key)`."
        )
    return _cached_spec(tuple(shape), np.dtype(dtype))
