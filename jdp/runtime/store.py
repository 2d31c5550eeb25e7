"""Store: how do the processes of a job share small values?"""

import itertools
import logging
import threading
import time
from typing import Any

import jax

from jdp.replicas import forked, progress
from jdp.runtime import job_key

_FORGED_PERIOD_S = 0.05  # between reads of a key that a stranger has written.
_MOST_WARNINGS = 20
_logger = logging.getLogger("jdp")


class _Bookkeeping:
    """Counters and retired keys, which a process keeps for itself."""

    def __init__(self) -> None:
        self._rounds = itertools.count()
        self._retired: list[str] = []

    def next_round(self) -> int:
        """See `jdp.types.Store`."""
        return next(self._rounds)

    def retire(self, directory: str) -> None:
        """See `jdp.types.Store`."""
        self._retired.append(directory)

    def take_retired(self, under: str = "") -> list[str]:
        """See `jdp.types.Store`."""
        retired, self._retired = self._retired, []
        self._retired += [each for each in retired if not each.startswith(under)]
        return [each for each in retired if each.startswith(under)]


class DistributedStore(_Bookkeeping):
    """The key-value store of `jax.distributed`, which process 0 serves.

    Any program that reaches its port can read and write it. So each value is signed for
    its key, and a value from a stranger counts as absent: `get` waits on until its
    deadline, and `set` overwrites it. A value that a stranger deletes is gone, and a
    wait for it ends at its deadline.

    A round trip between two processes on one host takes about a millisecond.
    """

    def __init__(self, client: Any, key: bytes):
        """Uses the client of `jax.distributed`, and signs with `key`, shape (32,)."""
        super().__init__()
        self._open_client = client
        self._key = key
        self._warned: set[str] = set()

    @property
    def _client(self) -> Any:
        forked.check_is_not_child()
        if self._open_client is None:
            raise RuntimeError(
                "The world has ended with `jdp.shutdown`. Use the world of the next "
                "`jdp.init`."
            )
        return self._open_client

    def close(self) -> None:
        """Ends the use of the client, which `jax.distributed` has ended."""
        self._open_client = None

    def set(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """See `jdp.types.Store`."""
        signed = job_key.sign(self._key, _context(key), value)
        try:
            self._client.key_value_set_bytes(key, signed, overwrite)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error) or self.try_get(key) is not None:
                raise
            self._client.key_value_set_bytes(key, signed, True)

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """See `jdp.types.Store`.

        A wait that times out leaves some 35 kB in process 0 until the key is set
        (measured, JAX 0.10.2): wait once and long, not repeatedly.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                timeout_ms = max(1, int(1000 * left_s))
                with progress.waiting():
                    signed = self._client.blocking_key_value_get_bytes(key, timeout_ms)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                text = f"`{key}` was not set in {timeout_s:.1f} s."
                raise TimeoutError(text) from None
            value, refusal = self._verify(key, signed)
            if value is not None:
                return value
            if left_s <= 0:
                raise TimeoutError(
                    f"`{key}` was not set by a process of this job in "
                    f"{timeout_s:.1f} s, but by a stranger."
                ) from refusal
            time.sleep(min(_FORGED_PERIOD_S, left_s))

    def try_get(self, key: str) -> bytes | None:
        """See `jdp.types.Store`."""
        try:
            signed = self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None
        return self._verify(key, signed)[0]

    def list_directory(self, directory: str) -> dict[str, bytes]:
        """See `jdp.types.Store`."""
        prefix = directory + "/"
        found = {}
        for key, signed in self._client.key_value_dir_get_bytes(prefix):
            value, _ = self._verify(key, signed)
            if value is not None:
                found[key.removeprefix(prefix)] = value
        return found

    def delete(self, key: str) -> None:
        """See `jdp.types.Store`."""
        self._client.key_value_delete(key)

    def derive_secret(self, context: str) -> bytes:
        """See `jdp.types.Store`."""
        return job_key.derive(self._key, f"secret {context}")

    def _verify(
        self, key: str, signed: bytes
    ) -> tuple[bytes, None] | tuple[None, job_key.WrongKey]:
        """Returns the value, or why it is not from this job, which is logged once."""
        try:
            return job_key.verify(self._key, _context(key), signed), None
        except job_key.WrongKey as error:
            if key not in self._warned and len(self._warned) < _MOST_WARNINGS:
                self._warned.add(key)
                _logger.warning("The store of the job: %s It is left out.", error)
            return None, error


def _context(key: str) -> str:
    return f"store {key}"


class _Shared:
    """State shared by the members of one in-memory job."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.key = job_key.make()


class MemoryStore(_Bookkeeping):
    """Store of a job whose members are threads of one process."""

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

    def derive_secret(self, context: str) -> bytes:
        """See `jdp.types.Store`."""
        return job_key.derive(self._shared.key, f"secret {context}")


def make_memory_stores(num_processes: int) -> list[MemoryStore]:
    """Makes the stores of the members of one in-memory job."""
    shared = _Shared()
    return [MemoryStore(shared) for _ in range(num_processes)]
