"""Manual results: how do the results of a step lie along manual model axes?

The devices of a replica may differ in a result. A leaf of the state is then cut, as it
was before the step. A `jdp.PerReplica` gets a row for each device.
"""

from typing import Any

from jax.sharding import PartitionSpec

from jdp import compat
from jdp.backward import flow
from jdp.replicas import layouts, per_replica
from jdp.replicas.device_program import DeviceProgram
from jdp.replicas.mesh import World
from jdp.step import sameness, spread_reasons
from jdp.step.result_checks import StepOutlines


def put_together(
    program: DeviceProgram, outlines: StepOutlines, world: World
) -> tuple[Any, StepOutlines]:
    """Puts the results of the step of one device together.

    Args:
      program: leaves of state and batches -> shared leaves of the new state, its other
        leaves, and rows of metrics.
      outlines: the results of the step; with layouts.
      world: the replicas.

    Returns:
      The closed jaxpr, and the outlines with the layouts that the new state has.

    Raises:
      ValueError: the devices of a replica may differ in a leaf of the new state that
        they all have whole, or in a metric; or a collective is in control flow that
        they decide differently.
    """
    body, inputs = compat.sharded_program(flow.open_jaxpr(program.closed)[0])
    found = sameness.find_spreads(body, inputs, world.manual_axes)
    axes = [spread.axes for spread in found]
    state, metrics, places = outlines.state, outlines.metrics, range(len(found))
    num_leaves = len(state.leaves)
    shared, own = places[: state.num_shared], places[state.num_shared : num_leaves]
    assert outlines.layouts is not None
    specs: list[PartitionSpec] = []
    for i, path, is_own, spec in zip(
        per_replica.merge_leaves(state.are_own, shared, own),
        state.paths,
        state.are_own,
        outlines.layouts,
        strict=True,
    ):
        if is_own:
            spec = _with_rows(world, spec, axes[i])
        elif axes[i] - layouts.axes_of(spec):
            line = spread_reasons.line_of_output(body, i)
            differs = sorted(axes[i] - layouts.axes_of(spec))[0]
            raise ValueError(_explain_leaf(path, line, differs))
        specs.append(spec)
    by_kind: tuple[list[PartitionSpec], list[PartitionSpec]] = [], []
    for spec, is_own in zip(specs, state.are_own, strict=True):
        by_kind[is_own].append(spec)
    row_specs = []
    flags = [*metrics.are_own, False]  # The last may be the weight of the replica.
    names = [*(f"metric `{path}`" for path in metrics.paths), "weight"]
    for i, is_own, name in zip(places[num_leaves:], flags, names, strict=False):
        if axes[i] and not is_own:
            line = spread_reasons.line_of_output(body, i)
            raise ValueError(_explain_metric(name, line, sorted(axes[i])[0]))
        row_specs.append(layouts.rows(world, axes[i]))
    closed = program.put_together([*by_kind[0], *by_kind[1], *row_specs])
    return closed, outlines._replace(layouts=tuple(specs))


def _with_rows(
    world: World, spec: PartitionSpec, axes: frozenset[str]
) -> PartitionSpec:
    """Returns a layout of rows that has one for each device, along these axes too."""
    first = layouts.rows(world, axes.union(layouts.names_in(spec[0])))
    return PartitionSpec(*first, *spec[1:])


def _explain_leaf(path: str, line: str, axis: str) -> str:
    return (
        f"The new state's leaf `{path}` may differ along the model axis {axis!r}, on "
        f"which each device has all of it{line}. Sum or average what it depends "
        f"on, with `lax.psum(x, {axis!r})` or `lax.pmean`. If each device is to have "
        "a part of it, cut it before the first step, with `jdp.replicate(world, state, "
        "specs=...)`. An optimizer that mixes parameters, such as "
        "`optax.clip_by_global_norm`, sees only the parts of one device: leave "
        "`manual_axes` out of `jdp.init`, so that JAX partitions the step."
    )


def _explain_metric(name: str, line: str, axis: str) -> str:
    return (
        f"The {name} may differ along the model axis {axis!r}{line}. Return a value "
        f"that is the same on all devices of a replica, with `lax.psum(x, {axis!r})` "
        "or `lax.pmean`, or one value per device, in a `jdp.PerReplica`."
    )
