"""Screen: how are the lines of many processes shown in one place?

Pure functions over bytes decide it, for a terminal and for a file or a pipe, without
decoding. `Screen` holds the bytes that its reader has not taken yet.
"""

import errno
import os
import re
import select
from collections.abc import Sequence
from typing import NamedTuple

RESET = b"\x1b[0m"
_COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94, 91, 31)
_DEFAULT_NUM_ROWS = 24  # where a terminal does not report its size.
_ERASE_LINE = b"\r\x1b[K"
_ERASE_LINE_ABOVE = b"\x1b[A\x1b[2K"
# An unfinished line is erased and drawn again, so it must stay on one row.
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_END = re.compile(rb"\r\n|\r|\n")
# Codes of a process that never resets its colors would pile up for ever.
_MAX_STYLES = 8
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_STYLE = re.compile(rb"\x1b\[([0-9;:]*)m")


class PlainState(NamedTuple):
    """Text on the current line of a file or a pipe."""

    open_owner: int | None = None  # Owner of the text there without a newline.
    is_partial: bool = False  # It has no carriage return either, and continues.


class TerminalState(NamedTuple):
    """The unfinished lines; the last one is on the bottom row, below the footer."""

    unfinished: tuple[tuple[int, bytes], ...] = ()  # (owner, text).
    footer: tuple[bytes, ...] = ()  # lines that stay below all others.


def prefix(process_id: int, *, num_processes: int, is_colored: bool) -> bytes:
    """Returns the prefix of every line of a process, such as `[3] `."""
    width = len(str(num_processes - 1)) + 3
    text = f"[{process_id}]".ljust(width).encode()
    if not is_colored:
        return text
    color = _COLORS[process_id % len(_COLORS)]
    return b"\x1b[0;%dm%s%s" % (color, text, RESET)


def split_segments(chunk: bytes) -> tuple[list[bytes], bytes]:
    r"""Splits `chunk` behind each `\n`, `\r\n` and lone `\r`.

    Returns:
      The segments with their ends, and the unfinished rest. Together they are `chunk`.
    """
    segments, start = [], 0
    for end in _END.finditer(chunk):
        segments.append(chunk[start : end.end()])
        start = end.end()
    return segments, chunk[start:]


def carry_style(style: bytes, text: bytes) -> bytes:
    """Returns the color codes active after `text`, given `style` before it."""
    active: list[bytes] = []
    for match in _STYLE.finditer(style + text):
        if not match[1].strip(b"0"):
            active.clear()
        else:
            active.append(match[0])
    return b"".join(active[-_MAX_STYLES:])


def render_plain(
    state: PlainState, owner: int, prefix: bytes, segment: bytes
) -> tuple[PlainState, bytes]:
    r"""Places one segment of `split_segments` in a file or a pipe.

    A line that ended in `\r` is open: the next segment of its owner replaces it, and
    segments of others start a new line. A line without any end continues.
    """
    close = b"\n" if state.open_owner not in (None, owner) else b""
    if state.is_partial and state.open_owner == owner:
        prefix = b""
    if segment == b"\r":
        return state, b""
    if segment == b"\r\n":  # As if the two had been read one by one.
        segment = b"\n"
    if segment == b"\n" and state.open_owner == owner:
        return PlainState(), segment
    is_open = not segment.endswith(b"\n")
    is_partial = is_open and not segment.endswith(b"\r")
    return (
        PlainState(owner if is_open else None, is_partial),
        close + prefix + segment,
    )


def render_terminal(
    state: TerminalState,
    owner: int,
    lines: Sequence[bytes],
    unfinished: bytes,
    footer: Sequence[bytes] | None = None,
    front: int | None = None,
) -> tuple[TerminalState, bytes]:
    """Places whole lines of one owner above the footer and the unfinished lines of all.

    Args:
      state: the unfinished lines so far.
      owner: the stream that wrote the lines.
      lines: with their prefixes, without their ends.
      unfinished: the new unfinished line of `owner`, with its prefix; empty for none.
      footer: the new footer, line by line; None: the footer stays.
      front: the owner whose unfinished line alone is shown; None: the last one is.

    Returns:
      The new state, and the bytes to write to the terminal.
    """
    out = [_ERASE_LINE] if state.unfinished else []
    out += [_ERASE_LINE_ABOVE] * len(state.footer)
    out += [line + b"\n" for line in lines]
    footer = state.footer if footer is None else tuple(footer)
    out += [_NO_WRAP + line + _WRAP + b"\n" for line in footer]
    kept = tuple(item for item in state.unfinished if item[0] != owner)
    if unfinished:
        kept += ((owner, unfinished),)
    kept = tuple(sorted(kept, key=lambda item: item[0] == front))
    if kept and front in (None, kept[-1][0]):
        out.append(_NO_WRAP + kept[-1][1] + _WRAP)
    return TerminalState(kept, footer), b"".join(out)


class Screen:
    """One place to write to; stdout and stderr share it where they lead to one place.

    Attributes:
      is_terminal: whether unfinished lines can be drawn again.
      backlog: bytes that its reader has not taken yet.
      is_broken: whether its reader is gone; later writes are dropped.
      disk_error: why a write to a file failed; its bytes are dropped, and later writes
        are tried again.
      front: the owner whose unfinished line alone is shown on a terminal.
    """

    def __init__(self, fd: int) -> None:
        """Uses an open descriptor, which the caller closes."""
        self.is_terminal = os.isatty(fd) and os.environ.get("TERM") != "dumb"
        self.backlog = bytearray()
        self.is_broken = False
        self.disk_error: str | None = None
        self.fd = fd
        self.front: int | None = None
        self._plain = PlainState()
        self._terminal = TerminalState()
        self._may_hide_cursor = False

    def write(self, owner: int, prefix: bytes, segment: bytes) -> None:
        """Adds one segment of a file or pipe to the backlog."""
        self._plain, out = render_plain(self._plain, owner, prefix, segment)
        self.backlog += out

    def draw(self, owner: int, lines: Sequence[bytes], unfinished: bytes) -> None:
        """Adds lines of a terminal to the backlog."""
        self._terminal, out = render_terminal(
            self._terminal, owner, lines, unfinished, front=self.front
        )
        self._may_hide_cursor |= _HIDE_CURSOR in out
        self.backlog += out

    def draw_footer(self, lines: Sequence[bytes]) -> None:
        """Replaces the lines below all others of a terminal."""
        num_rows = os.get_terminal_size(self.fd).lines or _DEFAULT_NUM_ROWS
        kept = lines[: max(0, num_rows - 2)]  # Lines that have scrolled off stay there.
        self._terminal, out = render_terminal(
            self._terminal, -1, [], b"", kept, front=self.front
        )
        self.backlog += out

    def close(self) -> None:
        """Ends open lines and resets colors, also after processes that were killed."""
        self.close_line()
        if self._may_hide_cursor:
            self.backlog += _SHOW_CURSOR

    def close_line(self, owner: int | None = None) -> None:
        """Ends the line that `owner`, by default any, left open."""
        if self._plain.open_owner is not None:
            if owner in (None, self._plain.open_owner):
                self._plain = PlainState()
                self.backlog += b"\n"

    def flush(self, *, timeout_s: float) -> None:
        """Writes as much of the backlog as its reader takes within `timeout_s`."""
        while self.backlog and not self.is_broken:
            if not select.select([], [self.fd], [], timeout_s)[1]:
                return
            try:
                # A ready pipe takes this many bytes without blocking.
                num_bytes = os.write(self.fd, self.backlog[: select.PIPE_BUF])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _DISK_ERRORS:
                    self.is_broken = True
                    break
                self.disk_error = self.disk_error or error.strerror
                self.backlog.clear()
            else:
                del self.backlog[:num_bytes]
        if self.is_broken:
            self.backlog.clear()
