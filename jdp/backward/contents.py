"""Contents: values and equations in the program of a loss, at any depth."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.core
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jdp.backward.flow import open_jaxpr
from jdp.compat import origins


def has_narrow_range(jaxpr: Any) -> bool:
    """Whether a jaxpr has values of a dtype with a narrower range than float32."""
    values = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
    if any(_is_narrow(getattr(var.aval, "dtype", None)) for var in values):
        return True
    inner = (x for eqn in jaxpr.eqns for x in jaxprs_in_params(eqn.params))
    return any(has_narrow_range(open_jaxpr(x)[0]) for x in inner)


def find_equations(
    jaxpr: Any,
    is_match: Callable[[Any], bool],
    is_closed: Callable[[Any], bool] = lambda eqn: False,
) -> Iterator[Any]:
    """Yields the equations that match, at any depth except inside closed equations."""
    for eqn in jaxpr.eqns:
        if is_closed(eqn):
            continue
        for inner in jaxprs_in_params(eqn.params):
            yield from find_equations(open_jaxpr(inner)[0], is_match, is_closed)
        if is_match(eqn):
            yield eqn


def has_custom_backward(eqn: Any) -> bool:
    """Whether an equation has a custom backward rule."""
    return eqn.primitive.name == "custom_vjp_call"


def is_of_batch_norm(eqn: Any) -> bool:
    """Whether an equation computes a statistic of Flax's `BatchNorm`."""
    if eqn.primitive.name != "reduce_sum":
        return False
    # `LayerNorm` also calls `_compute_stats`. `BatchNorm` does not call it when it uses
    # running averages.
    frames = [
        function
        for file, function in origins.frames_of(eqn)
        if "/flax/" in file and file.endswith("normalization.py")
    ]
    return "BatchNorm.__call__" in frames and "_compute_stats" in frames


@functools.cache
def _is_narrow(dtype: Any) -> bool:
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp


def tracers_in(jaxpr: Any) -> Iterator[Any]:
    """Yields the tracers of enclosing functions that a jaxpr holds as constants."""
    body, consts = open_jaxpr(jaxpr)
    yield from (x for x in consts if isinstance(x, jax.core.Tracer))
    for eqn in body.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from tracers_in(inner)
