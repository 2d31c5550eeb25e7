"""Derivatives: which program is the custom rule of an equation?"""

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
    inputs: list[int]  # operands that are differentiated.
    outputs: list[int]  # results that can have one.

    def select(self, eqn: Any, bits: Sequence[int]) -> tuple[int, ...]:
        """Turns sets of the jaxpr's inputs into sets of the equation's, by output."""
        found = [0] * len(eqn.outvars)
        first = len(eqn.invars)
        for p, i in enumerate(self.inputs):
            for q, o in enumerate(self.outputs):
                row, column = (p, q) if self.is_backward else (q, p)
                found[o] |= (bits[row] >> (first + column) & 1) << i
        return tuple(found)


def trace_derivative(eqn: Any, perturbed: int) -> Derivative:
    """Traces what JAX does to differentiate an equation with a rule of its own."""
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
