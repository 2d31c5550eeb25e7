"""Reduced values: which values did a function sum or average over the replicas?"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Literal

import jax

Kind = Literal["sum", "mean"]
Noted = list[tuple[jax.Array, Kind]]

_noted: contextvars.ContextVar[Noted | None] = contextvars.ContextVar(
    "reduced_values", default=None
)


def note(values: Sequence[jax.Array], kind: Kind) -> None:
    """Notes values that were reduced, where they are collected."""
    found = _noted.get()
    if found is not None:
        found += [(x, kind) for x in values]


@contextlib.contextmanager
def collected() -> Iterator[Noted]:
    """Collects the values that are reduced inside, while they are traced."""
    found: Noted = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def kind_of(value: object, noted: Noted) -> Kind | None:
    """Returns how a value was reduced last; None: it was not, or changed since."""
    return next((kind for x, kind in noted if x is value), None)
