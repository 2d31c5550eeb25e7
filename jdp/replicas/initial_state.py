"""Initial state: how do all replicas make a state at once, each its own part?

All processes make it with one program and the same values. They compare both first:
JAX does not, and treats different values as the same.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import NamedSharding, PartitionSpec

from jdp import compat, types
from jdp.replicas import (
    agreement,
    axes,
    comparison,
    device_program,
    host_arrays,
    layouts,
    mesh,
    per_replica,
    replication,
)
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import PerReplica
from jdp.types import AxisName, HostLeaf, PyTree

K = TypeVar("K")
T = TypeVar("T")
Leaf = TypeVar("Leaf", bound=HostLeaf)

_ADVICE = (
    "\nA state is made by the same program on all processes, with the same "
    "hyperparameters and seeds. Use the values of process 0 on all processes."
)


def init_on_replicas(
    init: Callable[..., T],
    *args: PyTree,
    axis_name: AxisName | None,
    world: World | None = None,
    cuts_rows: bool = False,
) -> T:
    """Makes a state of which each replica has its own parts.

    Inside a step this is `init(*args)`. Outside, every replica runs `init(*args)`, and
    every process must call this function. All use the arguments of process 0, as with
    `jdp.replicate`, and compare the program and the values that it captures.

    Args:
      init: makes the state of one replica; it may use `axis_name`.
      *args: pytrees of host arrays, or of `jax.Array`s that are local or replicated.
      axis_name: the axis, or axes, along which the replicas lie; None: the axes of
        the world.
      world: the replicas; None: the world that `jdp.init` returned. Not used inside a
        step.
      cuts_rows: whether the devices of a replica share its row of an array, where JAX
        partitions the step along model axes.

    Returns:
      The result of `init`, with its `PerReplica` parts split over the replicas, and all
      other parts replicated. Along the model axes, arrays are cut like `args`.

    Raises:
      RuntimeError: outside of a step, there is no world; or the processes have
        arguments with other paths, shapes or dtypes, other programs, or other captured
        values, such as a learning rate. Every process raises, and names the difference.
      ValueError: the world has other axes.
      TypeError: `world` is not a world.
    """
    axis_name = axes.find_outside(axis_name, world)
    if compat.is_bound(axis_name):
        names = sorted(compat.tracked_axes(axis_name))
        return per_replica.map_parts(
            init(*args), lambda x: x, lambda x: compat.cast_varying(x, names)
        )
    world = mesh.current_world() if world is None else world
    if types.as_axis_names(axis_name) != world.axis_names:
        raise ValueError(
            f"`axis_name={axis_name!r}` is not the axis of the world, "
            f"{world.axis_name!r}."
        )
    topic = "making of a state on all replicas"
    args = _place_arguments(world, args, topic)
    made = []

    def run(*args: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        tree = init(*args)
        made.append((jax.tree.structure(tree), per_replica.are_own(tree)))
        return per_replica.split_leaves(per_replica.leave(tree))

    names = world.axis_names
    if world.num_shards is not None:
        mapped = _on_shards(world, run)
    elif world.manual_axes:
        mapped = _on_devices(world, run, made, args)
    else:
        mapped = jax.shard_map(
            run,
            mesh=world.mesh,
            in_specs=PartitionSpec(),
            out_specs=(PartitionSpec(), PartitionSpec(names)),
            axis_names=world.program_axes,
            check_vma=False,
        )
    if world.store is not None:
        _compare(world, mapped, args, topic)
    mapped = _laid_out(world, mapped, args, cuts_rows=cuts_rows)
    shared, own = jax.jit(mapped)(*args)
    treedef, are_own = made[-1]
    leaves = per_replica.merge_leaves(are_own, shared, own)
    return jax.tree.unflatten(treedef, leaves)


def _on_shards(
    world: World, run: Callable[..., tuple[list[jax.Array], list[jax.Array]]]
) -> Callable[..., tuple[list[jax.Array], list[jax.Array]]]:
    """Returns the program of all shards, each with its own row."""
    assert world.num_shards is not None
    (name,), num_shards = world.axis_names, world.num_shards

    def mapped(*args: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        shared, own = jax.vmap(
            lambda _: run(*args), axis_name=name, axis_size=num_shards
        )(jnp.arange(num_shards))
        joined = [x.reshape(num_shards, *x.shape[2:]) for x in own]
        return (
            [lax.with_sharding_constraint(x[0], world.replicated) for x in shared],
            [_with_rows(world, x) for x in joined],
        )

    return mapped


def _with_rows(world: World, x: jax.Array) -> jax.Array:
    sharding = layouts.sharding_of_rows(world, x.shape)
    return lax.with_sharding_constraint(x, sharding)


def _on_devices(
    world: World,
    run: Callable[..., tuple[list[jax.Array], list[jax.Array]]],
    made: list[tuple[Any, list[bool]]],
    args: PyTree,
) -> Callable[..., tuple[list[jax.Array], list[jax.Array]]]:
    """Returns the program of all devices, each with its parts of the arguments."""
    leaves = jax.tree.leaves(args)
    aims = [layouts.target_of(world, x) for x in leaves]
    own_axes = [layouts.keep(spec, world.program_axes) for spec in aims]
    in_specs = jax.tree.unflatten(jax.tree.structure(args), own_axes)
    # Layouts by the shape of a device's part, and the axes along which it is cut.
    known: dict[Any, set[PartitionSpec]] = {}

    def flat(*args: PyTree) -> list[jax.Array]:
        for x, spec in zip(jax.tree.leaves(args), aims, strict=True):
            known.setdefault((x.shape, compat.varying_axes(x)), set()).add(spec)
        return jax.tree.leaves(run(*args))

    program = device_program.trace(world, flat, in_specs, args)
    _, are_own = made[-1]
    num_shared = are_own.count(False)
    specs = []
    for i, (aval, varying) in enumerate(
        zip(program.closed.out_avals, program.varying, strict=True)
    ):
        free = varying.difference(world.axis_names)
        if i >= num_shared:
            specs.append(layouts.rows(world, free))
            continue
        found = known.get((aval.shape, free), set())
        first = layouts.keep(layouts.rows(world, free), world.model_axes)
        specs.append(next(iter(found)) if len(found) == 1 else first)
        if len(specs[-1]) > len(aval.shape):
            raise ValueError(
                f"A number in the new state differs along the model axes {sorted(free)}"
                ", and every replica is to have one. Hold it in a `jdp.PerReplica`."
            )
    closed = program.put_together(specs)

    def mapped(*args: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        results = jax.core.eval_jaxpr(
            closed.jaxpr, closed.consts, *jax.tree.leaves(args)
        )
        return results[:num_shared], results[num_shared:]

    return mapped


def _laid_out(
    world: World, run: Callable[..., Any], args: PyTree, *, cuts_rows: bool
) -> Callable[..., tuple[list[jax.Array], list[jax.Array]]]:
    """Cuts the results of a program along the axes along which JAX partitions it.

    JAX would make zeros whole on each device. An array in the shape of an argument is
    cut like it, and rows of shards are cut where they divide.
    """
    names = tuple(n for n in world.model_axes if n not in world.manual_axes)
    size = math.prod(world.mesh.shape[name] for name in names)
    if world.manual_axes or size == 1:
        return run
    known: dict[tuple[int, ...], set[PartitionSpec]] = {}
    for x in jax.tree.leaves(args):
        known.setdefault(np.shape(x), set()).add(layouts.target_of(world, x))

    def pin(x: jax.Array, is_own: bool) -> jax.Array:
        found = known.get(x.shape[1:] if is_own else x.shape, set())
        if is_own and cuts_rows:
            divides = x.ndim == 2 and x.size and x.shape[1] % size == 0
            found = {PartitionSpec(names)} if divides else set()
        if len(found) != 1:
            return x
        (spec,) = found
        spec = PartitionSpec(*layouts.rows(world), *spec) if is_own else spec
        return lax.with_sharding_constraint(x, layouts.over_devices(world, spec))

    def pinned(*args: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        shared, own = run(*args)
        return [pin(x, False) for x in shared], [pin(x, True) for x in own]

    return pinned


def parts_of_device(world: World, tree: PyTree) -> PyTree:
    """Returns zeros like the parts that a device has of arrays, in a traced function.

    Their types vary along the model axes as the parts do.

    Args:
      world: the replicas.
      tree: arrays and numbers; values are not read.
    """

    def part(x: Any) -> Any:
        if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
            return x
        spec = layouts.keep(layouts.target_of(world, x), world.program_axes)
        shape = NamedSharding(world.mesh, spec).shard_shape(x.shape)
        zeros = jnp.zeros(shape, x.dtype)
        return compat.cast_varying(zeros, sorted(layouts.axes_of(spec)))

    return jax.tree.map(part, tree)


@overload
def copy_per_replica(
    tree: HostLeaf, *, axis_name: AxisName = ..., world: World | None = ...
) -> PerReplica[jax.Array]: ...
@overload
def copy_per_replica(
    tree: dict[K, Leaf], *, axis_name: AxisName = ..., world: World | None = ...
) -> PerReplica[dict[K, jax.Array]]: ...
@overload
def copy_per_replica(
    tree: T, *, axis_name: AxisName = ..., world: World | None = ...
) -> PerReplica[T]: ...
def copy_per_replica(
    tree: PyTree, *, axis_name: AxisName | None = None, world: World | None = None
) -> PerReplica[Any]:
    """Gives every replica its own copy, which may diverge afterwards.

    Args:
      tree: pytree of arrays, the same on all replicas.
      axis_name: the axis, or axes, along which the replicas lie; None: the axes of
        the world.
      world: the replicas; None: the world that `jdp.init` returned. Not used inside a
        step.

    Returns:
      The copies. Outside of a step they have one row per replica; every process must
      call this function there, and all use the arrays of process 0.

    Raises:
      RuntimeError: outside of a step, there is no world; or the processes have arrays
        with other paths, shapes or dtypes. Every process raises, and names the
        difference.
    """
    return init_on_replicas(
        lambda tree: PerReplica(jax.tree.map(jnp.asarray, tree)),
        tree,
        axis_name=axis_name,
        world=world,
    )


def _place_arguments(world: World, args: PyTree, topic: str) -> PyTree:
    """Returns arguments that a program of all replicas takes as replicated."""
    if world.store is not None:
        return replication.place(world, args, name="argument", topic=topic)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: _on_all(world, x, f"`argument{jax.tree_util.keystr(path)}`"),
        args,
    )


def _on_all(world: World, leaf: Any, name: str) -> Any:
    """Converts an argument so that a program of all replicas takes it as replicated."""
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set == set(
        world.mesh.devices.flat
    ):
        return leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        impl = jax.random.key_impl(leaf)
        return jax.random.wrap_key_data(
            jax.device_put(data, world.replicated), impl=impl
        )
    host_arrays.check_has_no_mask(leaf, name)
    value = np.asarray(leaf)
    return compat.as_weak(jnp.asarray(value)) if compat.is_weak(leaf) else value


def _compare(world: World, fn: Callable[..., Any], args: PyTree, topic: str) -> None:
    """Compares a program and the values inside it between the processes."""
    with agreement.reporting(world, topic):
        closed = jax.make_jaxpr(fn)(*args)
        found = _constants(closed)
        values = [x for x in found if _is_here(x)]
    comparison.compare_programs(world, closed, {}, topic=topic, advice=_ADVICE)
    comparison.compare_values(
        world, values, name="captured value ", topic=topic, advice=_ADVICE
    )


def _is_here(x: Any) -> bool:
    """Returns whether this process holds the whole value."""
    return not isinstance(x, jax.Array) or x.is_fully_replicated


def _constants(closed: Any) -> Iterator[Any]:
    """Yields the values in a program: literals, and the arrays that it captures."""
    if isinstance(closed, ClosedJaxpr):
        yield from closed.consts
        closed = closed.jaxpr
    for eqn in closed.eqns:
        yield from (atom.val for atom in eqn.invars if isinstance(atom, Literal))
        leaves = jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, _JAXPRS)
        )
        for inner in leaves:
            if isinstance(inner, _JAXPRS):
                yield from _constants(inner)
    yield from (atom.val for atom in closed.outvars if isinstance(atom, Literal))


_JAXPRS = (Jaxpr, ClosedJaxpr)
