"""Hook option: which communication hook does a text of the command line name?"""

from collections.abc import Callable

import jax.numpy as jnp
import typer

from jdp import hooks
from jdp.hooks import CommHook

_MAKERS: dict[str, tuple[Callable[..., CommHook], Callable[[str], object] | None]] = {
    "none": (hooks.none, None),
    "cast": (hooks.cast, jnp.dtype),
    "int8": (hooks.int8, None),
    "power_sgd": (hooks.power_sgd, int),
    "rows": (hooks.rows, int),
    "top_k": (hooks.top_k, float),
}
HELP = (
    "A communication hook: none, cast:DTYPE such as cast:bfloat16, int8, "
    "power_sgd:RANK, rows:MAX_ROWS, top_k:FRACTION, or several joined by +, each "
    "applied to what the previous sends."
)


def parse(text: str) -> CommHook:
    """Returns the hook of an option such as `power_sgd:4+cast:bfloat16`.

    Raises:
      typer.BadParameter: there is no such hook, or its argument is not valid.
    """
    try:
        return hooks.chain(*map(_parse_one, text.split("+")))
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint="--hook") from None


def _parse_one(text: str) -> CommHook:
    name, colon, argument = text.strip().partition(":")
    if name not in _MAKERS:
        raise ValueError(f"there is no hook {name!r}; known are {', '.join(_MAKERS)}.")
    make, convert = _MAKERS[name]
    if bool(colon) != (convert is not None):
        wanted = "an argument" if convert else "no argument"
        raise ValueError(f"`{name}` takes {wanted}.")
    if convert is None:
        return make()
    try:
        value = convert(argument)
    except (TypeError, ValueError):
        kind = {int: "a whole number", float: "a number"}.get(
            convert, "a dtype such as bfloat16"
        )
        raise ValueError(f"`{name}` takes {kind}, got {argument!r}.") from None
    return make(value)
