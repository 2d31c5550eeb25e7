"""Axes: along which axis do the replicas lie, where a call does not name one?"""

import contextlib
import contextvars
from collections.abc import Iterator

from jdp import compat, types
from jdp.replicas import mesh
from jdp.replicas.mesh import World
from jdp.types import AxisName

DEFAULT_AXIS = "data"  # of `jdp.init`.

_of_step: contextvars.ContextVar[AxisName | None] = contextvars.ContextVar(
    "axis_of_step", default=None
)


@contextlib.contextmanager
def inside_step(axis_name: AxisName) -> Iterator[None]:
    """Makes `axis_name` the default while the function of a step is called."""
    token = _of_step.set(axis_name)
    try:
        yield
    finally:
        _of_step.reset(token)


@contextlib.contextmanager
def tracing_shards() -> Iterator[None]:
    """Marks the trace of a step with `num_shards`.

    The step is taken apart at its collectives, and reduces along a fixed tree.
    """
    token = _traces_shards.set(True)
    try:
        yield
    finally:
        _traces_shards.reset(token)


def traces_shards() -> bool:
    """Whether a step with `num_shards` is being traced."""
    return _traces_shards.get()


_traces_shards: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "traces_shards", default=False
)


def find(axis_name: AxisName | None) -> AxisName:
    """Returns the axis, or axes, that a traced call reduces over.

    Args:
      axis_name: the axis that the caller named; None: the axis of the step that is
        traced, otherwise of the world of `jdp.init` if it is bound here, and otherwise
        "data".
    """
    if axis_name is not None:
        return axis_name
    of_step = _of_step.get()
    if of_step is not None:
        return of_step
    world = mesh.find_current_world()
    if world is not None and compat.is_bound(world.axis_name):
        return world.axis_name
    return DEFAULT_AXIS


def as_option(axis_name: AxisName | None) -> AxisName:
    """Returns the axis that a caller named, or () for None.

    Raises:
      ValueError: it is not a name, or names.
    """
    return () if axis_name is None else types.as_axis_names(axis_name) and axis_name


def find_outside(axis_name: AxisName | None, world: World | None) -> AxisName:
    """Returns the axis, or axes, for a call that may be inside or outside of a step.

    Args:
      axis_name: the axis that the caller named, or None.
      world: the replicas that the caller named; None: the world of `jdp.init`.

    Raises:
      TypeError: outside of a step, `world` is not a world.
    """
    found = find(axis_name)
    if compat.is_bound(found):
        return found
    if world is not None:
        mesh.check_world(world)
    if axis_name is not None:
        return axis_name
    world = mesh.find_current_world() if world is None else world
    return found if world is None else world.axis_name
