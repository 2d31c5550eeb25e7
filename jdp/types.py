"""Types: the aliases and protocols that the rest of jdp shares."""

from typing import Any, Protocol

import jax

PyTree = Any
AxisName = str | tuple[str, ...]
Device = Any  # jax.Device, which type checkers do not take for a type.


class AllReduce(Protocol):
    """Sums a flat buffer over the replicas, inside a traced function.

    Every replica of the axis calls it the same number of times, in the same order,
    with the same shape and dtype, and gets bitwise the same result.
    `jax.lax.psum` is one. One that packs by itself may also have a method
    `reduce_group(arrays, axis_name, *, has_data)`: arrays of one dtype and any shapes,
    to be summed together; a replica counts as zeros where `has_data`, None or
    bool (), is False. One that differs by buffer may have `pick(buffer, axis_name)`,
    which returns the one for a `jax.ShapeDtypeStruct`. One with `takes_scale = True`
    also takes `scale=`, a number or float32 (), which it multiplies the sum with before
    it rounds.
    """

    def __call__(self, x: jax.Array, axis_name: AxisName, /) -> jax.Array:
        """Returns the sum of `x`, shape (n,), over `axis_name`."""
        ...


class Store(Protocol):
    """Small values that the processes of a job share on the host, by key."""

    def next_round(self) -> int:
        """Returns 0, 1, 2, ...: how often this process has called it before."""
        ...

    def set(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """Publishes `value`; without `overwrite` a key is set once."""
        ...

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """Waits for `key` and returns its value.

        Raises:
          TimeoutError: the key was not set within `timeout_s` seconds.
        """
        ...

    def try_get(self, key: str) -> bytes | None:
        """Returns the value of `key`, or None while it is not set."""
        ...

    def list_directory(self, directory: str) -> dict[str, bytes]:
        """Returns what is set under `directory`, by what follows `<directory>/`."""
        ...

    def delete(self, key: str) -> None:
        """Forgets `key`, and everything under it where it is a directory."""
        ...

    def retire(self, directory: str) -> None:
        """Notes a directory to be deleted once no process can still read it."""
        ...

    def take_retired(self) -> list[str]:
        """Returns what this process has retired since the last call."""
        ...
