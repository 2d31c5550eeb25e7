"""Order: when the backward pass finishes the gradient of each parameter.

The backward pass visits the equations of the loss in reverse. A gradient is finished
with its last contribution, from the first equation that uses the parameter.
Multiplications and loops take the time. Operations between a parameter and the first of
these (a cast, a scale, a reshape) do not delay its gradient.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal, jaxprs_in_params

from jdp.backward import flow
from jdp.backward.flow import FlowAnalysis
from jdp.compat import primitives


class Readiness(NamedTuple):
    """Time at which a gradient is finished; earlier is less."""

    after_heavy: int  # steps of the backward pass until the last heavy step it needs.
    after: int  # steps until its last contribution.
    after_inner: int  # steps within the equation of that contribution.


NEVER = Readiness(-1, -1, -1)


class Timeline(NamedTuple):
    """Times at which the backward pass finishes each leaf's gradient."""

    ready: tuple[Readiness, ...]  # NEVER for leaves without a gradient.
    ready_after: tuple[float, ...]  # share of the work done by then, 0 to 1.

    def at_the_end(self) -> "Timeline":
        """Returns the same order with all gradients finished at the end of the pass."""
        return self._replace(ready_after=(1.0,) * len(self.ready_after))

    def order(self) -> tuple[int, ...]:
        """Returns leaf indices by time; leaves without a gradient come last."""
        return tuple(
            sorted(
                range(len(self.ready)),
                # Equal times in reverse, as a backward pass visits layers.
                key=lambda i: (self.ready[i] == NEVER, self.ready[i], -i),
            )
        )


def backward_timeline(jaxpr: Any, analysis: FlowAnalysis) -> Timeline:
    """Returns the timeline of an open jaxpr `(leaves) -> (loss, ...)`."""
    sweep = _ReverseSweep(analysis)
    num_others = len(jaxpr.outvars) - 1
    ready = sweep.run(jaxpr, [Readiness(0, 0, 0)] + [None] * num_others)
    total = sweep.work[-1]
    return Timeline(
        tuple(r or NEVER for r in ready),
        tuple(
            0.0 if r is None or not total else sweep.work[r.after_heavy] / total
            for r in ready
        ),
    )


class _ReverseSweep:
    """Walks a jaxpr backwards, through calls, and counts steps and work."""

    def __init__(self, analysis: FlowAnalysis):
        self.work = [0.0]  # total after each step: multiplications and elements.
        self._analysis = analysis
        self._step = 0

    def run(
        self, jaxpr: Any, outputs: Sequence[Readiness | None]
    ) -> list[Readiness | None]:
        """Returns when the gradient of each input is finished.

        Args:
          jaxpr: open.
          outputs: when the cotangent of each output is finished; None: never.
        """
        ready: dict[Any, Readiness] = {}

        def read(var: Any) -> Readiness | None:
            return None if isinstance(var, Literal) else ready.get(var)

        def contribute(var: Any, when: Readiness | None) -> None:
            if when is None or isinstance(var, Literal):
                return
            if self._analysis.carries(var):
                ready[var] = max(ready.get(var, NEVER), when)

        for var, when in zip(jaxpr.outvars, outputs, strict=True):
            contribute(var, when)
        for eqn in reversed(jaxpr.eqns):
            after = [read(v) for v in eqn.outvars]
            if all(when is None for when in after):
                continue
            for var, when in zip(eqn.invars, self._visit(eqn, after), strict=True):
                contribute(var, when)
        return [read(v) for v in jaxpr.invars]

    def _visit(
        self, eqn: Any, after: list[Readiness | None]
    ) -> Sequence[Readiness | None]:
        name = eqn.primitive.name
        if name in primitives.CALLS and not flow.is_marker(eqn):
            return self.run(flow.open_jaxpr(flow.called_jaxpr(eqn))[0], after)
        self._step += 1
        self.work.append(self.work[-1] + _work(eqn))
        last = max(when for when in after if when is not None)
        if _is_heavy(eqn):
            last = Readiness(self._step, self._step, 0)
        when = Readiness(last.after_heavy, self._step, 0)
        found = self._analysis.of_equation(eqn)
        if found is None:
            return [when] * len(eqn.invars)
        used = 0
        for bits, ready in zip(found.may, after, strict=True):
            used |= 0 if ready is None else bits
        inner = self._inner_steps(eqn)
        return [
            when._replace(after_inner=inner.get(i, 0)) if used >> i & 1 else None
            for i in range(len(eqn.invars))
        ]

    def _inner_steps(self, eqn: Any) -> dict[int, int]:
        """Returns in which order a `custom_vjp` makes the gradients of its operands."""
        if eqn.primitive.name != "custom_vjp_call":
            return {}
        rule = self._analysis.derivative(eqn)
        body, _ = flow.open_jaxpr(rule.jaxpr)
        steps = _steps(body)
        return {
            i: 0 if isinstance(var, Literal) else steps.get(var, 0)
            for i, var in zip(rule.inputs, body.outvars, strict=True)
        }


def _steps(jaxpr: Any, start: int = 0) -> dict[Any, int]:
    """Returns per value how many equations have run when it is made."""
    steps: dict[Any, int] = {}
    step = start
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in primitives.CALLS:
            body, _ = flow.open_jaxpr(flow.called_jaxpr(eqn))
            inner = _steps(body, step)
            made = [
                start if isinstance(v, Literal) else inner.get(v, start)
                for v in body.outvars
            ]
            steps |= zip(eqn.outvars, made, strict=True)
            step = max([step, *inner.values()])
        else:
            step += 1
            steps |= dict.fromkeys(eqn.outvars, step)
    return steps


def _work(eqn: Any) -> float:
    """Returns roughly how many multiplications, or elements, an equation computes."""
    name = eqn.primitive.name
    size = float(sum(_size(v.aval) for v in eqn.outvars))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return size * math.prod(shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        out_features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return size * _size(kernel) / max(1, out_features)
    inner = [
        sum(_work(e) for e in flow.open_jaxpr(jaxpr)[0].eqns)
        for jaxpr in _inner_jaxprs(eqn)
    ]
    if name == "cond":
        return max(inner)
    if inner:
        return eqn.params.get("length", 1) * sum(inner)
    return size


def _is_heavy(eqn: Any) -> bool:
    return eqn.primitive.name in primitives.HEAVY or any(
        _is_heavy(inner)
        for jaxpr in _inner_jaxprs(eqn)
        for inner in flow.open_jaxpr(jaxpr)[0].eqns
    )


def _inner_jaxprs(eqn: Any) -> list[Any]:
    return [] if flow.is_marker(eqn) else list(jaxprs_in_params(eqn.params))


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))
