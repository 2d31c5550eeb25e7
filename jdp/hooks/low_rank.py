"""Low rank: matrices that travel as the product of two thin ones (PowerSGD)."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import types
from jdp.compat import origins
from jdp.hooks.base import CommHook, HookAllReduce, is_real, map_buckets
from jdp.replicas.per_replica import PerReplica
from jdp.trees import buckets as packing
from jdp.trees.buckets import BucketAval

_DRAWN = 4096  # random numbers that are drawn at once.


class _Group(NamedTuple):
    """Leaves of a bucket that are sent as products: g matrices of one shape."""

    places: list[int]  # of the g leaves in the bucket.
    num_rows: int
    num_columns: int
    rank: int


class PowerSGDState(NamedTuple):
    """State that PowerSGD keeps from step to step."""

    step: jax.Array  # number of steps taken, int32 ().
    # Per bucket the last Q^T of its matrices, the same on all replicas: packed, shape
    # (m,), or None for a bucket without matrices. Matrices of one shape are together,
    # (g, rank, num_columns), in the order of the first of each shape. Empty without
    # `warm_start`.
    factors: list[jax.Array | None]
    # Per bucket the part that was not sent, shape (n,), or None if all is sent. None
    # without error feedback.
    residuals: PerReplica | None
    leaf_shapes: tuple[tuple[tuple[int, ...], ...], ...]  # per bucket, of its leaves.


# Shapes are not arrays. It still is a named tuple, which `flax.serialization` knows.
jax.tree_util.register_dataclass(
    PowerSGDState,
    data_fields=["step", "factors", "residuals"],
    meta_fields=["leaf_shapes"],
)


@dataclasses.dataclass(frozen=True)
class _PowerSGDOptions:
    rank: int
    start_step: int
    min_compression_rate: float
    warm_start: bool
    error_feedback: bool
    orthogonalization_epsilon: float
    seed: int


def power_sgd(
    rank: int = 1,
    *,
    start_step: int = 0,
    min_compression_rate: float = 2.0,
    warm_start: bool = True,
    error_feedback: bool = True,
    orthogonalization_epsilon: float = 0.0,
    seed: int = 0,
) -> CommHook[PowerSGDState]:
    """Returns the hook of PowerSGD (Vogels et al., 2019), like torch's.

    A matrix M, (a, b), is sent as P, (a, r), and Q, (b, r): one step of the power
    method on the mean over replicas, starting from the Q of the step before. A leaf
    with more dimensions is a matrix of its last dimension and all others. P Q^T is the
    projection of the mean onto the columns of P. The residual is at most as large as
    the mean, and zero if the rank of the mean is at most r; error feedback adds it to
    the next gradient. Leaves that would not become smaller by `min_compression_rate`
    travel unchanged, and so do buckets without any compressed leaf.

    A NaN or an infinity makes the whole matrix NaN in that step. It does not stay in
    the state: the residuals of that bucket restart at zero, and its Q is kept. A column
    of Q that a mean of lower rank sets to zero is drawn again.

    P and Q are sums of products in float32 and must be in its range. With n replicas, a
    matrix whose largest element is above 3.4e38 / (n sqrt(max(a, b))) may arrive as
    infinity or NaN. A matrix whose largest element is below 1.2e-38 sqrt(max(a, b)) may
    arrive as zeros, which error feedback adds to the next gradient.

    Args:
      rank: r; a higher rank is more accurate and sends more.
      start_step: number of first steps with plain all-reduces, since gradients change
        fast in the beginning.
      min_compression_rate: a matrix is compressed if a * b is more than this times
        (a + b) * r.
      warm_start: whether Q starts from the step before instead of a random draw.
      error_feedback: whether residuals are kept; they are as large as the gradients.
      orthogonalization_epsilon: added to the norms by which P and Q are divided.
        Columns that depend on earlier columns become zeros in any case.
      seed: seed of the first Q, the same on all replicas.

    Returns:
      The hook; its state is a `PowerSGDState`.

    Raises:
      TypeError: `rank` or `start_step` is not an integer, or another option is not a
        number.
      ValueError: `rank` is below 1, or `start_step` below 0.
    """
    rank = types.as_count(rank, "rank", least=1)
    start_step = types.as_count(start_step, "start_step", least=0)
    types.check_number(min_compression_rate, "min_compression_rate")
    types.check_number(orthogonalization_epsilon, "orthogonalization_epsilon")
    options = _PowerSGDOptions(
        rank,
        start_step,
        min_compression_rate,
        warm_start,
        error_feedback,
        orthogonalization_epsilon,
        seed,
    )

    def apply(
        buckets: list[jax.Array], state: PowerSGDState, all_reduce: HookAllReduce
    ) -> tuple[list[jax.Array], PowerSGDState]:
        def compressed() -> tuple[list[jax.Array], PowerSGDState]:
            return _apply(buckets, state, all_reduce, options)

        def plain() -> tuple[list[jax.Array], PowerSGDState]:
            return map_buckets(all_reduce, all_reduce, buckets), state

        if start_step == 0:
            sums, state = compressed()
        else:
            is_late = state.step >= start_step
            sums, state = all_reduce.switch(is_late, compressed, plain)
        return sums, state._replace(step=state.step + 1)

    init = functools.partial(_init, options=options)
    return CommHook(init, apply, f"power_sgd({rank})", is_elementwise=False)


def _init(avals: Sequence[BucketAval], options: _PowerSGDOptions) -> PowerSGDState:
    groups = [_groups(aval.dtype, aval.leaf_shapes, options) for aval in avals]
    residuals = [
        # An empty array would not do: orbax does not save it.
        jnp.zeros(aval.shape, aval.dtype) if found else None
        for aval, found in zip(avals, groups, strict=True)
    ]
    factors = []
    if options.warm_start:
        factors = _draw(jax.random.key(options.seed), groups)
    return PowerSGDState(
        jnp.zeros((), jnp.int32),
        factors,
        PerReplica(residuals) if options.error_feedback else None,
        tuple(aval.leaf_shapes for aval in avals),
    )


def _groups(
    dtype: Any, leaf_shapes: Sequence[tuple[int, ...]], options: _PowerSGDOptions
) -> list[_Group]:
    """Returns the leaves of a bucket that are worth compressing, by shape."""
    found: dict[tuple[int, int], _Group] = {}
    for place, shape in enumerate(leaf_shapes):
        if len(shape) < 2 or not is_real(dtype) or 0 in shape:
            continue
        rows, columns = math.prod(shape[:-1]), shape[-1]
        rank = min(rows, columns, options.rank)
        if (rows + columns) * rank * options.min_compression_rate < rows * columns:
            group = _Group([], rows, columns, rank)
            found.setdefault((rows, columns), group).places.append(place)
    return list(found.values())


def _draw(key: jax.Array, groups: list[list[_Group]]) -> list[jax.Array | None]:
    """Draws the Q of all buckets: per bucket float32 (m,), or None without matrices.

    All are cut from rows that one loop draws. XLA on CPU takes 0.1 s to compile each
    `jax.random.normal`, and without a loop it copies the computation to every consumer.
    """
    sizes = [sum(map(math.prod, _factor_shapes(found))) for found in groups]

    def draw(row: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, row), (_DRAWN,), jnp.float32)

    with origins.bound_by(origins.OWN_DRAWS):
        drawn = lax.map(draw, jnp.arange(-(-sum(sizes) // _DRAWN))).reshape(-1)
    ends = itertools.accumulate(sizes)
    return [
        drawn[end - size : end] if size else None
        for size, end in zip(sizes, ends, strict=True)
    ]


def _apply(
    buckets: list[jax.Array],
    state: PowerSGDState,
    all_reduce: HookAllReduce,
    options: _PowerSGDOptions,
) -> tuple[list[jax.Array], PowerSGDState]:
    groups = [
        _groups(bucket.dtype, leaf_shapes, options)
        for bucket, leaf_shapes in zip(buckets, state.leaf_shapes, strict=True)
    ]
    before = state.factors
    if not options.warm_start:
        key = jax.random.key(options.seed)
        before = _draw(jax.random.fold_in(key, state.step), groups)
    sums, factors, residuals = [], [], []
    for k, bucket in enumerate(buckets):
        residual = None if state.residuals is None else state.residuals.value[k]
        factor = before[k]
        with all_reduce.bucket(k):
            if factor is None:
                total = all_reduce(bucket)
            else:
                total, factor, residual = _send(
                    bucket,
                    residual,
                    factor,
                    state.step,
                    groups[k],
                    state.leaf_shapes[k],
                    all_reduce,
                    options,
                )
        sums.append(total)
        factors.append(factor)
        residuals.append(residual)
    return sums, state._replace(
        factors=factors if options.warm_start else [],
        residuals=None if state.residuals is None else PerReplica(residuals),
    )


def _send(
    bucket: jax.Array,
    residual: jax.Array | None,
    factor: jax.Array,
    step: jax.Array,
    groups: list[_Group],
    leaf_shapes: Sequence[tuple[int, ...]],
    all_reduce: HookAllReduce,
    options: _PowerSGDOptions,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Sums one bucket; returns the sum, the new Q and the residual."""
    num_replicas = all_reduce.num_replicas
    given = bucket
    if residual is not None:
        # Added in one kernel, in place of the residual. XLA would add each leaf in a
        # kernel of its own, and copy the residual first.
        given = lax.optimization_barrier(bucket + residual)
    leaves = packing.unpack(given, leaf_shapes)
    sent, left = list(leaves), [jnp.zeros_like(x) for x in leaves]
    matrices = {i for group in groups for i in group.places}
    exact = [i for i in range(len(leaves)) if i not in matrices]
    if exact:
        sums = _sum_packed([leaves[i] for i in exact], all_reduce)
        for i, total in zip(exact, sums, strict=True):
            sent[i] = total
    ms = [
        jnp.stack([leaves[i].reshape(g.num_rows, g.num_columns) for i in g.places])
        for g in groups
    ]
    ps, new_factor = _factorize(ms, factor, step, groups, all_reduce, options)
    qs = packing.unpack(new_factor, _factor_shapes(groups))
    is_finite = jnp.isfinite(new_factor).all()
    for group, m, p, q in zip(groups, ms, ps, qs, strict=True):
        product = _einsum("gar,grb->gab", p, q).astype(bucket.dtype)
        missing = m - product / num_replicas
        # P Q^T may overflow where Q does not.
        missing = jnp.where(is_finite & jnp.isfinite(missing), missing, 0)
        for k, i in enumerate(group.places):
            sent[i] = product[k].reshape(leaf_shapes[i])
            left[i] = missing[k].reshape(leaf_shapes[i])
    mean_factor = (new_factor / num_replicas).astype(factor.dtype)
    new_factor = jnp.where(is_finite, mean_factor, factor)
    if residual is None:
        return packing.pack(sent), new_factor, None
    return packing.pack(sent), new_factor, packing.pack(left).astype(bucket.dtype)


def _factorize(
    ms: list[jax.Array],
    factor: jax.Array,
    step: jax.Array,
    groups: list[_Group],
    all_reduce: HookAllReduce,
    options: _PowerSGDOptions,
) -> tuple[list[jax.Array], jax.Array]:
    """Takes a step of the power method on the sums of `ms`, (g, a, b) per group.

    Returns:
      P, shape (g, a, r) per group, orthonormal; and the sum of all P^T M, packed.
    """
    qs = packing.unpack(factor, _factor_shapes(groups))
    qs = [q.swapaxes(1, 2) for q in qs]
    # A column of Q that became zero, in a step of lower rank, would stay zero.
    qs = [_orthogonalize_all(_draw_zeros(q, step), options) for q in qs]
    ps = [_einsum("gab,gbr->gar", m, q) for m, q in zip(ms, qs, strict=True)]
    ps = [_orthogonalize_all(p, options) for p in _sum_packed(ps, all_reduce)]
    # P^T M: for M^T P, XLA on CPU would copy M to transpose it.
    qs = [_einsum("gar,gab->grb", p, m) for m, p in zip(ms, ps, strict=True)]
    return ps, all_reduce(packing.pack(qs))


def _factor_shapes(groups: list[_Group]) -> list[tuple[int, int, int]]:
    return [(len(g.places), g.rank, g.num_columns) for g in groups]


def _sum_packed(arrays: list[jax.Array], all_reduce: HookAllReduce) -> list[jax.Array]:
    total = all_reduce(packing.pack(arrays))
    return packing.unpack(total, [x.shape for x in arrays])


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies in float32 or wider, as rounded factors spoil the power method."""
    dtype = _wide(a.dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def _wide(dtype: Any) -> Any:
    """Returns the dtype itself, or float32 in place of a narrower one."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def _orthogonalize_all(matrices: jax.Array, options: _PowerSGDOptions) -> jax.Array:
    """Applies `_orthogonalize` to matrices, shape (g, n, r)."""
    return jax.vmap(lambda x: _orthogonalize(x, options))(matrices)


def _draw_zeros(matrices: jax.Array, step: jax.Array) -> jax.Array:
    """Draws the columns again that are zeros; `matrices` has shape (g, n, r)."""
    is_zero = (matrices == 0).all(1, keepdims=True)
    return jnp.where(is_zero, _scatter(matrices, step), matrices)


def _scatter(like: jax.Array, step: jax.Array) -> jax.Array:
    """Returns numbers in [-0.5, 0.5) that differ by step and not by replica.

    It hashes positions with the finalizer of MurmurHash3, which compiles in a tenth of
    the time of `jax.random.uniform`.
    """
    bits = lax.iota(jnp.uint32, like.size).reshape(like.shape)
    bits = bits + step.astype(jnp.uint32) * np.uint32(0x9E3779B9)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = (bits ^ (bits >> 16)) * np.uint32(factor)
    bits = (bits ^ (bits >> 16)) >> 8
    return bits.astype(like.dtype) * 2.0**-24 - 0.5


def _orthogonalize(matrix: jax.Array, options: _PowerSGDOptions) -> jax.Array:
    """Makes the columns orthonormal to rounding; dependent columns become zero.

    A column of rounding errors must not be scaled up to unit length: it would not be
    orthogonal to the others, and P P^T would not be a projection. So each column is
    scaled by its largest element, which keeps the squares in range, and projected off
    the columns before it twice, which is enough (Parlett, The Symmetric Eigenvalue
    Problem, 6.9). A column with only rounding errors left becomes zero.

    Args:
      matrix: shape (n, r), a float dtype.
      options: options of the hook.

    Returns:
      Shape (n, r); a NaN or an infinity makes its column and those after it NaN.
    """
    peaks = jnp.abs(matrix).max(0, keepdims=True)
    # XLA may multiply by the inverse, which is flushed to zero if it is subnormal.
    step_down = jnp.where(peaks > 2.0**64, jnp.asarray(2.0**-64, matrix.dtype), 1)
    divisor = jnp.where(peaks == 0, 1, peaks * step_down)
    columns = (matrix * step_down / divisor).T
    tolerance = math.sqrt(matrix.shape[0]) * float(jnp.finfo(matrix.dtype).eps)

    def add(k: jax.Array, units: jax.Array) -> jax.Array:
        column = columns[k]
        before = jnp.linalg.norm(column)
        for _ in range(2):
            # Later units are still zeros.
            shares = _einsum("kn,n->k", units, column)
            column = column - _einsum("k,kn->n", shares, units)
        norm = jnp.linalg.norm(column)
        is_dependent = norm <= tolerance * before  # False where it is NaN.
        unit = jnp.where(is_dependent, 0, column) / jnp.where(is_dependent, 1, norm)
        if options.orthogonalization_epsilon:
            unit = unit / (1 + options.orthogonalization_epsilon / (norm * peaks[0, k]))
        return units.at[k].set(unit)

    return lax.fori_loop(0, matrix.shape[1], add, jnp.zeros_like(columns)).T
