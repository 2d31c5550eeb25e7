"""Sameness: which values of a replica's program are the same on all replicas?

JAX proves sameness with types, under `shard_map(check_vma=True)`. Those types refuse
ordinary programs, such as a loop that begins with zeros, and change the meaning of
`jax.grad`. So the program is traced without them, and its values are followed here.

The spread of a value is a Python integer with two bits per axis: whether the value may
differ along the axis, and, if so, whether something was sent along the axis to compute
it. One more bit tells that something outside of the program takes part in it; see
`sources`. The spread of a result is the bitwise union of its operands' spreads. Loops
are followed until nothing changes.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal, jaxprs_in_params

from jdp import compat
from jdp.backward import exchange, flow, sources
from jdp.compat import primitives
from jdp.optimizers import outer_transforms
from jdp.step import divided_control


class Spread(NamedTuple):
    """Possible difference of one value between the replicas."""

    axes: frozenset[str]  # axes along which it may differ; empty: the same on all.
    # Whether nothing was sent along one of these axes to compute the value. It then
    # surely differs, unless nothing that it depends on differs.
    is_local: bool
    # Whether something outside of the program takes part in it; see `sources`.
    is_external: bool = False


def find_spreads(
    jaxpr: Any,
    inputs: Sequence[Collection[str]],
    axis_names: Sequence[str],
    *,
    refuse_divided: bool = True,
    with_index: bool = True,
) -> list[Spread]:
    """Follows the values of a program that every replica runs.

    Args:
      jaxpr: the open jaxpr of one replica's part.
      inputs: the axes along which an input differs, per input.
      axis_names: the axes along which the replicas lie.
      refuse_divided: whether to raise for a collective that only some replicas reach.
      with_index: whether the number of a replica makes values differ. With False only
        inputs do, which tells the two causes apart.

    Returns:
      The possible difference of each output.

    Raises:
      ValueError: a collective is in control flow that replicas decide differently.
    """
    analysis = SamenessAnalysis(
        axis_names, refuse_divided=refuse_divided, with_index=with_index
    )
    entering = tuple(analysis.mask(names) for names in inputs)
    return [analysis.spread(x) for x in analysis.follow(jaxpr, entering).outputs]


class _Followed(NamedTuple):
    """Spreads after a jaxpr was followed."""

    outputs: tuple[int, ...]
    inputs: tuple[int, ...]  # as they entered; a reference has the values written.


class SamenessAnalysis:
    """Follows values through jaxprs, each once per combination of input spreads.

    Attributes:
      observed: by the id of an equation of an observed primitive: per operand, whether
        it may differ between the replicas wherever the equation was followed.
      observed_once: the same, wherever or in one place.
    """

    def __init__(
        self,
        axis_names: Sequence[str],
        *,
        refuse_divided: bool,
        with_index: bool = True,
        observed: Collection[str] = (),
    ):
        """See `find_spreads`; `observed` are names of primitives."""
        self._names = tuple(axis_names)
        self._bits = {name: 1 << i for i, name in enumerate(self._names)}
        self._all = (1 << len(self._names)) - 1
        # A callback may return values that it got from other replicas.
        self._external = self._as_sent(self._all) | 1 << 2 * len(self._names)
        self._refuse_divided = refuse_divided
        self._with_index = with_index
        # Keyed by the id of the jaxpr, which is kept so that the id stays taken.
        self._followed: dict[tuple[int, tuple[int, ...]], tuple[Any, _Followed]] = {}
        self._collectives = divided_control.CollectiveFinder(self._bits)
        self._sources: dict[int, tuple[Any, int]] = {}
        self._marked: dict[int, str | None] = {}
        self._observed_names = observed
        self.observed: dict[int, list[bool]] = {}
        self.observed_once: dict[int, list[bool]] = {}
        self._rules = _make_rules(self)

    def mask(self, axis_names: Iterable[Any]) -> int:
        """Returns the bits of the axes in `axis_names` that replicas lie along."""
        return divided_control.mask_of(self._bits, axis_names)

    def spread(self, x: int) -> Spread:
        """Converts the bits of a value."""
        axes = x & self._all
        names = frozenset(n for n, bit in self._bits.items() if axes & bit)
        is_external = bool(axes and x >> 2 * len(self._names))
        return Spread(names, bool(axes & ~self._sent(x)), is_external)

    def follow(self, jaxpr: Any, entering: tuple[int, ...]) -> _Followed:
        """Propagates spreads through a jaxpr, open or closed."""
        key = id(jaxpr), entering
        if key not in self._followed:
            body, _ = flow.open_jaxpr(jaxpr)
            pairs = zip(body.invars, entering, strict=True)
            known = {var: x for var, x in pairs if x}
            for eqn in body.eqns:
                self._follow_equation(eqn, known)
            outer_transforms.check(
                body, lambda x: bool(_read(known, x) & self._all), self._marked
            )
            outputs = tuple(_read(known, var) for var in body.outvars)
            inputs = tuple(_read(known, var) for var in body.invars)
            self._followed[key] = jaxpr, _Followed(outputs, inputs)
        return self._followed[key][1]

    def _follow_equation(self, eqn: Any, known: dict[Any, int]) -> None:
        entering = [_read(known, var) for var in eqn.invars]
        if eqn.primitive.name in self._observed_names:
            differ = [bool(x & self._all) for x in entering]
            pairs = zip(self.observed.get(id(eqn), differ), differ, strict=True)
            self.observed[id(eqn)] = [a and b for a, b in pairs]
            pairs = zip(self.observed_once.get(id(eqn), differ), differ, strict=True)
            self.observed_once[id(eqn)] = [a or b for a, b in pairs]
        leaving, after = self.of_equation(eqn, entering)
        for var, x in zip(eqn.outvars, leaving, strict=True):
            if x:
                known[var] = x
        if after is not entering:  # A reference was written.
            for var, x in zip(eqn.invars, after, strict=True):
                if x and not isinstance(var, Literal):
                    known[var] = x

    def of_equation(self, eqn: Any, entering: list[int]) -> Any:
        """Returns the spreads of results, and of operands after writes to them."""
        return self._rules.get(eqn.primitive.name, self.plain)(eqn, entering)

    def plain(self, eqn: Any, entering: list[int]) -> Any:
        """Follows any other primitive: every operand affects every result."""
        found = self._source(eqn)
        for x in entering:
            found |= x
        for inner in jaxprs_in_params(eqn.params):
            found |= self._sources_in(inner)
            if found and self._collectives.find(inner):
                found = self._as_sent(found)
        return [found] * len(eqn.outvars), self._written(eqn, entering, found)

    def opaque(self, eqn: Any, entering: list[int]) -> Any:
        """Follows code that this analysis cannot see into."""
        leaving, after = self.plain(eqn, entering)
        return [self._as_sent(x) for x in leaving], after

    def reading(self, eqn: Any, entering: list[int]) -> Any:
        """Follows a read of a reference."""
        found = 0
        for x in entering:
            found |= x
        return [found] * len(eqn.outvars), entering

    def one_by_one(self, eqn: Any, entering: list[int]) -> Any:
        """Follows a primitive whose k-th result comes from the k-th operand."""
        return entering, entering

    def expected(self, eqn: Any, entering: list[int]) -> Any:
        """Follows a value that must be the same on all; raises if it cannot be."""
        axes = self.mask(exchange.axes_of(eqn))
        if self.spread(entering[0] & (axes | axes << len(self._names))).is_local:
            raise ValueError(eqn.params["message"])
        return entering, entering

    def uniting(self, eqn: Any, entering: list[int]) -> Any:
        """Follows a reduction or an all-gather along some of the axes."""
        if _has_groups(eqn):
            return self.moving(eqn, entering)
        axes = self.mask(exchange.axes_of(eqn))
        kept = ~(axes | axes << len(self._names))
        leaving = [x & kept if x & kept & self._all else 0 for x in entering]
        if len(leaving) != len(eqn.outvars):
            return self.plain(eqn, leaving)
        return leaving, entering

    def moving(self, eqn: Any, entering: list[int]) -> Any:
        """Follows a primitive that gives each replica along some axes another value."""
        axes = self.mask(exchange.axes_of(eqn))
        leaving, after = self.plain(eqn, entering)
        if not self._with_index:
            return leaving, after
        return [x | axes | axes << len(self._names) for x in leaving], after

    def call(self, eqn: Any, entering: list[int]) -> Any:
        """Follows a call of a jaxpr."""
        inner = next(iter(jaxprs_in_params(eqn.params)), None)
        if "jaxpr" in eqn.params or "call_jaxpr" in eqn.params:
            inner = flow.called_jaxpr(eqn)
        body = None if inner is None else flow.open_jaxpr(inner)[0]
        if body is None or len(body.invars) != len(entering):
            return self.plain(eqn, entering)
        found = self.follow(inner, tuple(entering))
        return found.outputs, found.inputs

    def linear_solve(self, eqn: Any, entering: list[int]) -> Any:
        """Follows the solver, which runs; the other jaxprs serve derivatives."""
        if eqn.effects and compat.touches_reference(eqn):
            return self.plain(eqn, entering)
        matvec, vecmat, solve, transposed = eqn.params["const_lengths"]
        first = matvec + vecmat
        end = first + solve
        operands = entering[first:end] + entering[end + transposed :]
        found = self.follow(eqn.params["jaxprs"].solve, tuple(operands))
        return found.outputs, entering

    def run_state(self, eqn: Any, entering: list[int]) -> Any:
        """Follows a function of references, which returns their contents."""
        found = self.follow(eqn.params["jaxpr"], tuple(entering))
        return found.inputs, entering

    def cond(self, eqn: Any, entering: list[int]) -> Any:
        """Follows all branches; results differ if replicas choose differently."""
        predicate, *operands = entering
        branches = eqn.params["branches"]
        if predicate:
            self._check_divided(eqn, predicate, branches)
        leaving = [predicate] * len(eqn.outvars)
        after = list(operands)
        for branch in branches:
            found = self.follow(branch, tuple(operands))
            leaving = _union(leaving, found.outputs)
            after = _union(after, found.inputs)
        return leaving, self._after([predicate, *after], entering, eqn, predicate)

    def scan(self, eqn: Any, entering: list[int]) -> Any:
        """Follows a loop of a fixed length."""
        body, num_consts, num_carries = flow.loop_shape(eqn)
        inputs, outputs = self._fixpoint(body, entering, num_consts, num_carries)
        if not eqn.params["length"]:
            first = entering[num_consts : num_consts + num_carries]
            return [*first, *outputs[num_carries:]], entering
        return outputs, self._after(inputs, entering, eqn, 0)

    def while_loop(self, eqn: Any, entering: list[int]) -> Any:
        """Follows a loop; its changed values differ if replicas end it differently."""
        body, num_consts, num_carries = flow.loop_shape(eqn)
        test, skipped = eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"]
        start = list(entering[skipped:])
        changed = _changed_carries(body, num_consts, num_carries)
        tested = list(entering[:skipped])
        while True:
            inputs, outputs = self._fixpoint(body, start, num_consts, num_carries)
            found = self.follow(test, (*tested, *inputs[num_consts:]))
            tested = _union(tested, found.inputs[:skipped])
            (predicate,) = found.outputs
            new = _union(inputs, [0] * num_consts + outputs)
            for i in changed:
                new[num_consts + i] |= predicate
            if new == start:
                break
            start = new
        if predicate:
            self._check_divided(eqn, predicate, (body, test))
        after = self._after([*tested, *inputs], entering, eqn, predicate)
        return start[num_consts:], after

    def _fixpoint(
        self, body: Any, entering: Sequence[int], num_consts: int, num_carries: int
    ) -> tuple[list[int], list[int]]:
        """Follows a loop's body until its inputs no longer grow."""
        inputs, end = list(entering), num_consts + num_carries
        while True:
            found = self.follow(body, tuple(inputs))
            new = list(found.inputs)
            new[num_consts:end] = _union(
                new[num_consts:end], found.outputs[:num_carries]
            )
            if new == inputs:
                return inputs, list(found.outputs)
            inputs = new

    def _after(
        self, inputs: Sequence[int], entering: list[int], eqn: Any, predicate: int
    ) -> list[int]:
        """Returns the operands after control flow, with writes to references."""
        if not (eqn.effects and compat.touches_reference(eqn)):
            return entering
        triples = zip(eqn.invars, entering, inputs, strict=True)
        return [
            x | new | predicate if compat.is_reference(var.aval) else x
            for var, x, new in triples
        ]

    def _written(self, eqn: Any, entering: list[int], found: int) -> list[int]:
        if not (found and eqn.effects and compat.touches_reference(eqn)):
            return entering
        pairs = zip(eqn.invars, entering, strict=True)
        return [found if compat.is_reference(var.aval) else x for var, x in pairs]

    def _sent(self, x: int) -> int:
        return x >> len(self._names)

    def _as_sent(self, x: int) -> int:
        return x | (x & self._all) << len(self._names)

    def _source(self, eqn: Any) -> int:
        """Returns the spread that an equation adds to the spreads of its operands."""
        if eqn.primitive.name == "axis_index":
            return self.mask(exchange.axes_of(eqn)) if self._with_index else 0
        return self._external if sources.is_external(eqn) else 0

    def _sources_in(self, jaxpr: Any) -> int:
        """Returns the spread that a jaxpr adds to the spreads of its operands."""
        if id(jaxpr) not in self._sources:
            found = 0
            for eqn in flow.open_jaxpr(jaxpr)[0].eqns:
                found |= self._source(eqn)
                for inner in jaxprs_in_params(eqn.params):
                    found |= self._sources_in(inner)
            self._sources[id(jaxpr)] = jaxpr, found
        return self._sources[id(jaxpr)][1]

    def _check_divided(self, eqn: Any, predicate: int, jaxprs: Iterable[Any]) -> None:
        """Raises ValueError for a collective that some replicas might not reach."""
        if not self._refuse_divided:
            return
        met = [m for jaxpr in jaxprs for m in self._collectives.find(jaxpr)]
        found = next((m for m in met if m.mask & predicate), None)
        if found is not None:
            axes = self.spread(predicate & self._all).axes
            names = [name for name in self._names if name in axes]
            raise ValueError(divided_control.explain(eqn, found.eqn, names))


def _make_rules(
    analysis: SamenessAnalysis,
) -> dict[str, Callable[[Any, list[int]], Any]]:
    """Returns rules by primitive name: (equation, entering) -> (leaving, after)."""
    rules: dict[str, Callable[[Any, list[int]], Any]] = {
        "cond": analysis.cond,
        "custom_linear_solve": analysis.linear_solve,
        "get": analysis.reading,
        "jdp_expect_same": analysis.expected,
        "run_state": analysis.run_state,
        "scan": analysis.scan,
        "while": analysis.while_loop,
    }
    rules |= dict.fromkeys(primitives.FOLLOWED_CALLS, analysis.call)
    rules |= dict.fromkeys(primitives.BARRIERS, analysis.one_by_one)
    rules |= dict.fromkeys(primitives.OPAQUE, analysis.opaque)
    for names, rule in (
        (primitives.UNITING, analysis.uniting),
        (primitives.MOVING, analysis.moving),
    ):
        rules |= dict.fromkeys(names, rule)
        rules |= {f"{name}_start": rule for name in names}
    return rules


def _read(known: dict[Any, int], var: Any) -> int:
    return 0 if isinstance(var, Literal) else known.get(var, 0)


def _union(xs: Sequence[int], ys: Sequence[int]) -> list[int]:
    return [x | y for x, y in zip(xs, ys, strict=True)]


def _changed_carries(body: Any, num_consts: int, num_carries: int) -> list[int]:
    """Returns the indices of the carries that a loop's body changes."""
    jaxpr, _ = flow.open_jaxpr(body)
    return [
        i
        for i in range(num_carries)
        if jaxpr.outvars[i] is not jaxpr.invars[num_consts + i]
    ]


def _has_groups(eqn: Any) -> bool:
    return len(eqn.params.get("axis_index_groups") or ()) > 1
