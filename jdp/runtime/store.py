"""Store: small values that the processes of a job share."""

import itertools
import threading
import time
from typing import Any

import jax


class DistributedStore:
    """The key-value store of `jax.distributed`, which process 0 serves.

    A round trip of two processes on one host takes about a millisecond.
    """

    def __init__(self, client: Any):
        """Uses `client`, that of an initialised `jax.distributed`."""
        self._client = client
        self._rounds = itertools.count()

    def next_round(self) -> int:
        """See `jdp.types.Store`."""
        return next(self._rounds)

    def set(self, key: str, value: bytes) -> None:
        """See `jdp.types.Store`."""
        self._client.key_value_set_bytes(key, value)

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """See `jdp.types.Store`."""
        try:
            timeout_ms = max(1, int(1000 * timeout_s))
            return self._client.blocking_key_value_get_bytes(key, timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(f"`{key}` was not set in {timeout_s:.1f} s.") from None

    def delete(self, key: str) -> None:
        """See `jdp.types.Store`."""
        self._client.key_value_delete(key)


class _Shared:
    """What the members of one in-memory job share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


class MemoryStore:
    """The in-memory twin: the members of one job live in threads of one process."""

    def __init__(self, shared: _Shared):
        """Use `make_memory_stores`."""
        self._shared = shared
        self._rounds = itertools.count()

    def next_round(self) -> int:
        """See `jdp.types.Store`."""
        return next(self._rounds)

    def set(self, key: str, value: bytes) -> None:
        """See `jdp.types.Store`."""
        with self._shared.changed:
            if key in self._shared.values:
                raise RuntimeError(f"`{key}` is set already.")
            self._shared.values[key] = value
            self._shared.changed.notify_all()

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """See `jdp.types.Store`."""
        deadline_s = time.monotonic() + timeout_s
        with self._shared.changed:
            while key not in self._shared.values:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._shared.changed.wait(left_s):
                    raise TimeoutError(f"`{key}` was not set in {timeout_s:.1f} s.")
            return self._shared.values[key]

    def delete(self, key: str) -> None:
        """See `jdp.types.Store`."""
        with self._shared.changed:
            self._shared.values.pop(key, None)


def make_memory_stores(num_processes: int) -> list[MemoryStore]:
    """Makes the stores of the members of one in-memory job."""
    shared = _Shared()
    return [MemoryStore(shared) for _ in range(num_processes)]
