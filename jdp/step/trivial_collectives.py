"""Trivial collectives: the ones of a single replica, taken out of its program.

XLA on CPU runs them otherwise. JAX's own flag for this returns wrong shapes for an
untiled `lax.psum_scatter`, and so for the derivative of an untiled `lax.all_gather`.
"""

from collections.abc import Collection
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jdp.backward import exchange, flow
from jdp.compat import primitives


def remove(closed: Any, axis_names: Collection[str]) -> Any:
    """Returns a closed jaxpr without collectives that return their operand.

    Args:
      closed: the jaxpr.
      axis_names: axes of size 1.
    """
    return _Removal(axis_names).of_value(closed)


class _Removal:
    """Removes collectives over some axes, once per jaxpr."""

    def __init__(self, axis_names: Collection[str]):
        self._axis_names = frozenset(axis_names)
        # By the id of the jaxpr, which it holds. JAX compiles a shared jaxpr once.
        self._known: dict[int, tuple[Any, Any]] = {}

    def of_value(self, value: Any) -> Any:
        """Returns a parameter of an equation, with its jaxprs replaced."""
        if isinstance(value, tuple | list):
            parts = [self.of_value(x) for x in value]
            same = all(a is b for a, b in zip(parts, value, strict=True))
            if same:
                return value
            is_named = hasattr(value, "_fields")  # As in `custom_linear_solve`.
            return type(value)(*parts) if is_named else type(value)(parts)
        if not isinstance(value, ClosedJaxpr | Jaxpr):
            return value
        if id(value) not in self._known:
            body, _ = flow.open_jaxpr(value)
            if body is value:  # Open, or either in JAX 0.12.
                made = self._of_jaxpr(value)
            else:
                replaced = self.of_value(body)
                made = value if replaced is body else value.replace(jaxpr=replaced)
            self._known[id(value)] = value, made
        return self._known[id(value)][1]

    def _of_jaxpr(self, jaxpr: Any) -> Any:
        operands: dict[Any, Any] = {}  # by the variables that are equal to them.

        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else operands.get(v, v)

        eqns, is_same = [], True
        for eqn in jaxpr.eqns:
            invars = [read(v) for v in eqn.invars]
            if self._is_trivial(eqn):
                operands[eqn.outvars[0]] = invars[0]
                is_same = False
                continue
            params = {k: self.of_value(v) for k, v in eqn.params.items()}
            is_kept = all(params[k] is v for k, v in eqn.params.items())
            if not is_kept or any(
                a is not b for a, b in zip(invars, eqn.invars, strict=True)
            ):
                eqn, is_same = eqn.replace(invars=invars, params=params), False
            eqns.append(eqn)
        if is_same:
            return jaxpr
        return jaxpr.replace(eqns=eqns, outvars=[read(v) for v in jaxpr.outvars])

    def _is_trivial(self, eqn: Any) -> bool:
        if eqn.primitive.name not in primitives.IDENTITY_ON_ONE:
            return False
        if not self._axis_names.issuperset(exchange.axes_of(eqn)):
            return False
        if not eqn.params.get("perm", True):  # A permutation that sends nothing.
            return False
        # A result in another shape stays a collective.
        (a,), (b,) = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
        return a.shape == b.shape and a.dtype == b.dtype
