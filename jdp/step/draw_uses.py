"""Draw uses: which draws does a step make for the samples of all replicas itself?

A step may gather the samples of all replicas and draw for all of them, or draw for all
and take out the part of the replica. Such draws are complete as they are written. Their
values are followed from the draw on, as long as they are the same on all replicas:

- A draw meets, in one equation, gathered samples: a value that is the same on all
  replicas, comes from a collective, and is larger for more samples.
- Its values are sliced or indexed at a position computed from `lax.axis_index`.

A draw whose values first meet something else that differs between the replicas is a
draw for the replica's own samples.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jdp import compat
from jdp.backward import flow
from jdp.compat import primitives
from jdp.replicas.mesh import World
from jdp.step import draw_names
from jdp.step.program_pairs import ProgramPair
from jdp.step.sameness import SamenessAnalysis

_WITH_JAXPRS = primitives.FOLLOWED_CALLS | primitives.CONTROL
# Each result comes from an operand of its own.
_SEPARATE = primitives.BARRIERS | primitives.UNITING | primitives.MOVING


class Uses(NamedTuple):
    """Facts about the draws of a program, by the ids of equations."""

    complete: frozenset[int]  # draws for the samples of all replicas.
    loops: frozenset[int]  # `while` loops with more iterations for more samples.
    pair: ProgramPair


def find_uses(single: Any, wide: Any, world: World) -> Uses:
    """Follows the values of the draws of a step.

    Args:
      single: closed jaxpr of the step, in which no two equations share a jaxpr with
        draws.
      wide: the trace with the samples of all replicas on each.
      world: the replicas.
    """
    body, inputs = compat.sharded_program(flow.open_jaxpr(single)[0])
    loops: frozenset[int] = frozenset()
    while True:
        pair = ProgramPair(loops)
        pair.compare(single, wide)
        if not _has_occasion(body, pair):
            return Uses(frozenset(), frozenset(), pair)
        analysis = _UseAnalysis(world, pair)
        analysis.follow(body, tuple(map(analysis.mask, inputs)))
        if analysis.loops == loops:
            complete = draw_names.add_repeated(body, analysis.complete)
            return Uses(complete, loops, pair)
        loops = frozenset(analysis.loops)


def _has_occasion(jaxpr: Any, pair: ProgramPair) -> bool:
    """Whether a program may have what `find_uses` searches for."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("axis_index", "while"):
            return True
        if name in primitives.UNITING and any(map(pair.is_larger, eqn.outvars)):
            return True
        inner = (flow.open_jaxpr(x)[0] for x in jaxprs_in_params(eqn.params))
        if any(_has_occasion(x, pair) for x in inner):
            return True
    return False


class _UseAnalysis(SamenessAnalysis):
    """Adds to the spread of a value: where it comes from.

    Attributes:
      loops: ids of `while` loops with more iterations for more samples.
    """

    def __init__(self, world: World, pair: ProgramPair):
        super().__init__(world.axis_names, refuse_divided=False)
        self.loops: set[int] = set()
        self._pair = pair
        first = 2 * len(world.axis_names) + 1
        self._gathered = 1 << first  # samples of all replicas, the same on all.
        self._number = 1 << first + 1  # integer from the number of the replica.
        self._count = 1 << first + 2  # integer from a number of samples.
        self._first_draw = first + 3
        # Bits above, two per draw: a value is made of it, and is the same on all; and
        # it still has the samples. How many samples a mask keeps has not.
        self._draws: list[int] = []  # ids of equations.
        self._made = self._sampled = 0  # all bits of the two kinds.
        self._complete = 0  # bits, of either kind, of draws for all replicas.

    @property
    def complete(self) -> frozenset[int]:
        """The ids of draws for the samples of all replicas."""
        bits = self._complete >> self._first_draw
        return frozenset(x for i, x in enumerate(self._draws) if bits >> 2 * i & 3)

    def of_equation(self, eqn: Any, entering: list[int]) -> Any:
        """See `SamenessAnalysis`."""
        counts = self._pair.counts_of(eqn)
        if any(counts):
            pairs = zip(entering, counts, strict=True)
            entering = [x | self._count if is_count else x for x, is_count in pairs]
        leaving, after = super().of_equation(eqn, entering)
        if eqn.primitive.name not in _WITH_JAXPRS | _SEPARATE:
            self._note_meeting(eqn, entering)
        pairs = zip(eqn.outvars, leaving, strict=True)
        return [self._origins(eqn, var, x) for var, x in pairs], after

    def _note_meeting(self, eqn: Any, entering: list[int]) -> None:
        """Notes draws that are complete because of an equation."""
        name, taken = eqn.primitive.name, entering[1:] if entering else []
        if name in primitives.DRAWS and not entering[0] & self._all:
            entering = [*entering, self._bits_of(eqn)]
        found = 0
        for x in entering:
            found |= x
        if found & self._gathered:
            self._complete |= found & self._sampled
        if name not in primitives.TAKING:
            return
        for x in taken:
            if entering[0] & self._gathered:
                self._complete |= x & self._made
            if x & self._number:
                self._complete |= entering[0] & self._sampled

    def _origins(self, eqn: Any, var: Any, x: int) -> int:
        """Returns a result's bits without origins that it does not have."""
        name = eqn.primitive.name
        if name == "axis_index":
            x |= self._number
        if name in primitives.DRAWS:
            x &= ~(self._number | self._count)
            x |= self._bits_of(eqn)
        elif not _is_integer(var):
            x &= ~(self._number | self._count)
        if name in primitives.UNITING:
            x |= self._gathered
        if not self._pair.is_larger(var):
            x &= ~(self._gathered | self._sampled)
        if x & self._all:
            x &= ~(self._gathered | self._sampled | self._made)
        return x

    def _bits_of(self, eqn: Any) -> int:
        if id(eqn) not in self._draws:
            self._draws.append(id(eqn))
        place = self._first_draw + 2 * self._draws.index(id(eqn))
        self._made |= 1 << place
        self._sampled |= 2 << place
        return 3 << place

    def _check_divided(self, eqn: Any, predicate: int, jaxprs: Any) -> None:
        if eqn.primitive.name == "while" and predicate & self._count:
            self.loops.add(id(eqn))


def _is_integer(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    is_number = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    return is_number or dtype == jnp.bool_
