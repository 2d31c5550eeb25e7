"""Cotangents: identities whose backward pass is a given function."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class Transpose:
    """Backward pass of `with_transpose`, printed as its name.

    Processes compare programs by their text, which must not contain addresses.

    Args:
      name: text in a printed jaxpr.
      fn: `fn(cotangents, *consts)` returns cotangents. None among `cotangents` stands
        for zeros.
    """

    def __init__(self, name: str, fn: Callable[..., Sequence[jax.Array]]):
        self.fn = fn
        self._name = name

    def __repr__(self) -> str:
        return self._name


def with_transpose(
    xs: Sequence[jax.Array], transpose: Transpose, consts: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """Returns `xs`, as a linear function of `xs` whose transpose is `transpose`.

    Tangents pass unchanged, so it can be differentiated forwards, and as often as
    `transpose` can. `transpose` also gets `consts`, which are not differentiated.
    """
    num_consts = len(consts)
    return _with_transpose_p.bind(
        *consts, *xs, transpose=transpose, num_consts=num_consts
    )


def scale(x: jax.Array, factor: jax.Array, *, in_backward: bool = False) -> jax.Array:
    """Returns `x` times `factor`, a float (), with the identity as transpose.

    With `in_backward`, returns `x` and multiplies its cotangent by `factor`. Two such
    scales that undo each other leave derivatives of any order unchanged; with plain
    products, each order would scale the derivative once more.
    """
    (found,) = _scale_p.bind(factor, x, in_backward=in_backward)
    return found


def _transpose_rule(
    cotangents: Sequence[Any], *operands: Any, transpose: Transpose, num_consts: int
) -> list[Any]:
    consts = operands[:num_consts]
    of_consts = [None] * num_consts
    is_zero = [isinstance(c, ad.Zero) for c in cotangents]
    given = [None if a else c for a, c in zip(is_zero, cotangents, strict=True)]
    if not given or all(is_zero):
        return [*of_consts, *cotangents]
    found = transpose.fn(given, *consts)
    pairs = zip(is_zero, cotangents, found, strict=True)
    return [*of_consts, *(old if a else new for a, old, new in pairs)]


def _tangent_rule(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    num_consts = params["num_consts"]
    out = _with_transpose_p.bind(*primals, **params)
    own = map(ad.instantiate_zeros, tangents[num_consts:])
    moved = _with_transpose_p.bind(*primals[:num_consts], *own, **params)
    return out, moved


def _scaled(factor: jax.Array, x: jax.Array, *, in_backward: bool) -> list[jax.Array]:
    return [x if in_backward else x * factor.astype(x.dtype)]


def _scale_tangent_rule(
    primals: Sequence[Any], tangents: Sequence[Any], *, in_backward: bool
) -> tuple[list[Any], list[Any]]:
    factor, x = primals
    moved = ad.instantiate_zeros(tangents[1])
    out = _scale_p.bind(factor, x, in_backward=in_backward)
    return out, _scale_p.bind(factor, moved, in_backward=in_backward)


def _scale_transpose_rule(
    cotangents: Sequence[Any], factor: Any, x: Any, *, in_backward: bool
) -> list[Any]:
    (cotangent,) = cotangents
    if isinstance(cotangent, ad.Zero):
        return [None, cotangent]
    return [None, *_scale_p.bind(factor, cotangent, in_backward=not in_backward)]


def _scale_batch_rule(
    operands: Sequence[Any], dims: Sequence[Any], *, in_backward: bool
) -> tuple[list[Any], list[Any]]:
    (factor, x), (factor_dim, x_dim) = operands, dims
    if factor_dim is not None:
        x = batching.bdim_at_front(x, x_dim, factor.shape[factor_dim])
        x_dim = 0
        factor = factor.reshape(-1, *(1,) * (x.ndim - 1))
    return _scale_p.bind(factor, x, in_backward=in_backward), [x_dim]


def _own(operands: Sequence[Any], num_consts: int) -> list[Any]:
    return list(operands[num_consts:])


_with_transpose_p = Primitive("jdp_with_transpose")
_with_transpose_p.multiple_results = True
_with_transpose_p.def_impl(lambda *xs, transpose, num_consts: _own(xs, num_consts))
_with_transpose_p.def_abstract_eval(
    lambda *avals, transpose, num_consts: _own(avals, num_consts)
)
mlir.register_lowering(
    _with_transpose_p, lambda ctx, *xs, transpose, num_consts: _own(xs, num_consts)
)
ad.primitive_jvps[_with_transpose_p] = _tangent_rule
ad.primitive_transposes[_with_transpose_p] = _transpose_rule
batching.primitive_batchers[_with_transpose_p] = lambda xs, dims, **params: (
    _with_transpose_p.bind(*xs, **params),
    _own(dims, params["num_consts"]),
)

_scale_p = Primitive("jdp_scale")
_scale_p.multiple_results = True
_scale_p.def_impl(_scaled)
_scale_p.def_abstract_eval(lambda factor, x, in_backward: [x])
mlir.register_lowering(_scale_p, mlir.lower_fun(_scaled, multiple_results=True))
ad.primitive_jvps[_scale_p] = _scale_tangent_rule
ad.primitive_transposes[_scale_p] = _scale_transpose_rule
batching.primitive_batchers[_scale_p] = _scale_batch_rule
