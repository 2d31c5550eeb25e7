"""Zero state: the arrays of an optimizer state, in shards or whole, and their names."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdp.backward import flat_program
from jdp.backward.sub_program import ProgramCutter
from jdp.collectives import base
from jdp.compat import annotations, primitives
from jdp.optimizers.shard_layout import ArrayShard, ShardLayout
from jdp.replicas import per_replica
from jdp.replicas.per_replica import PerReplica
from jdp.trees import tree_paths
from jdp.types import PyTree


class ZeroState(NamedTuple):
    """State of `zero1`: this replica's shards of the state of the inner optimizer."""

    shared: list[jax.Array]  # arrays of the inner state that every replica has whole.
    # Arrays with the shape of a parameter, of which each replica has a shard: shape
    # (ceil(size / n),) on n replicas.
    own: PerReplica
    hook: Any  # state of the hook; None without one.
    # Path in the inner state and shape of the whole array: `[0].mu['w'] [5, 16]`.
    shared_names: tuple[str, ...]
    own_names: tuple[str, ...]


# Names are static. The class is still a named tuple, which `flax.serialization` reads.
jax.tree_util.register_dataclass(
    ZeroState,
    data_fields=["shared", "own", "hook"],
    meta_fields=["shared_names", "own_names"],
)


class ArrayName(NamedTuple):
    """Name of one array of the inner state."""

    path: str
    shape: tuple[int, ...]  # of the whole array.
    is_cut: bool  # whether replicas have shards of it.

    @property
    def key(self) -> str:
        """The name as a `ZeroState` holds it."""
        return f"{self.path} {list(self.shape)}"


class InnerState(NamedTuple):
    """State of the inner optimizer, as its leaves."""

    names: list[ArrayName]
    leaves: list[Any]  # `ArrayShard`s, or arrays that every replica has whole.
    treedef: Any


def array_names(state: PyTree) -> list[str]:
    """Returns the names that a `ZeroState` has for the arrays of an inner state."""
    return [name.key for name in _names_of(state, ())]


def path_of(key: str) -> str:
    """Returns the path in a name that a `ZeroState` has for an array."""
    return key[: key.rindex(" [")]


def own_shapes(state: ZeroState) -> list[tuple[int, ...]]:
    """Returns the shapes of the whole arrays of which a state has shards."""
    return [tuple(json.loads(name[name.rindex("[") :])) for name in state.own_names]


def cut_state(
    state: PyTree,
    params: PyTree,
    hook_state: PyTree,
    layout: ShardLayout,
    repeats: dict[int, int],
) -> ZeroState:
    """Returns this replica's part of a new inner state.

    Args:
      state: the inner state.
      params: the parameters.
      hook_state: the state of the hook.
      layout: the replicas.
      repeats: leaves of `state` that are left out; see `find_repeats`.
    """
    names, leaves = _names_of(state, params), []
    for i, (name, x) in enumerate(zip(names, jax.tree.leaves(state), strict=True)):
        if i in repeats:
            continue
        x = jnp.asarray(x)
        if name.is_cut:
            leaves.append(base.cast_varying(layout.cut(x).row, layout.axis_name))
        else:
            leaves.append(jnp.array(x))
    kept = [name for i, name in enumerate(names) if i not in repeats]
    return pack(kept, leaves, hook_state)


def find_repeats(
    inner: optax.GradientTransformation, params: PyTree
) -> tuple[list[ArrayName], dict[int, int]]:
    """Finds arrays of a new inner state that are equal, such as all moments of a shape.

    To compile a program with a result for each takes XLA a millisecond per array.

    Returns:
      The names of all arrays, and for the index of an array that replicas cut, and that
      an earlier one equals, the index of the first that does.
    """
    made: list[ArrayName] = []

    def init(params: PyTree) -> list[Any]:
        state = inner.init(params)
        made[:] = _names_of(state, params)
        return jax.tree.leaves(state)

    program = flat_program.flatten(jax.make_jaxpr(init)(params), primitives.CALLS)
    cutter = ProgramCutter(program)
    first: dict[Any, int] = {}
    repeats = {}
    for i, (name, key) in enumerate(zip(made, program.outputs, strict=True)):
        part = cutter.cut([key])
        found = first.setdefault((part.signature, tuple(part.inputs)), i)
        if found != i and name.is_cut:
            repeats[i] = found
    return made, repeats


def repeat(
    state: ZeroState, names: list[ArrayName], repeats: dict[int, int]
) -> ZeroState:
    """Returns a state of `cut_state` with a copy of its own for each array left out."""
    own, shared = iter(state.own.value), iter(state.shared)
    leaves: list[Any] = []
    for i, name in enumerate(names):
        if i in repeats:
            leaves.append(jnp.copy(leaves[repeats[i]]))
        else:
            leaves.append(next(own if name.is_cut else shared))
    return pack(names, leaves, state.hook)


def pack(
    names: list[ArrayName], leaves: list[jax.Array], hook_state: PyTree
) -> ZeroState:
    """Returns a `ZeroState` of these leaves: whole arrays, and the data of shards."""
    pairs = list(zip(names, leaves, strict=True))
    return ZeroState(
        [x for name, x in pairs if not name.is_cut],
        PerReplica([x for name, x in pairs if name.is_cut]),
        hook_state,
        tuple(name.key for name in names if not name.is_cut),
        tuple(name.key for name in names if name.is_cut),
    )


def unpack(
    state: ZeroState,
    inner: optax.GradientTransformation,
    params: PyTree,
    layout: ShardLayout,
) -> InnerState:
    """Returns the leaves of a `ZeroState` in the order of the inner state.

    Raises:
      ValueError: the state belongs to other parameters; the array is named.
    """
    names, treedef = _names_of_init(inner, params)
    own = dict(zip(state.own_names, state.own.value, strict=True))
    shared = dict(zip(state.shared_names, state.shared, strict=True))
    _check_names([name.key for name in names], own, shared)
    leaves = []
    for name in names:
        if not name.is_cut:
            # Beside manual model axes, a step takes all of its state as varying.
            x = jnp.asarray(shared[name.key])
            leaves.append(annotations.forget_axes(x, layout.tracked_axes))
            continue
        data = own[name.key]
        width = layout.width(name.shape)
        if data.shape != (width,):
            advice = per_replica.explain_rows(data.shape, (width,))
            raise ValueError(
                f"The state of `zero1` does not fit: `{name.key}` is in shards of "
                f"{list(data.shape)}, but of {[width]} on {layout.num_replicas} "
                "replicas."
                + (advice or " Bring a state to other replicas with `jdp.reshard`.")
            )
        leaves.append(ArrayShard(lax.reshape(data, (1, width)), name.shape))
    return InnerState(names, leaves, treedef)


def _check_names(
    expected: list[str], own: dict[str, Any], shared: dict[str, Any]
) -> None:
    if {*own, *shared} == {*expected}:
        return
    missing = [key for key in expected if key not in own and key not in shared]
    extra = [key for key in (*shared, *own) if key not in expected]
    lines = [f"\n  missing: `{key}`" for key in missing[:3]]
    lines += [f"\n  too much: `{key}`" for key in extra[:3]]
    raise ValueError(
        "The state of `zero1` was not made for these parameters, by path and "
        f"shape of the whole arrays:{''.join(lines)}\n"
        "Call `init` again when parameters are added, removed or reshaped."
    )


def _names_of(state: PyTree, params: PyTree) -> list[ArrayName]:
    """Returns the names of the arrays of an inner state; some of them are cut."""
    of_params = {jnp.shape(x) for x in jax.tree.leaves(params)} - {()}
    # `flax.nnx.Optimizer` calls `init` with variables and `update` with their values.
    paths = [path.removesuffix(".value") for path in tree_paths.leaf_paths(state)]
    return [
        ArrayName(path, jnp.shape(x), jnp.shape(x) in of_params and not _is_key(x))
        for path, x in zip(paths, jax.tree.leaves(state), strict=True)
    ]


def _names_of_init(
    inner: optax.GradientTransformation, params: PyTree
) -> tuple[list[ArrayName], Any]:
    """Returns the names of the arrays of a new inner state, and its treedef."""
    made: list[Any] = []

    def init(params: PyTree) -> list[Any]:
        state = inner.init(params)
        made[:] = _names_of(state, params), jax.tree.structure(state)
        return jax.tree.leaves(state)

    jax.eval_shape(init, params)
    names, treedef = made
    return names, treedef


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
