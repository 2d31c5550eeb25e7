"""Mesh: which replicas does a job have, and how do arrays lie over them?"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.core
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import compat, types
from jdp.replicas import host_arrays, sharding
from jdp.types import AxisName, Device, HostLeaf, PyTree, Store

SCALAR_ADVICE = (
    "a batch is split on its first dimension. Turn lists into arrays. Put what is not "
    "per sample into the state (`num_states`), or name it in `replicated_argnames`."
)

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
Leaf = TypeVar("Leaf", bound=HostLeaf)


@dataclasses.dataclass(frozen=True)
class World:
    """Replicas that train together; `jdp.init` makes it.

    A replica is one device, or, beside model axes, the devices at one index of the data
    axis. Model axes are the axes of a user's mesh that are not in `axis_name`. Replicas
    are numbered along `axis_name`, and so in the order of `mesh.devices.flat` where the
    mesh is jdp's own; the replicas of a process are consecutive there.

    Attributes:
      mesh: mesh of all devices.
      axis_name: the axis, or axes, that collectives in a step reduce over.
      process_index: number of this process, counted from 0.
      process_count: number of processes.
      timeout_s: longest wait for another process on the host, in seconds.
      store: key-value store that the processes share; None with one process.
      host: address at which other processes reach process 0.
      num_nodes: number of hosts of the job.
      manual_axes: model axes along which a step communicates itself, in the order of
        the mesh; JAX partitions the step along the others.
      is_plain: whether the mesh is jdp's own: without model axes, its devices in the
        order of hosts and processes.
      num_shards: number of shards of a batch that a step computes one by one, so that
        its bits do not depend on the number of replicas; None: a step is computed
        whole on each replica.
    """

    mesh: Mesh
    axis_name: AxisName
    process_index: int
    process_count: int
    timeout_s: float
    store: Store | None
    host: str = "127.0.0.1"
    num_nodes: int = 1
    manual_axes: tuple[str, ...] = ()
    is_plain: bool = True
    num_shards: int | None = None

    shard = sharding.shard

    @functools.cached_property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes along which the replicas lie."""
        return types.as_axis_names(self.axis_name)

    @functools.cached_property
    def model_axes(self) -> tuple[str, ...]:
        """Names of the other axes of the mesh, in its order."""
        return tuple(n for n in self.mesh.axis_names if n not in self.axis_names)

    @functools.cached_property
    def program_axes(self) -> frozenset[str]:
        """Names of the axes along which a step is the program of one device."""
        return frozenset(self.axis_names + self.manual_axes)

    @functools.cached_property
    def grid(self) -> np.ndarray:
        """Devices by replica, shape (num_replicas, devices per replica)."""
        mesh, names = self.mesh, (*self.axis_names, *self.model_axes)
        order = [mesh.axis_names.index(name) for name in names]
        sizes = [mesh.shape[name] for name in self.axis_names]
        return mesh.devices.transpose(order).reshape(math.prod(sizes), -1)

    @functools.cached_property
    def num_replicas(self) -> int:
        """Number of replicas of all processes together."""
        return math.prod(self.mesh.shape[name] for name in self.axis_names)

    @property
    def num_rows(self) -> int:
        """Length of dimension 0 of a `jdp.PerReplica` array: one row per shard."""
        return self.num_shards or self.num_replicas

    @property
    def num_local_rows(self) -> int:
        """Number of these rows that belong to replicas of this process."""
        return self.num_rows // self.num_replicas * self.num_local_replicas

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """Indices of the replicas of which this process has a device, ascending."""
        return tuple(
            index
            for index, devices in enumerate(self.grid)
            if any(x.process_index == self.process_index for x in devices)
        )

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas of which this process has a device."""
        return len(self.local_replicas)

    @functools.cached_property
    def has_whole_replicas(self) -> bool:
        """Whether the devices of each replica belong to one process."""
        owners = [{x.process_index for x in devices} for devices in self.grid]
        return all(len(each) == 1 for each in owners)

    def replica_of(self, process: int) -> int:
        """Returns the index of the first replica of which a process has a device."""
        for index, devices in enumerate(self.grid):
            if any(x.process_index == process for x in devices):
                return index
        raise ValueError(f"Process {process} has no device of the mesh.")

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0, which logs and saves."""
        return self.process_index == 0

    @functools.cached_property
    def local_devices(self) -> tuple[Device, ...]:
        """Devices of this process, in the order of their replicas."""
        return tuple(
            device
            for device in self.grid.flat
            if device.process_index == self.process_index
        )

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """Sharding of an array that every replica holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def split(self) -> NamedSharding:
        """Sharding of an array that is split over the replicas on its dimension 0."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis_names))


class _CurrentWorld:
    """World of this process; as with `jax.distributed`, there is only one."""

    world: World | None = None


def set_current_world(world: World | None) -> None:
    """Makes `world` the default of functions that take a `world`."""
    _CurrentWorld.world = world


def current_world() -> World:
    """Returns the world of the last `jdp.init`.

    Raises:
      RuntimeError: `jdp.init` has not been called.
    """
    if _CurrentWorld.world is None:
        raise RuntimeError(
            "There is no world yet. Call `jdp.init()` once, before the first step, "
            "or pass `world=`."
        )
    return _CurrentWorld.world


def find_current_world() -> World | None:
    """Returns the world of the last `jdp.init`, or None before the first."""
    return _CurrentWorld.world


def check_world(world: Any) -> None:
    """Raises TypeError unless `world` is a `World`."""
    if not isinstance(world, World):
        raise TypeError(
            "`world` must be what `jdp.init` returned, got "
            f"{type(world).__name__}. It is the first argument of `jdp.replicate` and "
            "`jdp.global_batch`, and `world=` elsewhere."
        )


def without_ambient(fn: Callable[P, T]) -> Callable[P, T]:
    """Hides the mesh that `jax.set_mesh` has set, if any, from a function.

    Inside `jax.set_mesh`, JAX refuses to trace a `shard_map` over another mesh, or
    operations on arrays of another mesh.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not jax.sharding.get_abstract_mesh().axis_names:  # 0.2 us.
            return fn(*args, **kwargs)
        with jax.set_mesh(None):
            return fn(*args, **kwargs)

    return call


def make_mesh(
    devices: Sequence[Device], axis_name: AxisName, *, num_nodes: int
) -> Mesh:
    """Lays `devices` out on one axis, or on a node axis and a data axis.

    Args:
      devices: the devices, grouped by node, and within a node by process.
      axis_name: one name, or a pair of names: across nodes, within a node.
      num_nodes: number of hosts; only used with a pair of names.

    Raises:
      ValueError: there are not one or two names, or the nodes have different numbers
        of devices.
    """
    types.check_axis_name(axis_name)
    names = types.as_axis_names(axis_name)
    grid = np.array(devices, dtype=object)
    if len(names) == 2:
        if len(devices) % num_nodes:
            raise ValueError(
                f"`axis_name={axis_name!r}` needs the same number of devices on every "
                f"node, got {len(devices)} devices on {num_nodes} nodes."
            )
        grid = grid.reshape(num_nodes, -1)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return Mesh(grid, names, axis_types=auto)


@overload
def global_batch(world: World, local_batch: HostLeaf) -> jax.Array: ...
@overload
def global_batch(world: World, local_batch: dict[K, Leaf]) -> dict[K, jax.Array]: ...
@overload
def global_batch(world: World, local_batch: T) -> T: ...
def global_batch(world: World, local_batch: PyTree) -> PyTree:
    """Makes global arrays for a step from the samples that each process has loaded.

    Every process must call it with its own samples, in the same shapes. Nothing is
    sent. Leaves that are already split over the replicas are returned as they are. Host
    arrays are copied: the caller may write to them as soon as this returns.

    Args:
      world: the replicas.
      local_batch: pytree of host or device arrays, shape (n, ...), where n is the
        number of samples of this process, a multiple of its number of replicas.

    Returns:
      The same tree of `jax.Array`s, shape (n * process_count, ...), split over the
      replicas on dimension 0.

    Raises:
      TypeError: a leaf is not an array, or is a traced value.
      ValueError: a leaf has no dimension 0, is empty, does not divide among the
        replicas of this process, or is a global array with another sharding.
    """
    check_world(world)
    leaves, treedef = jax.tree.flatten(local_batch)
    placed = [
        leaf if _is_split(world, leaf) else _split_leaf(world, local_batch, i, leaf)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, placed)


def _is_split(world: World, leaf: Any) -> bool:
    return (
        type(leaf) in compat.ARRAY_TYPES
        and leaf.sharding == world.split
        and not leaf.is_deleted()
    )


def _split_leaf(world: World, tree: PyTree, index: int, leaf: object) -> jax.Array:
    if not isinstance(leaf, jax.Array):
        leaf = host_arrays.as_host_array(leaf, _describe(tree, index))
    elif isinstance(leaf, jax.core.Tracer):
        raise TypeError(
            f"{_describe(tree, index)} is a value that JAX traces. Pass batches from "
            "Python, outside of `jit` and `vmap`."
        )
    elif leaf.is_deleted():
        raise RuntimeError(
            f"{_describe(tree, index)} was deleted, or donated to a function; make a "
            "new batch."
        )
    elif not leaf.is_fully_addressable:
        if leaf.sharding.is_equivalent_to(world.split, leaf.ndim):
            return leaf
        raise ValueError(
            f"{_describe(tree, index)} is a global array with sharding "
            f"{leaf.sharding}; it must be split over {world.axis_name!r} on its first "
            "dimension. Pass host arrays, or the result of `jdp.global_batch`."
        )
    num_parts = world.num_local_replicas
    if leaf.ndim == 0:
        raise ValueError(f"{_describe(tree, index)} is a scalar; {SCALAR_ADVICE}")
    num_samples = leaf.shape[0]
    if num_samples == 0:
        raise ValueError(
            f"{_describe(tree, index)} has no samples: shape {leaf.shape}."
        )
    if num_samples % num_parts:
        raise ValueError(
            f"{_describe(tree, index)} has {num_samples} samples, which do not divide "
            f"among the {num_parts} replicas of this process. Use a batch size that is "
            f"a multiple of {num_parts}, or drop or pad the rest."
        )
    leaf = host_arrays.own_copy(leaf) if isinstance(leaf, np.ndarray) else leaf
    if world.process_count == 1:
        return jax.device_put(leaf, world.split)
    part = num_samples // num_parts
    # A replica's samples are on each of its devices here.
    parts = [
        leaf[k * part : (k + 1) * part]
        for k, replica in enumerate(world.local_replicas)
        for device in world.grid[replica]
        if device.process_index == world.process_index
    ]
    shards = jax.device_put(parts, list(world.local_devices))
    shape = (part * world.num_replicas, *leaf.shape[1:])
    placed = jax.make_array_from_single_device_arrays(shape, world.split, shards)
    return compat.as_weak(placed) if compat.is_weak(leaf) else placed


def _describe(tree: PyTree, index: int) -> str:
    path, _ = jax.tree_util.tree_flatten_with_path(tree)[0][index]
    return f"The batch's leaf `{jax.tree_util.keystr(path) or '(root)'}`"
