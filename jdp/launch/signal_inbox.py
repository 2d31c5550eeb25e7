"""Signal inbox: which signals has the launcher received since it last looked?"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Signals that were received and not taken yet, in order."""

    def __init__(self) -> None:
        self._received: list[int] = []

    def take(self) -> list[int]:
        """Returns the signals since the last call, in order, and forgets them."""
        received, self._received = self._received, []
        return received

    @contextlib.contextmanager
    def listening(self) -> Iterator[int | None]:
        """Collects signals until the block ends.

        Yields:
          A descriptor that becomes readable with a signal. None outside the main
          thread, where Python delivers no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield None
            return
        wake_fd, write_fd = os.pipe()
        os.set_blocking(wake_fd, False)
        os.set_blocking(write_fd, False)
        old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        old_handlers = {}
        for signum in (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGWINCH):
            old = signal.getsignal(signum)
            # `nohup` and a shell's `&` make a process ignore signals; that stays so.
            if signum in STOP_SIGNALS and old is signal.SIG_IGN:
                continue
            old_handlers[signum] = old
            signal.signal(signum, lambda signum, _: self._received.append(signum))
        try:
            yield wake_fd
        finally:
            for signum, old in old_handlers.items():
                signal.signal(signum, old)
            signal.set_wakeup_fd(old_fd)
            os.close(wake_fd)
            os.close(write_fd)
