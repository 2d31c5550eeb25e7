"""Reasons of a spread: why does a leaf of the new state differ, and what helps?"""

from typing import Any

from jdp import compat
from jdp.backward import exchange, flow, sources
from jdp.compat import origins
from jdp.replicas.mesh import World
from jdp.step import sameness
from jdp.step.sameness import Spread

_FINISHING = {"jdp_forget_axes", "broadcast_in_dim"}
# Advice for leaves that a file of another package computes.
_REMEDIES = {
    "normalization.py": (
        "It is a statistic of a layer. `jdp.sync_buffers(stats)` gives all replicas "
        "the same statistics; `SyncBatchNorm` of `jdp.flax_linen` or `jdp.flax_nnx`, "
        "or `axis_name={axis!r}`, computes them over all samples; `convert_batch_norm` "
        "of these modules puts it into a model."
    ),
    "reduce_on_plateau.py": (
        "`reduce_on_plateau` compares losses, which must be averaged over all "
        "replicas: `tx.update(..., value=jdp.average(loss))`."
    ),
}
_AVERAGE = (
    "Average the gradients, with `jdp.value_and_grad` in place of "
    "`jax.value_and_grad`, `jdp.flax_nnx.value_and_grad` in place of "
    "`nnx.value_and_grad`, `jdp.sync_gradients`, or `lax.pmean(grads, {axis!r})`. If "
    "an optimizer differentiates the loss, pass it `jdp.mean_loss(loss_fn)`."
)


def explain(
    spread: Spread, traced: Any, output: int, world: World, *, has_synchronized: bool
) -> str:
    """Explains why an output of a replica's program differs, and what to do."""
    body, inputs = compat.sharded_program(flow.open_jaxpr(traced)[0])
    external = sources.find_external(body) if spread.is_external else None
    if external is not None:
        return (
            f"it depends on what `{external.primitive.name}`"
            f"{exchange.line_of(external)} returns, which each replica calls "
            "separately. Call it outside of the step and pass the value as an argument "
            "(`replicated_argnames`), or give all replicas the value of one: "
            f"`jdp.broadcast_from(x, 0, axis_name={world.axis_name!r})`."
        )
    text, line = "it depends on a replica's own samples", line_of_output(body, output)
    over = [name for name in world.axis_names if name in spread.axes]
    if len(over) < len(world.axis_names):
        axes = " and ".join(f"`{name}`" for name in over)
        return (
            f"{text}{line}, and is averaged over some axes of the world only, not over "
            f"{axes}. Pass `axis_name={world.axis_names}` to the function that "
            "averages, such as `jdp.value_and_grad`."
        )
    makers = _makers_of_output(body, output)
    for file, remedy in _REMEDIES.items():
        if any(maker.endswith(file) for maker in makers):
            return f"{text}{line}. {remedy.format(axis=world.axis_name)}"
    without = sameness.find_spreads(
        body, inputs, world.axis_names, refuse_divided=False, with_index=False
    )
    if not without[output].axes:
        return (
            f"it depends on the number of a replica{line}, through `lax.axis_index` or "
            "a collective that moves values, such as `lax.ppermute`. Give all replicas "
            f"the same value: `lax.pmean(x, {world.axis_name!r})`, or "
            f"`jdp.broadcast_from(x, 0, axis_name={world.axis_name!r})`."
        )
    hint = ""
    if has_synchronized:
        hint = (
            " The step averages some gradients already. If the leaf adds up a metric, "
            f"add `lax.psum(x, {world.axis_name!r})`, `jdp.average(x)` or "
            f"`lax.all_gather(x, {world.axis_name!r}, tiled=True)`. For running "
            "statistics, use `jdp.sync_buffers(stats)`. Otherwise:"
        )
    return f"{text}{line}.{hint} {_AVERAGE.format(axis=world.axis_name)}"


def line_of_output(jaxpr: Any, index: int) -> str:
    """Returns the user's line that makes an output, as " (file.py:12)", or ""."""
    eqn = _maker_of(jaxpr, index)
    return "" if eqn is None else exchange.line_of(eqn)


def _makers_of_output(jaxpr: Any, index: int) -> list[str]:
    """Returns the source files in the call stack that makes an output."""
    eqn = _maker_of(jaxpr, index)
    return [] if eqn is None else [file for file, _ in origins.frames_of(eqn)]


def _maker_of(jaxpr: Any, index: int) -> Any | None:
    makers = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    eqn = makers.get(id(jaxpr.outvars[index]))
    # Results of a step are given another type, and metrics a row, after it has ended.
    while eqn is not None and eqn.primitive.name in _FINISHING:
        before = makers.get(id(eqn.invars[0]))
        if before is None or exchange.line_of(eqn):
            break
        eqn = before
    return eqn
