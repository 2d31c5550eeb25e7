"""Graph states: how do modules become arrays for JAX, and take its results?

Flax's contexts for updates do the work, as in `nnx.jit`: modules are taken apart into a
graph definition and arrays, put together anew inside the function, taken apart again
when it has run, and the modules outside get what has changed, new attributes too.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from jdp import compat
from jdp.replicas.per_replica import PerReplica
from jdp.trees import nnx_objects
from jdp.types import PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Hole:
    """Stands for an object of nnx among arguments; it belongs to the program."""

    number: int  # the place among all objects.
    graph: Any  # the graph definition.
    names: tuple[str, ...]  # of its leaves in the state, in the order of the graph.


class Split(NamedTuple):
    """Arguments without their objects of nnx, and the arrays of these."""

    arguments: PyTree  # with a `Hole` for each object.
    holes: list[Hole]
    state: dict[str, Any]  # leaves by name; some in a `PerReplica`.


class Splitter:
    """Takes objects of nnx apart, and names their leaves."""

    def __init__(self, tag: str):
        """Takes part in the update context with this tag."""
        self.tag = tag
        self._layouts: dict[str, _Layout] = {}  # of the last call, by path.

    def split(self, arguments: Mapping[str, PyTree]) -> Split:
        """Takes the objects in arguments apart.

        Args:
          arguments: arguments by name.

        Raises:
          TypeError: a variable holds a mutable reference of JAX.
        """
        holes: list[Hole] = []
        leaves: dict[str, Any] = {}
        with nnx.split_context(self.tag) as context:

            def take(root: str, x: Any) -> Hole:
                graph, flat = context.flatten(x)
                layout = self._layouts.get(root)
                if layout is None or layout.paths != flat.paths:
                    layout = _find_layout(root, x, flat.paths, leaves)
                    self._layouts[root] = layout
                for name, is_own, leaf in zip(
                    layout.names, layout.are_own, flat.leaves, strict=True
                ):
                    value = _value_of(name, leaf)
                    leaves[name] = PerReplica(value) if is_own else value
                holes.append(Hole(len(holes), graph, layout.names))
                return holes[-1]

            def visit(path: Any, x: Any) -> Any:
                if not nnx_objects.is_object(x):
                    return x
                return take(jax.tree_util.keystr(path, simple=True, separator="."), x)

            made = {}
            for name, tree in arguments.items():  # JAX would sort the names.
                made |= jax.tree_util.tree_map_with_path(
                    visit, {name: tree}, is_leaf=nnx_objects.is_object
                )
        # As JAX returns a dict.
        return Split(made, holes, {name: leaves[name] for name in sorted(leaves)})

    def merge(
        self, arguments: PyTree, state: Mapping[str, Any], *, is_inner: bool
    ) -> PyTree:
        """Puts the objects of `split` together.

        Args:
          arguments: arguments with holes.
          state: see `Split`; inside of a step, as the step sees it.
          is_inner: whether to make new objects, inside of the function. Outside, the
            objects that were taken apart get the new values.
        """
        holes = sorted(find_holes(arguments), key=lambda hole: hole.number)
        with nnx.merge_context(self.tag, is_inner) as context:
            made = [
                context.unflatten(hole.graph, [_raw(state[n]) for n in hole.names])
                for hole in holes
            ]
        return map_holes(lambda hole: made[hole.number], arguments)


def check_can_change(node: Any) -> None:
    """Checks that the variables of an object can change where this is traced.

    Flax finds out when it has already emptied the object.

    Raises:
      flax.errors.TraceContextError: a variable was made outside of this trace.
    """
    for _, x in nnx.iter_graph(node):
        if isinstance(x, nnx.Variable):
            x.set_raw_value(x.get_raw_value())


def find_holes(tree: PyTree) -> list[Hole]:
    """Returns the holes in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_hole)
    return [x for x in leaves if _is_hole(x)]


def map_holes(fn: Callable[[Hole], Any], tree: PyTree) -> PyTree:
    """Replaces the holes of a tree."""
    return jax.tree.map(lambda x: fn(x) if _is_hole(x) else x, tree, is_leaf=_is_hole)


class _Layout(NamedTuple):
    """Leaves of one object, in the order of its graph."""

    paths: Any
    names: tuple[str, ...]
    are_own: tuple[bool, ...]  # whether a leaf is in a `PerReplica`.


def _find_layout(root: str, node: Any, paths: Any, taken: Mapping[str, Any]) -> _Layout:
    own = {path for path, x in nnx.iter_graph(node) if isinstance(x, PerReplica)}
    names: list[str] = []
    for path in paths:
        name = ".".join([root, *map(str, path)])
        while name in taken or name in names:
            name += "'"
        names.append(name)
    are_own = tuple(
        any(path[:k] in own for k in range(len(path) + 1)) for path in paths
    )
    return _Layout(paths, tuple(names), are_own)


def _value_of(name: str, leaf: Any) -> Any:
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    if compat.is_mutable(value):
        raise TypeError(
            f"The variable `{name}` holds a mutable reference of JAX, which cannot be "
            "placed on several replicas. Make the variable without `ref=True`, or use "
            "`nnx.with_vars(model, ref=False)`."
        )
    return value


def _raw(value: Any) -> Any:
    return value.value if isinstance(value, PerReplica) else value


def _is_hole(x: Any) -> bool:
    return isinstance(x, Hole)
