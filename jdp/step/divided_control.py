"""Divided control flow: which collectives might only some replicas reach?"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params

from jdp.backward import exchange, flow
from jdp.compat import origins, primitives


class FoundCollective(NamedTuple):
    """A collective in a jaxpr, or in a jaxpr inside it."""

    eqn: Any
    mask: int  # the bits of its axes.


class CollectiveFinder:
    """Finds the collectives over some axes in jaxprs."""

    def __init__(self, bits: Mapping[str, int]):
        self._bits = bits
        # Keyed by the id of the jaxpr, which is kept so that the id stays taken.
        self._found: dict[int, tuple[Any, list[FoundCollective]]] = {}

    def find(self, jaxpr: Any) -> list[FoundCollective]:
        """Returns the collectives in a jaxpr and in all jaxprs inside it."""
        if id(jaxpr) not in self._found:
            found = []
            for eqn in flow.open_jaxpr(jaxpr)[0].eqns:
                name = exchange.stem(eqn)
                if name in primitives.UNITING or name in primitives.MOVING:
                    mask = mask_of(self._bits, exchange.axes_of(eqn))
                    found += [FoundCollective(eqn, mask)] if mask else []
                elif name in primitives.OPAQUE and origins.collective_of(eqn):
                    found.append(FoundCollective(eqn, sum(self._bits.values())))
                for inner in jaxprs_in_params(eqn.params):
                    found += self.find(inner)
            self._found[id(jaxpr)] = jaxpr, found
        return self._found[id(jaxpr)][1]


def mask_of(bits: Mapping[str, int], axis_names: Iterable[Any]) -> int:
    """Returns the bits of the axes that are in `bits`, as one number."""
    mask = 0
    for name in axis_names:
        mask |= bits.get(name, 0)
    return mask


def explain(eqn: Any, collective: Any, names: Sequence[str]) -> str:
    """Explains why control flow with a collective in it is refused.

    Args:
      eqn: the `cond` or `while` that replicas decide differently.
      collective: the equation of the collective, in a branch or the loop.
      names: axes over which the decision differs.
    """
    over = names[0] if len(names) == 1 else tuple(names)
    is_loop = eqn.primitive.name == "while"
    what = "end at different times" if is_loop else "choose differently"
    place = "a `while` loop" if is_loop else "a branch of a `cond`"
    caller = origins.caller_in_jdp(collective)
    hint = ""
    if caller == "average":
        hint = (
            " If an optimizer differentiates it, as a `value_fn`, pass "
            "`jdp.mean_loss(loss_fn)`: the gradient of a `jdp.average` is the gradient "
            "of one replica alone."
        )
    if caller in ("zero1", "distributed_optimizer"):
        hint = (
            " A wrapper that looks at gradients goes inside, where the gradients are "
            f"averaged: `jdp.{caller}(optax.apply_if_finite(...))`."
        )
    return (
        f"{_describe(collective)} is in {place}{exchange.line_of(eqn)} that the "
        f"replicas along {'/'.join(names)} may {what}: some would wait for the others "
        "forever. Decide with a value that is the same on all replicas, such as "
        f"`lax.pmax(condition, {over!r})` or a `jdp.average`, or call the collective "
        f"outside of the `{eqn.primitive.name}`.{hint}"
    )


def _describe(eqn: Any) -> str:
    """Names a collective, and the function of jdp that called it."""
    name = exchange.public_name(eqn)
    caller = origins.caller_in_jdp(eqn) or origins.collective_of(eqn)
    if caller is None:
        return f"`lax.{name}`"
    is_own = name.startswith("jdp") or name in primitives.OPAQUE
    return f"`jdp.{caller}`" if is_own else f"`jdp.{caller}` (`lax.{name}`)"
