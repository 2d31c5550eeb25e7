"""Evaluation: runs a traced program again, equation by equation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, jaxprs_in_params

from jdp import compat
from jdp.backward import flow


class EquationRunner:
    """Runs equations; like ones share what JAX derives from them.

    JAX differentiates a primitive anew wherever it meets it, at a third of a
    millisecond each, but what is behind `jit` once for all calls. `jnp`'s functions
    are, and the equations that they leave in a jaxpr are not; so each kind of equation
    gets a `jit` of its own, which leaves no trace in the program (`inline`). Without,
    tracing the step of `jdp bench overhead` would take 1.6 times as long.
    """

    def __init__(self):
        """Starts with no kind known."""
        self._functions: dict[Any, Callable[..., Any]] = {}

    def __call__(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Runs one equation on other operands."""
        key = _kind(eqn)
        if key is None:
            return compat.bind_equation(eqn, operands)
        if key not in self._functions:
            self._functions[key] = _inlined(eqn)
        with compat.inside_equation(eqn):
            return self._functions[key](*operands)

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Runs a closed jaxpr."""
        body, consts = flow.open_jaxpr(jaxpr)
        known: dict[Any, Any] = dict(zip(body.constvars, consts, strict=True))
        known |= zip(body.invars, operands, strict=True)

        def read(var: Any) -> Any:
            return var.val if isinstance(var, Literal) else known[var]

        for eqn in body.eqns:
            results = self(eqn, [read(v) for v in eqn.invars])
            known |= zip(eqn.outvars, results, strict=True)
        return [read(v) for v in body.outvars]


def _kind(eqn: Any) -> Any:
    """What equations have in common that run the same; None if it cannot be told."""
    if eqn.effects or any(True for _ in jaxprs_in_params(eqn.params)):
        return None
    key = (
        eqn.primitive,
        tuple(sorted(eqn.params.items())),
        tuple(v.aval for v in eqn.invars),
        eqn.ctx,
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _inlined(eqn: Any) -> Callable[..., list[Any]]:
    primitive, params = eqn.primitive, eqn.primitive.get_bind_params(eqn.params)

    def run(*operands: Any) -> list[Any]:
        results = primitive.bind(*operands, **params)
        return list(results) if primitive.multiple_results else [results]

    run.__name__ = primitive.name
    return jax.jit(run, inline=True)
