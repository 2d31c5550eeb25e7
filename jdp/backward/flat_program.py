"""Flat program: the equations of a jaxpr and of the jaxprs it calls, in one list."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jdp.backward import flow


class Equation(NamedTuple):
    """Equation with operands and results as keys that are unique in the list."""

    eqn: Any  # the equation of a jaxpr.
    inputs: list[Any]  # literals, or keys.
    outputs: list[int]  # keys.


class FlatProgram(NamedTuple):
    """Equations in the order of the program."""

    equations: list[Equation]
    inputs: list[int]  # keys of the arguments.
    outputs: list[Any]  # literals, or keys.
    constants: dict[int, Any]  # values that the program closes over, by key.


def flatten(closed: Any, calls: Collection[str]) -> FlatProgram:
    """Lists the equations of a closed jaxpr.

    Args:
      closed: the jaxpr.
      calls: names of primitives that are replaced by the equations of their jaxpr.
    """
    equations: list[Equation] = []
    constants: dict[int, Any] = {}
    num_keys = 0

    def make_keys(variables: Sequence[Any]) -> list[int]:
        nonlocal num_keys
        num_keys += len(variables)
        return list(range(num_keys - len(variables), num_keys))

    def walk(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
        body, consts = flow.open_jaxpr(jaxpr)
        known = dict(zip(body.invars, arguments, strict=True))
        known.update(zip(body.constvars, make_keys(body.constvars), strict=True))
        pairs = zip(body.constvars, consts, strict=True)
        constants.update((known[var], value) for var, value in pairs)

        def read(atom: Any) -> Any:
            return atom if is_literal(atom) else known[atom]

        for eqn in body.eqns:
            operands = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in calls:
                results = walk(flow.called_jaxpr(eqn), operands)
            else:
                results = make_keys(eqn.outvars)
                equations.append(Equation(eqn, operands, results))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in body.outvars]

    inputs = make_keys(closed.jaxpr.invars)
    outputs = walk(closed, inputs)
    return FlatProgram(equations, inputs, outputs, constants)


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal, not a key or a variable."""
    return hasattr(atom, "val")
