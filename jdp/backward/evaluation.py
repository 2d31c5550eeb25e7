"""Evaluation: runs a traced program again, for JAX to differentiate.

JAX differentiates each equation separately, a third of a millisecond each, but a `jit`
function once for all its calls. Functions of `jnp` are behind `jit`; the equations that
they leave in a jaxpr are not. So equations are run in segments, cut so that equal
layers have equal segments. Each kind of segment gets its own `jit`, which is inlined
and leaves no trace in the program. Tracing the gradient of a transformer's loss this
way is faster than tracing it directly (`jdp bench overhead`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal, jaxprs_in_params

from jdp import compat
from jdp.backward import flow
from jdp.compat import primitives

_MAX_SEGMENT = 64  # equations.


class ProgramRunner:
    """Runs programs and single equations; equal ones share their derivatives."""

    def __init__(self):
        self._functions: dict[Any, Callable[..., Any]] = {}

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Runs a closed jaxpr."""
        body, consts = flow.open_jaxpr(jaxpr)
        known: dict[Any, Any] = dict(zip(body.constvars, consts, strict=True))
        known |= zip(body.invars, operands, strict=True)
        last_use = _last_uses(body)
        end = 0
        for segment in _segments(body.eqns):
            end += len(segment)
            results = [
                (place, var)
                for i, eqn in enumerate(segment)
                for place, var in _places(i, eqn.outvars)
                if last_use.get(var, -1) >= end
            ]
            self._run_segment(segment, results, known)
        return [v.val if isinstance(v, Literal) else known[v] for v in body.outvars]

    def run_equation(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Runs one equation on other operands."""
        if _kind(eqn) is None:
            return compat.bind_equation(eqn, operands)
        known = {
            v: x
            for v, x in zip(eqn.invars, operands, strict=True)
            if not isinstance(v, Literal)
        }
        results = list(_places(0, eqn.outvars))
        self._run_segment([eqn], results, known)
        return [known[var] for var in eqn.outvars]

    def _run_segment(
        self, segment: list[Any], results: list[Any], known: dict[Any, Any]
    ) -> None:
        """Runs equations on `known` values, and adds `results` to these."""
        kinds = [_kind(eqn) for eqn in segment]
        if kinds[0] is None:
            (eqn,) = segment
            operands = [
                v.val if isinstance(v, Literal) else known[v] for v in eqn.invars
            ]
            made = compat.bind_equation(eqn, operands)
            known |= zip(eqn.outvars, made, strict=True)
            return
        wiring, operands = _wire(segment, known)
        key = tuple(kinds), wiring, tuple(place for place, _ in results)
        if key not in self._functions:
            self._functions[key] = _inlined(segment, wiring, key[2])
        with compat.inside_equation(segment[0]):  # The others share its scope.
            made = self._functions[key](*operands)
        known |= zip((var for _, var in results), made, strict=True)


class _Operand(NamedTuple):
    """Place in which an equation of a segment finds an operand."""

    equation: int  # its index in the segment; -1 for an operand of the segment.
    position: int


def _places(index: int, outvars: Sequence[Any]) -> list[tuple[_Operand, Any]]:
    return [(_Operand(index, k), var) for k, var in enumerate(outvars)]


def _segments(eqns: Sequence[Any]) -> list[list[Any]]:
    segments: list[list[Any]] = []
    is_open = False
    for eqn in eqns:
        is_plain = _kind(eqn) is not None
        if (
            is_open
            and is_plain
            and compat.share_scope(eqn, segments[-1][0])
            and len(segments[-1]) < _MAX_SEGMENT
        ):
            segments[-1].append(eqn)
        else:
            segments.append([eqn])
        # So that segments end at the same places in every layer.
        is_open = is_plain and eqn.primitive.name not in primitives.CONTRACTIONS
    return segments


def _last_uses(jaxpr: Any) -> dict[Any, int]:
    """Returns per value the index of the equation that uses it last."""
    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last |= {v: i for v in eqn.invars if not isinstance(v, Literal)}
    end = len(jaxpr.eqns)
    return last | {v: end for v in jaxpr.outvars if not isinstance(v, Literal)}


def _wire(
    segment: list[Any], known: dict[Any, Any]
) -> tuple[tuple[tuple[_Operand, ...], ...], list[Any]]:
    """Returns the places of each equation's operands, and the segment's operands."""
    at: dict[Any, _Operand] = {}
    operands: list[Any] = []
    wiring = []
    for i, eqn in enumerate(segment):
        places = []
        for var in eqn.invars:
            if isinstance(var, Literal):
                places.append(_Operand(-1, len(operands)))
                operands.append(var.val)
                continue
            if var not in at:
                at[var] = _Operand(-1, len(operands))
                operands.append(known[var])
            places.append(at[var])
        wiring.append(tuple(places))
        at |= {var: place for place, var in _places(i, eqn.outvars)}
    return tuple(wiring), operands


def _inlined(
    segment: list[Any],
    wiring: tuple[tuple[_Operand, ...], ...],
    results: tuple[_Operand, ...],
) -> Callable[..., list[Any]]:
    parts = [
        (eqn.primitive, eqn.primitive.get_bind_params(eqn.params), places)
        for eqn, places in zip(segment, wiring, strict=True)
    ]

    def run(*operands: Any) -> list[Any]:
        made: list[Sequence[Any]] = []

        def read(place: _Operand) -> Any:
            values = operands if place.equation < 0 else made[place.equation]
            return values[place.position]

        for primitive, params, places in parts:
            found = primitive.bind(*map(read, places), **params)
            made.append(found if primitive.multiple_results else [found])
        return [read(place) for place in results]

    return compat.jit_inlined(run)


def _kind(eqn: Any) -> Any:
    """Returns a key that equal computations share, or None if there is no such key."""
    if eqn.effects or any(True for _ in jaxprs_in_params(eqn.params)):
        return None
    avals = tuple(v.aval for v in eqn.invars)
    key = eqn.primitive, tuple(eqn.params.items()), avals, eqn.ctx
    try:
        hash(key)
    except TypeError:
        return None
    return key
