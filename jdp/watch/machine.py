"""Machine: what does Linux tell about a process, whatever the process does itself?"""

import os
import re
from typing import NamedTuple

from jdp.watch.process_report import Facts, State

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_WINDOW_NS = 1_000_000_000  # over which CPU time is compared.
# Part of a core that a process takes if its CPU time moves. A process that waits, with
# its beats and heartbeats, takes a hundredth of it.
_BUSY = 0.04
_KILLED = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class _Times(NamedTuple):
    """State and CPU time of a process."""

    letter: str  # of its main thread, as in /proc.
    total_s: float
    main_s: float


class ProcessPulse:
    """Facts about one process, over time."""

    def __init__(self, pid: int, *, now_ns: int):
        """Begins with a process that runs.

        Args:
          pid: process id on this host.
          now_ns: the time of the monotonic clock.
        """
        self._pid = pid
        self._state: State = "well"
        self._since_ns = now_ns
        self._window: list[tuple[int, _Times]] = []

    def look(self, *, now_ns: int, end: str = "", has_keyboard: bool = False) -> Facts:
        """Returns the facts now.

        Args:
          now_ns: the time of the monotonic clock.
          end: how the process has ended, in words; "" if it runs.
          has_keyboard: whether it reads from the keyboard.
        """
        times = None if end else _read(self._pid)
        state: State = "well"
        if times is None or times.letter in "ZX":
            state = "gone"
        elif times.letter in "Tt":
            state = "stopped" if times.letter == "T" else "traced"
        elif has_keyboard:
            state = "prompt"
        if state != self._state:
            self._state, self._since_ns = state, now_ns
        if times is None:
            return Facts(state, self._since_ns, end=end)
        while len(self._window) > 1 and now_ns - self._window[1][0] > _WINDOW_NS:
            self._window.pop(0)
        before_ns, before = self._window[0] if self._window else (now_ns, times)
        self._window.append((now_ns, times))
        wall_s = max(now_ns - before_ns, 1) * 1e-9
        return Facts(
            state,
            self._since_ns,
            is_busy=times.total_s - before.total_s > _BUSY * wall_s,
            is_main_busy=times.main_s - before.main_s > _BUSY * wall_s,
        )


def has_handler(pid: int, signum: int) -> bool:
    """Returns whether a process has a handler for a signal, which else may kill it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", file.read(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> (signum - 1) & 1)


def count_oom_kills(folders: tuple[str, ...]) -> int:
    """Returns how many processes the kernel has killed for lack of memory.

    Args:
      folders: folders of control groups that are asked beside the whole host.
    """
    count = 0
    for path in ("/proc/vmstat", *(f"{each}/memory.events" for each in folders)):
        try:
            with open(path) as file:
                found = _KILLED.search(file.read())
        except OSError:
            continue
        count += 0 if found is None else int(found[1])
    return count


def _read(pid: int) -> _Times | None:
    """Reads what /proc has; None if there is no such process."""
    try:
        letter, total_s = _read_stat(f"/proc/{pid}/stat")
        _, main_s = _read_stat(f"/proc/{pid}/task/{pid}/stat")
    except (OSError, ValueError, IndexError):
        return None
    return _Times(letter, total_s, main_s)


def _read_stat(path: str) -> tuple[str, float]:
    with open(path) as file:
        # The name, in parentheses, may have spaces and parentheses.
        fields = file.read().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) * _TICK_S
