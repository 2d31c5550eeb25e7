"""Keyboard: which process gets the keys that are typed at the launcher's terminal?

A process that reads with readline, such as pdb and `input()`, takes its pseudo-terminal
out of line mode meanwhile; `getpass` turns the echo off. The launcher sees that and
passes keys on. The echo comes back as output of the process, so it is drawn like other
unfinished lines. While no process reads, the terminal is left alone, and keys stay in
it for the next reader.
"""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_POLL_S = 0.02
_STAYS_S = 1.0
_TWICE_S = 1.0
_READ_BYTES = 512
# They stop or end the launcher at once, by Ctrl-Z and Ctrl-\.
_AT_ONCE = (signal.SIGTSTP, signal.SIGQUIT)


class HolderState(NamedTuple):
    """The process that has the keyboard, and the processes that wait for it."""

    process_id: int | None = None
    seen_s: float = 0.0  # when it last was seen to read, on the monotonic clock.
    waiting: tuple[int, ...] = ()  # in the order in which they came.


def observe(
    state: HolderState, readers: Sequence[int], *, now_s: float
) -> tuple[HolderState, list[int]]:
    """Gives the keyboard to the process that has waited for it longest.

    A process keeps it while it reads, and for `_STAYS_S` seconds after that, since
    debuggers read line after line.

    Returns:
      The new state, and the processes that have just begun to wait.
    """
    queue = [i for i in state.waiting if i in readers]
    queue += [i for i in readers if i not in queue]
    holder, seen_s = state.process_id, state.seen_s
    if holder in readers:
        seen_s = now_s
    elif holder is not None and now_s - seen_s >= _STAYS_S:
        holder = None
    if holder is None and queue:
        holder, seen_s = queue[0], now_s
    waiting = tuple(i for i in queue if i != holder)
    new = [i for i in waiting if i not in state.waiting]
    return HolderState(holder, seen_s, waiting), new


class Keyboard:
    """Passes keys from our terminal to the pseudo-terminals of processes.

    Attributes:
      has_taken_over: whether the last `poll` has, so the prompt must be drawn again.
    """

    def __init__(
        self,
        fd: int | None,
        selector: selectors.BaseSelector,
        *,
        has_screen: bool,
    ) -> None:
        """Reads `fd` only while a process does.

        Args:
          fd: our stdin, which the caller closes; None: all processes have an empty one.
          selector: calls the `data` of a key whose descriptor is readable.
          has_screen: whether stdout of the processes is a pseudo-terminal.
        """
        is_terminal = fd is not None and os.isatty(fd)
        self._fd = fd if is_terminal and has_screen else None
        self._pipe_fd = None if is_terminal else fd
        self._pipe_owner: int | None = None
        self._selector = selector
        self._terminals: dict[int, int] = {}  # by process id.
        self._state = HolderState()
        self._saved: list | None = (
            None  # The mode of our terminal before we changed it.
        )
        self._handlers: dict[int, Any] = {}  # what we replaced meanwhile, by signal.
        self.has_taken_over = False
        self._is_watched = False
        self._next_s = 0.0
        self._interrupted_s = -math.inf

    @property
    def holder(self) -> int | None:
        """The process that has the keyboard."""
        return self._state.process_id

    def connect(self, process_id: int, our_fd: int, stdout_fd: int) -> int:
        """Returns the stdin of a process, for `subprocess.Popen`.

        The first process gets a pipe or file that is our stdin.

        Args:
          process_id: the process.
          our_fd: our end of the stdout of the process.
          stdout_fd: its own end.
        """
        if self._fd is not None:
            self._terminals[process_id] = our_fd
            return stdout_fd
        if self._pipe_owner is None:
            self._pipe_owner = process_id
        if self._pipe_fd is None or self._pipe_owner != process_id:
            return subprocess.DEVNULL
        return self._pipe_fd

    def disconnect(self, process_id: int) -> None:
        """Forgets a process; before the caller closes its pseudo-terminal."""
        self._terminals.pop(process_id, None)

    def poll(self, now_s: float) -> list[int]:
        """Looks which processes read; returns those that now have to wait."""
        if self._fd is None or now_s < self._next_s:
            return []
        self._next_s = now_s + _POLL_S
        readers = [i for i, fd in self._terminals.items() if _is_read(fd)]
        if not (readers or self._saved) or not _is_foreground(self._fd):
            self._watch(False)
            return []
        self.has_taken_over = False
        self._state, new = observe(self._state, readers, now_s=now_s)
        try:
            if self.holder is None:
                self._restore()
            else:
                self._take_over()
        except termios.error:  # The terminal is gone.
            self._lose()
            return []
        self._watch(self.holder in readers)
        return new

    def keep_interrupts(
        self, signums: list[int], processes: Mapping[int, subprocess.Popen[bytes]]
    ) -> list[int]:
        """Sends SIGINT to the process with the keyboard alone; returns the others.

        The second of two within `_TWICE_S` seconds is returned, too.
        """
        process = None if self.holder is None else processes.get(self.holder)
        if process is None or signal.SIGINT not in signums:
            return signums
        before_s, self._interrupted_s = self._interrupted_s, time.monotonic()
        if self._interrupted_s - before_s < _TWICE_S:
            return signums
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        return [signum for signum in signums if signum != signal.SIGINT]

    def close(self) -> None:
        """Gives our terminal the mode that it had."""
        self._watch(False)
        if self._fd is not None and _is_foreground(self._fd):
            with contextlib.suppress(termios.error):
                self._restore()

    def _watch(self, is_read: bool) -> None:
        if self._fd is None or is_read == self._is_watched:
            return
        self._is_watched = is_read
        if is_read:
            self._selector.register(self._fd, selectors.EVENT_READ, self._pass_on)
        else:
            self._selector.unregister(self._fd)

    def _pass_on(self) -> bool:
        """Passes some keys on, if the process still reads."""
        their_fd = self._terminals.get(-1 if self.holder is None else self.holder)
        if self._fd is None or their_fd is None or not _is_read(their_fd):
            self._watch(False)
            return False
        try:
            keys = os.read(self._fd, _READ_BYTES)
        except OSError:
            keys = b""
        if keys:
            os.write(their_fd, keys)
        else:
            self._lose()
        return False

    def _take_over(self) -> None:
        assert self._fd is not None
        mode = termios.tcgetattr(self._fd)
        wanted = _by_key(mode)
        if mode != wanted:  # Also after a shell has continued us.
            self.has_taken_over = True
            self._saved = self._saved or mode
            self._handle_signals()
            termios.tcsetattr(self._fd, termios.TCSANOW, wanted)

    def _restore(self) -> None:
        if self._saved is not None and self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSANOW, self._saved)
            self._saved = None
            self._leave_signals()

    def _handle_signals(self) -> None:
        """Gives the terminal its mode back before a signal stops or ends us.

        Handlers are of the main thread; elsewhere, and where the caller has its own or
        ignores a signal, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in _AT_ONCE:
            if signal.getsignal(signum) == signal.SIG_DFL:
                self._handlers[signum] = signal.signal(signum, self._obey)

    def _leave_signals(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _obey(self, signum: int, _: object) -> None:
        """Does what the signal does by default, with the terminal in its mode.

        After SIGCONT, `poll` takes the terminal over again.
        """
        fd, saved = self._fd, self._saved
        if fd is not None and saved is not None and _is_foreground(fd):
            with contextlib.suppress(termios.error):
                termios.tcsetattr(fd, termios.TCSANOW, saved)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        signal.signal(signum, self._obey)

    def _lose(self) -> None:
        self._watch(False)
        self._fd = None
        self._state = HolderState()


def _by_key(mode: list) -> list:
    """Returns a mode in which each key can be read at once, and none is echoed.

    Ctrl-C, Ctrl-Z and Ctrl-\\ still send signals to the launcher.
    """
    iflag, oflag, cflag, lflag, *speeds, characters = mode
    iflag &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON)
    lflag &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
    characters = list(characters)
    # `tcgetattr` returns numbers for these two where the mode is not ICANON.
    characters[termios.VMIN], characters[termios.VTIME] = 1, 0
    return [iflag, oflag, cflag, lflag, *speeds, characters]


def _is_read(fd: int) -> bool:
    """Returns whether a process reads its pseudo-terminal by key, or without echo."""
    both = termios.ICANON | termios.ECHO
    try:
        return termios.tcgetattr(fd)[3] & both != both
    except termios.error:
        return False


def _is_foreground(fd: int) -> bool:
    """Returns whether the shell lets us use the terminal."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # It is not the terminal of our session.
        return True
