"""Program order: collectives on the host and XLA's, in one order on all processes.

XLA runs operations at the same time where none depends on another, on as few threads as
the process has cores. A collective keeps its thread until all replicas are there. If
one replica begins with a collective on the host and another with one of XLA's, both
wait forever. `ordered` orders the collectives on the host, and XLA its own. Here each
waits for the collectives of the other kind that stand before it in the program.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

from jdp import compat
from jdp.backward import exchange, flow
from jdp.compat import host_collectives, primitives
from jdp.replicas.mesh import World

_NOT_DONE = np.zeros((), bool)
_NAMES = (primitives.UNITING | primitives.MOVING) - {"jdp_replicated"}


def keep(traced: Any, world: World, reduced_later: Collection[int]) -> Any:
    """Returns a program whose collectives of both kinds run in one order.

    Args:
      traced: closed jaxpr with the `shard_map` of a step.
      world: the replicas.
      reduced_later: indices of results that XLA's collectives reduce after the program.

    Returns:
      `traced` itself if its collectives are of one kind.
    """
    (mapped,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "shard_map")
    body, _ = flow.open_jaxpr(mapped.params["jaxpr"])
    if not any(map(host_collectives.is_on_host, body.eqns)):
        return traced
    if not reduced_later and not any(map(_Search().has_any, body.eqns)):
        return traced
    outvars = traced.jaxpr.outvars
    later = {mapped.outvars.index(outvars[i]) for i in reduced_later}

    def run(*operands: jax.Array) -> list[Any]:
        known = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        known.update(zip(traced.jaxpr.invars, operands, strict=True))
        for eqn in traced.jaxpr.eqns:
            given = [_read(known, v) for v in eqn.invars]
            if eqn is mapped:
                found = _run_mapped(eqn, given, world, later)
            else:
                found = compat.bind_equation(eqn, given)
            known.update(zip(eqn.outvars, found, strict=True))
        return [_read(known, v) for v in outvars]

    return jax.make_jaxpr(run)(*traced.in_avals)


def _run_mapped(
    eqn: Any, operands: Sequence[jax.Array], world: World, later: Collection[int]
) -> Sequence[Any]:
    def run(*operands: jax.Array) -> list[Any]:
        program = _OrderedProgram(_Search())
        results = program.run(eqn.params["jaxpr"], operands)
        assert program.token is not None
        places = sorted(later)
        waiting = host_collectives.wait_for(program.token, [results[i] for i in places])
        for i, x in zip(places, waiting, strict=True):
            results[i] = x
        return results

    mapped = jax.shard_map(
        run,
        mesh=world.mesh,
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=list(eqn.params["out_specs"]),
        axis_names=world.program_axes,
        check_vma=False,
    )
    return mapped(*operands)


class _OrderedProgram:
    """Runs the program of a replica, or of a body within it.

    A collective within a call, a branch or a loop waits itself, and is waited for. That
    the results of the outer equation are there says nothing: XLA may have cut out a
    part of them, and a body that only prints has none.
    """

    def __init__(self, search: "_Search", token: jax.Array | None = None):
        self.token = token  # of the last collective on the host.
        self.earlier: list[jax.Array] = []  # results of XLA's collectives since.
        self._search = search

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr, open or closed."""
        body, consts = flow.open_jaxpr(jaxpr)
        known = dict(zip(body.constvars, consts, strict=True))
        known.update(zip(body.invars, operands, strict=True))
        for eqn in body.eqns:
            given = [_read(known, v) for v in eqn.invars]
            if host_collectives.is_on_host(eqn):
                found = host_collectives.run_equation(eqn, given, self.earlier)
                self.token, self.earlier = found[0], []
            elif self._search.has_any(eqn):
                found = self._run_with_collectives(eqn, given)
            else:
                found = compat.bind_equation(eqn, given)
            known.update(zip(eqn.outvars, found, strict=True))
        return [_read(known, v) for v in body.outvars]

    def _run_with_collectives(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in primitives.INLINABLE:
            with compat.inside_equation(eqn):
                return self._run_call(eqn, operands)
        rules = {
            "cond": self._run_cond,
            "scan": self._run_scan,
            "while": self._run_while,
        }
        if name in rules and not compat.touches_reference(eqn):
            with compat.inside_equation(eqn):
                *found, done = rules[name](eqn, operands)
            self.earlier.append(done)
            return found
        if self.token is not None:
            operands = host_collectives.wait_for(self.token, operands)
        found = compat.bind_equation(eqn, operands)
        self.earlier += found
        return found

    def _run_call(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Runs the equations of the call, as JAX lowers a differentiated `remat`."""
        if eqn.params.get("differentiated"):
            prevents = eqn.params["prevent_cse"]
            if isinstance(prevents, bool):
                prevents = [prevents] * len(operands)
            places = [i for i, is_behind in enumerate(prevents) if is_behind]
            kept = lax.optimization_barrier([operands[i] for i in places])
            operands = list(operands)
            for i, x in zip(places, kept, strict=True):
                operands[i] = x
        return self.run(flow.called_jaxpr(eqn), operands)

    def _run_cond(self, eqn: Any, operands: list[Any]) -> list[Any]:
        branches = [
            functools.partial(self._run_body, b) for b in eqn.params["branches"]
        ]
        return lax.switch(operands[0], branches, *operands[1:])

    def _run_scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        loop, params = flow.loop_shape(eqn), eqn.params
        first, end = loop.num_consts, loop.num_consts + loop.num_carries

        def body(carry: Any, xs: list[Any]) -> Any:
            carries, done = carry
            *found, now = self._run_body(loop.body, *operands[:first], *carries, *xs)
            split = loop.num_carries
            return (found[:split], done | now), found[split:]

        start = operands[first:end], _NOT_DONE
        (carries, done), stacked = lax.scan(
            body,
            start,
            operands[end:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carries, *stacked, done]

    def _run_while(self, eqn: Any, operands: list[Any]) -> list[Any]:
        loop = flow.loop_shape(eqn)
        skipped = eqn.params["cond_nconsts"]
        cond_consts, operands = operands[:skipped], operands[skipped:]
        consts, start = operands[: loop.num_consts], operands[loop.num_consts :]

        def condition(carry: Any) -> jax.Array:
            # The loop waits for the collectives that decide whether it goes on.
            return self._run_body(eqn.params["cond_jaxpr"], *cond_consts, *carry[0])[0]

        def body(carry: Any) -> Any:
            carries, done = carry
            *found, now = self._run_body(loop.body, *consts, *carries)
            return found, done | now

        carries, done = lax.while_loop(condition, body, (start, _NOT_DONE))
        return [*carries, done]

    def _run_body(self, jaxpr: Any, *operands: Any) -> list[Any]:
        """Returns the results, and a bool () made of results of all collectives."""
        inner = _OrderedProgram(self._search, self.token)
        found = inner.run(jaxpr, operands)
        return [*found, host_collectives.join(inner.earlier)]


def _read(known: dict[Any, Any], var: Any) -> Any:
    return var.val if isinstance(var, Literal) else known[var]


class _Search:
    """Finds XLA's collectives, once per jaxpr."""

    def __init__(self) -> None:
        # By the id of the jaxpr, which it holds.
        self._known: dict[int, tuple[Any, bool]] = {}

    def has_any(self, eqn: Any) -> bool:
        """Whether an equation is a collective, or holds one at any depth."""
        if exchange.stem(eqn) in _NAMES:
            return True
        return any(map(self._is_in, jaxprs_in_params(eqn.params)))

    def _is_in(self, jaxpr: Any) -> bool:
        if id(jaxpr) not in self._known:
            eqns = flow.open_jaxpr(jaxpr)[0].eqns
            self._known[id(jaxpr)] = jaxpr, any(map(self.has_any, eqns))
        return self._known[id(jaxpr)][1]
