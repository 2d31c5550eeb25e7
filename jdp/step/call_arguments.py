"""Call arguments: which arguments of a step are batches, replicated, or static?

A call with batches alone, passed by position, is left as it is. Any other call becomes
one `CallArguments`. JAX compares its static part like the structure of a tree, so that
another static value is another program.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jdp import compat
from jdp.gradients import buffers
from jdp.replicas import mesh, replication
from jdp.replicas.mesh import World
from jdp.step import placement
from jdp.types import PyTree

Names = str | Iterable[str] | None


class CallForm(NamedTuple):
    """Parts of a call that belong to the program."""

    positional: tuple[str, ...]  # names of arguments passed by position, in order.
    static: tuple[tuple[str, type, Any], ...]  # name, type, value; sorted by name.
    is_weak: tuple[bool, ...]  # by leaf of `replicated`: whether a Python number.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CallArguments:
    """Arguments of one call other than the state, by name."""

    batches: dict[str, PyTree]  # leaves of shape (n, ...), split over the replicas.
    replicated: dict[str, PyTree]  # leaves of any shape, whole on each replica.
    form: CallForm = dataclasses.field(metadata={"static": True})


class NotGiven:
    """Placeholder for the state of a call without positional arguments."""


class CallBinder:
    """Sorts the arguments of one step by the names of its parameters."""

    def __init__(
        self,
        step: Callable[..., Any],
        name: str,
        *,
        static_argnames: Names,
        replicated_argnames: Names,
    ):
        """Checks the names of the options.

        Raises:
          TypeError: a name is not a string.
          ValueError: a name is not a parameter of the step, is the state, or is both
            static and replicated.
        """
        self._step = step
        self._name = name
        self._static = as_names("static_argnames", static_argnames)
        self._replicated = as_names("replicated_argnames", replicated_argnames)
        self.names = frozenset((*self._static, *self._replicated))
        self.has_names = bool(self.names)
        # By name: the Python number of the last call, whether 64 bits were enabled, and
        # the array that it became.
        self._placed: dict[str, tuple[Any, bool, jax.Array]] = {}
        self._check_names()

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._step)

    def _check_names(self) -> None:
        options = {
            "static_argnames": self._static,
            "replicated_argnames": self._replicated,
        }
        for name in self._static:
            if name in self._replicated:
                raise ValueError(
                    f"`{name}` is in `static_argnames` and in `replicated_argnames`; "
                    "name it in only one of the two."
                )
        for option, names in options.items():
            if not names:
                continue
            known = self._signature.parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
            for name in names:
                if name not in known and not takes_all:
                    raise ValueError(
                        f"`{option}` has {name!r}, which is not a parameter of the "
                        f"step `{self._name}{self._signature}`."
                    )
                if name == next(iter(known), None):
                    raise ValueError(
                        f"`{option}` has {name!r}, the state of the step "
                        f"`{self._name}{self._signature}`. Name only arguments after "
                        "it."
                    )

    def forget_placed(self) -> None:
        """Forgets arrays on the devices of an earlier world."""
        self._placed.clear()

    def take_state(self, named: dict[str, PyTree]) -> PyTree:
        """Takes the state out of the arguments that were passed by name.

        Raises:
          TypeError: the state was not passed.
        """
        first = next(iter(self._signature.parameters.values()), None)
        if first is not None and first.kind is first.POSITIONAL_OR_KEYWORD:
            if first.name in named:
                return named.pop(first.name)
        raise TypeError(
            f"The step `{self._name}{self._signature}` was called without a state, its "
            "first argument."
        )

    def bind(
        self, batches: tuple[PyTree, ...], named: dict[str, PyTree]
    ) -> tuple[PyTree, ...]:
        """Converts the arguments of a call into the form that the program takes.

        Args:
          batches: arguments passed by position, after the state.
          named: arguments passed by name.

        Returns:
          `batches`, or one `CallArguments`. Passing an argument by position or by name
          makes no difference.

        Raises:
          TypeError: the step does not take these arguments, or a static argument is not
            hashable.
        """
        if not named and not self.has_names:
            return batches
        try:
            bound = self._signature.bind(None, *batches, **named)
        except TypeError as error:
            raise TypeError(
                f"The step `{self._name}{self._signature}` cannot be called with these "
                f"arguments: {error}. With the state, it got {len(batches) + 1} by "
                f"position{_count_named(named)}; it takes {self._count_taken()}."
            ) from None
        values, positional = self._name_values(bound)
        kinds: tuple[dict[str, Any], ...] = ({}, {}, {})
        for name, value in values.items():
            base = name.split("[")[0]
            kinds[(base in self._replicated) + 2 * (base in self._static)][name] = value
        batch, replicated, static = kinds
        for name, value in static.items():
            _check_has_hash(name, value)
        weak = [type(x) in (int, float, complex) for x in jax.tree.leaves(replicated)]
        typed = tuple(
            (name, type(static[name]), static[name]) for name in sorted(static)
        )
        form = CallForm(positional, typed, tuple(weak))
        return (CallArguments(batch, replicated, form),)

    def _count_taken(self) -> str:
        """Returns how many arguments the step takes, such as "from 2 to 3"."""
        known = self._signature.parameters.values()
        single = [p for p in known if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        least = sum(p.default is p.empty for p in single)
        if len(single) < len(known):
            return f"at least {least}"
        return str(least) if least == len(single) else f"from {least} to {len(single)}"

    def _name_values(
        self, bound: inspect.BoundArguments
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        names, rest = [], ""
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                rest = parameter.name
                break
            names.append(parameter.name)
        num_rest = max(0, len(bound.args) - len(names))
        names += [f"{rest}[{i}]" for i in range(num_rest)]
        positional = tuple(names[1 : len(bound.args)])
        values = dict(zip(positional, bound.args[1:], strict=True))
        return values | bound.kwargs, positional

    def place(self, world: World, batches: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Puts the arguments of a call on the replicas; nothing is sent.

        Raises:
          TypeError: a leaf is not an array.
          ValueError: see `jdp.global_batch`.
        """
        if not is_call(batches):
            return mesh.global_batch(world, batches)
        *others, call = batches
        replicated = {
            name: self._place_replicated(world, name, value)
            for name, value in call.replicated.items()
        }
        placed = dataclasses.replace(
            call,
            batches=mesh.global_batch(world, call.batches),
            replicated=replicated,
        )
        return *mesh.global_batch(world, tuple(others)), placed

    def _place_replicated(self, world: World, name: str, value: PyTree) -> PyTree:
        is_wide = jax.config.jax_enable_x64  # pyright: ignore
        last, was_wide, placed = self._placed.get(name, (None, False, None))
        if last is value and was_wide is is_wide and placed is not None:
            return placed

        def place(path: Any, leaf: Any) -> jax.Array:
            where = f"The argument `{name}{jax.tree_util.keystr(path)}`"
            placement.check_is_array(leaf, where)
            return replication.place_own_value(world, leaf, where)

        placed = jax.tree_util.tree_map_with_path(place, value)
        if type(value) in (int, float, complex, bool):
            self._placed[name] = (value, is_wide, placed)
        return placed


def is_call(batches: tuple[PyTree, ...]) -> bool:
    """Returns whether the arguments of a call were bound to names."""
    return bool(batches) and type(batches[-1]) is CallArguments


def has_static(batches: tuple[PyTree, ...]) -> bool:
    """Returns whether a call has static arguments."""
    return is_call(batches) and bool(batches[-1].form.static)


def specs(batches: tuple[PyTree, ...], axis_names: tuple[str, ...]) -> list[PyTree]:
    """Returns the partition specs of the arguments of a call."""
    split = PartitionSpec(axis_names)
    found: list[PyTree] = [split] * len(batches)
    if is_call(batches):
        whole = PartitionSpec()
        found[-1] = dataclasses.replace(batches[-1], batches=split, replicated=whole)
    return found


def split_trees(batches: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Returns the arguments of a call that are split over the replicas."""
    if is_call(batches):
        return *batches[:-1], batches[-1].batches
    return batches


def split_leaves(batches: tuple[PyTree, ...]) -> list[Any]:
    """Returns the leaves that are split over the replicas."""
    return jax.tree.leaves(split_trees(batches))


def check_divide(batches: tuple[PyTree, ...], num_shards: int) -> None:
    """Raises ValueError for a leaf whose samples do not divide among the shards."""
    for length, where in _lengths(batches).items():
        if length % num_shards:
            raise ValueError(
                f"`{where}` has {length} samples over all replicas, which do not "
                f"divide among {num_shards} shards (`num_shards`). Use a batch size "
                f"that is a multiple of {num_shards}, or drop or pad the rest."
            )


def warn_of_unequal_lengths(world: World, batches: tuple[PyTree, ...]) -> None:
    """Warns about a leaf that is split but might not have one row per sample.

    A leaf with one row per replica, such as the weights of replicas, is fine.
    """
    lengths = _lengths(batches)
    lengths.pop(world.num_replicas, None)
    if len(lengths) > 1:
        warnings.warn(_describe_lengths(lengths), stacklevel=2)


def explain_unequal_lengths(error: Exception, batches: tuple[PyTree, ...]) -> None:
    """Adds to an error of a step that leaves of its batches differ in length."""
    lengths = _lengths(batches)
    if len(lengths) > 1:
        error.add_note(_describe_lengths(lengths))


def _lengths(batches: tuple[PyTree, ...]) -> dict[int, str]:
    """Returns the first dimensions of the batches, each with the first such leaf."""
    trees = {k: v for k, v in by_name(batches).items() if k != "argument"}
    lengths: dict[int, str] = {}
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            where = f"{name}{jax.tree_util.keystr(path)}"
            lengths.setdefault(leaf.shape[0], where)
    return lengths


def _describe_lengths(lengths: dict[int, str]) -> str:
    (first, a), (second, b) = list(lengths.items())[:2]
    return (
        f"The batches have different first dimensions: `{a}` {first}, `{b}` {second}, "
        "over all replicas. Each is split over the replicas. If all samples share an "
        "array, such as weights of classes or a random key, name it in "
        "`replicated_argnames`, or hold it in the state."
    )


def by_name(batches: tuple[PyTree, ...]) -> dict[str, PyTree]:
    """Returns the arguments of a call by the names that errors use."""
    if is_call(batches):
        call = batches[-1]
        return {"batch": call.batches, "argument": call.replicated}
    return {f"batch[{i}]": batch for i, batch in enumerate(batches)}


def map_batches(
    fn: Callable[[Any], Any], batches: tuple[PyTree, ...]
) -> tuple[PyTree, ...]:
    """Applies `fn` to the leaves that are split over the replicas."""
    if not is_call(batches):
        return jax.tree.map(fn, batches)
    *others, call = batches
    mapped = dataclasses.replace(call, batches=jax.tree.map(fn, call.batches))
    return *jax.tree.map(fn, tuple(others)), mapped


def run(
    step: Callable[..., Any], world: World, state: PyTree, *batches: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs the step of one replica, while JAX traces.

    With several processes, replica 0 sends the replicated arguments to all replicas;
    inside a `jdp.Join`, the first replica with data does.
    """
    if not is_call(batches):
        return step(state, *batches)
    call = batches[-1]
    replicated = call.replicated
    if world.process_count > 1:
        replicated = buffers.sync_buffers(replicated, axis_name=world.axis_name)
    if world.manual_axes:
        replicated = compat.cast_tree_varying(replicated, world.axis_name)
    leaves, treedef = jax.tree.flatten(replicated)
    leaves = [
        compat.as_weak(x) if is_weak else x
        for x, is_weak in zip(leaves, call.form.is_weak, strict=True)
    ]
    replicated = jax.tree.unflatten(treedef, leaves)
    static = {name: value for name, _, value in call.form.static}
    values = {**call.batches, **replicated, **static}
    positional = [values.pop(name) for name in call.form.positional]
    return step(state, *positional, **values)


def as_names(option: str, names: Names) -> tuple[str, ...]:
    """Returns the names that an option holds.

    Raises:
      TypeError: one is not a string.
    """
    found = (names,) if isinstance(names, str) else names
    if found is None:
        return ()
    if not isinstance(found, Iterable):
        found = (found,)
    found = tuple(found)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(
                f"`{option}` must hold names of parameters as strings, got {name!r}."
            )
    return found


def _count_named(named: dict[str, PyTree]) -> str:
    return f" and {len(named)} by name" if named else ""


def _check_has_hash(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"The static argument `{name}` must have a hash, since its value is part "
            f"of the program, got {type(value).__name__}. Pass a tuple or a frozen "
            "dataclass, or name it in `replicated_argnames` if it is an array."
        ) from None
