"""Flat state: the leaves of a state as a list, which a program takes and returns.

At every call JAX takes the state apart, with the keys of every dict sorted. A step has
looked for the leaves already, to compare them with those it returned last, and so hands
them over as they are.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jdp import compat
from jdp.types import PyTree

# Of a tree with more, JAX finds the leaves faster: measured with 145 leaves, 60 us more
# than a call of the compiled step in place of 100 to 130. Of one dict it is 50 for 36.
_MOST_CONTAINERS = 8


class Structure:
    """A structure of states: one object for each, compared by identity."""

    def __init__(self, treedef: Any, paths: list[str]):
        """Use `Structures.flatten`.

        Args:
          treedef: the structure, as JAX has it.
          paths: of the leaves, such as "['params']['w']".
        """
        self.treedef = treedef
        self.paths = paths


class Structures:
    """Structures of the states of one step."""

    def __init__(self) -> None:
        self._known: dict[Any, Structure] = {}

    def flatten(self, tree: PyTree) -> "FlatState":
        """Returns a state as its leaves; also while JAX traces."""
        leaves, treedef = jax.tree.flatten(tree)
        found = self._known.get(treedef)
        if found is None:
            with_paths, _ = jax.tree_util.tree_flatten_with_path(tree)
            paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
            found = self._known[treedef] = Structure(treedef, paths)
        return FlatState(leaves, found)

    def take_flat(self, step: Callable[..., tuple[PyTree, Any]]) -> Callable[..., Any]:
        """Returns `step`, whose first argument and result are states, of flat ones."""

        def run(state: "FlatState", *batches: PyTree) -> tuple["FlatState", Any]:
            new_state, metrics = step(state.to_tree(), *batches)
            return self.flatten(new_state), metrics

        return run


class FlatState:
    """Leaves of a state in the order of `jax.tree.leaves`; itself a pytree."""

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: Iterable[Any], structure: Structure):
        self.leaves: Any = leaves
        self.structure = structure

    def to_tree(self) -> PyTree:
        """Returns the state as the user has it."""
        return jax.tree.unflatten(self.structure.treedef, self.leaves)


# With paths: in XLA's dumps, and where memory runs out, arguments have the names that
# they have in the user's state.
jax.tree_util.register_pytree_with_keys(
    FlatState,
    lambda x: (zip(x.structure.paths, x.leaves, strict=True), x.structure),
    lambda structure, leaves: FlatState(leaves, structure),
    flatten_func=lambda x: (x.leaves, x.structure),
)


class Finder:
    """Finds the leaves of trees that are all laid out like one."""

    def __init__(self, example: PyTree):
        """Looks at how `example`, a tree of `jax.Array`s, is laid out."""
        numbers: list[int] = []
        self._layout, _ = _find_layout(example, 0, numbers)
        if _count_containers(self._layout) > _MOST_CONTAINERS:
            numbers = [*range(len(numbers))]
            self._layout = _TreeLayout(None, jax.tree.structure(example), (), list)
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        self._sort = _make_picker(order, len(order))

    def find(self, tree: PyTree) -> Sequence[Any] | None:
        """Returns what `jax.tree.leaves` does; None if `tree` is laid out differently.

        Also None where a dict has its keys in another order. What stands where the
        example has a leaf is taken for a leaf.
        """
        found: list[Any] = []
        return self._sort(found) if _collect(tree, self._layout, found) else None


class _TreeLayout(NamedTuple):
    """Positions of the leaves of a tree of dicts, lists and tuples."""

    kind: Any  # the type of the container; None: JAX takes the node apart.
    form: Any  # keys of a dict, in its order; of other containers the length.
    inner: tuple[tuple[int, "_TreeLayout"], ...]  # children that are containers.
    get_leaves: Callable[[list[Any]], Sequence[Any]]  # from a list of the children.


def _find_layout(node: Any, first: int, numbers: list[int]) -> tuple[_TreeLayout, int]:
    """Finds how a node is laid out.

    Args:
      node: of a tree.
      first: leaves of the tree before it.
      numbers: gets the position in `jax.tree.leaves` of each leaf, in the order of
        `_collect`.

    Returns:
      The layout, and how many leaves it has.
    """
    kind = type(node)
    if kind is dict:
        keys, children = [*node], [*node.values()]
    elif kind is list or (isinstance(node, tuple) and _is_plain(node)):
        keys, children = [*range(len(node))], [*node]
    else:
        treedef = jax.tree.structure(node)
        numbers.extend(range(first, first + treedef.num_leaves))
        return _TreeLayout(None, treedef, (), list), treedef.num_leaves
    inner, own, end = [], {}, first
    mine: list[list[int]] = [[] for _ in children]
    for i in sorted(range(len(children)), key=keys.__getitem__):  # As JAX does.
        if type(children[i]) in compat.ARRAY_TYPES:
            own[i], size = end, 1
        else:
            layout, size = _find_layout(children[i], end, mine[i])
            inner.append((i, layout))
        end += size
    inner.sort(key=lambda pair: pair[0])
    for numbers_of_child in mine:
        numbers.extend(numbers_of_child)
    indices = sorted(own)
    numbers.extend([own[i] for i in indices])
    form = keys if kind is dict else len(children)
    get_leaves = _make_picker(indices, len(children))
    layout = _TreeLayout(kind, form, tuple(inner), get_leaves)
    return layout, end - first


def _count_containers(layout: _TreeLayout) -> int:
    return 1 + sum(_count_containers(inner) for _, inner in layout.inner)


def _make_picker(indices: list[int], size: int) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns what takes the elements at `indices` of a list of `size` elements."""
    if indices == [*range(size)]:
        return lambda xs: xs
    if len(indices) < 2:  # For which `itemgetter` returns no tuple.
        return lambda xs: [xs[i] for i in indices]
    return operator.itemgetter(*indices)


def _is_plain(node: tuple[Any, ...]) -> bool:
    """Returns whether a tuple is defined for JAX by its type and ordered fields."""
    kind = type(node)
    if kind is tuple:
        return True
    # A class that is registered has static data of its own, or other children.
    found = jax.tree_util.default_registry.flatten_one_level(node)
    if found is None or found[1] is not kind:
        return False
    return len(found[0]) == len(node) and all(map(operator.is_, found[0], node))


def _collect(node: Any, layout: _TreeLayout, found: list[Any]) -> bool:
    """Appends the leaves of a node to `found`; False if it is not laid out like that.

    Leaves come in an order of their own: leaves of inner containers first.
    """
    kind, form, inner, get_leaves = layout
    if kind is None:
        leaves, treedef = jax.tree.flatten(node)
        found.extend(leaves)
        return treedef == form
    if type(node) is not kind:
        return False
    if kind is dict:
        if [*node] != form:
            return False
        children = [*node.values()]
    else:
        children = [*node]
        if len(children) != form:
            return False
    for i, layout in inner:
        if not _collect(children[i], layout, found):
            return False
    found.extend(get_leaves(children))
    return True
