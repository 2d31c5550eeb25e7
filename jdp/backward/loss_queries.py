"""Loss queries: public answers about a loss, read from its program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jdp import compat
from jdp.backward import loss
from jdp.backward.loss import LossProgram, trace_loss
from jdp.types import PyTree


def gradient_order(
    loss_fn: Callable[..., Any], params: PyTree, *args: Any
) -> tuple[int, ...]:
    """Returns the order in which the backward pass finishes the gradients.

    The order is read from the program of the loss, through `jit`, `remat`, `cond`,
    `scan`, `while` and custom derivatives; nothing is run. A gradient is finished with
    its last contribution, which comes from the parameter's first use. Gradients from
    control flow are finished when it ends. `jdp.value_and_grad` uses this order by
    default.

    Args:
      loss_fn: `loss_fn(params, *args)` returns a scalar loss.
      params: pytree of floating or complex arrays, or `jax.ShapeDtypeStruct`s.
      *args: other arguments of the loss; arrays, or `jax.ShapeDtypeStruct`s.

    Returns:
      Indices into `jax.tree.leaves(params)`, the first gradient first, for the
      `order=` of `jdp.plan_buckets`. Leaves that are finished together come in reverse,
      and leaves without a gradient come last. Every process gets the same order for the
      same program.

    Raises:
      TypeError: a parameter is an integer or a PRNG key, by path; or the loss is not
        real.
      ValueError: the loss is not a scalar.
    """
    return trace_abstractly(loss_fn, params, args).timeline.order()


def used_parameters(loss_fn: Callable[..., Any], params: PyTree, *args: Any) -> PyTree:
    """Returns which parameters the loss uses: which receive a gradient.

    A parameter is used if a path of operations that pass a gradient leads from it to
    the loss. `stop_gradient` and operations without a derivative cut the path. Branches
    that are not taken, and loops that do not run, use nothing.

    In a train step, use `jdp.value_and_grad(find_unused=True)`, which runs the model
    once for flags and gradients. This function runs the parts of the model on which
    the flags depend.

    Args:
      loss_fn: `loss_fn(params, *args)` returns a scalar loss and has no side effects.
      params: pytree of floating or complex arrays.
      *args: other arguments of the loss.

    Returns:
      A pytree like `params`, True for each leaf that receives a gradient, zero or not:
      a Python bool if the program decides it, an array, bool (), if control flow does.

    Raises:
      TypeError: a parameter is an integer or a PRNG key, by path; the loss is not
        real; or a class of the parameters does not hold booleans.
      ValueError: the loss is not a scalar, or has side effects.
    """
    program = trace_loss(loss_fn, params, args)
    effects = compat.side_effects(program.jaxpr)
    if effects:
        raise ValueError(
            "The loss has side effects, which `used_parameters` would repeat: "
            f"{', '.join(effects)}. Take the flags from "
            "`jdp.value_and_grad(find_unused=True)`, which runs the loss once, or "
            "remove callbacks and prints from the loss."
        )
    return program.used_by(params)


def trace_abstractly(
    loss_fn: Callable[..., Any], params: PyTree, args: tuple[Any, ...]
) -> LossProgram:
    """`trace_loss` that also takes `jax.ShapeDtypeStruct`s in place of arrays."""
    loss.check_are_parameters(params)
    avals, unflatten_args = loss.partition(args, jax.ShapeDtypeStruct)
    programs: list[LossProgram] = []

    def trace(arrays: list[jax.Array]) -> int:
        program = trace_loss(loss_fn, params, unflatten_args(arrays))
        # The constants are values of this trace, and end with it.
        avals = [jax.typeof(x) for x in program.jaxpr.consts]
        closed = ClosedJaxpr(program.jaxpr.jaxpr, avals)
        programs.append(dataclasses.replace(program, jaxpr=closed, run=_ended))
        return 0

    jax.make_jaxpr(trace)(avals)
    return programs[-1]


def _ended(*leaves: Any) -> list[Any]:
    raise AssertionError("its arguments ended with their trace")
