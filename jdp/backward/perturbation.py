"""Perturbation: which operands of a custom rule JAX differentiates with respect to.

A rule can see which operands these are, and refuse some: `custom_vjp` refuses values
that its function closes over. So each rule must be called with the same operands as by
`jax.grad`: those that depend on a parameter, whether or not a gradient comes back. Sets
are Python integers, one bit per operand.
"""

from typing import Any

from jax.extend.core import Literal

from jdp import compat
from jdp.backward import flow
from jdp.backward.flow import FlowAnalysis, loop_shape, open_jaxpr
from jdp.compat import primitives


def find_perturbed(jaxpr: Any) -> dict[int, int]:
    """Returns the perturbed operands of each equation with a custom rule, by its id.

    If a function is called from several places, the sets of all places are united.
    Equations that JAX does not differentiate are left out.

    Args:
      jaxpr: program of a loss, open; all its inputs are parameters.
    """
    search = _PerturbationSearch()
    search.of_jaxpr(jaxpr, (1 << len(jaxpr.invars)) - 1)
    return search.found


class _PerturbationSearch:
    """Follows tangents through the forward pass, once per jaxpr and set of inputs."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}
        self._known: dict[tuple[int, int], int] = {}
        self._flows = FlowAnalysis()

    def of_jaxpr(self, jaxpr: Any, entering: int) -> int:
        """Returns the perturbed outputs of a jaxpr with these perturbed inputs."""
        key = id(jaxpr), entering
        if key not in self._known:
            self._known[key] = self._walk(open_jaxpr(jaxpr)[0], entering)
        return self._known[key]

    def _walk(self, body: Any, entering: int) -> int:
        perturbed: set[Any] = set()

        def add(variables: Any, bits: int) -> None:
            for i, var in enumerate(variables):
                if bits >> i & 1 and compat.is_differentiable(var):
                    perturbed.add(var)

        def read(variables: Any) -> int:
            bits = 0
            for i, var in enumerate(variables):
                if not isinstance(var, Literal) and var in perturbed:
                    bits |= 1 << i
            return bits

        add(body.invars, entering)
        for eqn in body.eqns:
            bits = read(eqn.invars)
            # Memory may hold anything.
            touches = bool(eqn.effects) and compat.touches_reference(eqn)
            if bits or touches:
                leaving = self._of_equation(eqn, bits)
                add(eqn.outvars, -1 if touches else leaving)
        return read(body.outvars)

    def _of_equation(self, eqn: Any, bits: int) -> int:
        name = eqn.primitive.name
        if name in primitives.CUSTOM_RULES:
            self.found[id(eqn)] = self.found.get(id(eqn), 0) | bits
            return -1
        if name in primitives.CALLS or name == "shard_map":
            return self.of_jaxpr(flow.called_jaxpr(eqn), bits)
        if name == "cond":
            leaving = 0
            for branch in eqn.params["branches"]:
                leaving |= self.of_jaxpr(branch, bits >> 1)
            return leaving
        if name in ("scan", "while"):
            return self._of_loop(eqn, bits >> eqn.params.get("cond_nconsts", 0))
        found = self._flows.of_equation(eqn)
        if found is None:
            return -1
        return sum(1 << k for k, may in enumerate(found.may) if may & bits)

    def _of_loop(self, eqn: Any, entering: int) -> int:
        loop = loop_shape(eqn)
        are_carries = (1 << loop.num_carries) - 1
        while True:
            leaving = self.of_jaxpr(loop.body, entering)
            wider = entering | (leaving & are_carries) << loop.num_consts
            if wider == entering:
                return leaving | entering >> loop.num_consts & are_carries
            entering = wider
