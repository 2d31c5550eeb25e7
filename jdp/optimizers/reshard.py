"""Resharding: a state on another number of replicas, or in the form of plain optax."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdp.optimizers import device_rows, saved_values, zero_state
from jdp.optimizers.device_rows import Cut
from jdp.optimizers.zero_state import ZeroState
from jdp.replicas import comparison, mesh
from jdp.replicas.per_replica import PerReplica
from jdp.trees import tree_paths
from jdp.types import PyTree

T = TypeVar("T")


def checkpoint_template(state: T, *, num_replicas: int) -> T:
    """Returns a template of a state saved on another number of replicas.

    The template is the target of a checkpoint's `restore`; `jdp.reshard` then brings
    the restored state to the current replicas. orbax rounds to the dtypes of its
    target: if the first step of the optimizer widens dtypes, pass a state after it.

    Args:
      state: a state on the current replicas; values are not read.
      num_replicas: number of replicas of the job that saved the checkpoint.

    Returns:
      The same tree of numpy arrays of zeros, which take no memory; for PRNG keys, which
      numpy does not have, new arrays of keys.

    Raises:
      TypeError: `num_replicas` is not an integer, or a leaf of `state` not an array.
      ValueError: it is below 1.
    """
    if isinstance(num_replicas, bool) or not isinstance(num_replicas, int | np.integer):
        raise TypeError(f"`num_replicas` must be an integer, got {num_replicas!r}.")
    if num_replicas < 1:
        raise ValueError(f"`num_replicas` must be at least 1, got {num_replicas}.")

    for path, leaf in zip(
        tree_paths.leaf_paths(state), jax.tree.leaves(state), strict=True
    ):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(f"`state{path}` must be an array, got {leaf!r}.")

    def like(x: Any, shape: tuple[int, ...]) -> Any:
        if saved_values.is_key(x):
            return jnp.empty(shape, x.dtype)
        return np.broadcast_to(np.zeros((), x.dtype), shape)

    def shard(x: Any, size: int) -> Any:
        num_rows = num_replicas * device_rows.count_devices(x)
        return like(x, (num_rows, -(-size // num_replicas)))

    def row(x: Any) -> Any:
        num_rows = num_replicas * device_rows.count_devices(x)
        return like(x, (num_rows, *x.shape[1:]))

    def shared(x: Any) -> Any:
        return like(x, x.shape)

    return _map(state, shared, shard, row)


def reshard(saved: PyTree, *, like: T) -> T:
    """Brings a state to another number of replicas.

    Every process calls it with the whole saved state; the processes compare the values,
    and the arrays are copied. Shards of `jdp.zero1` are cut anew, bit for bit. Other
    state per replica stays bit for bit as it is if all replicas had the same, such as a
    count of steps. Otherwise each replica gets the mean, for example of the residuals
    of hooks, whose mean over the replicas stays the same.

    Args:
      saved: the state as it was saved, of host arrays, and of PRNG keys where `like`
        has some; see `checkpoint_template`.
      like: a new state on the current replicas; the placement of its arrays is kept.

    Returns:
      The saved values in the shapes of `like`. Floats keep their saved dtype,
      with which training goes on: in some states, such as the state of
      `optax.inject_hyperparams` for parameters of several dtypes, it changes in the
      first step.

    Raises:
      ValueError: `saved` belongs to other parameters, or has integers, floats or keys
        where `like` has another of the three; the leaf is named.
      RuntimeError: the processes have different values; on every process, naming the
        leaf.
      TypeError: integers or keys, which have no mean, differ between the replicas that
        saved them; the leaf is named.
    """
    _compare_values(saved, like, name="saved", topic="resharding of a state")
    paths = tree_paths.leaf_paths(saved)
    if paths != tree_paths.leaf_paths(like):
        tree_paths.check_same_structure(saved, "The saved state", like, "`like`")
    found = iter(zip(paths, jax.tree.leaves(saved), strict=True))

    def take(x: Any) -> tuple[str, Any]:
        path, value = next(found)
        value = saved_values.as_array(value)
        if not saved_values.is_of_kind(value, x):
            is_key = bool(saved_values.is_key(x))
            advice = " Wrap it with `jax.random.wrap_key_data`." * is_key
            raise ValueError(
                f"`{path}` was saved as {value.dtype}, but is {x.dtype} here.{advice}"
            )
        return path, value

    def shared(x: Any) -> jax.Array:
        path, value = take(x)
        if value.shape != x.shape:
            raise saved_values.misfit(path, value.shape, x.shape)
        return saved_values.place(value, x)

    def shard(x: Any, size: int) -> jax.Array:
        path, value = take(x)
        count = device_rows.count_devices(x)
        num_before, rest = divmod(value.shape[0] if value.ndim == 2 else 0, count)
        if not num_before or rest or value.shape[1] != -(-size // num_before):
            raise saved_values.misfit(path, value.shape, x.shape)
        flat = np.zeros((count, x.size // count), value.dtype)
        before = device_rows.by_device(value, count).reshape(count, -1)
        flat[:, :size] = before[:, :size]
        shards = flat.reshape(count, x.shape[0] // count, x.shape[1])
        return saved_values.place(device_rows.by_replica(shards), x)

    def row(x: Any) -> jax.Array:
        path, value = take(x)
        count = device_rows.count_devices(x)
        if value.ndim == 0 or value.shape[1:] != x.shape[1:] or len(value) % count:
            raise saved_values.misfit(path, value.shape, x.shape)
        rows = saved_values.with_rows(path, value, x.shape[0], count)
        return saved_values.place(rows, x)

    new = _map(like, shared, shard, row)
    # Shapes of another model may have shards of the same sizes.
    tree_paths.check_same_structure(saved, "The saved state", like, "`like`")
    return new


def consolidate(state: PyTree, *, like: T) -> T:
    """Gathers the shards of `jdp.zero1` into the state of plain optax.

    Every process calls it, with states of the same paths and shapes. All devices get
    all arrays: while they are kept, `zero1` saves no memory. The state of a hook is
    left out.

        plain = jdp.consolidate(opt, like=jax.eval_shape(tx.init, params))
        params = optax.contrib.schedule_free_eval_params(plain, params)

    Args:
      state: a `ZeroState`, on any number of replicas, or a pytree that holds some; of
        `jax.Array`s, or of host arrays as a checkpoint returns them.
      like: the same tree with states of the optimizer without `zero1`; values are not
        read.

    Returns:
      A tree like `like`; each `jax.Array` in it is on all replicas of `state`, or local
      if the array of `state` is. Along model axes it is cut as its array in `like`,
      such as a result of `tx.init(params)`, if that is a `jax.Array`.

    Raises:
      ValueError: `like` belongs to other parameters or another optimizer; the array is
        named.
      RuntimeError: the processes have states of different paths or shapes, or one of
        them does not call it; on every process, naming the first difference.
    """
    world = _world_of(state)
    if world is not None:
        trees = {"state": state, "like": like}
        comparison.compare_programs(world, "", trees, topic="gathering of a state")

    def visit(node: Any, plain: Any) -> Any:
        if not isinstance(node, ZeroState):
            return node
        own = dict(zip(node.own_names, node.own.value, strict=True))
        parts = dict(zip(node.own_names, zero_state.own_shapes(node), strict=True))
        shared = dict(zip(node.shared_names, node.shared, strict=True))
        leaves, treedef = jax.tree.flatten(plain)
        found = [
            shared[name] if name in shared else _join(own[name], parts[name], x, name)
            for name, x in zip(_names_in(plain, node), leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, found)

    return jax.tree.map(visit, state, like, is_leaf=_is_zero)


def spread(whole: PyTree, *, like: T) -> T:
    """Cuts a state of plain optax into the shards of `jdp.zero1`.

    The inverse of `consolidate`, on any number of replicas. Every process calls it with
    the whole state; the processes compare the values, and host arrays are copied.

    Args:
      whole: state of the optimizer without `zero1`: host arrays, or `jax.Array`s that
        are local or replicated.
      like: a new `ZeroState` on the current replicas, or a pytree that holds some; the
        placement of its arrays is kept, and so is the state of hooks.

    Returns:
      The values of `whole` in the form of `like`; floats keep their dtype.

    Raises:
      ValueError: `whole` belongs to other parameters or another optimizer, or has
        integers, floats or keys where `like` has another of the three; the array is
        named.
      RuntimeError: the processes have different values; on every process, naming the
        array.
    """
    _compare_values(whole, like, name="whole", topic="cutting of a state")

    def visit(node: Any, plain: Any) -> Any:
        if not isinstance(node, ZeroState):
            return plain
        values = dict(zip(_names_in(plain, node), jax.tree.leaves(plain), strict=True))
        shared = [
            saved_values.place(saved_values.host(values[name], name, x), x)
            for name, x in zip(node.shared_names, node.shared, strict=True)
        ]
        own = []
        parts = zero_state.own_shapes(node)
        for name, part, x in zip(node.own_names, parts, node.own.value, strict=True):
            value = saved_values.host(values[name], name, x)
            cut = _find_cut(x, part, values[name], name)
            num_replicas = x.shape[0] // math.prod(cut.sizes)
            rows = device_rows.cut_up(value, part, cut, num_replicas)
            own.append(saved_values.place(rows, x))
        return node._replace(shared=shared, own=PerReplica(own))

    return jax.tree.map(visit, like, whole, is_leaf=_is_zero)


def _world_of(state: PyTree) -> mesh.World | None:
    """Returns the world if arrays of a state lie in several of its processes."""
    world = mesh.find_current_world()
    is_far = any(
        isinstance(x, jax.Array) and not x.is_fully_addressable
        for x in jax.tree.leaves(state)
    )
    return world if is_far and world is not None and world.store else None


def _compare_values(tree: PyTree, like: PyTree, *, name: str, topic: str) -> None:
    """Compares values that all processes pass for arrays of all of them."""
    world = _world_of(like)
    if world is None:
        return

    def is_own(node: Any) -> bool:
        return isinstance(node, PerReplica)

    # The rows of all replicas are here, and are compared like the rest.
    tree = jax.tree.map(lambda x: x.value if is_own(x) else x, tree, is_leaf=is_own)
    comparison.compare_values(world, tree, name=name, topic=topic)


def _is_zero(node: Any) -> bool:
    return isinstance(node, ZeroState)


def _names_in(plain: PyTree, state: ZeroState) -> list[str]:
    """Returns the names of the arrays of a plain state, as a `ZeroState` has them."""
    names = zero_state.array_names(plain)
    known = {*state.shared_names, *state.own_names}
    if set(names) == known:
        return names
    if device_rows.are_possible():  # A state has the shapes of the parts of a device.
        by_path = {zero_state.path_of(name): name for name in known}
        found = [by_path.get(zero_state.path_of(name), name) for name in names]
        if set(found) == known and not {*state.shared_names} - {*names}:
            return found
    missing, extra = sorted(known - {*names}), sorted({*names} - known)
    raise ValueError(
        "The state of plain optax does not match the `ZeroState`, by path and shape: "
        + (f"it has no `{missing[0]}`" if missing else f"it has `{extra[0]}` as well")
        + ". Make it with `init` of the same optimizer, without `zero1`, for the same "
        "parameters."
    )


def _join(rows: Any, part: tuple[int, ...], like: Any, name: str) -> Any:
    cut = _find_cut(rows, part, like, name)
    if not isinstance(rows, jax.Array):
        return device_rows.join(np.asarray(rows), part, like.shape, cut)
    if not isinstance(rows.sharding, NamedSharding):  # As `pickle` returns it.
        return device_rows.join(rows, part, like.shape, cut)
    sharding = device_rows.sharding_of_whole(rows, cut, like)
    join = jax.jit(device_rows.join, static_argnums=(1, 2, 3), out_shardings=sharding)
    return join(rows, part, like.shape, cut)


def _find_cut(rows: Any, part: tuple[int, ...], like: Any, name: str) -> Cut:
    cut = device_rows.find_cut(rows, part, np.shape(like), like)
    if cut is None:
        raise ValueError(
            f"`{name}` holds shards of parts of shape {list(part)}, and their shapes "
            f"do not tell how an array of shape {list(np.shape(like))} was cut into "
            "them along the model axes. Pass arrays that are cut as the parameters "
            "are, such as `tx.init(params)`."
        )
    return cut


def _map(
    tree: PyTree,
    of_shared: Callable[[Any], Any],
    of_shard: Callable[[Any, int], Any],
    of_row: Callable[[Any], Any],
) -> PyTree:
    """Maps shared leaves, shards with the size of the whole, and rows of replicas."""

    def visit(node: Any) -> Any:
        if isinstance(node, PerReplica):
            return jax.tree.map(of_row, node)
        if not isinstance(node, ZeroState):
            return of_shared(node)
        sizes = [math.prod(shape) for shape in zero_state.own_shapes(node)]
        shared = [of_shared(x) for x in node.shared]
        own = [of_shard(x, n) for x, n in zip(node.own.value, sizes, strict=True)]
        hook = _map(node.hook, of_shared, of_shard, of_row)
        return node._replace(shared=shared, own=PerReplica(own), hook=hook)

    def is_special(node: Any) -> bool:
        return isinstance(node, PerReplica | ZeroState)

    return jax.tree.map(visit, tree, is_leaf=is_special)
