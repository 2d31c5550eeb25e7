"""Sources: which equations give each replica a value of its own, whatever enters them.

The number of a replica is one. So is what a host callback returns, since each replica
calls it by itself, and what a device keeps between calls, such as a generator's state.
"""

from typing import Any

from jax.extend.core import jaxprs_in_params

from jdp.compat import origins, primitives


def is_external(eqn: Any) -> bool:
    """Returns whether what an equation returns is more than a function of its operands.

    By JAX's contract the function of a `pure_callback` is one of its operands; without
    operands it would be a constant, and nothing says that all hosts have the same. Code
    that declares an effect may read anything. jdp's own collectives are followed as the
    reductions that they are.
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
    """Returns the first equation, at any depth, that `is_external`."""
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
    """Whether an equation declares that it touches more than the device's memory."""
    kinds = (type(effect) for effect in eqn.effects)
    others = (k for k in kinds if k.__name__ not in primitives.INSIDE_EFFECTS)
    return any(".pallas." not in kind.__module__ for kind in others)
