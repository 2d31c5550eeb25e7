"""Loss call: which arguments of a call hold the parameters."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jdp.types import PyTree


class LossCall(NamedTuple):
    """A loss and its positional arguments, parameters first."""

    loss_fn: Callable[..., Any]  # of (params, *rest, **kwargs).
    params: PyTree  # an argument, or a tuple of arguments.
    rest: tuple[Any, ...]


def pick(
    loss_fn: Callable[..., Any], argnums: int | Sequence[int], args: tuple[Any, ...]
) -> LossCall:
    """Takes the parameters out of the positional arguments of a call.

    Args:
      loss_fn: the loss, of `args`.
      argnums: as `jax.value_and_grad` takes it: the place of the parameters, or
        places; negative ones count from the end.
      args: the arguments.

    Raises:
      TypeError: `argnums` is neither an integer nor integers.
      ValueError: there is no such argument, or one is named twice.
    """
    places = _places(argnums, len(args))
    if argnums == 0:
        return LossCall(loss_fn, args[0], args[1:])
    is_one = not isinstance(argnums, Sequence)
    chosen = tuple(args[place] for place in places)
    rest = tuple(x for place, x in enumerate(args) if place not in places)

    @functools.wraps(loss_fn)
    def of_params(params: PyTree, *rest: Any, **kwargs: Any) -> Any:
        left = iter(rest)
        given = dict(zip(places, (params,) if is_one else params, strict=True))
        ordered = [given[i] if i in given else next(left) for i in range(len(args))]
        return loss_fn(*ordered, **kwargs)

    return LossCall(of_params, chosen[0] if is_one else chosen, rest)


def check_loss(loss_fn: Any) -> None:
    """Raises TypeError for a loss that is not a function."""
    if not callable(loss_fn):
        raise TypeError(
            "`loss_fn` must be a function `(params, *args) -> loss`, got "
            f"{type(loss_fn).__name__}. Pass the function, not what it returns; its "
            "arguments go to the function that comes back."
        )


def _places(argnums: int | Sequence[int], count: int) -> list[int]:
    try:
        given = argnums if isinstance(argnums, Sequence) else [argnums]
        found = [operator.index(number) for number in given]
    except TypeError:
        raise TypeError(
            f"`argnums` must be an integer or a tuple of integers, got {argnums!r}."
        ) from None
    for number in found:
        if not -count <= number < count:
            raise ValueError(
                f"`argnums={argnums!r}` names the positional argument {number}, but "
                f"the call has {count}. Pass parameters by position."
            )
    places = [number % count for number in found]
    if len(set(places)) < len(places) or not places:
        raise ValueError(
            f"`argnums={argnums!r}` must name at least one argument, and each once."
        )
    return places
