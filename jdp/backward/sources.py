"""Sources: equations whose results may differ between replicas for equal operands.

The index of a replica is a source. So is a host callback, which each replica calls
separately, and state that a device keeps between calls, such as a generator's.
"""

from typing import Any

from jax.extend.core import jaxprs_in_params

from jdp.compat import origins, primitives


def is_external(eqn: Any) -> bool:
    """Returns whether the results of an equation depend on more than its operands.

    By JAX's contract, a `pure_callback` is a function of its operands. Without operands
    it is a constant, which may differ between hosts. Code with a declared effect may
    read anything. jdp's own collectives are followed as reductions.
    """
    name = eqn.primitive.name
    if not eqn.outvars:
        return False
    if name in primitives.STATEFUL or (name in primitives.CALLBACKS and not eqn.invars):
        return True
    return (
        _has_outside_effect(eqn)
        and next(iter(jaxprs_in_params(eqn.params)), None) is None
        and origins.collective_of(eqn) is None
    )


def find_external(jaxpr: Any) -> Any | None:
    """Returns the first external equation, at any depth."""
    found, seen, todo = None, set(), [jaxpr]
    while todo and found is None:
        body = todo.pop()
        body = getattr(body, "jaxpr", body)
        if id(body) not in seen:
            seen.add(id(body))
            found = next((eqn for eqn in body.eqns if is_external(eqn)), None)
            inner = [j for eqn in body.eqns for j in jaxprs_in_params(eqn.params)]
            todo += reversed(inner)
    return found


def _has_outside_effect(eqn: Any) -> bool:
    """Whether an equation declares an effect outside of the device's memory."""
    kinds = (type(effect) for effect in eqn.effects)
    others = (k for k in kinds if k.__name__ not in primitives.INSIDE_EFFECTS)
    return any(".pallas." not in kind.__module__ for kind in others)
