"""Program pairs: what differs in the trace of a step for more samples?"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params

from jdp.backward import flow


class ProgramPair:
    """Values of a program that are larger, or other counts, for more samples.

    Equations are compared in their order. Where the programs have other equations,
    the values between are taken to be larger.
    """

    def __init__(self, loops: frozenset[int] = frozenset()):
        """Takes the ids of `while` loops with more iterations for more samples."""
        self._loops = loops
        self._larger: set[Any] = set()  # variables.
        self._counts: set[Any] = set()  # variables of constants.
        self._literals: dict[int, list[bool]] = {}  # by the id of an equation.
        # By ids, with the objects, so that the ids stay taken.
        self._compared: dict[tuple[int, int, bool], tuple[Any, Any]] = {}

    def is_larger(self, var: Any) -> bool:
        """Whether a variable has another shape, or is in a loop of more iterations."""
        return var in self._larger

    def counts_of(self, eqn: Any) -> list[bool]:
        """Returns per operand whether it is an integer constant that differs."""
        literals = self._literals.get(id(eqn)) or [False] * len(eqn.invars)
        return [
            is_other or (not isinstance(var, Literal) and var in self._counts)
            for var, is_other in zip(eqn.invars, literals, strict=True)
        ]

    def compare(self, value: Any, wide: Any, *, in_loop: bool = False) -> None:
        """Compares jaxprs, open or closed, or containers of jaxprs.

        Args:
          value: a jaxpr of the program.
          wide: the jaxpr of the trace with more samples; None if there is none.
          in_loop: whether it is in a loop that has more iterations there.
        """
        if isinstance(value, tuple | list):
            same = isinstance(wide, tuple | list) and len(wide) == len(value)
            for i, x in enumerate(value):
                self.compare(x, wide[i] if same else None, in_loop=in_loop)
        key = id(value), id(wide), in_loop
        if isinstance(value, ClosedJaxpr | Jaxpr) and key not in self._compared:
            self._compared[key] = value, wide
            self._compare_jaxprs(value, wide, in_loop)

    def _compare_jaxprs(self, jaxpr: Any, wide: Any, in_loop: bool) -> None:
        body, consts = flow.open_jaxpr(jaxpr)
        other, other_consts = (None, ()) if wide is None else flow.open_jaxpr(wide)
        if other is None:
            self._compare_variables(body.invars, (), in_loop)
            pairs = [(eqn, None) for eqn in body.eqns]
        else:
            self._compare_variables(body.invars, other.invars, in_loop)
            pairs = _align(body.eqns, other.eqns)
        triples = zip(body.constvars, consts, other_consts, strict=False)
        self._counts.update(var for var, a, b in triples if _is_other_count(a, b))
        for eqn, partner in pairs:
            self._compare_equations(eqn, partner, in_loop)

    def _compare_equations(self, eqn: Any, wide: Any, in_loop: bool) -> None:
        self._compare_variables(
            eqn.outvars, () if wide is None else wide.outvars, in_loop
        )
        in_loop |= id(eqn) in self._loops
        if wide is not None:
            self._compare_literals(eqn, wide)
            if eqn.primitive.name == "scan":
                in_loop |= eqn.params["length"] != wide.params["length"]
        params = {} if wide is None else wide.params
        if any(True for _ in jaxprs_in_params(eqn.params)):
            for name, value in eqn.params.items():
                self.compare(value, params.get(name), in_loop=in_loop)

    def _compare_variables(
        self, variables: Sequence[Any], wide: Sequence[Any], in_loop: bool
    ) -> None:
        is_paired = len(variables) == len(wide)
        for i, var in enumerate(variables):
            if in_loop or not is_paired or _shape(var) != _shape(wide[i]):
                self._larger.add(var)

    def _compare_literals(self, eqn: Any, wide: Any) -> None:
        if len(eqn.invars) != len(wide.invars):
            return
        found = [
            isinstance(a, Literal)
            and isinstance(b, Literal)
            and _is_other_count(a.val, b.val)
            for a, b in zip(eqn.invars, wide.invars, strict=True)
        ]
        if any(found):
            self._literals[id(eqn)] = found


def _align(eqns: Sequence[Any], wide: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs equations of equal names from the first on and from the last on."""
    names = [[eqn.primitive.name for eqn in x] for x in (eqns, wide)]
    first = _common(*names)
    last = _common(names[0][first:][::-1], names[1][first:][::-1])
    end = len(eqns) - last
    return [
        *zip(eqns[:first], wide[:first], strict=True),
        *((eqn, None) for eqn in eqns[first:end]),
        *zip(eqns[end:], wide[len(wide) - last :], strict=True),
    ]


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Returns how many first names are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _shape(var: Any) -> Any:
    return getattr(var.aval, "shape", ())


def _is_other_count(a: Any, b: Any) -> bool:
    is_count = all(np.ndim(x) == 0 and _is_integer(x) for x in (a, b))
    return is_count and a is not b and bool(a != b)


def _is_integer(x: Any) -> bool:
    dtype = getattr(x, "dtype", None) or np.result_type(type(x))
    return jnp.issubdtype(dtype, jnp.integer)
