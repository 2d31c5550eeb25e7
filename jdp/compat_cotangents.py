"""Compat of cotangents: an identity whose backward pass is a function of ours."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class Transpose:
    """Backward pass of `with_transpose`; shown by its name alone.

    A program is compared between processes by its text, which has no addresses.
    """

    def __init__(
        self, name: str, fn: Callable[[list[jax.Array | None]], Sequence[jax.Array]]
    ):
        """Takes a function from cotangents to cotangents; None stands for zeros."""
        self.fn = fn
        self._name = name

    def __repr__(self) -> str:
        """The name."""
        return self._name


def with_transpose(xs: Sequence[jax.Array], transpose: Transpose) -> list[jax.Array]:
    """Returns `xs`, a linear function of them whose transpose is `transpose`.

    Tangents pass as they are, so that it can be differentiated forwards, and as often
    as `transpose` can.
    """
    return _with_transpose_p.bind(*xs, transpose=transpose)


def _transpose_rule(
    cotangents: Sequence[Any], *xs: Any, transpose: Transpose
) -> list[Any]:
    is_zero = [isinstance(c, ad.Zero) for c in cotangents]
    given = [None if a else c for a, c in zip(is_zero, cotangents, strict=True)]
    if not given or all(is_zero):
        return list(cotangents)
    found = transpose.fn(given)
    pairs = zip(is_zero, cotangents, found, strict=True)
    return [old if a else new for a, old, new in pairs]


_with_transpose_p = Primitive("jdp_with_transpose")
_with_transpose_p.multiple_results = True
_with_transpose_p.def_impl(lambda *xs, transpose: list(xs))
_with_transpose_p.def_abstract_eval(lambda *avals, transpose: list(avals))
mlir.register_lowering(_with_transpose_p, lambda ctx, *xs, transpose: list(xs))
ad.deflinear2(_with_transpose_p, _transpose_rule)
batching.primitive_batchers[_with_transpose_p] = lambda xs, dims, **params: (
    _with_transpose_p.bind(*xs, **params),
    dims,
)
