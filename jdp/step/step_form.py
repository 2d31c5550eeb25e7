"""Step form: which arguments and results of a step are its state?

Inside jdp every step is `(state, *batches) -> (state, metrics)`. A step may also take
and return its state in several parts, and may return the state alone.
"""

import collections
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from jdp.step.call_arguments import NotGiven
from jdp.types import PyTree

Step = Callable[..., Any]


class StepForm:
    """Converts calls and results of one step to one state, and back."""

    def __init__(self, step: Step, name: str, num_states: int):
        """Reads the signature of the step.

        Args:
          step: the step as the user wrote it.
          name: its name, for errors.
          num_states: number of arguments, and of results, that are its state.

        Raises:
          ValueError: the step has fewer parameters than states.
        """
        self._step = step
        self._name = name
        self._num_states = num_states
        # Number of results after the states, or None for a state alone; set by a trace.
        self._num_metrics: int | None = 1
        self._is_traced = False
        self._names: tuple[str, ...] = ()
        if num_states > 1:
            self._read_names()
        self.packed = self._pack()

    def group(
        self, state: PyTree, batches: tuple[PyTree, ...], named: dict[str, PyTree]
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Returns the state of a call in one, and the arguments after it.

        Args:
          state: the first argument passed by position, or `NotGiven`.
          batches: the other ones.
          named: arguments passed by name; states are taken out.

        Raises:
          TypeError: a part of the state was not passed.
        """
        if self._num_states == 1:
            return state, batches
        given = () if state is NotGiven else (state, *batches)
        states = [*given[: self._num_states]]
        for name in self._names[len(states) :]:
            if name not in named:
                raise TypeError(
                    f"The step `{self._name}` was called without `{name}`. With "
                    f"`num_states={self._num_states}` its first arguments, "
                    f"{', '.join(f'`{n}`' for n in self._names)}, are its state."
                )
            states.append(named.pop(name))
        return self._make_state(*states), given[self._num_states :]

    def ungroup(self, state: PyTree, metrics: PyTree) -> Any:
        """Returns the results as the step of the user returns them."""
        if self._num_states == 1:
            return (state, metrics) if self._num_metrics is not None else state
        if self._num_metrics == 1:
            return *state, metrics
        return *state, *(metrics if self._num_metrics else ())

    def hint_at_states(
        self,
        error: Exception,
        arguments: tuple[PyTree, ...],
        named: dict[str, PyTree],
        held: Collection[str],
    ) -> None:
        """Adds to an error of a call that arguments look like parts of the state.

        An optimizer state has arrays of the names and shapes of the parameters.

        Args:
          error: the error, to which a note is added.
          arguments: arguments passed by position.
          named: arguments passed by name.
          held: names of arguments that are not batches.
        """
        known = inspect.signature(self._step).parameters
        given = dict(zip(known, arguments, strict=False)) | named
        names = [name for name in known if name in given and name not in held]
        # An array alone may look like a batch.
        if self._num_states > 1 or jax.tree.structure(arguments[:1]).num_leaves < 2:
            return
        alike = [
            i for i, name in enumerate(names) if _has_like(given[name], given[names[0]])
        ]
        if alike[1:]:
            error.add_note(
                f"The argument `{names[alike[-1]]}` of `{self._name}` holds arrays as "
                f"`{names[0]}` does. If it is part of the state, such as an "
                "optimizer's, pass `jdp.data_parallel` the number of such arguments at "
                f"the front: `num_states={alike[-1] + 1}`."
            )

    @functools.cached_property
    def _make_state(self) -> Any:
        return collections.namedtuple("State", self._names, rename=True)

    def _read_names(self) -> None:
        known = inspect.signature(self._step).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, _EITHER)
        names = [p.name for p in known if p.kind in kinds][: self._num_states]
        if len(names) < self._num_states:
            raise ValueError(
                f"`num_states={self._num_states}` needs a step whose first "
                f"{self._num_states} parameters are its state, got "
                f"`{self._name}{inspect.signature(self._step)}`."
            )
        self._names = tuple(names)

    def _pack(self) -> Step:
        """Returns the step as `(state, *batches) -> (state, metrics)`."""

        @functools.wraps(self._step)
        def packed(state: PyTree, *batches: PyTree, **named: PyTree) -> Any:
            given = (state,) if self._num_states == 1 else state
            return self._take_results(self._step(*given, *batches, **named), state)

        if self._num_states > 1:
            signature = inspect.signature(self._step)
            parameters = [*signature.parameters.values()]
            parameters = [parameters[0], *parameters[self._num_states :]]
            signature = signature.replace(parameters=parameters)
            packed.__signature__ = signature  # pyright: ignore
        return packed

    def _take_results(self, out: Any, state: PyTree) -> tuple[PyTree, PyTree]:
        """Splits what the step returned into state and metrics."""
        if self._num_states > 1:
            num_metrics, found = self._split_states(out, state)
        elif _is_alone(out, state):
            num_metrics, found = None, (out, {})
        else:
            num_metrics, found = 1, _check_pair(out)
            self._check_order(found, (state,))
        if self._is_traced and num_metrics != self._num_metrics:
            raise ValueError(
                f"The step `{self._name}` returned {_describe(self._num_metrics)} "
                f"before, and now {_describe(num_metrics)}. Return the same kinds of "
                "results in every branch of its code."
            )
        self._is_traced, self._num_metrics = True, num_metrics
        return found

    def _split_states(
        self, out: Any, state: PyTree
    ) -> tuple[int, tuple[PyTree, PyTree]]:
        if not isinstance(out, tuple) or len(out) < self._num_states:
            got = f"{len(out)} values" if type(out) is tuple else type(out).__name__
            names = ", ".join(self._names)
            raise TypeError(
                f"With `num_states={self._num_states}` the step must return "
                f"`({names}, metrics)`, or `({names})`, got {got}."
            )
        self._check_order(out, state)
        state = self._make_state(*out[: self._num_states])
        metrics = out[self._num_states :]
        return len(metrics), (state, metrics[0] if len(metrics) == 1 else metrics)

    def _check_order(self, out: tuple[Any, ...], states: tuple[PyTree, ...]) -> None:
        """Raises TypeError if the metrics come before the state."""
        metrics, *others = out
        if len(others) < len(states) or not any(map(_has_arrays, states)):
            return
        is_like = (
            _shapes(x) == _shapes(s) for x, s in zip(others, states, strict=False)
        )
        if not _has_arrays(metrics) and _shapes(metrics) != _shapes(states[0]):
            if all(is_like):
                names = ", ".join(self._names) or "state"
                raise TypeError(
                    f"The step `{self._name}` returned its metrics first. Return "
                    f"`({names}, metrics)`: what comes first is the new state, and "
                    "metrics are averaged over the replicas."
                )


_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _has_like(tree: PyTree, like: PyTree) -> bool:
    """Returns whether a tree holds one of the structure and shapes of another."""
    expected = _shapes(like)
    found = False

    def visit(part: Any) -> bool:
        nonlocal found
        found = found or _shapes(part) == expected
        return found

    jax.tree.leaves(tree, is_leaf=visit)
    return found


def _shapes(tree: PyTree) -> tuple[Any, list[Any]]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [np.shape(x) for x in leaves]


def _has_arrays(tree: PyTree) -> bool:
    """Returns whether a tree holds more than numbers without a dimension."""
    return any(np.ndim(x) for x in jax.tree.leaves(tree))


def _is_alone(out: Any, state: PyTree) -> bool:
    """Returns whether a step returned a state without metrics."""
    expected = jax.tree.structure(state)
    if jax.tree.structure(out) != expected:
        return False
    is_pair = type(out) is tuple and len(out) == 2
    # A pair whose first element is the state is a state and metrics.
    return not is_pair or jax.tree.structure(out[0]) != expected


def _check_pair(out: Any) -> tuple[PyTree, PyTree]:
    if not isinstance(out, tuple) or len(out) != 2:
        got = f"{len(out)} values" if type(out) is tuple else type(out).__name__
        raise TypeError(
            f"The step must return a pair `(state, metrics)`, got {got}. Return "
            "`(state, {})`, or a state of the same structure alone, if there are no "
            "metrics. If the state has several parts, such as parameters and optimizer "
            "state, pass `num_states=2`."
        )
    return out


def _describe(num_metrics: int | None) -> str:
    if num_metrics is None:
        return "a state alone"
    return f"{num_metrics} results after its state"
