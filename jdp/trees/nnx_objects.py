"""Objects of nnx: which values in a tree change in place, and are lost in a copy?

JAX takes an `nnx.Module` for a tree, and a function that it transforms gets a copy.
What the function changes in the copy, such as running statistics or the counts of rng
streams, is lost. Flax is not imported here: without it, there are no such objects.
"""

import contextlib
import sys
from collections.abc import Hashable, Iterator
from typing import Any

import jax

from jdp.types import PyTree


def is_object(x: Any) -> bool:
    """Returns whether `x` is an object of nnx that holds variables, or one variable."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    if isinstance(x, nnx.Variable | nnx.Module | nnx.metrics.Metric):
        return True
    # Other classes of nnx may be containers of plain arrays, such as a batch.
    return isinstance(x, nnx.Pytree) and any(
        isinstance(leaf, nnx.Variable)
        for leaf in jax.tree.leaves(x, is_leaf=lambda y: isinstance(y, nnx.Variable))
    )


def find(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns the objects of nnx in a tree, with their paths."""
    if "flax.nnx" not in sys.modules:
        return []
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_object)
    return [(jax.tree_util.keystr(path), x) for path, x in found if is_object(x)]


def describe_first(tree: PyTree) -> str | None:
    """Names the first object in a tree that is more than a variable; None without.

    Variables alone are the leaves of an `nnx.State`, which JAX may copy.
    """
    for path, x in find(tree):
        if not isinstance(x, sys.modules["flax.nnx"].Variable):
            return f"`{path or '(root)'}` ({type(x).__name__})"
    return None


def check_parameters(params: PyTree) -> None:
    """Raises TypeError for parameters that are modules.

    Args:
      params: the parameters of a loss.
    """
    found = describe_first(params)
    if found is not None:
        raise TypeError(
            f"The parameters have an nnx object, {found}. The loss would get a copy, "
            "and what it changes there, such as running statistics or the counts of "
            "rng streams, would be lost. Use `jdp.flax_nnx.value_and_grad` in a step "
            "of `jdp.flax_nnx.data_parallel`, or pass arrays: `graph, params, rest = "
            "nnx.split(model, nnx.Param, ...)`, and in the loss `model = "
            "nnx.merge(graph, params, rest, copy=True)`."
        )


def check_arguments(step: str, arguments: dict[str, PyTree]) -> None:
    """Raises TypeError for an object among the arguments of a step.

    Args:
      step: the name of the step.
      arguments: state and batches, by the names for messages.
    """
    for name, tree in arguments.items():
        found = describe_first(tree)
        if found is not None:
            raise TypeError(
                f"The {name} of the step `{step}` has an nnx object, {found}. A step "
                "of `jdp.data_parallel` gets a copy, and the object itself would not "
                "change. Decorate the step with `@jdp.flax_nnx.data_parallel`: it "
                "takes models, optimizers and metrics as arguments and changes them in "
                "place. Or let arrays be the state: `graph, state = nnx.split(model)`, "
                "and in the step `model = nnx.merge(graph, state, copy=True)`."
            )


@contextlib.contextmanager
def refusing_changes(function: str, params: PyTree) -> Iterator[None]:
    """Refuses changes of the objects that an evaluation gets.

    Args:
      function: the name of the function that runs meanwhile.
      params: its parameters.

    Raises:
      ValueError: an object has another value afterwards.
    """
    before = jax.tree_util.tree_leaves_with_path(params) if find(params) else []
    static = _static_attributes(params)
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "TraceContextError":
            raise
        raise _lost_change(function, "a variable or an attribute") from error
    after = jax.tree.leaves(params) if before else []
    if len(before) != len(after):
        raise _lost_change(function, "attributes")
    for (path, x), y in zip(before, after, strict=True):
        if x is not y:
            raise _lost_change(function, f"`{jax.tree_util.keystr(path)}`")
    changed = static ^ _static_attributes(params)
    if changed:
        name = min(name for name, _ in changed)
        raise _lost_change(function, f"the attribute `{name}`")


def _static_attributes(params: PyTree) -> set[tuple[str, Any]]:
    """Returns the names and values of attributes that hold neither arrays nor objects.

    Such an attribute is part of a graph definition of Flax, and so can be hashed.
    """
    found: set[tuple[str, Any]] = set()
    for root, x in find(params):
        nnx = sys.modules["flax.nnx"]
        for path, value in nnx.iter_graph(x):
            is_flax = any(str(key).startswith("_pytree__") for key in path)
            is_dynamic = isinstance(value, jax.Array | nnx.Variable | nnx.Pytree)
            if not is_flax and not is_dynamic and isinstance(value, Hashable):
                found.add((".".join([root, *map(str, path)]).lstrip("."), value))
    return found


def _lost_change(function: str, what: str) -> ValueError:
    return ValueError(
        f"`{function}` changes {what} of an nnx object among its parameters. "
        "`jdp.replicated` gives the function a copy, so the change would be lost. "
        "Call `model.eval()` before the evaluation or use `nnx.view`, return metric "
        "objects that are made in the function, or decorate it with "
        "`@jdp.flax_nnx.data_parallel`, which changes objects in place."
    )


@contextlib.contextmanager
def explaining(step: str) -> Iterator[None]:
    """Explains Flax's error for an object that is changed out of reach.

    Args:
      step: name of the step that is traced meanwhile.

    Raises:
      ValueError: in place of Flax's error; any other error stays.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "TraceContextError":
            raise
        raise ValueError(
            f"The step `{step}` changes an nnx object that was made outside of the "
            "function that JAX traces, such as a model that the step or its loss "
            "captures. The object cannot get the new values. Decorate the step with "
            "`@jdp.flax_nnx.data_parallel`, pass the object as an argument, and use "
            "`jdp.flax_nnx.value_and_grad`; or merge a copy where it is changed: "
            f"`nnx.merge(graph, state, copy=True)`. Flax says: {error}"
        ) from error
