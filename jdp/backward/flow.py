"""Flow: which inputs of a jaxpr can pass a gradient to which outputs.

Sets of inputs are Python integers, one bit an input. There are two of each: `may`, what
some execution connects, and `must`, what every execution connects; they differ where
control flow decides.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jdp import compat

# `jdp.sync_in_backward` is a `jit` of this name, so that it can be found in a jaxpr.
SYNC_MARKER = "jdp_sync_in_backward"

# Primitives that call one jaxpr with their own operands.
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint"})
CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
# Floating-point results whose derivative JAX takes to be zero.
_ZERO_DERIVATIVE = frozenset(
    {"stop_gradient", "floor", "ceil", "round", "sign", "nextafter"}
)
# The k-th result comes from the k-th operand alone.
_ELEMENT_BY_ELEMENT = frozenset(
    {
        "all_gather",
        "jdp_barrier",
        "optimization_barrier",
        "pcast",
        "pmax",
        "pmin",
        "ppermute",
        "psum",
        "psum_invariant",
        "pvary",
        "sort",
    }
)


class Sets(NamedTuple):
    """The inputs that reach one value."""

    must: int
    may: int


NOTHING = Sets(0, 0)


class Flow(NamedTuple):
    """The inputs that reach each output; for each, a bit an input."""

    must: tuple[int, ...]
    may: tuple[int, ...]

    @property
    def is_decided(self) -> bool:
        """Whether no control flow decides anything."""
        return self.must == self.may

    def apply(self, inputs: Sequence[Sets]) -> list[Sets]:
        """The sets of the outputs, from those of the inputs."""
        musts, mays = [s.must for s in inputs], [s.may for s in inputs]
        pairs = zip(self.must, self.may, strict=True)
        return [Sets(union(a, musts), union(b, mays)) for a, b in pairs]


class FlowAnalysis:
    """Computes flows, each jaxpr once.

    With `by_value` it follows values instead of gradients: through integers, through
    derivatives of zero, and from a predicate to what it chooses. With `cut_markers` no
    gradient passes `jdp.sync_in_backward`.
    """

    def __init__(self, *, by_value: bool = False, cut_markers: bool = False):
        """Starts with nothing known."""
        self.has_markers = False  # whether a marker has been met.
        self._by_value = by_value
        self._cut_markers = cut_markers
        self._known: dict[int, tuple[Any, Flow]] = {}  # the jaxpr keeps its id taken.
        self._pullbacks: dict[int, Pullback] = {}  # by the id of a `_known` jaxpr.

    def of_jaxpr(self, jaxpr: Any) -> Flow:
        """The flow of a jaxpr, open or closed."""
        if id(jaxpr) not in self._known:
            body, _ = open_jaxpr(jaxpr)
            inputs = [Sets(1 << i, 1 << i) for i in range(len(body.invars))]
            outputs = self.propagate(body, inputs)
            flow = Flow(tuple(s.must for s in outputs), tuple(s.may for s in outputs))
            self._known[id(jaxpr)] = (jaxpr, flow)
        return self._known[id(jaxpr)][1]

    def propagate(self, jaxpr: Any, inputs: Sequence[Sets]) -> list[Sets]:
        """Carries sets through an open jaxpr."""
        sets: dict[Any, Sets] = {}
        for var, found in zip(jaxpr.invars, inputs, strict=True):
            if self.carries(var):
                sets[var] = found
        for eqn in jaxpr.eqns:
            entering = [self._read(sets, v) for v in eqn.invars]
            flow = self.of_equation(eqn)
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
        return [self._read(sets, v) for v in jaxpr.outvars]

    def of_equation(self, eqn: Any) -> Flow | None:
        """The flow of an equation; None where every input reaches every output."""
        name = eqn.primitive.name
        if name in _ZERO_DERIVATIVE:
            return None if self._by_value else _nothing(eqn)
        if name in _ELEMENT_BY_ELEMENT and len(eqn.invars) == len(eqn.outvars):
            return None if self._by_value else _identity(eqn)
        if is_marker(eqn):
            self.has_markers = True
            return _nothing(eqn) if self._cut_markers else _identity(eqn)
        if name in CALLS:
            return self.of_jaxpr(called_jaxpr(eqn))
        if name == "cond":
            return self._of_cond(eqn)
        if name == "scan":
            return self._of_scan(eqn)
        if name == "while":
            return None if self._by_value else self._of_while(eqn)
        if self._by_value:
            return None
        if name == "shard_map":
            # Which branch runs may differ from device to device, so what may be used
            # counts as used.
            may = self.of_jaxpr(called_jaxpr(eqn)).may
            return Flow(may, may)
        if name in CUSTOM_RULES:
            return self._of_custom_rule(eqn)
        return None

    def carries(self, var: Any) -> bool:
        """Whether a gradient can pass through a value of this type."""
        return self._by_value or is_differentiable(var)

    def pullback(self, eqn: Any) -> "Pullback":
        """The backward pass of an equation that has a rule of its own."""
        self._of_custom_rule(eqn)
        return self._pullbacks[id(called_jaxpr(eqn))]

    def carry_sets(self, eqn: Any, entering: Sequence[Sets]) -> list[Sets]:
        """What reaches the carries of a loop, over all iterations.

        `must` is left empty.

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

    def _of_cond(self, eqn: Any) -> Flow:
        index, branches = eqn.invars[0], eqn.params["branches"]
        if isinstance(index, Literal):
            branches = [branches[int(index.val)]]
        flows = [self.of_jaxpr(branch) for branch in branches]
        musts, mays = [f.must for f in flows], [f.may for f in flows]
        must = [_intersection(column) for column in zip(*musts, strict=True)]
        may = [_union_of(column) for column in zip(*mays, strict=True)]
        by_index = 1 if self._by_value else 0
        return Flow(
            tuple(bits << 1 | by_index for bits in must),
            tuple(bits << 1 | by_index for bits in may),
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
        # It may run no iteration, so that only what a carry keeps of itself is sure.
        own = [1 << (loop.num_consts + k) for k in range(loop.num_carries)]
        must = [bits & bit for bits, bit in zip(flow.must, own, strict=True)]
        skipped = eqn.params["cond_nconsts"]
        return Flow(
            tuple(bits << skipped for bits in must),
            tuple(s.may << skipped for s in carries),
        )

    def _of_custom_rule(self, eqn: Any) -> Flow:
        jaxpr = called_jaxpr(eqn)
        if id(jaxpr) not in self._known:
            pullback = _trace_pullback(eqn)
            self._pullbacks[id(jaxpr)] = pullback
            backward = FlowAnalysis(by_value=True).of_jaxpr(pullback.jaxpr)
            must, may = [0] * len(eqn.outvars), [0] * len(eqn.outvars)
            for position, i in enumerate(pullback.inputs):
                for k, o in enumerate(pullback.outputs):
                    cotangent = 1 << (len(eqn.invars) + k)
                    must[o] |= bool(backward.must[position] & cotangent) << i
                    may[o] |= bool(backward.may[position] & cotangent) << i
            self._known[id(jaxpr)] = (jaxpr, Flow(tuple(must), tuple(may)))
        return self._known[id(jaxpr)][1]


class LoopShape(NamedTuple):
    """How the operands of a loop's body are laid out: constants, carries, slices."""

    body: Any
    num_consts: int
    num_carries: int


class Pullback(NamedTuple):
    """The backward pass of one equation."""

    jaxpr: Any  # (operands, cotangents of `outputs`) -> cotangents of `inputs`.
    inputs: list[int]  # operands that can have a gradient.
    outputs: list[int]  # results that can have one.


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the open jaxpr of an open or a closed one, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def called_jaxpr(eqn: Any) -> Any:
    """Returns the jaxpr that a call, or a function with a custom rule, runs."""
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


def is_marker(eqn: Any) -> bool:
    """Whether an equation is a `jdp.sync_in_backward`."""
    return eqn.params.get("name") == SYNC_MARKER and eqn.primitive.name in CALLS


def is_differentiable(var: Any) -> bool:
    """Whether a value of this type can have a gradient."""
    dtype = getattr(var.aval, "dtype", None)  # None: a token, or a reference.
    return dtype is not None and _is_inexact(dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def union(bits: int, sets: Sequence[int]) -> int:
    """The union of the sets that `bits` selects."""
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


def _nothing(eqn: Any) -> Flow:
    none = (0,) * len(eqn.outvars)
    return Flow(none, none)


def _identity(eqn: Any) -> Flow:
    each = tuple(1 << i for i in range(len(eqn.outvars)))
    return Flow(each, each)


def _repeat(body: Sequence[int], loop: LoopShape, length: int) -> tuple[int, ...]:
    """Runs a scan's body `length` times, on sets of the scan's inputs."""
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


def _trace_pullback(eqn: Any) -> Pullback:
    inputs = [i for i, v in enumerate(eqn.invars) if is_differentiable(v)]
    outputs = [o for o, v in enumerate(eqn.outvars) if is_differentiable(v)]

    def pull_back(operands: list[jax.Array], cotangents: list[jax.Array]) -> Any:
        def run(*chosen: jax.Array) -> list[jax.Array]:
            values = list(operands)
            for i, x in zip(inputs, chosen, strict=True):
                values[i] = x
            results = compat.bind_equation(eqn, values)
            return [results[o] for o in outputs]

        _, vjp = jax.vjp(run, *[operands[i] for i in inputs])
        return vjp(cotangents)

    avals = [v.aval for v in eqn.invars], [eqn.outvars[o].aval for o in outputs]
    return Pullback(jax.make_jaxpr(pull_back)(*avals), inputs, outputs)
