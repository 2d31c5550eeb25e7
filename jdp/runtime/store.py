"""Store: small values that the processes of a job share."""

import itertools
import threading
import time
from typing import Any

import jax


class _Own:
    """What a process counts and notes for itself."""

    def __init__(self) -> None:
        self._rounds = itertools.count()
        self._retired: list[str] = []

    def next_round(self) -> int:
        """See `jdp.types.Store`."""
        return next(self._rounds)

    def retire(self, directory: str) -> None:
        """See `jdp.types.Store`."""
        self._retired.append(directory)

    def take_retired(self) -> list[str]:
        """See `jdp.types.Store`."""
        retired, self._retired = self._retired, []
        return retired


class DistributedStore(_Own):
    """The key-value store of `jax.distributed`, which process 0 serves.

    A round trip of two processes on one host takes about a millisecond.
    """

    def __init__(self, client: Any):
        """Uses `client`, that of an initialised `jax.distributed`."""
        super().__init__()
        self._client = client

    def set(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """See `jdp.types.Store`."""
        self._client.key_value_set_bytes(key, value, overwrite)

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """See `jdp.types.Store`.

        One that times out leaves some 35 kB in process 0 until the key is set
        (measured, JAX 0.10.2): to wait long, do not repeat short ones.
        """
        try:
            timeout_ms = max(1, int(1000 * timeout_s))
            return self._client.blocking_key_value_get_bytes(key, timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(f"`{key}` was not set in {timeout_s:.1f} s.") from None

    def try_get(self, key: str) -> bytes | None:
        """See `jdp.types.Store`."""
        try:
            return self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None

    def list_directory(self, directory: str) -> dict[str, bytes]:
        """See `jdp.types.Store`."""
        prefix = directory + "/"
        found = self._client.key_value_dir_get_bytes(prefix)
        return {key.removeprefix(prefix): value for key, value in found}

    def delete(self, key: str) -> None:
        """See `jdp.types.Store`."""
        self._client.key_value_delete(key)


class _Shared:
    """What the members of one in-memory job share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


class MemoryStore(_Own):
    """The in-memory twin: the members of one job live in threads of one process."""

    def __init__(self, shared: _Shared):
        """Use `make_memory_stores`."""
        super().__init__()
        self._shared = shared

    def set(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """See `jdp.types.Store`."""
        with self._shared.changed:
            if key in self._shared.values and not overwrite:
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

    def try_get(self, key: str) -> bytes | None:
        """See `jdp.types.Store`."""
        with self._shared.changed:
            return self._shared.values.get(key)

    def list_directory(self, directory: str) -> dict[str, bytes]:
        """See `jdp.types.Store`."""
        prefix = directory + "/"
        with self._shared.changed:
            items = self._shared.values.items()
            return {k.removeprefix(prefix): v for k, v in items if k.startswith(prefix)}

    def delete(self, key: str) -> None:
        """See `jdp.types.Store`."""
        with self._shared.changed:
            values = self._shared.values
            for name in [k for k in values if k == key or k.startswith(key + "/")]:
                del values[name]


def make_memory_stores(num_processes: int) -> list[MemoryStore]:
    """Makes the stores of the members of one in-memory job."""
    shared = _Shared()
    return [MemoryStore(shared) for _ in range(num_processes)]
