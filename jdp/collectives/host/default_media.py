"""Default media: the memory or links of reductions that were given none."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from jdp import types
from jdp.replicas.mesh import World
from jdp.types import AxisName

Medium = TypeVar("Medium")


class DefaultMedia(Generic[Medium]):
    """Media of one kind for the current world, by axes."""

    def __init__(self, make: Callable[[World, AxisName], Medium]):
        """Makes none yet; `make` is called on every process for the same axes."""
        self._make = make
        self._lock = threading.Lock()
        self._world: World | None = None
        self._media: dict[tuple[str, ...], Medium] = {}
        # Why there is none, by axes: the processes meet for it once.
        self._failures: dict[tuple[str, ...], str] = {}

    def find(self, world: World, axis_name: AxisName) -> Medium:
        """Returns the medium over these axes; the first call makes it.

        Raises:
          RuntimeError: it cannot be made.
        """
        names = types.as_axis_names(axis_name)
        with self._lock:
            if self._world is not world:
                self._world, self._media, self._failures = world, {}, {}
            if names in self._failures:
                raise RuntimeError(self._failures[names])
            if names not in self._media:
                try:
                    self._media[names] = self._make(world, axis_name)
                except RuntimeError as error:
                    self._failures[names] = str(error)
                    raise
            return self._media[names]
