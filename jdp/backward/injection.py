"""Injection: inputs that get a gradient which no path to the loss passes on.

The backward rule of a `custom_vjp` may make a gradient itself, for example the gradient
of an auxiliary loss. Such gradients are called injected. JAX runs the rule wherever the
forward pass ran the function and a cotangent, zero or not, reaches one of its results.
So an injected gradient arrives even if control flow did not take the path from the
function to the loss. It does not arrive if the function is in a branch that was not
taken, or if nothing differentiable leads from it to the loss.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from jdp.backward import flow
from jdp.backward.flow import NOTHING, FlowAnalysis, Sets, loop_shape, open_jaxpr
from jdp.backward.vanishing import vanishing
from jdp.compat import primitives

# Programs without any of these inject nothing.
RULES = primitives.CUSTOM_RULES | primitives.CUSTOM_TRANSPOSES


class InjectionAnalysis:
    """Finds injected gradients, once per jaxpr and set of live outputs.

    An output is live if the backward pass has a cotangent for it, zero or not. Sets of
    outputs are integers, one bit per output.

    Args:
      flows: flows of gradients.
    """

    def __init__(self, flows: FlowAnalysis):
        self._flows = flows
        self._has_any: dict[int, tuple[Any, bool]] = {}  # by id; holds the jaxpr.
        self._known: dict[tuple[int, int], tuple[Any, Sets]] = {}
        self._operands: dict[int, tuple[Any, int]] = {}  # by the id of an equation.

    def of_jaxpr(self, jaxpr: Any, live: int) -> Sets:
        """Returns the inputs that get an injected gradient."""
        if not live or not self.has_any(jaxpr):
            return NOTHING
        key = id(jaxpr), live
        if key not in self._known:
            num_inputs = len(open_jaxpr(jaxpr)[0].invars)
            inputs = [Sets(1 << i, 1 << i) for i in range(num_inputs)]
            self._known[key] = jaxpr, self.collect(jaxpr, inputs, live)
        return self._known[key][1]

    def collect(self, jaxpr: Any, inputs: Sequence[Sets], live: int) -> Sets:
        """Returns the union of the sets that get an injected gradient."""
        if not live or not self.has_any(jaxpr):
            return NOTHING
        body, _ = open_jaxpr(jaxpr)
        sets = self._flows.sets_of_values(body, inputs)
        live_values = self.live_values(body, live)
        must = may = 0
        for eqn in body.eqns:
            injected = self.of_equation(eqn, bits_of(eqn.outvars, live_values))
            if not injected.may:
                continue
            found = apply(injected, [read(sets, v) for v in eqn.invars])
            must, may = must | found.must, may | found.may
        return Sets(must, may)

    def has_any(self, jaxpr: Any) -> bool:
        """Whether a function in a jaxpr injects gradients."""
        if id(jaxpr) not in self._has_any:
            found = any(map(self._injects, open_jaxpr(jaxpr)[0].eqns))
            self._has_any[id(jaxpr)] = jaxpr, found
        return self._has_any[id(jaxpr)][1]

    def of_equation(self, eqn: Any, live: int) -> Sets:
        """Returns the operands of an equation that get an injected gradient.

        Args:
          eqn: the equation.
          live: its live results.
        """
        name = eqn.primitive.name
        if not live or flow.is_marker(eqn):
            return NOTHING
        if name in RULES:
            bits = self._injected_operands(eqn)
            return Sets(bits, bits)
        if not self._injects(eqn):
            return NOTHING
        if name in primitives.CALLS:
            return self.of_jaxpr(flow.called_jaxpr(eqn), live)
        if name == "shard_map":  # Devices may take different branches.
            may = self.of_jaxpr(flow.called_jaxpr(eqn), live).may
            return Sets(may, may)
        if name == "cond":
            found = [self.of_jaxpr(b, live) for b in self._flows.possible_branches(eqn)]
            must = functools.reduce(lambda a, b: a & b, [s.must for s in found])
            may = functools.reduce(lambda a, b: a | b, [s.may for s in found])
            return Sets(must << 1, may << 1)
        if name == "scan":
            return self._of_scan(eqn, live)
        return NOTHING  # A `while` has no backward pass.

    def live_values(self, jaxpr: Any, live: int) -> set[Any]:
        """Returns the values of an open jaxpr that get a cotangent."""
        found = {
            v for k, v in enumerate(jaxpr.outvars) if live >> k & 1 and self._carries(v)
        }
        for eqn in reversed(jaxpr.eqns):
            bits = bits_of(eqn.outvars, found)
            if not bits:
                continue
            reached = self._live_operands(eqn, bits)
            for i, var in enumerate(eqn.invars):
                if reached >> i & 1 and self._carries(var):
                    found.add(var)
        return found

    def body_live(self, eqn: Any, live: int) -> int:
        """Returns the live outputs of the body of a `scan`, over all iterations."""
        loop = loop_shape(eqn)
        of_carries = (1 << loop.num_carries) - 1
        while True:
            inputs = self._live_inputs(loop.body, live)
            wider = live | inputs >> loop.num_consts & of_carries
            if wider == live:
                return live
            live = wider

    def _injects(self, eqn: Any) -> bool:
        if flow.is_marker(eqn):
            return False
        if eqn.primitive.name in RULES:
            return self._injected_operands(eqn) != 0
        return any(map(self.has_any, jaxprs_in_params(eqn.params)))

    def _injected_operands(self, eqn: Any) -> int:
        """Returns the operands whose gradient does not vanish with the cotangents."""
        every = sum(1 << i for i, v in enumerate(eqn.invars) if self._carries(v))
        if eqn.primitive.name in primitives.CUSTOM_TRANSPOSES:
            return every
        if id(eqn) not in self._operands:
            self._operands[id(eqn)] = eqn, self._read_rule(eqn, every)
        return self._operands[id(eqn)][1]

    def _read_rule(self, eqn: Any, every: int) -> int:
        if eqn.params.get("symbolic_zeros"):
            # Such a rule may behave differently if a cotangent does not arrive.
            return every
        rule = self._flows.derivative(eqn)
        if not rule.is_backward:  # It is linear; otherwise JAX could not transpose it.
            return every if _contains_opaque(rule.jaxpr) else 0
        operands: list[int | None] = [None] * len(eqn.invars)
        seeds = [1 << k for k in range(len(rule.outputs))]
        made = vanishing(rule.jaxpr, [*operands, *seeds])
        pairs = zip(rule.inputs, made, strict=True)
        return sum(1 << i for i, condition in pairs if condition is None)

    def _of_scan(self, eqn: Any, live: int) -> Sets:
        loop = loop_shape(eqn)
        if not eqn.params["length"]:
            return NOTHING
        found = self.of_jaxpr(loop.body, self.body_live(eqn, live))
        entering = [Sets(0, 1 << i) for i in range(len(eqn.invars))]
        first, end = loop.num_consts, loop.num_consts + loop.num_carries
        mays = [s.may for s in entering]
        mays[first:end] = [s.may for s in self._flows.carry_sets(eqn, entering)]
        # The first iteration always runs, on the initial carries.
        return Sets(found.must, flow.union(found.may, mays))

    def _live_operands(self, eqn: Any, live: int) -> int:
        name = eqn.primitive.name
        if name in primitives.CALLS and not flow.is_marker(eqn):
            return self._live_inputs(flow.called_jaxpr(eqn), live)
        if name == "cond":
            found = [self._live_inputs(b, live) for b in eqn.params["branches"]]
            return functools.reduce(lambda a, b: a | b, found) << 1
        if name == "scan":
            loop, live = loop_shape(eqn), self.body_live(eqn, live)
            # A carry that no iteration reads gets a cotangent, of zeros.
            carries = (live & ((1 << loop.num_carries) - 1)) << loop.num_consts
            return self._live_inputs(loop.body, live) | carries
        every = (1 << len(eqn.invars)) - 1
        if name in primitives.CUSTOM_RULES or name == "while":
            return every  # A rule returns cotangents for all, zeros or not.
        found = self._flows.of_equation(eqn)
        return every if found is None else flow.union(live, found.may)

    def _live_inputs(self, jaxpr: Any, live: int) -> int:
        body, _ = open_jaxpr(jaxpr)
        return bits_of(body.invars, self.live_values(body, live))

    def _carries(self, var: Any) -> bool:
        return not isinstance(var, Literal) and self._flows.carries(var)


def bits_of(variables: Sequence[Any], found: set[Any]) -> int:
    """Returns which variables are in a set, one bit per variable."""
    return sum(1 << k for k, v in enumerate(variables) if v in found)


def apply(injected: Sets, entering: Sequence[Sets]) -> Sets:
    """Returns the sets that the injected gradients of these operands go on to."""
    return Sets(
        flow.union(injected.must, [s.must for s in entering]),
        flow.union(injected.may, [s.may for s in entering]),
    )


def read(sets: dict[Any, Sets], var: Any) -> Sets:
    """Returns the sets of a value, or of a literal."""
    return NOTHING if isinstance(var, Literal) else sets.get(var, NOTHING)


def _contains_opaque(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in primitives.CUSTOM_TRANSPOSES
        or any(map(_contains_opaque, jaxprs_in_params(eqn.params)))
        for eqn in open_jaxpr(jaxpr)[0].eqns
    )
