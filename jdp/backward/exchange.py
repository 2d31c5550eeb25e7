"""Exchange: collectives in a loss, through which replicas send each other values.

Through such a collective, the gradient of one replica depends on the losses of others.
So the weights of these losses must be known before the backward pass, and a replica of
weight 0 must not send a cotangent, not even NaN.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

from jdp import compat
from jdp.backward import flow, injection
from jdp.backward.flow import FlowAnalysis, Sets
from jdp.backward.injection import InjectionAnalysis
from jdp.compat import origins, primitives

# In a program without any of these, `ExchangeAnalysis` finds nothing.
MAY_EXCHANGE = (
    primitives.UNITING | primitives.MOVING | primitives.OPAQUE | primitives.CUSTOM_RULES
)


def stem(eqn: Any) -> str:
    """Returns the name of a primitive, without the suffix "_start"."""
    return eqn.primitive.name.removesuffix("_start")


def public_name(eqn: Any) -> str:
    """Returns the name of a collective in `jax.lax`."""
    return primitives.PUBLIC_NAMES.get(stem(eqn), stem(eqn))


def axes_of(eqn: Any) -> tuple[Any, ...]:
    """Returns the axes of a collective."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(names) if isinstance(names, tuple | list | frozenset) else (names,)


def line_of(eqn: Any) -> str:
    """Returns the user's source line of an equation: " (file.py:12)", or ""."""
    line = origins.user_line(eqn)
    return "" if line is None else f" ({line})"


def describe(eqn: Any) -> str:
    """Names a collective for a message: function and source line."""
    if stem(eqn) in primitives.OPAQUE or stem(eqn).startswith("jdp_"):
        name = origins.caller_in_jdp(eqn) or origins.collective_of(eqn)
        return f"`jdp.{name or 'collectives'}`{line_of(eqn)}"
    return f"`lax.{public_name(eqn)}`{line_of(eqn)}"


class ExchangeAnalysis:
    """Finds the collectives over some axes, once per jaxpr.

    Args:
      flows: flows of gradients.
      axis_names: the axes.
      with_casts: whether to include casts, whose transposes sum over the axes.
    """

    def __init__(
        self, flows: FlowAnalysis, axis_names: Collection[str], *, with_casts: bool
    ):
        self._flows = flows
        self._axis_names = frozenset(axis_names)
        self._names = primitives.UNITING | primitives.MOVING
        if with_casts:
            self._names |= primitives.CASTS
        # By the id of the jaxpr, which it holds.
        self._known: dict[tuple[int, bool], tuple[Any, list[Any]]] = {}

    def met_in(self, eqn: Any, *, with_rules: bool = True) -> list[Any]:
        """Returns the collectives in an equation and in its derivative.

        Derivatives are searched if `with_rules`. Within a derivative no other custom
        rule runs.
        """
        if flow.is_marker(eqn):  # It averages gradients, and is counted elsewhere.
            return []
        name = stem(eqn)
        is_own = name in primitives.OPAQUE and origins.collective_of(eqn)
        if is_own or (name in self._names and self._axis_names & {*axes_of(eqn)}):
            return [eqn]
        found: list[Any] = []
        for inner in jaxprs_in_params(eqn.params):
            found += self.in_jaxpr(inner, with_rules=with_rules)
        if with_rules and name in primitives.CUSTOM_RULES:
            made = self._flows.derivative(eqn)
            found += self.in_jaxpr(made.jaxpr, with_rules=False)
        return found

    def in_jaxpr(self, jaxpr: Any, *, with_rules: bool = True) -> list[Any]:
        """Returns the collectives in a jaxpr, at any depth."""
        key = id(jaxpr), with_rules
        if key not in self._known:
            found: list[Any] = []
            for eqn in flow.open_jaxpr(jaxpr)[0].eqns:
                found += self.met_in(eqn, with_rules=with_rules)
            self._known[key] = jaxpr, found
        return self._known[key][1]

    def on_path(self, jaxpr: Any, inputs: Sequence[Sets], live: int) -> Iterator[Any]:
        """Yields the collectives that gradients go through.

        Args:
          jaxpr: open or closed.
          inputs: the set of each input; empty if it does not depend on parameters.
          live: the outputs that get a cotangent, one bit per output.
        """
        if not self.in_jaxpr(jaxpr):
            return
        body, _ = flow.open_jaxpr(jaxpr)
        sets = self._flows.sets_of_values(body, inputs)
        injections = InjectionAnalysis(self._flows)
        live_values = injections.live_values(body, live)
        for eqn in body.eqns:
            bits = injection.bits_of(eqn.outvars, live_values)
            entering = [injection.read(sets, v) for v in eqn.invars]
            if not bits or not any(s.may for s in entering):
                continue
            name = eqn.primitive.name
            if flow.is_marker(eqn) or not self.met_in(eqn):
                continue
            if name in primitives.CALLS:
                yield from self.on_path(flow.called_jaxpr(eqn), entering, bits)
            elif name == "cond":
                for branch in eqn.params["branches"]:
                    yield from self.on_path(branch, entering[1:], bits)
            elif name == "scan":
                loop = flow.loop_shape(eqn)
                first, end = loop.num_consts, loop.num_consts + loop.num_carries
                entering[first:end] = self._flows.carry_sets(eqn, entering)
                bits = injections.body_live(eqn, bits)
                yield from self.on_path(loop.body, entering, bits)
            else:
                yield from self.met_in(eqn)


class GatedEvaluation:
    """Runs a jaxpr so that replicas without data send no cotangents to others.

    Such a replica treats results of collectives as constants. Its own loss may divide
    by zero, and a NaN cotangent would reach all other replicas.

    Args:
      exchanges: finds the collectives, including casts.
      has_data: bool (), whether this replica has data.
    """

    def __init__(self, exchanges: ExchangeAnalysis, has_data: jax.Array):
        self._exchanges = exchanges
        self._has_data = has_data
        self._varying = compat.varying_axes(has_data)

    def run(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """Runs `jaxpr`, open or closed."""
        body, consts = flow.open_jaxpr(jaxpr)
        known: dict[Any, Any] = dict(zip(body.constvars, consts, strict=True))
        known |= zip(body.invars, values, strict=True)

        def value(var: Any) -> Any:
            return var.val if isinstance(var, Literal) else known[var]

        for eqn in body.eqns:
            operands = [value(v) for v in eqn.invars]
            if self._exchanges.met_in(eqn):
                results = self._run_equation(eqn, operands)
            else:
                results = compat.bind_equation(eqn, operands)
            known |= zip(eqn.outvars, results, strict=True)
        return [value(v) for v in body.outvars]

    def _run_equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "cond":
            branches = [self._runner(b) for b in eqn.params["branches"]]
            with compat.inside_equation(eqn):
                return lax.switch(operands[0], branches, *operands[1:])
        if name == "scan":
            with compat.inside_equation(eqn):
                return self._run_scan(eqn, operands)
        if name in primitives.CALLS:
            run = self._runner(flow.called_jaxpr(eqn))
            if "policy" in eqn.params:
                run = jax.checkpoint(
                    run,
                    prevent_cse=eqn.params["prevent_cse"],
                    policy=eqn.params["policy"],
                )
            with compat.inside_equation(eqn):
                return run(*operands)
        # A collective, or an equation that contains one and has a custom rule.
        results = compat.bind_equation(eqn, operands)
        return [
            self._gate(x) if compat.is_differentiable(var) else x
            for x, var in zip(results, eqn.outvars, strict=True)
        ]

    def _run_scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        loop = flow.loop_shape(eqn)
        first, end = loop.num_consts, loop.num_consts + loop.num_carries

        def body(carries: list[Any], xs: list[Any]) -> Any:
            results = self.run(loop.body, [*operands[:first], *carries, *xs])
            return results[: loop.num_carries], results[loop.num_carries :]

        carries, stacked = lax.scan(
            body,
            operands[first:end],
            operands[end:],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carries, *stacked]

    def _runner(self, jaxpr: Any) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            return self.run(jaxpr, operands)

        return run

    def _gate(self, x: jax.Array) -> jax.Array:
        # By its type it is the same on all replicas, as is its cotangent.
        if not self._varying <= compat.varying_axes(x):
            return x
        return _gate(x, self._has_data)


# Without a `select` of `x`: it is the same on all replicas, as the program must show.
@jax.custom_jvp
def _gate(x: jax.Array, has_data: jax.Array) -> jax.Array:
    return x


@_gate.defjvp
def _gate_tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, has_data), (tangent, _) = primals, tangents
    return x, lax.select_n(has_data, jnp.zeros_like(tangent), tangent)
