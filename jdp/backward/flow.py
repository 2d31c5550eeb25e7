"""Flow: which inputs of a jaxpr can pass a gradient to which outputs.

Sets of inputs are Python integers, one bit per input. They come in pairs: `may` has the
inputs that some execution connects, `must` those that every execution connects. The two
differ where control flow decides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from jdp import compat
from jdp.backward.derivatives import Derivative, trace_derivative
from jdp.compat import origins, primitives

# `jdp.sync_in_backward` is a `jit` in a name scope that begins so.
_SYNC_MARKER = "jdp_sync_in_backward_over_"


class Sets(NamedTuple):
    """Inputs that reach one value."""

    must: int
    may: int


NOTHING = Sets(0, 0)


class Flow(NamedTuple):
    """Sets of inputs that reach each output."""

    must: tuple[int, ...]
    may: tuple[int, ...]

    @property
    def is_decided(self) -> bool:
        """Whether control flow decides nothing."""
        return self.must == self.may

    def apply(self, inputs: Sequence[Sets]) -> list[Sets]:
        """Returns the sets of the outputs, given the sets of the inputs."""
        musts, mays = [s.must for s in inputs], [s.may for s in inputs]
        pairs = zip(self.must, self.may, strict=True)
        return [Sets(union(a, musts), union(b, mays)) for a, b in pairs]


class FlowAnalysis:
    """Computes flows, once per jaxpr.

    Args:
      by_value: whether to follow values instead of gradients: through integers, through
        zero derivatives, and from a predicate to the values it selects.
      cut_markers: whether `jdp.sync_in_backward` stops gradients.
      perturbed: operands of custom rules that are differentiated, by the id of the
        equation; see `perturbation`. None: all operands.
    """

    def __init__(
        self,
        *,
        by_value: bool = False,
        cut_markers: bool = False,
        perturbed: Mapping[int, int] | None = None,
    ):
        self.markers: set[str] = set()  # names of the markers found so far.
        self.has_references = False  # whether a mutable array was found.
        self._by_value = by_value
        self._cut_markers = cut_markers
        self._known: dict[int, tuple[Any, Flow]] = {}  # by id; holds the jaxpr.
        self._perturbed = perturbed
        # By the id of the jaxpr, which it holds, and the perturbed operands.
        self._rules: dict[tuple[int, int], tuple[Any, Derivative, Flow]] = {}
        self._constants: dict[Any, int] = {}  # indices of `cond`s with known values.

    def of_jaxpr(self, jaxpr: Any) -> Flow:
        """Returns the flow of a jaxpr, open or closed."""
        if id(jaxpr) not in self._known:
            body, _ = open_jaxpr(jaxpr)
            inputs = [Sets(1 << i, 1 << i) for i in range(len(body.invars))]
            outputs = self.propagate(body, inputs)
            flow = Flow(tuple(s.must for s in outputs), tuple(s.may for s in outputs))
            self._known[id(jaxpr)] = (jaxpr, flow)
        return self._known[id(jaxpr)][1]

    def propagate(self, jaxpr: Any, inputs: Sequence[Sets]) -> list[Sets]:
        """Returns the sets of the outputs of an open jaxpr."""
        sets = self.sets_of_values(jaxpr, inputs)
        return [self._read(sets, v) for v in jaxpr.outvars]

    def sets_of_values(self, jaxpr: Any, inputs: Sequence[Sets]) -> dict[Any, Sets]:
        """Returns the sets of the values in an open jaxpr, without empty sets."""
        sets: dict[Any, Sets] = {}
        for var, found in zip(jaxpr.invars, inputs, strict=True):
            if self.carries(var):
                sets[var] = found
        for eqn in jaxpr.eqns:
            entering = [self._read(sets, v) for v in eqn.invars]
            if eqn.primitive.name == "clamp":
                self._note_constant(eqn)
            flow = self.of_equation(eqn)
            if eqn.effects and compat.touches_reference(eqn):
                self.has_references = True
            if flow is None:
                must = may = 0
                for s in entering:
                    must |= s.must
                    may |= s.may
                if may:
                    leaving = Sets(must, may)
                    for var in eqn.outvars:
                        if self.carries(var):
                            sets[var] = leaving
                continue
            for var, leaving in zip(eqn.outvars, flow.apply(entering), strict=True):
                if leaving.may and self.carries(var):
                    sets[var] = leaving
        return sets

    def of_equation(self, eqn: Any) -> Flow | None:
        """Returns the flow of an equation; None if each input reaches each output."""
        name = eqn.primitive.name
        has_zero_derivative = name in primitives.ZERO_DERIVATIVE and _is_real(eqn)
        if name == "stop_gradient" or has_zero_derivative:
            return None if self._by_value else _nothing(eqn)
        if name in primitives.ONE_TO_ONE and len(eqn.invars) == len(eqn.outvars):
            is_mixed = self._by_value and name == "sort"
            return None if is_mixed else _identity(eqn)
        if (marker := marker_of(eqn)) is not None:
            self.markers.add(marker)
            return _nothing(eqn) if self._cut_markers else _identity(eqn)
        if name in primitives.CALLS:
            return self.of_jaxpr(called_jaxpr(eqn))
        if name == "cond":
            return self._of_cond(eqn)
        if name == "scan":
            return self._of_scan(eqn)
        if name == "while":
            return self._of_while(eqn)
        if self._by_value:
            return None
        if name == "shard_map":
            # Devices may take different branches, so each input that may be used counts
            # as used.
            may = self.of_jaxpr(called_jaxpr(eqn)).may
            return Flow(may, may)
        if name in primitives.CUSTOM_RULES:
            return self._of_custom_rule(eqn)[1]
        return None

    def carries(self, var: Any) -> bool:
        """Whether a gradient can pass through a variable, by its type."""
        return self._by_value or compat.is_differentiable(var)

    def derivative(self, eqn: Any) -> "Derivative":
        """Returns the derivative of an equation with a custom rule."""
        return self._of_custom_rule(eqn)[0]

    @property
    def derivatives(self) -> "list[Derivative]":
        """The derivatives of all custom rules found so far."""
        return [made for _, made, _ in self._rules.values()]

    def deciding_inputs(self, eqn: Any) -> int:
        """Returns the inputs whose values decide what runs; empty for gradients."""
        if not self._by_value:
            return 0
        if eqn.primitive.name == "cond":
            return 1
        return self._deciding_carries(eqn) if eqn.primitive.name == "while" else 0

    def possible_branches(self, eqn: Any) -> Sequence[Any]:
        """Returns the branches of a `cond`; one branch if its index is constant."""
        index, branches = eqn.invars[0], eqn.params["branches"]
        if isinstance(index, Literal):
            return [branches[int(index.val)]]
        if index in self._constants:
            return [branches[self._constants[index]]]
        return branches

    def carry_sets(self, eqn: Any, entering: Sequence[Sets]) -> list[Sets]:
        """Returns the inputs that reach the carries of a loop, over all iterations.

        `must` stays empty.

        Args:
          eqn: a `scan` or a `while`.
          entering: the sets of the body's inputs: constants, carries, and slices.
        """
        loop = loop_shape(eqn)
        flow = self.of_jaxpr(loop.body)
        mays = [s.may for s in entering]
        first, end = loop.num_consts, loop.num_consts + loop.num_carries
        while True:
            leaving = [union(bits, mays) for bits in flow.may[: loop.num_carries]]
            merged = [a | b for a, b in zip(mays[first:end], leaving, strict=True)]
            if merged == mays[first:end]:
                return [Sets(0, may) for may in merged]
            mays[first:end] = merged

    @staticmethod
    def _read(sets: dict[Any, Sets], var: Any) -> Sets:
        return NOTHING if isinstance(var, Literal) else sets.get(var, NOTHING)

    def _note_constant(self, eqn: Any) -> None:
        """Notes the index of a `lax.switch` if it was a Python integer."""
        if all(isinstance(v, Literal) for v in eqn.invars):
            low, x, high = (v.val for v in eqn.invars)  # literals are scalars.
            self._constants[eqn.outvars[0]] = int(min(max(low, x), high))

    def _of_cond(self, eqn: Any) -> Flow:
        _check_markers(eqn.invars[0], eqn.params["branches"])
        flows = [self.of_jaxpr(branch) for branch in self.possible_branches(eqn)]
        musts, mays = [f.must for f in flows], [f.may for f in flows]
        must = [_intersection(column) for column in zip(*musts, strict=True)]
        may = [_union_of(column) for column in zip(*mays, strict=True)]
        deciding = self.deciding_inputs(eqn)
        return Flow(
            tuple(bits << 1 | deciding for bits in must),
            tuple(bits << 1 | deciding for bits in may),
        )

    def _of_scan(self, eqn: Any) -> Flow:
        loop = loop_shape(eqn)
        flow = self.of_jaxpr(loop.body)
        must = _repeat(flow.must, loop, eqn.params["length"])
        may = _repeat(flow.may, loop, eqn.params["length"])
        return Flow(must, may)

    def _of_while(self, eqn: Any) -> Flow:
        loop = loop_shape(eqn)
        flow = self.of_jaxpr(loop.body)
        num_inputs = loop.num_consts + loop.num_carries
        entering = [Sets(0, 1 << i) for i in range(num_inputs)]
        carries = self.carry_sets(eqn, entering)
        # It may run no iteration, so only what a carry keeps of its own start is sure.
        own = [1 << (loop.num_consts + k) for k in range(loop.num_carries)]
        must = [bits & bit for bits, bit in zip(flow.must, own, strict=True)]
        skipped = eqn.params["cond_nconsts"]
        deciding = self.deciding_inputs(eqn)
        return Flow(
            tuple(bits << skipped | deciding for bits in must),
            tuple(s.may << skipped | deciding for s in carries),
        )

    def _deciding_carries(self, eqn: Any) -> int:
        loop = loop_shape(eqn)
        skipped = eqn.params["cond_nconsts"]
        entering = [
            Sets(0, 1 << (skipped + i))
            for i in range(loop.num_consts + loop.num_carries)
        ]
        carries = [s.may for s in self.carry_sets(eqn, entering)]
        (bits,) = self.of_jaxpr(eqn.params["cond_jaxpr"]).may
        return union(bits, [1 << i for i in range(skipped)] + carries)

    def _of_custom_rule(self, eqn: Any) -> "tuple[Derivative, Flow]":
        jaxpr = called_jaxpr(eqn)
        perturbed = -1 if self._perturbed is None else self._perturbed.get(id(eqn), 0)
        key = id(jaxpr), perturbed
        if key not in self._rules:
            made = trace_derivative(eqn, perturbed)
            inner = FlowAnalysis(by_value=True).of_jaxpr(made.jaxpr)
            flow = Flow(made.select(eqn, inner.must), made.select(eqn, inner.may))
            self._rules[key] = jaxpr, made, flow
        return self._rules[key][1:]


class LoopShape(NamedTuple):
    """Layout of the operands of a loop's body: constants, carries, slices."""

    body: Any
    num_consts: int
    num_carries: int


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the open jaxpr, and its constants, of an open or closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def called_jaxpr(eqn: Any) -> Any:
    """Returns the jaxpr of a call or of a function with a custom rule."""
    params = eqn.params
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def loop_shape(eqn: Any) -> LoopShape:
    """Returns the body of a `scan` or a `while` and the layout of its operands."""
    if eqn.primitive.name == "scan":
        return LoopShape(eqn.params["jaxpr"], *compat.scan_operands(eqn.params))
    params = eqn.params
    num_consts = params["body_nconsts"]
    num_carries = len(eqn.invars) - num_consts - params["cond_nconsts"]
    return LoopShape(params["body_jaxpr"], num_consts, num_carries)


def marker_name(axis_names: Sequence[str], divide_by: str | None) -> str:
    """Returns the name of a `jdp.sync_in_backward` over these axes."""
    suffix = "" if divide_by is None else f"_by_{divide_by}"
    return _SYNC_MARKER + "_and_".join(axis_names) + suffix


def marker_of(eqn: Any) -> str | None:
    """Returns the name of a `jdp.sync_in_backward`; None for other equations."""
    is_call = eqn.primitive.name in primitives.CALLS
    return origins.part_of(eqn, _SYNC_MARKER) if is_call else None


def is_marker(eqn: Any) -> bool:
    """Whether an equation is a `jdp.sync_in_backward`."""
    return marker_of(eqn) is not None


def _is_real(eqn: Any) -> bool:
    return jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)


def union(bits: int, sets: Sequence[int]) -> int:
    """Returns the union of the sets that `bits` selects."""
    found = 0
    while bits:
        lowest = bits & -bits
        found |= sets[lowest.bit_length() - 1]
        bits ^= lowest
    return found


def _union_of(sets: Sequence[int]) -> int:
    found = 0
    for s in sets:
        found |= s
    return found


def _intersection(sets: Sequence[int]) -> int:
    found = -1
    for s in sets:
        found &= s
    return found


def _check_markers(index: Any, branches: Sequence[Any]) -> None:
    """Refuses a `jdp.sync_in_backward` in a branch that not all replicas need take."""
    axes = compat.varying_axes_of_type(index.aval)
    if axes and any(map(_contains_marker, branches)):
        raise ValueError(
            "`jdp.sync_in_backward` is in a branch of a `cond` that replicas of "
            f"{'/'.join(sorted(axes))} choose separately; some would wait for the "
            "others forever. Apply it outside of the `cond`."
        )


def _contains_marker(jaxpr: Any) -> bool:
    return any(
        is_marker(eqn) or any(map(_contains_marker, jaxprs_in_params(eqn.params)))
        for eqn in open_jaxpr(jaxpr)[0].eqns
    )


def _nothing(eqn: Any) -> Flow:
    none = (0,) * len(eqn.outvars)
    return Flow(none, none)


def _identity(eqn: Any) -> Flow:
    each = tuple(1 << i for i in range(len(eqn.outvars)))
    return Flow(each, each)


def _repeat(body: Sequence[int], loop: LoopShape, length: int) -> tuple[int, ...]:
    """Follows `length` iterations of a scan's body, on sets of the scan's inputs."""
    num_inputs = _num_invars(loop.body)
    sets = [1 << i for i in range(num_inputs)]
    first, end = loop.num_consts, loop.num_consts + loop.num_carries
    stacked = [0] * (len(body) - loop.num_carries)
    seen: list[list[int]] = []  # the carries before each iteration.
    for _ in range(length):
        carries = sets[first:end]
        if carries in seen:  # from here on everything repeats.
            start = seen.index(carries)
            period = len(seen) - start
            sets[first:end] = seen[start + (length - start) % period]
            break
        seen.append(carries)
        results = [union(bits, sets) for bits in body]
        sets[first:end] = results[: loop.num_carries]
        for k, found in enumerate(results[loop.num_carries :]):
            stacked[k] |= found
    return (*sets[first:end], *stacked)


def _num_invars(jaxpr: Any) -> int:
    return len(open_jaxpr(jaxpr)[0].invars)
