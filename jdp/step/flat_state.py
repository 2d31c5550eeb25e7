"""Flat state: how does a program take and return a state as a list of leaves?

JAX flattens the state at every call and sorts the keys of every dict. A step has the
leaves already, since it compares them with the leaves that it returned last, and so
passes them to JAX as a list.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jdp import compat
from jdp.step.state_layouts import Layouts
from jdp.types import PyTree

# JAX finds the leaves of a tree with more containers faster. Measured with 145 leaves:
# 60 us over a call of the compiled step instead of 100 to 130. With a single dict,
# JAX takes 50 us and `Finder` 36.
_MOST_CONTAINERS = 8


class Structure:
    """Structure of states; one object per structure, compared by identity."""

    def __init__(self, treedef: Any, paths: list[str], layouts: Layouts):
        """Use `Structures.flatten`.

        Args:
          treedef: the structure in JAX.
          paths: the paths of the leaves, such as "['params']['w']".
          layouts: how the leaves lie over the model axes.
        """
        self.treedef = treedef
        self.paths = paths
        self.layouts = layouts


class Structures:
    """Table of the structures of the states of one step.

    Attributes:
      num_flattened: number of states flattened, also while JAX traced. A program
        that returns a structure or shapes not seen before makes it grow.
    """

    def __init__(self) -> None:
        self.num_flattened = 0
        self._known: dict[Any, Structure] = {}

    def flatten(self, tree: PyTree, layouts: Layouts = None) -> "FlatState":
        """Converts a state into its leaves; also works while JAX traces."""
        self.num_flattened += 1
        leaves, treedef = jax.tree.flatten(tree)
        found = self._known.get((treedef, layouts))
        if found is None:
            with_paths, _ = jax.tree_util.tree_flatten_with_path(tree)
            paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
            found = Structure(treedef, paths, layouts)
            self._known[treedef, layouts] = found
        return FlatState(leaves, found)

    def take_flat(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of flat states.

        Args:
          step: (layouts, state, *batches) -> (state, metrics, layouts).

        Returns:
          (flat state, *batches) -> (flat state, metrics).
        """

        def run(state: "FlatState", *batches: PyTree) -> tuple["FlatState", Any]:
            layouts = state.structure.layouts
            new_state, metrics, layouts = step(layouts, state.to_tree(), *batches)
            return self.flatten(new_state, layouts), metrics

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


# With paths, so that XLA's dumps and its errors when memory runs out name the
# arguments as in the user's state.
jax.tree_util.register_pytree_with_keys(
    FlatState,
    lambda x: (zip(x.structure.paths, x.leaves, strict=True), x.structure),
    lambda structure, leaves: FlatState(leaves, structure),
    flatten_func=lambda x: (x.leaves, x.structure),
)


class LeafFinder:
    """Finds the leaves of trees that have the layout of an example."""

    def __init__(self, example: PyTree):
        """Reads the layout of `example`, a tree of `jax.Array`s."""
        numbers: list[int] = []
        self._layout, _ = _find_layout(example, 0, numbers)
        if _count_containers(self._layout) > _MOST_CONTAINERS:
            numbers = [*range(len(numbers))]
            self._layout = _TreeLayout(None, jax.tree.structure(example), (), list)
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        self._sort = _make_picker(order, len(order))

    def find(self, tree: PyTree) -> Sequence[Any] | None:
        """Returns `jax.tree.leaves(tree)`, or None if `tree` has another layout.

        Dicts with their keys in another order are another layout. An object at the
        place of a leaf of the example is taken for a leaf.
        """
        found: list[Any] = []
        return self._sort(found) if _collect(tree, self._layout, found) else None


class _TreeLayout(NamedTuple):
    """Positions of the leaves of a tree of dicts, lists and tuples."""

    kind: Any  # the type of the container; None: JAX flattens the node.
    form: Any  # the keys of a dict, in its order; the length of other containers.
    inner: tuple[tuple[int, "_TreeLayout"], ...]  # children that are containers.
    get_leaves: Callable[[list[Any]], Sequence[Any]]  # from a list of the children.


def _find_layout(node: Any, first: int, numbers: list[int]) -> tuple[_TreeLayout, int]:
    """Finds the layout of a node.

    Args:
      node: a node of a tree.
      first: the number of leaves before it in the tree.
      numbers: appended to: the position in `jax.tree.leaves` of each leaf, in the
        order of `_collect`.

    Returns:
      The layout, and its number of leaves.
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
    """Returns a function that takes the elements at `indices` of a list."""
    if indices == [*range(size)]:
        return lambda xs: xs
    if len(indices) < 2:  # `itemgetter` would not return a tuple.
        return lambda xs: [xs[i] for i in indices]
    return operator.itemgetter(*indices)


def _is_plain(node: tuple[Any, ...]) -> bool:
    """Returns whether JAX flattens a tuple into its fields, in order."""
    kind = type(node)
    if kind is tuple:
        return True
    # A registered class may have static data, or other children.
    found = jax.tree_util.default_registry.flatten_one_level(node)
    if found is None or found[1] is not kind:
        return False
    return len(found[0]) == len(node) and all(map(operator.is_, found[0], node))


def _collect(node: Any, layout: _TreeLayout, found: list[Any]) -> bool:
    """Appends the leaves of a node to `found`; returns whether it has the layout.

    The leaves of inner containers come first, unlike in `jax.tree.leaves`.
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
