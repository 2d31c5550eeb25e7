"""Vanishing: which results of a linear rule are zero if its inputs are.

The backward rule of a `custom_vjp` may return a gradient that does not depend on its
cotangents, for example the gradient of an auxiliary loss. It is recognised by its
condition for vanishing: a set of inputs such that the result is zero if all of them
are, or None if no zeros make it vanish. Sets are Python integers, one bit per input.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jdp.backward import flow
from jdp.compat import primitives

_ALWAYS_ZERO = 0  # the empty set of conditions.


def vanishing(
    jaxpr: Any, inputs: Sequence[int | None], consts: Sequence[Any] = ()
) -> list[int | None]:
    """Returns the condition under which each output of a jaxpr vanishes.

    Args:
      jaxpr: open or closed.
      inputs: condition of each input.
      consts: constants of an open jaxpr, if they are known.
    """
    body, own = flow.open_jaxpr(jaxpr)
    known: dict[Any, int | None] = dict(zip(body.invars, inputs, strict=True))
    own = consts or own
    # An open jaxpr may come without the values of its constants.
    for var, value in zip(body.constvars, own, strict=bool(own)):
        known[var] = _of_value(value)

    def read(var: Any) -> int | None:
        return _of_value(var.val) if isinstance(var, Literal) else known.get(var)

    for eqn in body.eqns:
        made = _of_equation(eqn, [read(v) for v in eqn.invars])
        known |= zip(eqn.outvars, made, strict=True)
    return [read(v) for v in body.outvars]


def _of_value(value: Any) -> int | None:
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable or not _is_number(value):
            return None
    elif not isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        return None
    return _ALWAYS_ZERO if not np.any(np.asarray(value)) else None


def _is_number(value: jax.Array) -> bool:
    return not jnp.issubdtype(value.dtype, jax.dtypes.extended)


def _of_equation(eqn: Any, entering: list[int | None]) -> list[int | None]:
    name = eqn.primitive.name
    if name in primitives.ZERO_WITH_FIRST:
        made = entering[0]
    elif name in primitives.ZERO_WITH_EACH and len(entering) == len(eqn.outvars):
        return entering
    elif name in primitives.ZERO_WITH_ALL:
        made = _all_of(entering)
    elif name in primitives.PRODUCTS:
        # Either condition is enough; the first is kept.
        made = next((bits for bits in entering if bits is not None), None)
    elif name == "div":
        made = entering[0] if entering[1] is None else None  # 0 / 0 is NaN.
    elif name == "integer_pow":
        made = entering[0] if eqn.params["y"] > 0 else None
    elif name == "select_n":
        made = _all_of(entering[1:])
    elif name == "dynamic_update_slice":
        made = _all_of(entering[:2])
    elif name in ("scatter", "scatter-add"):
        made = _all_of([entering[0], entering[2]])
    elif name == "gather" and "FILL" not in str(eqn.params["mode"]):
        made = entering[0]
    else:
        return _of_control_flow(eqn, entering)
    return [made] * len(eqn.outvars)


def _of_control_flow(eqn: Any, entering: list[int | None]) -> list[int | None]:
    name = eqn.primitive.name
    if name in primitives.INLINABLE or name == "shard_map":
        return vanishing(flow.called_jaxpr(eqn), entering)
    if name == "cond":
        found = [vanishing(b, entering[1:]) for b in eqn.params["branches"]]
        return [_all_of(column) for column in zip(*found, strict=True)]
    if name in ("scan", "while"):
        return _of_loop(eqn, entering)
    return [None] * len(eqn.outvars)


def _of_loop(eqn: Any, entering: list[int | None]) -> list[int | None]:
    loop = flow.loop_shape(eqn)
    inputs = entering[eqn.params.get("cond_nconsts", 0) :]
    first, end = loop.num_consts, loop.num_consts + loop.num_carries
    while True:  # Conditions only grow, or become None.
        made = vanishing(loop.body, inputs)
        pairs = zip(inputs[first:end], made[: loop.num_carries], strict=True)
        carries = [_all_of(pair) for pair in pairs]
        if carries == inputs[first:end]:
            return [*carries, *made[loop.num_carries :]]
        inputs = [*inputs[:first], *carries, *inputs[end:]]


def _all_of(conditions: Sequence[int | None]) -> int | None:
    found = _ALWAYS_ZERO
    for bits in conditions:
        if bits is None:
            return None
        found |= bits
    return found
