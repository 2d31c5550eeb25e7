"""Leaf updates: an optimizer that works leaf by leaf, as one program per leaf.

The optimizer is traced once, on the whole tree, and the equations that lead to the
results of a leaf are its program. So tracing takes time linear in the number of leaves;
to run the optimizer once per leaf, on trees of all leaves, takes quadratic time. Leaves
of one program and one shape share a `jit`, which is traced and lowered once.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jdp.backward import flat_program
from jdp.backward.sub_program import ProgramCutter
from jdp.optimizers import update_arguments
from jdp.types import PyTree


class LeafPlace(NamedTuple):
    """The place of one leaf in the trees of a structure."""

    treedef: Any
    position: int

    def put(self, x: Any, others: Sequence[Any] | None = None) -> PyTree:
        """Returns a tree with `x` there, and `()` in place of all others."""
        # Not `optax.MaskedNode()`: to make one per pair of parameters doubles the time
        # to trace.
        entries = [()] * self.treedef.num_leaves if others is None else list(others)
        entries[self.position] = x
        return self.treedef.unflatten(entries)

    def pick(self, tree: PyTree) -> Any:
        """Returns the entry of a tree at this place."""
        return self.treedef.flatten_up_to(tree)[self.position]

    def slots(self, state: PyTree) -> PyTree:
        """Returns a slot for each tree in `state` made from a result of `put`."""

        def find(tree: PyTree) -> "_ColumnSlot | None":
            entries = _entries_of(self.treedef, tree)
            if entries is None:
                return None
            own = entries[self.position]
            others = [*entries[: self.position], *entries[self.position + 1 :]]
            is_made = _is_entry(own) and all(map(_is_nothing, others))
            return _ColumnSlot(entries) if is_made else None

        def is_made(tree: PyTree) -> bool:
            return find(tree) is not None

        return jax.tree.map(lambda x: find(x) or _NO_SLOT, state, is_leaf=is_made)

    def expand(self, slots: PyTree, state: PyTree) -> PyTree:
        """Undoes `contract`."""

        def put(slot: _ColumnSlot, x: Any) -> Any:
            return x if slot is _NO_SLOT else self.put(x, slot.others)

        return jax.tree.map(put, slots, state)

    def contract(self, slots: PyTree, state: PyTree) -> PyTree:
        """Returns `state` with the one entry in place of each tree that has a slot."""
        return jax.tree.map(
            lambda slot, x: x if slot is _NO_SLOT else self.pick(x), slots, state
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _ColumnSlot:
    """A place in a tree like `params`; not itself a tree."""

    others: list[Any]  # the entries; `()` or `optax.MaskedNode()` elsewhere.


_NO_SLOT = _ColumnSlot([])


def _entries_of(treedef: Any, tree: PyTree) -> list[Any] | None:
    """Returns what a tree has in place of each leaf; None for another structure."""
    try:
        return treedef.flatten_up_to(tree)
    except (TypeError, ValueError):
        return None


def _is_entry(x: Any) -> bool:
    return jax.tree.structure(x) in _ENTRIES


def _is_nothing(x: Any) -> bool:
    # Nothing else without leaves: a chain of three has `EmptyState()` around a count.
    return jax.tree.structure(x) in _NOTHINGS


_ENTRIES = [jax.tree.structure(x) for x in (0, optax.MaskedNode())]
_NOTHINGS = [jax.tree.structure(x) for x in ((), optax.MaskedNode())]


class StateLayout(NamedTuple):
    """How the state of an optimizer is made of arrays and of trees like `params`."""

    params: Any  # treedef of the parameters.
    outer: Any  # treedef of the state, in which such a tree, a column, is a leaf.
    are_columns: list[bool]
    structures: list[Any]  # of the state of each parameter.

    def split(self, state: PyTree) -> list[Any]:
        """Returns the parts of a state: entries per parameter, or one array of all."""
        return [
            self.params.flatten_up_to(part) if is_column else part
            for part, is_column in zip(
                self.outer.flatten_up_to(state), self.are_columns, strict=True
            )
        ]

    def join(self, parts: Sequence[Any]) -> PyTree:
        """Undoes `split`."""
        return self.outer.unflatten(
            self.params.unflatten(part) if is_column else part
            for part, is_column in zip(parts, self.are_columns, strict=True)
        )

    def of_leaf(self, parts: Sequence[Any], i: int) -> PyTree:
        """Returns the state of one parameter; each has the array of all for itself."""
        return self.outer.unflatten(
            part[i] if is_column else part
            for part, is_column in zip(parts, self.are_columns, strict=True)
        )

    def gather(self, states: Sequence[PyTree]) -> list[list[Any]] | None:
        """Returns the parts of all states: entries per parameter, of either kind.

        None if a state is not laid out so, or if the arrays of all differ in type.
        """
        found = map(jax.tree.structure, states)
        if any(a != b for a, b in zip(found, self.structures, strict=True)):
            return None
        rows = [self.outer.flatten_up_to(state) for state in states]
        columns = [list(column) for column in zip(*rows, strict=True)]
        for column, is_column in zip(columns, self.are_columns, strict=True):
            if not is_column and len(set(map(_type_of, column))) > 1:
                return None
        return columns


def find_layout(
    inner: optax.GradientTransformation, params: PyTree
) -> StateLayout | None:
    """Returns the layout of a new state; None if it is not made by columns alone.

    A column has an array, or `optax.MaskedNode()`, for each parameter.
    """
    leaves, treedef = jax.tree.flatten(params)
    if len(leaves) < 2:
        return None

    def is_column(tree: PyTree) -> bool:
        entries = _entries_of(treedef, tree)
        return entries is not None and all(map(_is_entry, entries))

    state = jax.eval_shape(inner.init, params)
    parts, outer = jax.tree.flatten(state, is_leaf=is_column)
    layout = StateLayout(treedef, outer, list(map(is_column, parts)), [])
    parts = layout.split(state)
    structures = [
        jax.tree.structure(layout.of_leaf(parts, i)) for i in range(len(leaves))
    ]
    # An entry that is not an array looks like a part of all parameters, but goes where
    # its parameter goes. Two parameters show that.
    for i in (0, len(leaves) - 1):
        place = LeafPlace(treedef, i)
        alone = jax.eval_shape(lambda x, p=place: inner.init(p.put(x)), leaves[i])
        alone = place.contract(place.slots(alone), alone)
        if jax.tree.structure(alone) != structures[i]:
            return None
    return layout._replace(structures=structures)


def _type_of(x: Any) -> Hashable:
    return jax.typeof(x)  # Also whether it is weak.


class LeafUpdate(NamedTuple):
    """The program that updates one parameter."""

    signature: Hashable  # the same for equal programs, of one `trace`.
    arguments: list[Any]
    # arguments -> the update, and the leaves of the new state of the parameter.
    run: Callable[[Sequence[Any]], list[Any]]
    aval: Any  # of the update.


def trace(
    inner: optax.GradientTransformationExtraArgs,
    layout: StateLayout,
    trees: dict[str, PyTree],
    states: Sequence[PyTree],
) -> list[LeafUpdate] | None:
    """Cuts one update of all leaves into an update of each.

    Args:
      inner: the optimizer.
      layout: the layout of its state.
      trees: the arguments of its `update`, by name, but for the state.
      states: the states of all parameters.

    Returns:
      The updates; None where the program of one leaf needs data of another leaf, as
      with a `cond` around all leaves, or has side effects.
    """
    rows = layout.gather(states)
    if rows is None:
        return None
    pairs = list(zip(rows, layout.are_columns, strict=True))
    parts = [row if is_column else row[0] for row, is_column in pairs]
    grads, params = trees["updates"], trees["params"]
    extra = {k: x for k, x in trees.items() if k not in ("updates", "params")}
    arrays, merge = update_arguments.split_arrays(extra)
    made: list[Any] = []

    def update(grads: Any, params: Any, arrays: list[Any], parts: list[Any]) -> Any:
        found = inner.update(grads, layout.join(parts), params, **merge(arrays))
        made.append(jax.tree.structure(found))
        return jax.tree.leaves(found)

    arguments = grads, params, arrays, parts
    try:
        closed = jax.make_jaxpr(update)(*arguments)
    except jax.errors.ConcretizationTypeError:
        return None  # It reads a value, which it can do outside of a trace.
    like = layout.params.unflatten(range(len(states))), layout.join(parts)
    if closed.effects or made[-1] != jax.tree.structure(like):
        return None
    program = flat_program.flatten(closed, {"jit"})
    values = program.constants | dict(
        zip(program.inputs, jax.tree.leaves(arguments), strict=True)
    )
    owners = dict(zip(program.inputs, _owners(layout, arguments, extra), strict=True))
    shared = [key for key, owner in owners.items() if owner == _EACH]
    own = [row for row, is_column in pairs if not is_column]
    indices = jax.tree.unflatten(made[-1], range(len(program.outputs)))
    updates, new_parts = jax.tree.leaves(indices[0]), layout.split(indices[1])
    cutter = ProgramCutter(program)
    found = []
    for i, index in enumerate(updates):
        results = [index, *jax.tree.leaves(layout.of_leaf(new_parts, i))]
        cut = cutter.cut([program.outputs[k] for k in results])
        if any(owners.get(key, i) not in (i, _EACH, _ALL) for key in cut.inputs):
            return None
        here = dict(zip(shared, (row[i] for row in own), strict=True))
        arguments = [here[key] if key in here else values[key] for key in cut.inputs]
        aval = closed.out_avals[index]
        found.append(LeafUpdate(cut.signature, arguments, cut.run, aval))
    return found


_EACH = -1  # owner of arrays that each parameter has, such as a count of its steps.
_ALL = -2  # owner of arrays that all parameters get, such as extra arguments.


def _owners(
    layout: StateLayout, arguments: tuple[Any, ...], extra: dict[str, PyTree]
) -> list[int]:
    """Returns for each leaf of the arguments the index of its parameter."""
    grads, params, _, parts = arguments
    found = [*range(len(jax.tree.leaves(grads))), *range(len(jax.tree.leaves(params)))]
    for _, tree in sorted(extra.items()):  # As `jax.tree` does.
        is_cut = jax.tree.structure(tree) == layout.params
        found += [
            i if is_cut else _ALL
            for i, x in enumerate(jax.tree.leaves(tree))
            if update_arguments.is_array(x)
        ]
    for part, is_column in zip(parts, layout.are_columns, strict=True):
        if is_column:
            found += [i for i, x in enumerate(part) for _ in jax.tree.leaves(x)]
        else:
            found.append(_EACH)
    return found
