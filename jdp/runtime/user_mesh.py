"""User mesh: does the mesh of the user fit the job, and is it one on all processes?"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jdp import types
from jdp.replicas import agreement
from jdp.replicas.mesh import World
from jdp.types import AxisName, Device

TOPIC = "making of the mesh that `jdp.init` was given"
MeshOption = Mesh | Callable[[], Mesh] | None


def check_options(
    mesh: Any, axis_name: AxisName, manual_axes: Sequence[str], num_nodes: int | None
) -> None:
    """Checks the options of `jdp.init` that concern a mesh, as far as they tell.

    Raises:
      TypeError: `mesh` is neither a mesh nor a function.
      ValueError: a mesh lacks an axis, or an option does not go with the others.
    """
    if mesh is None:
        if manual_axes:
            raise ValueError(
                f"`manual_axes={tuple(manual_axes)}` are model axes of a mesh, and "
                "`mesh` is missing."
            )
        return
    if num_nodes is not None:
        raise ValueError(
            f"`num_nodes={num_nodes}` says how jdp makes a mesh, and `mesh` is given. "
            "Leave `num_nodes` out."
        )
    if isinstance(mesh, Mesh):
        _check_axes(mesh, axis_name, manual_axes)
    elif not callable(mesh):
        raise TypeError(
            "`mesh` must be a `jax.sharding.Mesh`, or a function without arguments "
            f"that makes one, got {type(mesh).__name__}."
        )


def check_comes_in_time(mesh: MeshOption, num_processes: int) -> None:
    """Raises ValueError for a mesh that was made before the processes have met."""
    if isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` was made before the {num_processes} processes of this job have "
            "met, so it cannot have the devices of all of them. Pass a function that "
            "makes it: `jdp.init(mesh=lambda: jax.make_mesh((2, 4), ('data', "
            "'model')))`."
        )


def make(
    given: Mesh | Callable[[], Mesh], axis_name: AxisName, manual_axes: Sequence[str]
) -> Mesh:
    """Returns the mesh that the user has given, or that the user's function makes.

    The types of its axes become Auto: a step itself says how it uses an axis.

    Raises:
      TypeError: the function returns something else.
      ValueError: the mesh lacks an axis or a process, or has devices of another backend
        than JAX's default.
    """
    mesh = given if isinstance(given, Mesh) else given()
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "`mesh` must be a function that returns a `jax.sharding.Mesh`, it returned "
            f"{type(mesh).__name__}."
        )
    _check_axes(mesh, axis_name, manual_axes)
    stray = next((x for x in mesh.devices.flat if x not in jax.devices()), None)
    if stray is not None:
        raise ValueError(
            f"`mesh` has the device {stray}, which is not among `jax.devices()`. Make "
            "the mesh of those."
        )
    owners = {device.process_index for device in mesh.devices.flat}
    missing = sorted({*range(jax.process_count())} - owners)
    if missing:
        raise ValueError(
            f"`mesh` has no device of process {missing[0]}. Each process of the job "
            "must have one: make the mesh of `jax.devices()`, or start fewer processes."
        )
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)


def is_made_by(given: MeshOption, world: World) -> bool:
    """Returns whether the option makes the mesh of the world once more."""
    if given is None:
        return False
    mesh = given if isinstance(given, Mesh) else given()
    return isinstance(mesh, Mesh) and _text_of(mesh) == _text_of(world.mesh)


def is_plain(mesh: Mesh, world: World, axis_name: AxisName) -> bool:
    """Returns whether a mesh is the mesh that jdp would make of all devices.

    Args:
      mesh: the mesh of the user.
      world: the world with a mesh of jdp.
      axis_name: the axes along which the replicas lie.
    """
    names = types.as_axis_names(axis_name)
    if mesh.axis_names != names or [*mesh.devices.flat] != [*world.mesh.devices.flat]:
        return False
    return len(names) == 1 or mesh.devices.shape[0] == world.num_nodes


def compare(world: World) -> None:
    """Compares the mesh between the processes; every process calls it.

    Raises:
      RuntimeError: the processes have made different meshes; on every process.
    """
    if world.store is None:
        return
    body = f"{_text_of(world.mesh)}, manual axes {[*world.manual_axes]}".encode()

    def decide(bodies: list[bytes]) -> bytes:
        for process, other in enumerate(bodies):
            if other != bodies[0]:
                return (
                    f"`mesh` is {bodies[0].decode()} on process 0, and "
                    f"{other.decode()} on process {process}. Make the same mesh on "
                    "every process."
                ).encode()
        return b""

    difference = agreement.meet(world, TOPIC, body, decide)
    if difference:
        agreement.meet(world, TOPIC, b"", lambda _: b"", then_raises=True)
        raise RuntimeError(difference.decode(errors="replace"))


def _check_axes(mesh: Mesh, axis_name: AxisName, manual_axes: Sequence[str]) -> None:
    names = types.as_axis_names(axis_name)
    axes = " and ".join(map(repr, mesh.axis_names))
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        example = mesh.axis_names[0] if mesh.axis_names else "data"
        raise ValueError(
            f"`mesh` has no axis {missing[0]!r}, along which the replicas lie; it has "
            f"{axes}. Name the axis along which samples are split, such as "
            f"`jdp.init(mesh=mesh, axis_name={example!r})`, or give the mesh an axis "
            f"{missing[0]!r}, of size 1 if there is one replica."
        )
    model_axes = [name for name in mesh.axis_names if name not in names]
    stray = [name for name in manual_axes if name not in model_axes]
    if stray:
        raise ValueError(
            f"`manual_axes` has {stray[0]!r}, which is not a model axis of `mesh`: "
            f"{' and '.join(map(repr, model_axes)) or 'it has none'}."
        )


def _text_of(mesh: Mesh) -> str:
    devices: list[Device] = list(mesh.devices.flat)
    ids = ", ".join(str(device.id) for device in devices)
    return f"{dict(mesh.shape)} of devices {ids}"
