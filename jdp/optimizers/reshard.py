"""Resharding: a state on another number of replicas, or in the form of plain optax."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdp.optimizers import shard_layout, zero_state
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
        if _is_key(x):
            return jnp.empty(shape, x.dtype)
        return np.broadcast_to(np.zeros((), x.dtype), shape)

    def shard(x: Any, size: int) -> Any:
        return like(x, (num_replicas, -(-size // num_replicas)))

    def row(x: Any) -> Any:
        return like(x, (num_replicas, *x.shape[1:]))

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
        value = _as_array(value)
        if not _is_of_kind(value, x):
            advice = " Wrap it with `jax.random.wrap_key_data`." if _is_key(x) else ""
            raise ValueError(
                f"`{path}` was saved as {value.dtype}, but is {x.dtype} here.{advice}"
            )
        return path, value

    def shared(x: Any) -> jax.Array:
        path, value = take(x)
        if value.shape != x.shape:
            raise _misfit(path, value.shape, x.shape)
        return _place(value, x)

    def shard(x: Any, size: int) -> jax.Array:
        path, value = take(x)
        if value.ndim != 2 or value.shape[1] != -(-size // value.shape[0]):
            raise _misfit(path, value.shape, x.shape)
        flat = np.zeros(x.shape, value.dtype).reshape(-1)
        flat[:size] = value.reshape(-1)[:size]
        return _place(flat.reshape(x.shape), x)

    def row(x: Any) -> jax.Array:
        path, value = take(x)
        if value.ndim == 0 or value.shape[1:] != x.shape[1:]:
            raise _misfit(path, value.shape, x.shape)
        return _place(_with_rows(path, value, x.shape[0]), x)

    new = _map(like, shared, shard, row)
    # Shapes of another model may have shards of the same sizes.
    tree_paths.check_same_structure(saved, "The saved state", like, "`like`")
    return new


def _with_rows(path: str, value: Any, num_replicas: int) -> Any:
    """Returns saved rows of replicas as the rows of another number of replicas."""
    shape = (num_replicas, *value.shape[1:])
    if value.shape == shape:
        return value
    if _has_equal_rows(value):
        rows = jnp if _is_key(value) else np
        return rows.broadcast_to(value[0], shape)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        raise TypeError(
            f"`{path}`, {value.dtype}, differs between the {value.shape[0]} replicas "
            f"that saved it; it cannot be averaged for {num_replicas} others. Make "
            "this part anew, and put it in the place of the saved values, with one row "
            "per replica that is here."
        )
    wide = np.promote_types(value.dtype, np.float32)
    mean = value.astype(wide).mean(0).astype(value.dtype)
    return np.broadcast_to(mean, shape)


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
      A tree like `like`; each `jax.Array` in it is replicated over the mesh of `state`,
      or local if the array of `state` is.

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
        names, leaves = _names_in(plain, node), jax.tree.leaves(plain)
        pairs = zip(node.own_names, node.own.value, strict=True)
        shapes = {k: x.shape for k, x in zip(names, leaves, strict=True)}
        found = dict(zip(node.shared_names, node.shared, strict=True))
        found |= {name: _join(rows, shapes[name]) for name, rows in pairs}
        return jax.tree.unflatten(
            jax.tree.structure(plain), [found[name] for name in names]
        )

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
            _place(_host(values[name], name, x), x)
            for name, x in zip(node.shared_names, node.shared, strict=True)
        ]
        own = []
        for name, x in zip(node.own_names, node.own.value, strict=True):
            value = _host(values[name], name, x).reshape(-1)
            flat = np.zeros(math.prod(x.shape), value.dtype)
            flat[: value.size] = value
            own.append(_place(flat.reshape(x.shape), x))
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
    missing, extra = sorted(known - {*names}), sorted({*names} - known)
    raise ValueError(
        "The state of plain optax does not match the `ZeroState`, by path and shape: "
        + (f"it has no `{missing[0]}`" if missing else f"it has `{extra[0]}` as well")
        + ". Make it with `init` of the same optimizer, without `zero1`, for the same "
        "parameters."
    )


def _join(rows: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(rows, jax.Array):
        return shard_layout.restore(np.asarray(rows), shape)
    if not isinstance(rows.sharding, NamedSharding):
        return shard_layout.restore(
            rows, shape
        )  # on one device, as `pickle` returns it.
    sharding = NamedSharding(rows.sharding.mesh, PartitionSpec())
    join = jax.jit(shard_layout.restore, static_argnums=1, out_shardings=sharding)
    return join(rows, shape)


def _host(value: Any, name: str, like: Any) -> Any:
    if not _is_key(value) and not isinstance(value, jax.Array):
        # Python numbers and arrays of 64 bits get the dtypes of JAX.
        given = np.asarray(value)
        value = given.astype(jax.dtypes.canonicalize_dtype(given.dtype))
        if given.dtype.kind in "iu" and (value != given).any():
            raise ValueError(
                f"`{name}` is {given.dtype} and does not fit into {value.dtype}, which "
                "JAX makes of it. Set `jax_enable_x64`, or pass smaller numbers."
            )
    value = _as_array(value)
    if not _is_of_kind(value, like):
        raise ValueError(f"`{name}` is {value.dtype}, but {like.dtype} here.")
    return value


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


def _is_key(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    return is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_of_kind(value: Any, like: Any) -> bool:
    """Whether a step can go on with `value`: the same dtype, or another float of JAX.

    The state of some optimizers has other floats after its first update than before.
    """
    are_floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (value, like))
    is_of_jax = are_floats and value.dtype == jax.dtypes.canonicalize_dtype(value.dtype)
    return value.dtype == like.dtype or is_of_jax


def _has_equal_rows(value: Any) -> bool:
    """Whether all rows, one per replica, are the same bit for bit."""
    data = np.asarray(jax.random.key_data(value)) if _is_key(value) else value
    if not data.size:
        return True
    rows = np.ascontiguousarray(data).reshape(len(data), -1).view(np.uint8)
    return bool((rows == rows[0]).all())


def _as_array(x: Any) -> Any:
    """Returns an array of PRNG keys as it is, any other array on the host."""
    return x if _is_key(x) else np.asarray(x)


def _place(value: Any, like: Any) -> jax.Array:
    if _is_key(value):
        data = np.asarray(jax.random.key_data(value))
        sharded = jax.random.key_data(like) if isinstance(like, jax.Array) else None
        impl = jax.random.key_impl(value)
        return jax.random.wrap_key_data(_place(data, sharded), impl=impl)
    sharding = like.sharding if isinstance(like, jax.Array) else None
    # Copies: the caller may go on writing to the array.
    if sharding is None:
        return jnp.array(value)
    return jax.make_array_from_callback(
        value.shape, sharding, lambda i: np.array(value[i])
    )


def _misfit(path: str, saved: Any, here: Any) -> ValueError:
    return ValueError(
        f"`{path}` was saved with shape {list(saved)}, which does not become "
        f"{list(here)}: the checkpoint belongs to a model with other shapes."
    )
