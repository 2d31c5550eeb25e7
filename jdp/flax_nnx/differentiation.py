"""Differentiation: gradients of a loss of modules, averaged over the replicas."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jdp import compat
from jdp.backward.loss import split_loss
from jdp.flax_nnx import graph_states, metric_updates
from jdp.gradients import differentiation
from jdp.gradients.weighted_mean import DivideBy
from jdp.hooks.base import CommHook
from jdp.replicas import axes
from jdp.trees import nnx_objects
from jdp.trees.buckets import BucketPlan, Packing
from jdp.types import AllReduceOption, AxisName, PyTree

_TAG = "jdp.flax_nnx.value_and_grad"
Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


def value_and_grad(
    loss_fn: Callable[..., Any] | None = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    find_unused: bool = False,
    allow_int: bool = False,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName | None = None,
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduceOption = "auto",
    hook: CommHook | None = None,
    hook_state: PyTree = None,
    find_norms: bool = False,
) -> Callable[..., Any]:
    """A drop-in for `nnx.value_and_grad` that averages over the replicas.

    Takes modules as `nnx.value_and_grad` does: what the loss changes in them, such as
    running statistics and counts of rng streams, stays changed. Loss and gradients are
    averaged as in `jdp.value_and_grad`, in one pass of buckets.

    Args:
      loss_fn: `loss_fn(model, *args, **kwargs)` returns a scalar loss over this
        replica's samples, or with `has_aux` a pair of it and anything else. None: the
        result is a decorator.
      argnums: which positional arguments hold the parameters: places, or
        `nnx.DiffState(place, filter)`. Of modules, `nnx.Param`s are differentiated,
        or the variables that the filter names.
      has_aux: whether `loss_fn` returns a pair; the second part stays local.
      find_unused: see `jdp.value_and_grad`, as for all other options.
      allow_int: see there.
      weight: see there.
      divide_by: see there.
      axis_name: see there.
      plan: see there.
      packing: see there.
      all_reduce: see there.
      hook: see there.
      hook_state: see there.
      find_norms: see there.

    Returns:
      A function of the arguments of `loss_fn`. It returns what the function of
      `jdp.value_and_grad` returns; the gradients of a module are an `nnx.State`.

    Raises:
      TypeError: `loss_fn` is not a function, or an option has the wrong type.
    """
    options: dict[str, Any] = {
        "find_unused": find_unused,
        "allow_int": allow_int,
        "weight": weight,
        "divide_by": divide_by,
        "axis_name": axis_name,
        "plan": plan,
        "packing": packing,
        "all_reduce": all_reduce,
        "hook": hook,
        "hook_state": hook_state,
        "find_norms": find_norms,
    }
    if loss_fn is None:
        return functools.partial(
            value_and_grad, argnums=argnums, has_aux=has_aux, **options
        )
    differentiation.check_loss(loss_fn)
    filters = _find_filters(argnums)

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(_TAG):
            call = _Call(loss_fn, filters, args, kwargs, has_aux=has_aux)
            return _run(call, options, is_one=not isinstance(argnums, Sequence))

    return wrapped


def _run(call: "_Call", options: dict[str, Any], *, is_one: bool) -> Any:
    """Returns loss and gradients, in the form of `jdp.value_and_grad`.

    Args:
      call: the loss and its arguments.
      options: options of `jdp.value_and_grad`.
      is_one: whether the parameters are one argument, not a tuple of arguments.
    """
    loss = functools.partial(call.loss, is_one=is_one)
    grad_fn = differentiation.value_and_grad(loss, has_aux=True, **options)
    out = grad_fn(call.params[0] if is_one else tuple(call.params))
    extras = []
    has_state = options["hook_state"] is not None
    for _ in range(options["find_unused"] + options["find_norms"] + has_state):
        out, extra = out
        extras.append(extra)
    (value, (aux, changed)), grads = out
    call.update(changed)
    call.check_streams(axes.find(options["axis_name"]))
    metric_updates.note_same(value)
    out = ((value, aux) if call.has_aux else value), _without_slots(grads)
    for extra in reversed(extras):
        out = out, _without_slots(extra)
    return out


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Place of an object among the arguments."""

    number: int  # the place among all objects.
    state: Any = None  # the variables that get gradients, or their gradients.


class _NoKey:
    """Key of a slot's state, which leaves no trace in the paths of parameters."""

    def __str__(self) -> str:
        return ""


jax.tree_util.register_pytree_with_keys(
    _Slot,
    lambda slot: (((_NoKey(), slot.state),), slot.number),
    lambda number, states: _Slot(number, *states),
)


class _Call:
    """One call of a loss, with the objects in its arguments taken apart."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        filters: dict[int, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        has_aux: bool,
    ):
        self._loss_fn = loss_fn
        self.has_aux = has_aux
        # Per object: the graph definition, and the variables without gradients.
        self._graphs: list[tuple[Any, Any]] = []
        # Per rng stream, its count before the loss runs.
        self._streams = [
            (path, x, x.count.get_raw_value())
            for _, node in nnx_objects.find((args, kwargs))
            for path, x in nnx.iter_graph(node)
            if isinstance(x, nnx.RngStream)
        ]
        places = {_resolve(i, len(args)): i for i in filters}
        with nnx.split_context(_TAG) as context:

            def take(tree: PyTree, chosen: Any) -> PyTree:
                def visit(x: Any) -> Any:
                    if not nnx_objects.is_object(x):
                        return x
                    graph_states.check_can_change(x)
                    is_whole = isinstance(x, nnx.Variable)
                    state = None
                    if chosen is None:
                        graph, rest = context.split(x)
                    elif is_whole:
                        (graph, state), rest = context.split(x), nnx.State({})
                    else:
                        graph, state, rest = context.split(x, chosen, ...)
                    self._graphs.append((graph, rest))
                    return _Slot(len(self._graphs) - 1, state)

                return jax.tree.map(visit, tree, is_leaf=nnx_objects.is_object)

            taken = [
                take(x, filters[places[i]] if i in places else None)
                for i, x in enumerate(args)
            ]
            self._kwargs = take(kwargs, None)
        self._places = list(places)
        self.params = [taken[i] for i in self._places]
        self._args = [None if i in places else x for i, x in enumerate(taken)]

    def loss(self, params: PyTree, *, is_one: bool) -> tuple[Any, Any]:
        """Runs the loss on new objects.

        Args:
          params: see the attribute `params`.
          is_one: whether `params` is the only element of that list.

        Returns:
          The loss, and a pair: what else it returned, and the objects as it left them.
        """
        args = list(self._args)
        for i, x in zip(self._places, [params] if is_one else params, strict=True):
            args[i] = x
        slots = jax.tree.leaves((args, self._kwargs), is_leaf=_is_slot)
        states = {x.number: x.state for x in slots if _is_slot(x)}
        with nnx.merge_context(_TAG, True) as context:
            objects = [
                context.merge(graph, rest)
                if states[i] is None
                else context.merge(graph, states[i], rest)
                for i, (graph, rest) in enumerate(self._graphs)
            ]
        args, kwargs = jax.tree.map(
            lambda x: objects[x.number] if _is_slot(x) else x,
            (args, self._kwargs),
            is_leaf=_is_slot,
        )
        out = self._loss_fn(*args, **kwargs)
        loss, aux = split_loss(self._loss_fn, out, self.has_aux)
        for path, x in nnx_objects.find(aux):
            raise TypeError(
                f"The loss returns an nnx object, `{path or '(root)'}` "
                f"({type(x).__name__}), beside its value. Return arrays; what the loss "
                "changes in its arguments stays changed."
            )
        with nnx.split_context(_TAG) as context:
            changed = [context.split(x) for x in objects]
        return loss, (aux, changed)

    def update(self, changed: list[tuple[Any, Any]]) -> None:
        """Gives the objects in the arguments what the loss has changed."""
        with nnx.merge_context(_TAG, False) as context:
            for graph, state in changed:
                context.merge(graph, state)

    def check_streams(self, axis_name: AxisName) -> None:
        """Checks that a stream from which the loss drew differs between replicas.

        Only types tell, in a `shard_map` with `check_vma=True`. In a step of jdp, every
        replica gets its part of what is drawn.

        Raises:
          ValueError: the key of a stream is the same on all replicas, by its type.
        """
        tracked = compat.tracked_axes(axis_name)
        if not tracked or compat.is_alone(axis_name):
            return
        for path, stream, count in self._streams:
            key = stream.key.get_raw_value()
            is_used = stream.count.get_raw_value() is not count
            if is_used and not tracked <= compat.varying_axes(key):
                name = ".".join(map(str, path)) or stream.tag
                raise ValueError(
                    f"The rng stream `{name}` is the same on all replicas, so they "
                    "would draw the same numbers, such as the same dropout masks, for "
                    "other samples. Let the step be one of "
                    "`jdp.flax_nnx.data_parallel`, which draws as one device does. In "
                    "a `shard_map` of your own, give each replica a key: "
                    "`stream.key[...] = jax.random.fold_in(stream.key[...], "
                    f"jax.lax.axis_index({axis_name!r}))`."
                )


def _without_slots(tree: PyTree) -> PyTree:
    """Returns a tree like the parameters, with an `nnx.State` for each object."""
    return jax.tree.map(lambda x: x.state if _is_slot(x) else x, tree, is_leaf=_is_slot)


def _is_slot(x: Any) -> bool:
    return isinstance(x, _Slot)


def _find_filters(argnums: Argnums) -> dict[int, Any]:
    """Returns the filter of the variables that get gradients, per place."""
    given = argnums if isinstance(argnums, Sequence) else [argnums]
    filters: dict[int, Any] = {}
    for entry in given:
        chosen: Any = nnx.Param
        if isinstance(entry, nnx.DiffState):
            entry, chosen = entry.argnum, entry.filter
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise TypeError(
                "`argnums` must be places of arguments, or `nnx.DiffState(place, "
                f"filter)`, got {argnums!r}."
            )
        if entry in filters:
            raise ValueError(f"`argnums` names the argument {entry} twice.")
        filters[entry] = chosen
    return filters


def _resolve(place: int, num_args: int) -> int:
    """Returns the place of a positional argument, counted from 0."""
    found = place + num_args if place < 0 else place
    if not 0 <= found < num_args:
        raise ValueError(
            f"`argnums` has {place}, but the loss got {num_args} positional arguments. "
            "Pass the parameters by position."
        )
    return found
