"""Ordered: collectives on the host, in one order on all processes.

XLA may run operations that do not depend on each other in a different order on each
process. Here each collective of a program depends on the one before. That needs a body
which is traced once and of which the program consists: in a function that JAX traces on
its own, such as the body of a loop or a jitted function, XLA's collectives take over,
which XLA keeps in order itself.
"""

import contextlib
import contextvars
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import compat
from jdp.compat import host_collectives, host_functions, origins
from jdp.compat.host_collectives import HostCollective


class Label(NamedTuple):
    """Name of a collective.

    Attributes:
      name: its name in `jdp.collectives`.
      what: the operation, equal on all processes.
    """

    name: str
    what: str


class _LastReduction(NamedTuple):
    """Last reduction of the body that is being traced."""

    trace: Any
    token: jax.Array | None = None  # uint32 (1,); what takes it comes after.
    number: int = 0


_last: contextvars.ContextVar[_LastReduction | None] = contextvars.ContextVar(
    "last_host_reduction", default=None
)


@contextlib.contextmanager
def tracing_body() -> Iterator[None]:
    """Marks the body of a program: all that each replica runs.

    Enter it in the function that `shard_map` traces, where the program has no other
    `shard_map`, or in the body of its only loop.
    """
    before = _last.set(_LastReduction(compat.current_trace()))
    try:
        yield
    finally:
        _last.reset(before)


def bind(
    run: Callable[[int, Sequence[Any], Sequence[Any]], None],
    substitute: Callable[..., list[jax.Array]],
    label: Label,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    varying: Sequence[str],
    *,
    num_in_place: int = 0,
) -> list[jax.Array]:
    """Calls `run(call, results, operands)` when the program reaches this point.

    In other functions than the body of `tracing_body`, and for numbers of fewer than 8
    bits, it is `substitute`.

    Args:
      run: fills the results; results in place are the first operands.
      substitute: the same function of the operands, by XLA's collectives.
      label: name of the operation; must be the same on all processes.
      operands: arrays of this replica.
      results: shapes and dtypes of the results.
      varying: axes over which the results may differ.
      num_in_place: number of first operands whose memory the first results take.
    """
    last = _last.get()
    if last is None or last.trace is not compat.current_trace():
        return substitute(*operands)
    if not all(host_functions.can_see(x.dtype) for x in (*operands, *results)):
        return substitute(*operands)
    token = jnp.zeros(1, jnp.uint32) if last.token is None else last.token
    call = zlib.crc32(f"{last.number} {label.what}".encode())
    collective = HostCollective(functools.partial(run, call), substitute, num_in_place)
    with origins.bound_by_collective(label.name):
        token, filled = host_collectives.run_on_host(
            collective, token, operands, results, varying
        )
    _last.set(_LastReduction(last.trace, token, last.number + 1))
    return filled
