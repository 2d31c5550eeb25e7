"""Usage: which parameters a loss used, determined while it runs."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jdp import compat
from jdp.backward import flow, injection
from jdp.backward.evaluation import ProgramRunner
from jdp.backward.flow import FlowAnalysis, Sets
from jdp.backward.injection import InjectionAnalysis
from jdp.compat import primitives


class Marks(NamedTuple):
    """Candidates, of n, that reach one value."""

    sets: Sets  # by the program.
    decided: jax.Array | None  # by the run, bool (n,); None if `sets` decides.


UNMARKED = Marks(flow.NOTHING, None)


class Evaluated(NamedTuple):
    """Result of a marked run of a jaxpr or an equation."""

    results: list[Any]
    marks: list[Marks]  # of the results.
    injected: Marks  # candidates that get an injected gradient.


class MarkedEvaluation:
    """Runs a jaxpr with a set of candidates beside each value.

    A set is an array only if control flow decides it. Such arrays go through loops as
    carries and through branches as results, so nothing runs twice.

    Args:
      analysis: flows of gradients, or of values.
      num_candidates: n.
      varying_over: manual mesh axes over which a predicate may differ.
      injections: finds injected gradients; None: there are none.
    """

    def __init__(
        self,
        analysis: FlowAnalysis,
        num_candidates: int,
        varying_over: Sequence[str] = (),
        injections: InjectionAnalysis | None = None,
    ):
        self._analysis = analysis
        self._injections = injections
        self._num_candidates = num_candidates
        self._varying_over = tuple(varying_over)
        self._runner = ProgramRunner()

    def run(
        self,
        jaxpr: Any,
        values: Sequence[Any],
        marks: Sequence[Marks],
        live: int = 0,
    ) -> Evaluated:
        """Runs `jaxpr`, open or closed.

        Args:
          jaxpr: the program.
          values: its inputs.
          marks: their marks.
          live: the outputs that get a cotangent, one bit per output.
        """
        body, consts = flow.open_jaxpr(jaxpr)
        live_values: set[Any] = set()
        if self._injections is not None and self._injections.has_any(jaxpr):
            live_values = self._injections.live_values(body, live)
        injected = [UNMARKED]
        known: dict[Any, Any] = dict(zip(body.constvars, consts, strict=True))
        known |= zip(body.invars, values, strict=True)
        marked = dict(zip(body.invars, marks, strict=True))

        def value(var: Any) -> Any:
            return var.val if isinstance(var, Literal) else known[var]

        def mark(var: Any) -> Marks:
            if isinstance(var, Literal) or not self._analysis.carries(var):
                return UNMARKED
            return marked.get(var, UNMARKED)

        for eqn in body.eqns:
            made = self._run_equation(
                eqn,
                [value(v) for v in eqn.invars],
                [mark(v) for v in eqn.invars],
                injection.bits_of(eqn.outvars, live_values) if live_values else 0,
            )
            known |= zip(eqn.outvars, made.results, strict=True)
            marked |= {
                var: found
                for var, found in zip(eqn.outvars, made.marks, strict=True)
                if found.sets.may
            }
            if made.injected.sets.may:
                injected.append(made.injected)
        return Evaluated(
            [value(v) for v in body.outvars],
            [mark(v) for v in body.outvars],
            functools.reduce(self.unite, injected),
        )

    def unite(self, a: Marks, b: Marks) -> Marks:
        """Returns the union of two marks."""
        sets = Sets(a.sets.must | b.sets.must, a.sets.may | b.sets.may)
        if sets.must == sets.may:
            return Marks(sets, None)
        return Marks(sets, self.as_array(a) | self.as_array(b))

    def as_array(self, marks: Marks) -> jax.Array:
        """Returns marks as an array, bool (n,)."""
        if marks.decided is not None:
            return marks.decided
        bits = [bool(marks.sets.may >> i & 1) for i in range(self._num_candidates)]
        return compat.cast_varying(jnp.asarray(np.array(bits)), self._varying_over)

    def _run_equation(
        self, eqn: Any, values: list[Any], entering: list[Marks], live: int
    ) -> Evaluated:
        if not any(m.sets.may for m in entering):
            results = self._runner.run_equation(eqn, values)
            return Evaluated(results, [UNMARKED] * len(eqn.outvars), UNMARKED)
        found = self._analysis.of_equation(eqn)
        if found is None:
            everything = (1 << len(eqn.invars)) - 1
            every = (everything,) * len(eqn.outvars)
            found = flow.Flow(every, every)
        sets = [
            s if self._analysis.carries(v) else flow.NOTHING
            for v, s in zip(
                eqn.outvars, found.apply([m.sets for m in entering]), strict=True
            )
        ]
        inner = self._injected_operands(eqn, live)
        injected = injection.apply(inner, [m.sets for m in entering])
        if inner.must == inner.may and (
            found.is_decided or all(s.must == s.may for s in sets)
        ):
            results = self._runner.run_equation(eqn, values)
            arrays = [
                self._union(bits, entering) if s.must != s.may else None
                for bits, s in zip(found.may, sets, strict=True)
            ]
            array = None
        else:
            results, arrays, array = self._run_control_flow(eqn, values, entering, live)
            deciding = self._analysis.deciding_inputs(eqn)
            if any(m.sets.may for i, m in enumerate(entering) if deciding >> i & 1):
                chosen = self._union(deciding, entering)
                arrays = [None if a is None else a | chosen for a in arrays]
        if injected.must == injected.may:
            array = None
        elif array is None:
            array = self._union(inner.may, entering)
        leaving = [
            Marks(s, a if s.must != s.may else None)
            for s, a in zip(sets, arrays, strict=True)
        ]
        return Evaluated(results, leaving, Marks(injected, array))

    def _injected_operands(self, eqn: Any, live: int) -> Sets:
        if self._injections is None or not live:
            return flow.NOTHING
        return self._injections.of_equation(eqn, live)

    def _run_control_flow(
        self, eqn: Any, values: list[Any], entering: list[Marks], live: int
    ) -> tuple[list[Any], list[jax.Array | None], jax.Array | None]:
        """Runs an equation whose control flow decides marks.

        Arrays of marks enter as operands: values that a branch or a loop closes over
        would become operands in any case.

        Returns:
          The results; an array for each result that may be marked; and an array of the
          injected gradients, or None if `_injected_operands` decides them.
        """
        name = eqn.primitive.name
        with compat.inside_equation(eqn):
            if name == "cond":
                return self._run_cond(eqn, values, entering, live)
            if name == "scan":
                return self._run_scan(eqn, values, entering, live)
            if name == "while":
                return *self._run_while(eqn, values, entering), None
            if name in primitives.CALLS:
                return self._run_call(eqn, values, entering, live)
        assert name in primitives.CUSTOM_RULES, name
        return *self._run_custom_rule(eqn, values, entering), None

    def _run_cond(
        self, eqn: Any, values: list[Any], entering: list[Marks], live: int
    ) -> Any:
        wanted = [self._analysis.carries(v) for v in eqn.outvars]
        arrays = [m.decided for m in entering[1:]]

        def run_branch(branch: Any) -> Callable[..., Any]:
            def run(operands: list[Any], arrays: list[Any]) -> Any:
                marks = _with_arrays(entering[1:], arrays)
                made = self.run(branch, operands, marks, live)
                chosen = self._chosen(made.marks, wanted)
                return made.results, chosen, self._injected_array(made.injected)

            return run

        branches = [run_branch(branch) for branch in eqn.params["branches"]]
        results, chosen, injected = lax.switch(values[0], branches, values[1:], arrays)
        return results, _at(wanted, chosen), injected

    def _run_scan(
        self, eqn: Any, values: list[Any], entering: list[Marks], live: int
    ) -> Any:
        if self._injections is not None:
            live = self._injections.body_live(eqn, live)
        loop = flow.loop_shape(eqn)
        first, end = loop.num_consts, loop.num_consts + loop.num_carries
        carried = self._carried_marks(eqn, entering)
        wanted = [self._analysis.carries(v) for v in eqn.outvars]
        carry_wanted, stacked_wanted = wanted[: end - first], wanted[end - first :]

        def body(carry: Any, xs: list[Any]) -> Any:
            carries, arrays, stacked_arrays, injected = carry
            marks = list(entering)
            marks[first:end] = _with_arrays(carried, _at(carry_wanted, arrays))
            operands = [*values[:first], *carries, *xs]
            results, leaving, of_turn = self.run(loop.body, operands, marks, live)
            split = end - first
            arrays = self._chosen(leaving[:split], carry_wanted)
            new = self._chosen(leaving[split:], stacked_wanted)
            stacked_arrays = [a | b for a, b in zip(stacked_arrays, new, strict=True)]
            if injected is not None:
                injected |= self.as_array(of_turn)
            return (results[:split], arrays, stacked_arrays, injected), results[split:]

        start = (
            values[first:end],
            self._chosen(entering[first:end], carry_wanted),
            self._chosen([UNMARKED] * len(stacked_wanted), stacked_wanted),
            self._injected_array(UNMARKED),
        )
        params = eqn.params
        (carries, arrays, stacked_arrays, injected), stacked = lax.scan(
            body,
            start,
            values[end:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        found = _at(carry_wanted, arrays) + _at(stacked_wanted, stacked_arrays)
        return [*carries, *stacked], found, injected

    def _run_while(self, eqn: Any, values: list[Any], entering: list[Marks]) -> Any:
        loop = flow.loop_shape(eqn)
        skipped = eqn.params["cond_nconsts"]
        cond_consts, values = values[:skipped], values[skipped:]
        entering = entering[skipped:]
        consts, carries = values[: loop.num_consts], values[loop.num_consts :]
        carried = self._carried_marks(eqn, entering)
        wanted = [self._analysis.carries(v) for v in eqn.outvars]

        def condition(carry: Any) -> jax.Array:
            operands = [*cond_consts, *carry[0]]
            # Not `jaxpr_as_fun`, which leaves `jax_debug_nans` switched off.
            test, consts = flow.open_jaxpr(eqn.params["cond_jaxpr"])
            return jax.core.eval_jaxpr(test, consts, *operands)[0]

        def body(carry: Any) -> Any:
            carries, arrays = carry
            marks = [
                *entering[: loop.num_consts],
                *_with_arrays(carried, _at(wanted, arrays)),
            ]
            results, leaving, _ = self.run(loop.body, [*consts, *carries], marks)
            return results, self._chosen(leaving, wanted)

        start = carries, self._chosen(entering[loop.num_consts :], wanted)
        carries, arrays = lax.while_loop(condition, body, start)
        return carries, _at(wanted, arrays)

    def _run_call(
        self, eqn: Any, values: list[Any], entering: list[Marks], live: int
    ) -> Any:
        wanted = [self._analysis.carries(v) for v in eqn.outvars]

        def run(operands: list[Any], arrays: list[Any]) -> Any:
            marks = _with_arrays(entering, arrays)
            made = self.run(flow.called_jaxpr(eqn), operands, marks, live)
            chosen = self._chosen(made.marks, wanted)
            return made.results, chosen, self._injected_array(made.injected)

        if "policy" in eqn.params:
            run = jax.checkpoint(
                run,
                prevent_cse=eqn.params["prevent_cse"],
                policy=eqn.params["policy"],
            )
        results, chosen, injected = run(values, [m.decided for m in entering])
        return results, _at(wanted, chosen), injected

    def _run_custom_rule(
        self, eqn: Any, values: list[Any], entering: list[Marks]
    ) -> Any:
        """Runs the function, and finds in its rule which operand reaches which result.

        The rule runs on tangents, or cotangents, of zero; no mark depends on their
        values. XLA keeps what the rule's control flow needs and drops the rest.
        """
        results = self._runner.run_equation(eqn, values)
        rule = self._analysis.derivative(eqn)
        arrays: list[jax.Array | None] = [None] * len(eqn.outvars)
        by_value = FlowAnalysis(by_value=True)
        held = lax.stop_gradient(values)
        unmarked = [UNMARKED] * len(values)
        if not rule.is_backward:
            tangents = [jnp.zeros_like(held[i]) for i in rule.inputs]
            inner = MarkedEvaluation(by_value, self._num_candidates, self._varying_over)
            marks = [*unmarked, *[entering[i] for i in rule.inputs]]
            leaving = inner.run(rule.jaxpr, [*held, *tangents], marks).marks
            for o, found in zip(rule.outputs, leaving, strict=True):
                arrays[o] = inner.as_array(found)
            return results, arrays
        # A backward rule shows which results pass a cotangent to which operand.
        num_outputs = len(rule.outputs)
        cotangents = [jnp.zeros_like(results[o]) for o in rule.outputs]
        inner = MarkedEvaluation(by_value, num_outputs, self._varying_over)
        bits = [1 << k for k in range(num_outputs)]
        marks = unmarked + [Marks(Sets(bit, bit), None) for bit in bits]
        held = [*held, *lax.stop_gradient(cotangents)]
        leaving = inner.run(rule.jaxpr, held, marks).marks
        reached = [inner.as_array(found) for found in leaving]  # by operand.
        for k, o in enumerate(rule.outputs):
            arrays[o] = _any_of(
                [
                    self.as_array(entering[i]) & reached[position][k]
                    for position, i in enumerate(rule.inputs)
                    if entering[i].sets.may
                ]
            )
        return results, arrays

    def _carried_marks(self, eqn: Any, entering: list[Marks]) -> list[Marks]:
        sets = self._analysis.carry_sets(eqn, [m.sets for m in entering])
        return [Marks(s, None) for s in sets]

    def _injected_array(self, marks: Marks) -> jax.Array | None:
        return None if self._injections is None else self.as_array(marks)

    def _union(self, bits: int, entering: Sequence[Marks]) -> jax.Array:
        parts = [
            self.as_array(m)
            for i, m in enumerate(entering)
            if bits >> i & 1 and m.sets.may
        ]
        return _any_of(parts)

    def _chosen(
        self, marks: Sequence[Marks], wanted: Sequence[bool]
    ) -> list[jax.Array]:
        return [self.as_array(m) for m in itertools.compress(marks, wanted)]


def _with_arrays(marks: Sequence[Marks], arrays: Sequence[Any]) -> list[Marks]:
    pairs = zip(marks, arrays, strict=True)
    return [Marks(m.sets, array) for m, array in pairs]


def _at(wanted: Sequence[bool], arrays: Sequence[jax.Array]) -> list[Any]:
    """The inverse of `itertools.compress`, with None where nothing is wanted."""
    left = iter(arrays)
    return [next(left) if is_wanted else None for is_wanted in wanted]


def _any_of(arrays: Sequence[jax.Array]) -> jax.Array:
    found = arrays[0]
    for array in arrays[1:]:
        found = found | array
    return found
