"""Shard index: equations that read the number of a shard, which is their operand."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

from jdp import compat
from jdp.backward import exchange, flow
from jdp.compat import primitives


def refuse_index(eqn: Any) -> ValueError:
    """Returns the error for a `lax.axis_index` of the user's."""
    return ValueError(
        f"The step reads `lax.axis_index`{exchange.line_of(eqn)} and has `num_shards`, "
        "with which nothing may depend on the number of a replica. For a random key of "
        "each shard call `jdp.shard_key(key)`."
    )


def evaluate(eqn: Any, operands: list[Any], index: jax.Array) -> list[Any]:
    """Runs an equation with the number of a shard in place of `lax.axis_index`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "axis_index":
        if not compat.is_own_index(eqn):
            raise refuse_index(eqn)
        return [index]
    if not any(reads_index(x) for x in jaxprs_in_params(params)):
        return compat.bind_equation(eqn, operands)
    if name in primitives.INLINABLE:
        return _run(flow.called_jaxpr(eqn), operands, index)
    if name == "scan":
        return _run_scan(eqn, operands, index)
    if name == "while":
        return _run_while(eqn, operands, index)
    if name == "cond":
        branches = [
            lambda *xs, jaxpr=jaxpr: _run(jaxpr, xs, index)
            for jaxpr in params["branches"]
        ]
        return lax.switch(operands[0], branches, *operands[1:])
    raise ValueError(
        f"`{name}`{exchange.line_of(eqn)} reads `lax.axis_index`, which a step with "
        "`num_shards` cannot give it there. Read it outside and pass it in."
    )


def reads_index(jaxpr: Any) -> bool:
    """Whether an equation of a jaxpr, at any depth, reads the number of a shard."""
    for eqn in flow.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name == "axis_index":
            return True
        if any(reads_index(x) for x in jaxprs_in_params(eqn.params)):
            return True
    return False


def _run(jaxpr: Any, operands: Sequence[Any], index: jax.Array) -> list[Any]:
    body, consts = flow.open_jaxpr(jaxpr)
    known = dict(zip(body.constvars, consts, strict=True))
    known.update(zip(body.invars, operands, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else known[v]

    for eqn in body.eqns:
        found = evaluate(eqn, [read(v) for v in eqn.invars], index)
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(v) for v in body.outvars]


def _run_scan(eqn: Any, operands: list[Any], index: jax.Array) -> list[Any]:
    body, num_consts, num_carries = flow.loop_shape(eqn)
    end = num_consts + num_carries
    consts = operands[:num_consts]

    def step(carries: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
        out = _run(body, [*consts, *carries, *parts], index)
        return out[:num_carries], out[num_carries:]

    carries, stacked = lax.scan(
        step,
        operands[num_consts:end],
        operands[end:],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carries, *stacked]


def _run_while(eqn: Any, operands: list[Any], index: jax.Array) -> list[Any]:
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first = of_test + of_body

    def is_on(carries: list[Any]) -> jax.Array:
        return _run(test, [*operands[:of_test], *carries], index)[0]

    def step(carries: list[Any]) -> list[Any]:
        return _run(body, [*operands[of_test:first], *carries], index)

    return lax.while_loop(is_on, step, operands[first:])
