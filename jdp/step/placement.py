"""Placement: does every leaf of a state lie where the step of all replicas needs it?"""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdp.compat import array_parts
from jdp.replicas import host_arrays, layouts, per_replica, replication
from jdp.replicas.mesh import World
from jdp.step import state_layouts
from jdp.step.flat_state import FlatState, LeafFinder, Structure, Structures
from jdp.trees import tree_paths
from jdp.types import PyTree

T = TypeVar("T")

_MAX_PARTS = 16  # parts of a state; one array of each part is held weakly.


def from_python(run: Callable[..., T]) -> Callable[..., T]:
    """Replaces the error of a call that fails because JAX is tracing.

    Otherwise the error would come from the first code that looks at a traced value.

    Args:
      run: a method of an object with a `name`.
    """

    @functools.wraps(run)
    def call(self: Any, *arguments: Any) -> T:
        try:
            return run(self, *arguments)
        except Exception:
            if not _is_traced(arguments):
                raise
            raise _while_tracing(self.name) from None

    return call


class HeldLeaves:
    """Arrays of one state that were checked already, without keeping them alive.

    The largest array of each part of the state, such as parameters or optimizer state,
    is held weakly. When one of these dies, all other arrays are released: a program
    that drops a part of its state frees the memory.
    """

    def __init__(self) -> None:
        self._largest: list[weakref.ref[Any]] = []  # of each part.
        self._places: list[int] = []  # their positions among the leaves, ascending.
        self._others: list[Any] = []
        self._structure: Structure | None = None
        self._finder: LeafFinder | None = None
        self._num_donations = 0  # of all steps, when the arrays were held.

    def hold(self, flat: FlatState, tree: PyTree) -> bool:
        """Holds the leaves of a state, all of them arrays, in place of the last state.

        Args:
          flat: the state.
          tree: the same state as the user has it. If the last state had the same
            structure, the keys of each dict have the same order as there.

        Returns:
          Whether the structure might differ from the structure of the last state.
        """
        is_other = self._finder is None or flat.structure is not self._structure
        if is_other:
            self._structure, self._finder = flat.structure, LeafFinder(tree)
            self._places = _find_largest(tree, flat.leaves)
        self._num_donations = _Donations.count
        others = list(flat.leaves)

        def let_go(_: Any) -> None:
            others.clear()

        self._largest = [weakref.ref(others[i], let_go) for i in self._places]
        for i in reversed(self._places):
            del others[i]
        self._others = others
        return is_other

    def forget_layout(self) -> None:
        """Allows the next state to have another structure or other shapes."""
        self._finder = None

    def ids(self) -> set[int]:
        """Returns the `id` of each array that is held."""
        held = [*self._others, *(reference() for reference in self._largest)]
        return set(map(id, held))

    def find(self, tree: PyTree) -> FlatState | None:
        """Returns the state if its leaves are the held arrays, and alive."""
        structure = self._structure
        if not self._largest or self._finder is None or structure is None:
            return None
        leaves = self._finder.find(tree)
        if leaves is None or len(leaves) != len(self._others) + len(self._largest):
            return None
        others = list(leaves)
        for i, reference in zip(self._places, self._largest, strict=True):
            largest = reference()
            if largest is None or others[i] is not largest or largest.is_deleted():
                return None
        for i in reversed(self._places):
            del others[i]
        if not all(map(operator.is_, others, self._others)):
            return None
        if self._num_donations != _Donations.count and _has_deleted(others):
            return None
        return FlatState(leaves, structure)


class _Donations:
    """Number of states that were donated to a step of this process."""

    count = 0


class StatePlacer:
    """Places the state of one step on the replicas, and checks it leaf by leaf.

    A state whose leaves were all returned by the step, or checked before, costs one
    identity comparison per leaf. A single other leaf makes all leaves be checked.
    """

    def __init__(self, name: str, *, donates: bool):
        """Places states for one step.

        Args:
          name: the name of the step, for errors.
          donates: whether the state is donated to the step.
        """
        self._name = name
        self._donates = donates
        self._returned = HeldLeaves()
        self._passed = HeldLeaves()  # only filled if states are not donated.
        self.structures = Structures()
        self._placed: set[Any] = set()  # treedefs.
        # Positions of the leaves by the size of their parts in bytes, which arrays that
        # share memory have in common, unlike the shape: a PRNG key and its data differ.
        self._places: dict[Structure, dict[int, set[int]]] = {}
        self._num_noted = 0  # `structures.num_flattened` when sizes were last noted.

    def find_known(self, state: PyTree) -> FlatState | None:
        """Returns a state if all its leaves were checked before and are alive."""
        found = self._returned.find(state)
        if found is None and not self._donates:
            found = self._passed.find(state)
        return found

    def take_returned(self, world: World, flat: FlatState) -> PyTree:
        """Converts a state that the step returned, and lets `find_known` find it.

        Its leaves are distinct arrays, all in their places.
        """
        state = flat.to_tree()
        if self._donates:
            _Donations.count += 1
        is_other = self._returned.hold(flat, state)
        if is_other or self._num_noted != self.structures.num_flattened:
            self._note_sizes(flat)
        return state

    def note_other_program(self) -> None:
        """Notes that the step may return another structure next."""
        self._returned.forget_layout()

    def needs_others(self, world: World, state: PyTree) -> bool:
        """Returns whether `place` waits for other processes."""
        return self._is_new_structure(state) or bool(_not_placed(world, state)[0])

    def check(self, state: PyTree) -> None:
        """Checks that a state consists of arrays that are alive.

        Raises:
          RuntimeError: a leaf was donated before.
          TypeError: a leaf is not an array, or is a traced value.
        """
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
            name = _name_of(path)
            if isinstance(leaf, jax.core.Tracer):
                raise _while_tracing(self._name)
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise RuntimeError(
                    f"The state was donated to an earlier call of `{self._name}`, or "
                    f"of another function. {name} is gone. Use the state that the call "
                    "returned, or pass `donate_state=False` to `jdp.data_parallel`."
                )
            check_is_array(leaf, name)

    def place(self, world: World, state: PyTree) -> FlatState:
        """Puts a state on the replicas; leaves already in place are not copied.

        If one process has a leaf that is not in its place, or a structure that it has
        not seen, every process must call it.

        Raises:
          RuntimeError: the processes do not have the same leaves in place. Every
            process raises, and names the first such leaf.
          ValueError: a leaf lies on devices of several processes that are not replicas.
        """
        shared, own = _not_placed(world, state)
        if shared or self._is_new_structure(state):
            topic = self._topic(state, shared)
            state = replication.place(world, state, name="state", topic=topic)
        elif own:
            state = replication.place_own_rows(world, state)
        flat = self.structures.flatten(state, state_layouts.of_state(world, state))
        self._placed.add(flat.structure.treedef)
        if self._donates:
            known = self._returned.ids()
            flat = FlatState(_copy_aliases(flat.leaves, known), flat.structure)
        else:
            self._passed.forget_layout()  # Keys may come in any order.
            self._passed.hold(flat, state)
        self._note_sizes(flat)
        return flat

    def part_from(self, state: FlatState, arguments: PyTree) -> PyTree:
        """Copies arrays of `arguments` that may share memory with a donated state."""
        leaves, treedef = jax.tree.flatten(arguments)
        places = self._places[state.structure]
        sizes = [array_parts.part_bytes(x) for x in leaves]
        if places.keys().isdisjoint(sizes):
            return arguments
        for i, size in enumerate(sizes):
            others = (state.leaves[k] for k in places.get(size, ()))
            if array_parts.may_share_memory(leaves[i], others):
                leaves[i] = _copy(leaves[i])
        return jax.tree.unflatten(treedef, leaves)

    def _note_sizes(self, state: FlatState) -> None:
        """Notes which leaves of a donated state could share memory with what."""
        if not self._donates:
            return
        # The sizes may change with the shapes of a batch.
        places = self._places.setdefault(state.structure, {})
        for i, x in enumerate(state.leaves):
            places.setdefault(array_parts.part_bytes(x), set()).add(i)
        self._num_noted = self.structures.num_flattened

    def _is_new_structure(self, state: PyTree) -> bool:
        return jax.tree.structure(state) not in self._placed

    def _topic(self, state: PyTree, shared: list[int]) -> str:
        """Returns a topic that differs from the topics of other meetings."""
        if self._is_new_structure(state):
            return f"placement of the state of the step `{self._name}`"
        path = tree_paths.leaf_paths(state)[shared[0]] or "(root)"
        more = f" and {len(shared) - 1} more leaves" if len(shared) > 1 else ""
        return (
            f"placement of the state's leaf `{path}`{more}, not yet on the replicas, "
            f"for the step `{self._name}`"
        )


def state_avals(world: World, state: PyTree) -> PyTree:
    """Returns shapes, dtypes and shardings that a state has on the replicas.

    Raises:
      TypeError: a leaf is not an array.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    for path, leaf in leaves:
        check_is_array(leaf, _name_of(path))
    # Once for all: a call takes a third of a millisecond.
    types = jax.eval_shape(lambda xs: xs, [leaf for _, leaf in leaves])
    avals = []
    found = state_layouts.of_state(world, state)
    for i, (aval, is_own) in enumerate(
        zip(types, per_replica.are_own(state), strict=True)
    ):
        sharding = world.replicated
        if found is not None:
            sharding = layouts.over_devices(world, found[i])
        elif is_own:
            sharding = layouts.sharding_of_rows(world, aval.shape)
        avals.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding))
    return jax.tree.unflatten(treedef, avals)


def _name_of(path: Any) -> str:
    return f"The state's leaf `{jax.tree_util.keystr(path) or '(root)'}`"


def check_is_array(leaf: Any, name: str) -> None:
    """Raises TypeError unless `leaf` is an array or a number that JAX takes."""
    host_arrays.check_has_no_mask(leaf, name)
    host_arrays.check_has_known_dtype(leaf, name)
    try:
        jax.typeof(leaf)
    except TypeError:
        raise TypeError(
            f"{name} is a {type(leaf).__name__}, not an array or a number. Keep other "
            "objects out of the state: for an equinox model call `params, static = "
            "eqx.partition(model, eqx.is_array)`, and `eqx.combine` in the step. "
            "Register your own classes with `jax.tree_util.register_dataclass`."
        ) from None


def _is_traced(arguments: PyTree) -> bool:
    """Returns whether an argument, or any value computed now, is traced."""
    probes = [jax.device_put(np.float32(0)), *jax.tree.leaves(arguments)]
    return any(isinstance(x, jax.core.Tracer) for x in probes)


def _while_tracing(step: str) -> TypeError:
    return TypeError(
        f"The step `{step}` was called while JAX traces. The step compiles itself: "
        "call it from Python, or use `jdp.value_and_grad` under your own `jit` and "
        "`shard_map`."
    )


def _find_largest(tree: PyTree, leaves: Sequence[Any]) -> list[int]:
    """Returns the position of the largest leaf of each part of a tree.

    Parts are the children of the first node that has several children. If they are more
    than `_MAX_PARTS`, the tree is one part.
    """
    parts = [tree]
    while len(parts) == 1:
        node = jax.tree_util.default_registry.flatten_one_level(parts[0])
        if node is None or not (children := [*node[0]]):
            break
        parts = children
    if len(parts) > _MAX_PARTS:
        parts = [tree]
    places, end = [], 0
    for part in parts:
        first, end = end, end + jax.tree.structure(part).num_leaves
        sizes = [x.size * x.dtype.itemsize for x in leaves[first:end]]
        if sizes:
            places.append(first + int(np.argmax(sizes)))
    return places


def _has_deleted(leaves: list[Any]) -> bool:
    return any(leaf.is_deleted() for leaf in leaves)


def _not_placed(world: World, state: PyTree) -> tuple[list[int], list[int]]:
    """Returns the shared leaves that are not in place, and the per-replica ones."""
    found: tuple[list[int], list[int]] = ([], [])
    leaves = jax.tree.leaves(state)
    for i, is_own in enumerate(per_replica.are_own(state)):
        if layouts.find(world, leaves[i], is_own=is_own) is None:
            found[is_own].append(i)
    return found


def _copy_aliases(leaves: Sequence[Any], distinct: Set[int]) -> list[Any]:
    """Copies arrays that share memory with another one.

    XLA refuses to take one buffer twice; with several local CPU devices it ends the
    process. Waits for arrays that are not in `distinct`.

    Args:
      leaves: arrays.
      distinct: the `id`s of arrays of which no two share memory.
    """
    known = {id(x): i for i, x in reversed([*enumerate(leaves)]) if id(x) in distinct}
    places = set(known.values())  # of each of them, the first one.
    others = [i for i in range(len(leaves)) if i not in places]
    jax.block_until_ready([leaves[i] for i in others])
    sizes = {array_parts.part_bytes(leaves[i]) for i in others}
    # An array that is still computed shares memory with none of them.
    taken: set[int] = set()
    for i in places:
        if array_parts.part_bytes(leaves[i]) in sizes:
            taken |= array_parts.computed_addresses(leaves[i])
    parted = list(leaves)
    for i in others:
        addresses = array_parts.computed_addresses(leaves[i])
        if not taken.isdisjoint(addresses):
            parted[i] = _copy(leaves[i])
        taken |= addresses
    return parted


def _copy(x: jax.Array) -> jax.Array:
    """Copies an array shard by shard, which needs no program of several processes."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _copy(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    shards = [shard.data.copy() for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
