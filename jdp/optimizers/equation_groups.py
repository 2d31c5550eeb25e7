"""Equation groups: equations of a program that share arrays and run as one program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdp.backward.flat_program import Equation, is_literal


class DisjointSets:
    """Sets of integers that are united step by step; each is alone at first."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def find(self, i: int) -> int:
        """Returns an integer that stands for the set of `i`."""
        root = i
        while (parent := self._parents.setdefault(root, root)) != root:
            root = parent
        while self._parents[i] != root:
            self._parents[i], i = root, self._parents[i]
        return root

    def unite(self, i: int, j: int) -> None:
        """Makes one set of two."""
        self._parents[self.find(i)] = self.find(j)


def connect(
    equations: Sequence[Equation],
    members: Sequence[int],
    is_link: Callable[[Any, Any], bool],
) -> list[list[int]]:
    """Divides equations into groups that share links.

    Args:
      equations: the equations of a program, in order.
      members: indices of the equations to divide, in order.
      is_link: (key, its variable in the equation that reads it) -> whether all members
        that make or read the key are in one group.
    """
    sets, seen = DisjointSets(), {}
    for i in members:
        equation = equations[i]
        sets.find(i)
        for key, atom in zip(equation.inputs, equation.eqn.invars, strict=True):
            if not is_literal(key) and is_link(key, atom):
                sets.unite(i, seen.setdefault(key, i))
        seen.update(dict.fromkeys(equation.outputs, i))
    groups: dict[int, list[int]] = {}
    for i in members:
        groups.setdefault(sets.find(i), []).append(i)
    return list(groups.values())


def find_outputs(
    equations: Sequence[Equation],
    groups: Sequence[Sequence[int]],
    results: Sequence[Any],
) -> list[list[Any]]:
    """Returns for each group the keys that it makes and others read.

    Args:
      equations: the equations of a program, in order.
      groups: indices of equations.
      results: keys that the program returns, or literals.
    """
    group_of = {i: n for n, group in enumerate(groups) for i in group}
    made_by: Mapping[Any, int] = {
        key: n for i, n in group_of.items() for key in equations[i].outputs
    }
    read = {key for key in results if not is_literal(key)}
    for i, equation in enumerate(equations):
        own = group_of.get(i)
        read.update(
            key
            for key in equation.inputs
            if not is_literal(key) and made_by.get(key, own) != own
        )
    outputs: list[list[Any]] = [[] for _ in groups]
    for key in sorted(read & made_by.keys()):
        outputs[made_by[key]].append(key)
    return outputs
