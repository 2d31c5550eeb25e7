"""Refusals: messages of peers with the keys that make no sense."""

import logging
import time

from jdp import wire

_LOG_PERIOD_S = 5.0
_logger = logging.getLogger("jdp")


class Refusals:
    """Counts them, with a log that they cannot flood."""

    def __init__(self, who: str):
        """Begins with none.

        Args:
          who: refuses them; the log begins with it.
        """
        self.count = 0
        self._who = who
        self._num_logged = 0
        self._quiet_until_s = float("-inf")

    def note(self, reason: str) -> None:
        """Counts one, and logs it unless another was logged a moment ago.

        Args:
          reason: goes on after "it ".
        """
        self.count += 1
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return
        _logger.warning(
            "%s has refused messages of peers that have the keys of this job: %d; of "
            "the last one, it %s.",
            self._who,
            self.count - self._num_logged,
            wire.printable(reason),
        )
        self._num_logged = self.count
        self._quiet_until_s = now_s + _LOG_PERIOD_S
