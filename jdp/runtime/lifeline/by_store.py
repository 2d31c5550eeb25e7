"""Lifeline by store: how does a process hear of ends while it has no line?

Strangers may crowd the port of the lines. So processes post their ends, signed, in
JAX's store as well, and look for other posts every few seconds.
"""

import logging
import threading
from collections.abc import Callable

from jdp.replicas.mesh import World

_DIRECTORY = "jdp/lifeline_ends"
_PERIOD_S = 2.0
_logger = logging.getLogger("jdp")


class EndsInStore:
    """Posts of one process's end, and a thread that reads the posts of others."""

    def __init__(
        self,
        world: World,
        heard: Callable[[int, bytes], None],
        wake: Callable[[], None],
    ):
        """Starts the thread.

        Args:
          world: the job.
          heard: called once per post of another process, with its index and the post,
            in the thread.
          wake: called after `heard`.
        """
        assert world.store is not None
        self._store, self._own, self._heard = world.store, world.process_index, heard
        self._others = {str(p) for p in range(world.process_count)} - {str(self._own)}
        self._wake = wake
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._look, name="jdp-lifeline-store", daemon=True
        )
        self._thread.start()

    def post(self, body: bytes) -> None:
        """Posts the end of this process."""
        try:
            self._store.set(f"{_DIRECTORY}/{self._own}", body, overwrite=True)
        except RuntimeError as error:  # The store has ended, and the job with it.
            _logger.debug("An end is not told: %s", error)

    def close(self) -> None:
        """Stops the thread."""
        self._stopped.set()
        self._thread.join(_PERIOD_S)

    def _look(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            try:
                found = self._store.list_directory(_DIRECTORY)
            except RuntimeError as error:
                _logger.debug("The ends of processes are not looked for: %s", error)
                return
            for name in sorted(found.keys() & self._others):
                self._others.remove(name)
                self._heard(int(name), found[name])
                self._wake()
