"""Program pairs: how do the update for one replica's samples and that for all pair up?

Both are traces of one update of a metric, so they have the same equations, of other
shapes, unless the update depends on the number of samples otherwise.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal


class Total(NamedTuple):
    """A new value of a state: the whole, plus what each replica adds."""

    whole: jax.Array | None  # None: zero.
    own: jax.Array | None  # None: nothing is added.


class Whole(NamedTuple):
    """A value that is the same on all replicas, as the second program has it."""

    x: Any


class Part(NamedTuple):
    """The part of a value that belongs to the samples of a replica."""

    x: Any
    dim: int  # of the samples.


Value = Whole | Part | Total | None  # None: unknown.


class Pair(NamedTuple):
    """One equation, in both programs."""

    narrow: Any
    wide: Any

    def shape(self, place: int) -> tuple[int, ...]:
        """The shape of an operand for the samples of a replica."""
        return self.narrow.invars[place].aval.shape

    def wide_shape(self, place: int) -> tuple[int, ...]:
        """The shape of an operand for the samples of all replicas."""
        return self.wide.invars[place].aval.shape

    def has_equal_params(self, *besides: str) -> bool:
        """Whether the parameters are equal, besides some and besides jaxprs."""
        left_out = {"sharding", "out_sharding", "update_jaxpr", *besides}
        a, b = (
            {k: v for k, v in eqn.params.items() if k not in left_out} for eqn in self
        )
        return a == b


def are_alike(a: Any, b: Any) -> bool:
    """Returns whether two open jaxprs are alike, except for shapes and parameters."""
    if len(a.eqns) != len(b.eqns) or len(a.outvars) != len(b.outvars):
        return False
    partners = dict(zip(b.invars, a.invars, strict=True))
    if len(a.constvars) != len(b.constvars):
        return False
    partners |= zip(b.constvars, a.constvars, strict=True)

    def match(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
        return len(xs) == len(ys) and all(
            isinstance(x, Literal) if isinstance(y, Literal) else partners[y] is x
            for x, y in zip(xs, ys, strict=True)
        )

    for x, y in zip(a.eqns, b.eqns, strict=True):
        if x.primitive is not y.primitive or not match(x.invars, y.invars):
            return False
        if len(x.outvars) != len(y.outvars):
            return False
        partners |= zip(y.outvars, x.outvars, strict=True)
    return match(a.outvars, b.outvars)


def grown_dims(shape: Sequence[int], wide: Sequence[int]) -> list[int]:
    """Returns the dimensions in which two shapes of one rank differ."""
    return [i for i, (a, b) in enumerate(zip(shape, wide, strict=True)) if a != b]
