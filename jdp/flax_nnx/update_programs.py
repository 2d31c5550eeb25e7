"""Update programs: what does the update of a metric do with its state and arguments?"""

from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from jdp.backward import flow
from jdp.compat import primitives


def used_inputs(closed: Any) -> set[int]:
    """Returns the indices of the inputs that some output of a jaxpr depends on."""
    jaxpr, _ = flow.open_jaxpr(closed)
    used = _used_variables(jaxpr)
    return {i for i, var in enumerate(jaxpr.invars) if var in used}


def has_collective(jaxpr: Any) -> bool:
    """Returns whether replicas communicate in a jaxpr, at any depth."""
    for eqn in flow.open_jaxpr(jaxpr)[0].eqns:
        name = eqn.primitive.name
        if name in primitives.UNITING | primitives.MOVING | primitives.OPAQUE:
            return True
        if any(map(has_collective, jaxprs_in_params(eqn.params))):
            return True
    return False


def _used_variables(jaxpr: Any) -> set[Any]:
    used = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or used.intersection(eqn.outvars):
            used.update(v for v in eqn.invars if not isinstance(v, Literal))
    return used
