"""Sub-program: some equations of a flat program, as a program of their own."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdp import compat
from jdp.backward import flow
from jdp.backward.flat_program import Equation, FlatProgram, is_literal


class SubProgram(NamedTuple):
    """Equations of a flat program that run together."""

    equations: list[Equation]
    inputs: list[int]  # keys that they read and none of them makes, in order of use.
    outputs: list[Any]  # keys, or literals.
    # The same for programs that compute the same, if their inputs have the same types.
    signature: Hashable

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Returns the outputs, given the values of the inputs."""
        known = dict(zip(self.inputs, arguments, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else known[atom]

        for equation in self.equations:
            found = compat.bind_equation(
                equation.eqn, [read(atom) for atom in equation.inputs]
            )
            known.update(zip(equation.outputs, found, strict=True))
        return [
            jnp.asarray(atom.val) if is_literal(atom) else known[atom]
            for atom in self.outputs
        ]


def make(equations: list[Equation], outputs: Sequence[Any]) -> SubProgram:
    """Returns the program of `equations`, which are in the order of their program.

    Args:
      equations: the equations.
      outputs: keys that they make or read, or literals.
    """
    inputs: list[int] = []
    numbers: dict[int, int] = {}

    def describe(atom: Any) -> Hashable:
        if is_literal(atom):
            return _describe_literal(atom)
        if atom not in numbers:  # It is read before any equation has made it.
            inputs.append(atom)
            numbers[atom] = len(numbers)
        return numbers[atom]

    lines = []
    for equation in equations:
        operands = tuple(map(describe, equation.inputs))
        lines.append((_kind(equation.eqn), operands))
        for key in equation.outputs:
            numbers[key] = len(numbers)
    signature = tuple(lines), tuple(map(describe, outputs))
    return SubProgram(equations, inputs, list(outputs), signature)


class ProgramCutter:
    """Cuts a program into the parts that some of its results need."""

    def __init__(self, program: FlatProgram):
        self._equations = program.equations
        self._made_by = {
            key: i for i, x in enumerate(program.equations) for key in x.outputs
        }

    def cut(self, results: Sequence[Any]) -> SubProgram:
        """Returns the part that computes `results`: keys, or literals."""
        wanted: set[int] = set()
        waiting = list(results)
        while waiting:
            atom = waiting.pop()
            index = None if is_literal(atom) else self._made_by.get(atom)
            if index is not None and index not in wanted:
                wanted.add(index)
                waiting += self._equations[index].inputs
        equations = [self._equations[i] for i in sorted(wanted)]
        return make(equations, results)


def _kind(eqn: Any) -> Hashable:
    """Returns a description of an equation without its operands."""
    params = tuple((name, _hashable(x)) for name, x in sorted(eqn.params.items()))
    return eqn.primitive, _hashable(eqn.ctx), params


def _hashable(x: Any) -> Hashable:
    if isinstance(x, tuple):
        return type(x), tuple(map(_hashable, x))
    if isinstance(x, float | complex | np.generic):
        return type(x), repr(x)  # 0.0 and -0.0 are equal.
    if hasattr(flow.open_jaxpr(x)[0], "eqns"):
        return _describe_jaxpr(x)
    try:
        hash(x)
    except TypeError:
        return id(x)  # The program keeps it from being taken again.
    return type(x), x


def _describe_jaxpr(jaxpr: Any) -> Hashable:
    """Returns the same for the bodies of loops that compute the same."""
    body, consts = flow.open_jaxpr(jaxpr)
    variables = [*body.constvars, *body.invars]
    numbers = {var: i for i, var in enumerate(variables)}

    def describe(atom: Any) -> Hashable:
        return _describe_literal(atom) if is_literal(atom) else numbers[atom]

    lines = []
    for eqn in body.eqns:
        lines.append((_kind(eqn), tuple(map(describe, eqn.invars))))
        for var in eqn.outvars:
            numbers[var] = len(numbers)
    types = tuple(var.aval for var in variables)
    return (
        "jaxpr",
        types,
        tuple(map(id, consts)),
        tuple(lines),
        tuple(map(describe, body.outvars)),
    )


def _describe_literal(atom: Any) -> Hashable:
    return atom.aval, np.asarray(atom.val).tobytes()
