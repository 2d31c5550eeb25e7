"""Lifeline by store: how does a process hear of ends while its line is not there?

Strangers may crowd the port of the lines. Then what processes say of their ends goes
through JAX's store as well, where it is signed; it is looked for every few seconds.
"""

import logging
import threading
from collections.abc import Callable

from jdp.replicas.mesh import World

_DIRECTORY = "jdp/lifeline_ends"
_PERIOD_S = 2.0
_logger = logging.getLogger("jdp")


class EndsInStore:
    """The second way of one process; a thread of its own looks."""

    def __init__(
        self,
        world: World,
        heard: Callable[[int, bytes], None],
        wake: Callable[[], None],
    ):
        """Starts to look.

        Args:
          world: the job.
          heard: gets what another process has posted, once, and its number; it is
            called in the thread.
          wake: called after it.
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
        """Tells the others that look."""
        try:
            self._store.set(f"{_DIRECTORY}/{self._own}", body, overwrite=True)
        except RuntimeError as error:  # The store has ended, and with it the job.
            _logger.debug("An end is not told: %s", error)

    def close(self) -> None:
        """Looks no more."""
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
