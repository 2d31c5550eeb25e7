"""Derivatives: the program of an equation's custom rule."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdp import compat


class Derivative(NamedTuple):
    """Program of the rule of a `custom_jvp` or `custom_vjp`."""

    # (operands, tangents of `inputs`) -> tangents of `outputs`; or, if backward,
    # (operands, cotangents of `outputs`) -> cotangents of `inputs`.
    jaxpr: Any
    is_backward: bool
    inputs: list[int]  # indices of operands that are differentiated.
    outputs: list[int]  # indices of results that can have a derivative.

    def select(self, eqn: Any, bits: Sequence[int]) -> tuple[int, ...]:
        """Converts sets of the jaxpr's inputs to sets of operands, by result."""
        found = [0] * len(eqn.outvars)
        first = len(eqn.invars)
        for p, i in enumerate(self.inputs):
            for q, o in enumerate(self.outputs):
                row, column = (p, q) if self.is_backward else (q, p)
                found[o] |= (bits[row] >> (first + column) & 1) << i
        return tuple(found)


def trace_derivative(eqn: Any, perturbed: int) -> Derivative:
    """Traces the derivative of an equation with a custom rule, as JAX takes it."""
    inputs = [
        i
        for i, v in enumerate(eqn.invars)
        if perturbed >> i & 1 and compat.is_differentiable(v)
    ]
    outputs = [o for o, v in enumerate(eqn.outvars) if compat.is_differentiable(v)]
    is_backward = eqn.primitive.name == "custom_vjp_call"

    def differentiate(operands: list[jax.Array], seeds: list[jax.Array]) -> Any:
        def run(*chosen: jax.Array) -> list[jax.Array]:
            values = list(operands)
            for i, x in zip(inputs, chosen, strict=True):
                values[i] = x
            results = compat.bind_equation(eqn, values)
            return _at(results, outputs)

        chosen = _at(operands, inputs)
        if is_backward:
            return jax.vjp(run, *chosen)[1](seeds)
        return jax.jvp(run, tuple(chosen), tuple(seeds))[1]

    operands = [v.aval for v in eqn.invars]
    results = [v.aval for v in eqn.outvars]
    seeds = _at(results, outputs) if is_backward else _at(operands, inputs)
    made = jax.make_jaxpr(differentiate)(operands, seeds)
    return Derivative(made, is_backward, inputs, outputs)


def _at(values: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [values[i] for i in indices]
