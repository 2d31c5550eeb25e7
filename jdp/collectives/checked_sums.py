"""Checked sums: a user's all-reduce, with each result checked while it is traced."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.trees.buckets import LeafSpec
from jdp.types import AxisName


@dataclasses.dataclass(frozen=True)
class CheckedReduce:
    """`reduce` of an `AllReduce`, which must return one array like its argument.

    Raises:
      TypeError: the function cannot be called like this, or its result is not an array.
      ValueError: its result has another shape or dtype.
    """

    function: Callable[..., Any]

    def __call__(
        self,
        x: jax.Array,
        axis_name: AxisName,
        *,
        scale: jax.typing.ArrayLike | None = None,
    ) -> jax.Array:
        """Returns the sum of `x`, shape (n,), over the axis."""
        options = {} if scale is None else {"scale": scale}
        check_call("reduce", self.function, (x, axis_name), options)
        found = self.function(x, axis_name, **options)
        if not _is_array(found):
            raise TypeError(
                "`reduce` of `all_reduce` must return one array, the sum, got "
                f"{_name_of(found)}."
            )
        if _form(found) != _form(x):
            raise ValueError(
                "`reduce` of `all_reduce` must return the sum in the shape and dtype "
                f"of its buffer, {_form(x)}, got {_form(found)}."
            )
        return jnp.asarray(found)


@dataclasses.dataclass(frozen=True)
class CheckedReduceGroup:
    """`reduce_group` of an `AllReduce`, which must return arrays like its arguments.

    Raises:
      TypeError: the function cannot be called like this, or its result is not a list or
        tuple of arrays.
      ValueError: its result has another length, or an array of it another shape or
        dtype.
    """

    function: Callable[..., Any]

    def __call__(
        self,
        arrays: Sequence[jax.Array],
        axis_name: AxisName,
        *,
        has_data: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Returns the sums of arrays over the axis."""
        arrays, options = list(arrays), {"has_data": has_data}
        check_call("reduce_group", self.function, (arrays, axis_name), options)
        # A copy, so that the function may change the list that it is given.
        found = self.function([*arrays], axis_name, **options)
        if not isinstance(found, list | tuple):
            raise TypeError(
                "`reduce_group` of `all_reduce` must return a list of "
                f"{len(arrays)} arrays, the sums, got {_name_of(found)}."
            )
        stray = [x for x in found if not _is_array(x)]
        if stray:
            raise TypeError(
                "`reduce_group` of `all_reduce` must return a list of arrays, got "
                f"{_name_of(stray[0])} among them."
            )
        given, returned = ([_form(x) for x in xs] for xs in (arrays, found))
        if given != returned:
            raise ValueError(
                "`reduce_group` of `all_reduce` must return the sums in the shapes and "
                f"dtypes of its arrays.\n  given:    {given}\n  returned: {returned}"
            )
        return [jnp.asarray(x) for x in found]


def check_call(
    member: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: dict[str, Any],
) -> None:
    """Raises TypeError if a function of an `AllReduce` does not take its arguments.

    Args:
      member: name of the field.
      function: its value.
      arguments: the positional arguments, of which the second is the axis.
      options: the keyword arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # A function without a signature in Python.
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as e:
        names = {"reduce": "x", "reduce_group": "arrays", "choose": "buffer"}
        passed = [names[member], "axis_name", *(f"{name}=..." for name in options)]
        raise TypeError(
            f"`{member}` of `all_reduce` is called as `{member}({', '.join(passed)})`, "
            f"which its signature does not allow: {e}."
        ) from None


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _form(x: Any) -> str:
    return str(LeafSpec(tuple(x.shape), x.dtype))


def _name_of(x: Any) -> str:
    if isinstance(x, list | tuple):
        return f"a {type(x).__name__} of {len(x)}"
    return "None" if x is None else f"a {type(x).__name__}"
