"""Rarely: cases of a test that take long and break rarely, for `make test-all`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def cases(values: Iterable[Any], *, often: Container[Any]) -> list[Any]:
    """Returns values for `parametrize`; those that are not in `often` are slow.

    A tuple holds the values of several arguments.
    """
    return [
        value
        if value in often
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow
        )
        for value in values
    ]
