"""Update programs: what does the update of a metric do with its state and arguments?"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from jdp.backward import flow
from jdp.compat import primitives


def used_inputs(closed: Any) -> set[int]:
    """Returns the indices of the inputs that some output of a jaxpr depends on."""
    jaxpr, _ = flow.open_jaxpr(closed)
    used = _used_variables(jaxpr)
    return {i for i, var in enumerate(jaxpr.invars) if var in used}


def constants(closed: Any) -> list[str]:
    """Returns what the outputs of a jaxpr depend on besides the inputs."""
    jaxpr, _ = flow.open_jaxpr(closed)
    used = _used_variables(jaxpr)
    found = [str(_literals(jaxpr.outvars))]
    for eqn in jaxpr.eqns:
        if used.intersection(eqn.outvars):
            params = sorted(f"{k}={v}" for k, v in eqn.params.items())
            found.append(f"{eqn.primitive.name} {params} {_literals(eqn.invars)}")
    return found


def has_collective(jaxpr: Any) -> bool:
    """Returns whether replicas communicate in a jaxpr, at any depth."""
    for eqn in flow.open_jaxpr(jaxpr)[0].eqns:
        name = eqn.primitive.name
        if name in primitives.UNITING | primitives.MOVING | primitives.OPAQUE:
            return True
        if any(map(has_collective, jaxprs_in_params(eqn.params))):
            return True
    return False


def only_adds(closed: Any, num_states: int) -> bool:
    """Returns whether a jaxpr adds to its states amounts that do not depend on them.

    Args:
      closed: the k-th output is the new value of the k-th of the first `num_states`
        inputs.
      num_states: number of states.
    """
    jaxpr, _ = flow.open_jaxpr(closed)
    # Per value: the state that it is, plus an amount; -1: a state in another way.
    entering = [i if i < num_states else None for i in range(len(jaxpr.invars))]
    return list(_follow(jaxpr, entering)) == list(range(num_states))


_TANGLED = -1
# They add their other operands to the first.
_ADDING_TO_FIRST = frozenset({"scatter-add", "sub"})
_KEEPING = frozenset({"convert_element_type", "copy"})


def _follow(jaxpr: Any, entering: Sequence[int | None]) -> Iterator[int | None]:
    """Yields for each output which state it is, plus an amount."""
    known: dict[Any, int | None] = dict(zip(jaxpr.invars, entering, strict=True))

    def read(var: Any) -> int | None:
        return None if isinstance(var, Literal) else known.get(var)

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        if any(x is not None for x in operands):
            known |= zip(eqn.outvars, _of_equation(eqn, operands), strict=True)
    for var in jaxpr.outvars:
        yield read(var)


def _of_equation(eqn: Any, operands: list[int | None]) -> list[int | None]:
    name = eqn.primitive.name
    if name in primitives.CALLS:
        body, _ = flow.open_jaxpr(flow.called_jaxpr(eqn))
        return list(_follow(body, operands))
    states = [i for i, x in enumerate(operands) if x is not None]
    place = states[0]
    is_kept = (
        len(states) == 1
        and len(eqn.outvars) == 1
        and eqn.outvars[0].aval.shape == eqn.invars[place].aval.shape
        and (
            name in primitives.RESHAPES | _KEEPING | {"add", "add_any"}
            or (name in _ADDING_TO_FIRST and place == 0)
        )
    )
    return [operands[place]] if is_kept else [_TANGLED] * len(eqn.outvars)


def _used_variables(jaxpr: Any) -> set[Any]:
    used = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or used.intersection(eqn.outvars):
            used.update(v for v in eqn.invars if not isinstance(v, Literal))
    return used


def _literals(variables: Sequence[Any]) -> list[str]:
    return [str(v.val) for v in variables if isinstance(v, Literal)]
