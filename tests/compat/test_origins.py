"""Which code made an equation is known from its marker, tracebacks or not."""

import jax
import jax.numpy as jnp
from jax import lax

from jdp.backward import exchange, sources
from jdp.collectives.host import ordered
from jdp.compat import origins, primitives
from tests import harness

LABEL = ordered.Label("shared_memory_all_reduce", "sum")


def _callback_of(fn):
    jaxpr = jax.make_jaxpr(fn)(jnp.ones(3))
    return next(e for e in jaxpr.eqns if e.primitive.name in primitives.OPAQUE)


def _shared_memory(x):
    aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
    with ordered.tracing_body():
        return ordered.bind(lambda *_: None, lambda x: [x], LABEL, [x], [aval], [])[0]


def test_a_collective_over_shared_memory_is_known_without_tracebacks(monkeypatch):
    harness.drop_tracebacks(monkeypatch)
    eqn = _callback_of(_shared_memory)
    assert origins.collective_of(eqn) == "shared_memory_all_reduce"
    assert not sources.is_external(eqn)
    assert exchange.describe(eqn) == "`jdp.shared_memory_all_reduce`"


def test_a_callback_of_others_is_external():
    eqn = _callback_of(lambda x: jax.experimental.io_callback(jnp.sin, x, x))
    assert origins.collective_of(eqn) is None
    assert sources.is_external(eqn)


def test_scopes_of_others_are_no_markers():
    def scoped(x):
        with jax.named_scope("jdp.batch_norm_of_mine"):
            return lax.sin(x)

    (eqn,) = jax.make_jaxpr(scoped)(1.0).eqns
    assert not origins.is_bound_by(eqn, origins.BATCH_NORM)
    assert origins.collective_of(eqn) is None
