"""Refusals: how are refused messages and workers counted and logged?"""

import logging
import time

from jdp.replicas import wire

_LOG_PERIOD_S = 5.0
_MOST_WORKERS = 4096  # whose last log line is remembered.
_logger = logging.getLogger("jdp")


class PeerRefusals:
    """Counter of refusals, with log lines that peers cannot flood."""

    def __init__(self, name: str):
        """Counts from 0.

        Args:
          name: the process that refuses; log lines begin with it.
        """
        self.count = 0
        self._name = name
        self._messages, self._workers = _Throttle(), _Throttle()
        self._come_at_s: dict[int, float] = {}  # by worker.

    def note(self, reason: str) -> None:
        """Counts a refused message; logs it unless the last line is recent.

        Args:
          reason: continues "it ".
        """
        self.count += 1
        if num := self._messages.take():
            _logger.warning(
                "%s has refused messages of peers that have the keys of this job: %d; "
                "the last peer %s.",
                self._name,
                num,
                wire.printable(reason),
            )

    def note_worker(self, worker: int, text: str) -> None:
        """Counts a refused worker; logs it unless the last line is recent.

        Args:
          worker: index of the worker.
          text: the reason, in printable characters.
        """
        self.count += 1
        if num := self._workers.take():
            more = f" Before it, {num - 1} were refused." if num > 1 else ""
            _logger.warning("Worker %d is refused: %s%s", worker, text, more)

    def note_come(self, worker: int) -> None:
        """Logs that a worker has come, unless it also came a moment ago."""
        now_s = time.monotonic()
        if now_s < self._come_at_s.pop(worker, float("-inf")) + _LOG_PERIOD_S:
            self._come_at_s[worker] = now_s
            return
        if len(self._come_at_s) >= _MOST_WORKERS:
            del self._come_at_s[next(iter(self._come_at_s))]
        self._come_at_s[worker] = now_s
        _logger.info("Worker %d has come.", worker)


class _Throttle:
    """Lets one line pass every few seconds."""

    def __init__(self) -> None:
        self._num = 0
        self._quiet_until_s = float("-inf")

    def take(self) -> int:
        """Returns the number of events to log now; 0: log nothing."""
        self._num += 1
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return 0
        self._quiet_until_s = now_s + _LOG_PERIOD_S
        num, self._num = self._num, 0
        return num
