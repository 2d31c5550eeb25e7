"""Annotations: identities that tell XLA or an analysis more than types do."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir.dialects import stablehlo

from jdp.compat import axis_index, cast_varying, varying_axes


def order_after(
    xs: Sequence[jax.Array], earlier: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Makes `xs` depend on `earlier`, so that XLA can neither merge nor swap them.

    Returns:
      `xs` and `earlier`, to be used in place of the arguments: XLA drops operands of a
      barrier whose results are not used.
    """
    held = _barrier_p.bind(*xs, *earlier)
    return held[: len(xs)], held[len(xs) :]


# `lax.optimization_barrier`, except that each result varies over the axes of its own
# operand. With JAX 0.10, all results vary over the axes of all operands.
_barrier_p = Primitive("jdp_barrier")
_barrier_p.multiple_results = True
_barrier_p.def_impl(lambda *xs: list(xs))
_barrier_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(
    _barrier_p, lambda ctx, *xs: list(stablehlo.OptimizationBarrierOp(xs).results)
)
batching.primitive_batchers[_barrier_p] = lambda xs, dims: (_barrier_p.bind(*xs), dims)
ad.primitive_jvps[_barrier_p] = lambda xs, dots: (_barrier_p.bind(*xs), dots)


def declare_replicated(x: jax.Array, axis_names: Sequence[str]) -> jax.Array:
    """Declares that `x` is the same over `axis_names`; no data moves.

    If JAX tracks varying axes by type, the result's type has fewer axes, and the
    derivative is taken of the copy at index 0. Otherwise, under `shard_map`, an
    equation stays in the program for `jdp.step.sameness`; cotangents pass it, as they
    pass `lax.psum` there.
    """
    names = tuple(n for n in axis_names if n in varying_axes(x))
    if names:
        return _replicated_p.bind(x, axes=names, is_typed=True)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = tuple(n for n in axis_names if n in manual)
    if not names or varying_axes(axis_index(names)):
        return x
    return _replicated_p.bind(x, axes=names, is_typed=False)


def _replicated_type(aval: Any, *, axes: tuple[str, ...], is_typed: bool) -> Any:
    if not is_typed:
        return aval
    varying = aval.mat.varying - frozenset(axes)
    return aval.update(manual_axis_type=aval.mat.update(varying=varying))


def _replicated_transpose(
    cotangent: Any, x: Any, *, axes: tuple[str, ...], is_typed: bool
) -> list[jax.Array]:
    if not is_typed:
        return [cotangent]
    is_first = axis_index(axes) == 0
    return [
        cast_varying(jnp.where(is_first, cotangent, jnp.zeros_like(cotangent)), axes)
    ]


def _replicated_batch(
    xs: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    return _replicated_p.bind(xs[0], **params), dims[0]


_replicated_p = Primitive("jdp_replicated")
_replicated_p.def_impl(lambda x, **_: x)
_replicated_p.def_abstract_eval(_replicated_type)
mlir.register_lowering(_replicated_p, lambda ctx, x, **_: [x])
ad.deflinear2(_replicated_p, _replicated_transpose)
batching.primitive_batchers[_replicated_p] = _replicated_batch


def forget_axes(x: jax.Array, axis_names: Collection[str]) -> jax.Array:
    """Returns `x` with a type that does not vary over axes, though its values may.

    Unlike `declare_replicated` it claims nothing: the analysis of a step looks at the
    values. It has no derivative.
    """
    # In one order: processes compare the text of the program.
    names = tuple(sorted(varying_axes(x).intersection(axis_names)))
    if not names:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = forget_axes(jax.random.key_data(x), names)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return _forgetful_p.bind(x, axes=names)


def _forgetful_type(aval: Any, *, axes: tuple[str, ...]) -> Any:
    varying = aval.mat.varying - frozenset(axes)
    return aval.update(manual_axis_type=aval.mat.update(varying=varying))


_forgetful_p = Primitive("jdp_forget_axes")
_forgetful_p.def_impl(lambda x, *, axes: x)
_forgetful_p.def_abstract_eval(_forgetful_type)
mlir.register_lowering(_forgetful_p, lambda ctx, x, *, axes: [x])


def expect_same(x: jax.Array, axis_names: Sequence[str], message: str) -> jax.Array:
    """Returns `x`, which must be the same over `axis_names`; no data moves.

    If JAX tracks varying axes by type, this checks at once. Otherwise an equation stays
    in the program, for an analysis that raises `message`.

    Args:
      x: any array.
      axis_names: bound names of axes.
      message: text of the ValueError that is raised if `x` may differ.

    Raises:
      ValueError: `x` may differ.
    """
    if varying_axes(x) & frozenset(axis_names):
        raise ValueError(message)
    if varying_axes(axis_index(tuple(axis_names))):
        return x
    return expect_same_p.bind(x, axes=tuple(axis_names), message=message)


expect_same_p = Primitive("jdp_expect_same")
expect_same_p.def_impl(lambda x, *, axes, message: x)
expect_same_p.def_abstract_eval(lambda aval, *, axes, message: aval)
mlir.register_lowering(expect_same_p, lambda ctx, x, *, axes, message: [x])
ad.primitive_jvps[expect_same_p] = lambda xs, dots, **params: (
    expect_same_p.bind(*xs, **params),
    dots[0],
)
batching.primitive_batchers[expect_same_p] = lambda xs, dims, **params: (
    expect_same_p.bind(*xs, **params),
    dims[0],
)


def watch(x: jax.Array, number: int, place: int) -> jax.Array:
    """Returns `x`; an equation that tells two numbers stays in the program."""
    return _watched_p.bind(jnp.asarray(x), number=number, place=place)


WATCHED = "jdp_watched"
_watched_p = Primitive(WATCHED)
_watched_p.def_impl(lambda x, **_: x)
_watched_p.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(_watched_p, lambda ctx, x, **_: [x])
ad.primitive_jvps[_watched_p] = lambda xs, dots, **params: (
    _watched_p.bind(*xs, **params),
    dots[0],
)
batching.primitive_batchers[_watched_p] = lambda xs, dims, **params: (
    _watched_p.bind(*xs, **params),
    dims[0],
)


def only_for(x: jax.Array, platform: str, message: str) -> jax.Array:
    """Returns `x`; a program that uses it compiles only for `platform`.

    Args:
      x: any array.
      platform: "cuda", for example.
      message: text of the NotImplementedError for other platforms, which replace
        `{platform}`.
    """
    return _only_for_p.bind(x, platform=platform, message=message)


def _lower_only_for(ctx: Any, x: Any, *, platform: str, message: str) -> list[Any]:
    platforms = ctx.module_context.platforms
    if tuple(platforms) != (platform,):
        raise NotImplementedError(message.format(platform=" and ".join(platforms)))
    return [x]


_only_for_p = Primitive("jdp_only_for")
_only_for_p.def_impl(lambda x, *, platform, message: x)
_only_for_p.def_abstract_eval(lambda aval, *, platform, message: aval)
mlir.register_lowering(_only_for_p, _lower_only_for)
