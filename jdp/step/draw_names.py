"""Draw names: which draws of a program make the same numbers twice?

A backward pass, with `jax.checkpoint` or a rule of its own, may repeat a draw of the
forward pass from the same key. Values are named by how they are computed, so that the
same computation has the same name wherever it stands.
"""

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from jdp.backward import flow
from jdp.compat import primitives


def add_repeated(jaxpr: Any, draws: Collection[int]) -> frozenset[int]:
    """Returns ids of draws and of all draws that make the same numbers.

    Args:
      jaxpr: an open jaxpr, in which no two equations share a jaxpr with draws.
      draws: ids of equations of `primitives.DRAWS` in it.
    """
    if not draws:
        return frozenset()
    names = _Names()
    names.follow(jaxpr, [names.of("input", i) for i in range(len(jaxpr.invars))])
    chosen = {names.draws[x] for x in draws if x in names.draws}
    repeated = {x for x, name in names.draws.items() if name in chosen}
    return frozenset(repeated.union(draws))


class _Names:
    """Numbers that stand for computations."""

    def __init__(self) -> None:
        self.draws: dict[int, int] = {}  # the names of draws, by id.
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._made: list[tuple[Any, ...]] = []  # by number.
        # By ids and names, with the jaxpr, so that the id stays taken.
        self._known: dict[Any, tuple[Any, list[int]]] = {}

    def of(self, *computation: Any) -> int:
        """Returns the name of a computation."""
        if computation not in self._numbers:
            self._numbers[computation] = len(self._made)
            self._made.append(computation)
        return self._numbers[computation]

    def follow(self, jaxpr: Any, entering: Sequence[int]) -> list[int]:
        """Names the values of a jaxpr, open or closed; returns its results' names."""
        key = id(jaxpr), tuple(entering)
        if key not in self._known:
            body, consts = flow.open_jaxpr(jaxpr)
            known = dict(zip(body.invars, entering, strict=True))
            known |= {v: self.of("constant", id(v)) for v in body.constvars}
            for var, x in zip(body.constvars, consts, strict=False):
                known[var] = self.of("constant", id(x))
            for eqn in body.eqns:
                operands = [self._read(known, v) for v in eqn.invars]
                known |= zip(eqn.outvars, self._of_equation(eqn, operands), strict=True)
            self._known[key] = jaxpr, [self._read(known, v) for v in body.outvars]
        return self._known[key][1]

    def _read(self, known: dict[Any, int], var: Any) -> int:
        if isinstance(var, Literal):
            return self.of("literal", str(var.aval), str(var.val))
        return known[var]

    def _of_equation(self, eqn: Any, operands: list[int]) -> list[int]:
        name = eqn.primitive.name
        if name in ("scan", "while"):
            return self._of_loop(eqn, operands)
        if name == "cond":
            return self._of_branches(eqn, *operands)
        if name in primitives.BARRIERS:
            return operands
        inner = list(jaxprs_in_params(eqn.params))
        if name in primitives.FOLLOWED_CALLS and inner:
            called = inner[0]
            if "jaxpr" in eqn.params or "call_jaxpr" in eqn.params:
                called = flow.called_jaxpr(eqn)
            if len(flow.open_jaxpr(called)[0].invars) == len(operands):
                return self.follow(called, operands)
        if inner or eqn.effects:
            return [self.of("result", id(eqn), i) for i in range(len(eqn.outvars))]
        params = tuple((k, str(v)) for k, v in sorted(eqn.params.items()))
        found = self.of(name, params, *operands)
        if name in primitives.DRAWS:
            self.draws[id(eqn)] = found
        return [self.of("part", found, i) for i in range(len(eqn.outvars))]

    def _of_branches(self, eqn: Any, index: int, *operands: int) -> list[int]:
        """Names the results of a `cond`; a later one may choose by the same index."""
        found: list[list[int]] = []
        for i, branch in enumerate(eqn.params["branches"]):
            made = [self._made[x] for x in operands]
            pairs = zip(operands, made, strict=True)
            chosen = [m[2 + i] if m[:2] == ("cond", index) else x for x, m in pairs]
            found.append(self.follow(branch, chosen))
        return [self.of("cond", index, *x) for x in zip(*found, strict=True)]

    def _of_loop(self, eqn: Any, operands: list[int]) -> list[int]:
        loop = flow.loop_shape(eqn)
        if eqn.primitive.name == "while":
            operands = operands[eqn.params["cond_nconsts"] :]
        first, end = loop.num_consts, loop.num_consts + loop.num_carries
        entering = [
            *operands[:first],
            *(self.of("carry", x) for x in operands[first:end]),
            *(self._inverse("slice", "stack", x) for x in operands[end:]),
        ]
        leaving = self.follow(loop.body, entering)
        return [
            *(self.of("last", x) for x in leaving[: loop.num_carries]),
            *(self._inverse("stack", "slice", x) for x in leaving[loop.num_carries :]),
        ]

    def _inverse(self, kind: str, inverse: str, x: int) -> int:
        """Returns the name of a slice of a stack, or of a stack of slices."""
        made = self._made[x]
        return made[1] if made[0] == inverse else self.of(kind, x)
