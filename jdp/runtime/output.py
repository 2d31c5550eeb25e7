"""Output: how do the lines of many processes share one terminal or one file?

Every process writes into pipes or pseudo-terminals of its own. `Forwarder` reads them
and writes to `Screen`s, one for each place our own stdout and stderr lead to. What a
screen shows is decided by pure functions over bytes; nothing is decoded.
"""

import collections
import dataclasses
import fcntl
import functools
import os
import re
import select
import selectors
import struct
import termios
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

TAIL_LINES = 20
_TAIL_LINE_BYTES = 2000
_READ_BYTES = 1 << 16
# How long an unfinished line may wait for its end before a terminal shows it.
_PARTIAL_DELAY_S = 0.05
_PARTIAL_BYTES = 4096
_COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94, 91, 31)
_RESET = b"\x1b[0m"
_DEFAULT_NUM_ROWS = 24  # of a terminal that does not say.
_ERASE_LINE = b"\r\x1b[K"
_ERASE_LINE_ABOVE = b"\x1b[A\x1b[2K"
# An unfinished line is erased and drawn again, so it must stay on one row.
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_END = re.compile(rb"\r\n|\r|\n")
# A process that turns colours off one by one, never all, would carry them for ever.
_MAX_STYLES = 8
# Moves to other rows, and erasures that reach our prefix: on a terminal that is shared,
# a process owns one line. Displays of many lines come out one below the other.
_MOVE = re.compile(rb"\x1b\[(?:[0-9;]*[ABEFHJf]|[12]K)")
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_ESCAPE = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]")
_STYLE = re.compile(rb"\x1b\[([0-9;:]*)m")


class PlainState(NamedTuple):
    """What stands on the current line of a file or a pipe."""

    open_owner: int | None = None  # Whose text ended in a carriage return there.


class TerminalState(NamedTuple):
    """The unfinished lines; the last one is on the bottom row, below the footer."""

    unfinished: tuple[tuple[int, bytes], ...] = ()  # (owner, text).
    footer: tuple[bytes, ...] = ()  # lines that stay below what comes.


def prefix(process_id: int, *, num_processes: int, is_colored: bool) -> bytes:
    """Returns what stands before every line of a process, such as `[3] `."""
    width = len(str(num_processes - 1)) + 3
    text = f"[{process_id}]".ljust(width).encode()
    if not is_colored:
        return text
    color = _COLORS[process_id % len(_COLORS)]
    return b"\x1b[0;%dm%s%s" % (color, text, _RESET)


def split_segments(chunk: bytes) -> tuple[list[bytes], bytes]:
    r"""Splits `chunk` behind each `\n`, `\r\n` and lone `\r`.

    Returns:
      The segments with their ends, and the rest that has no end yet. Together they are
      `chunk`.
    """
    segments, start = [], 0
    for end in _END.finditer(chunk):
        segments.append(chunk[start : end.end()])
        start = end.end()
    return segments, chunk[start:]


def carry_style(style: bytes, text: bytes) -> bytes:
    """Returns the colours that are still on after `text`, `style` being on before."""
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

    A line that ended in `\r` is open: what follows from the same owner replaces it,
    anything else goes to a line of its own.
    """
    close = b"\n" if state.open_owner not in (None, owner) else b""
    if segment == b"\r":
        return state, b""
    if segment == b"\r\n":  # As if the two had been read one by one.
        segment = b"\n"
    if segment == b"\n" and state.open_owner == owner:
        return PlainState(), segment
    is_open = not segment.endswith(b"\n")
    return PlainState(owner if is_open else None), close + prefix + segment


def render_terminal(
    state: TerminalState,
    owner: int,
    lines: Sequence[bytes],
    unfinished: bytes,
    footer: Sequence[bytes] | None = None,
) -> tuple[TerminalState, bytes]:
    """Places whole lines of one owner above the footer and the unfinished lines of all.

    Args:
      state: the unfinished lines until now.
      owner: whose lines these are.
      lines: with their prefixes, without their ends.
      unfinished: the new unfinished line of `owner`, with its prefix; empty for none.
      footer: the new footer, line by line; None: it stays.

    Returns:
      The new state, and the bytes that take the terminal there.
    """
    out = [_ERASE_LINE] if state.unfinished else []
    out += [_ERASE_LINE_ABOVE] * len(state.footer)
    out += [line + b"\n" for line in lines]
    footer = state.footer if footer is None else tuple(footer)
    out += [_NO_WRAP + line + _WRAP + b"\n" for line in footer]
    kept = tuple(item for item in state.unfinished if item[0] != owner)
    if unfinished:
        kept += ((owner, unfinished),)
    if kept:
        out.append(_NO_WRAP + kept[-1][1] + _WRAP)
    return TerminalState(kept, footer), b"".join(out)


class Screen:
    """One place to write to; stdout and stderr share it where they lead to one place.

    Attributes:
      is_terminal: whether unfinished lines can be drawn again.
      backlog: bytes that its reader has not taken yet.
      is_broken: whether its reader has gone; what is written then is dropped.
    """

    def __init__(self, fd: int) -> None:
        """Takes an open descriptor, which stays the caller's."""
        self.is_terminal = os.isatty(fd) and os.environ.get("TERM") != "dumb"
        self.backlog = bytearray()
        self.is_broken = False
        self.fd = fd
        self._plain = PlainState()
        self._terminal = TerminalState()
        self._may_hide_cursor = False

    def write(self, owner: int, prefix: bytes, segment: bytes) -> None:
        """Adds one segment of a file or pipe to the backlog."""
        self._plain, out = render_plain(self._plain, owner, prefix, segment)
        self.backlog += out

    def draw(self, owner: int, lines: Sequence[bytes], unfinished: bytes) -> None:
        """Adds lines of a terminal to the backlog."""
        self._terminal, out = render_terminal(self._terminal, owner, lines, unfinished)
        self._may_hide_cursor |= _HIDE_CURSOR in out
        self.backlog += out

    def draw_footer(self, lines: Sequence[bytes]) -> None:
        """Shows lines below all others of a terminal, in place of those before."""
        num_rows = os.get_terminal_size(self.fd).lines or _DEFAULT_NUM_ROWS
        kept = lines[: max(0, num_rows - 2)]  # What has scrolled off stays there.
        self._terminal, out = render_terminal(self._terminal, -1, [], b"", kept)
        self.backlog += out

    def close(self) -> None:
        """Leaves the place as it was found, also by processes that were killed."""
        self.close_line()
        if self._may_hide_cursor:
            self.backlog += _SHOW_CURSOR

    def close_line(self, owner: int | None = None) -> None:
        """Ends the line that `owner`, by default anybody, left open."""
        if self._plain.open_owner is not None:
            if owner in (None, self._plain.open_owner):
                self._plain = PlainState()
                self.backlog += b"\n"

    def flush(self, *, timeout_s: float) -> None:
        """Writes the backlog as far as its reader takes it within `timeout_s`."""
        while self.backlog and not self.is_broken:
            if not select.select([], [self.fd], [], timeout_s)[1]:
                return
            try:
                # A ready pipe takes this many bytes without blocking.
                num_bytes = os.write(self.fd, self.backlog[: select.PIPE_BUF])
            except BlockingIOError:
                return
            except OSError:
                self.is_broken = True
            else:
                del self.backlog[:num_bytes]
        if self.is_broken:
            self.backlog.clear()


@dataclasses.dataclass(eq=False)
class _Stream:
    """What one process writes to one of its two outputs."""

    owner: int  # Unique among the streams.
    process_id: int
    fd: int
    screen: Screen
    prefix: bytes
    pieces: list[bytes] = dataclasses.field(default_factory=list)  # No end yet.
    replaced: bytes = b""  # What stood before the last `\r`, nothing having followed.
    style: bytes = b""
    is_changed: bool = False  # Its unfinished line was not drawn yet.

    def take(self, chunk: bytes) -> list[bytes]:
        """Adds `chunk` and returns the segments that it completes."""
        segments, rest = split_segments(chunk)
        if segments:
            segments[0] = b"".join([*self.pieces, segments[0]])
            self.pieces.clear()
        if rest:
            self.pieces.append(rest)
        return segments


class Forwarder:
    """Brings the output of processes to our own stdout and stderr, line by line."""

    def __init__(self, *, num_processes: int, stdout_fd: int, stderr_fd: int) -> None:
        """Takes the number of processes of the job, for the width of the prefix."""
        out, err = os.fstat(stdout_fd), os.fstat(stderr_fd)
        self.stdout = self.stderr = Screen(stdout_fd)
        if (out.st_dev, out.st_ino) != (err.st_dev, err.st_ino):
            self.stderr = Screen(stderr_fd)
        self._num_processes = num_processes
        self._selector = selectors.DefaultSelector()
        self._streams: list[_Stream] = []
        self._tails: dict[int, collections.deque[bytes]] = {}
        self._partial_due_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether a process may still write."""
        return bool(self._streams)

    @property
    def has_backlog(self) -> bool:
        """Whether a reader of ours is slower than the processes."""
        return bool(self.stdout.backlog or self.stderr.backlog)

    @property
    def is_broken(self) -> bool:
        """Whether a reader of ours has gone."""
        return self.stdout.is_broken or self.stderr.is_broken

    def open_streams(self, process_id: int) -> tuple[int, int]:
        """Makes the two outputs of a process.

        Returns:
          The descriptors for its stdout and its stderr, which the caller closes.
        """
        self._tails[process_id] = collections.deque(maxlen=TAIL_LINES)
        return (
            self._open_stream(2 * process_id, process_id, self.stdout),
            self._open_stream(2 * process_id + 1, process_id, self.stderr),
        )

    def watch(self, fd: int, heard: Callable[[bytes], None] | None = None) -> None:
        """Lets `pump` return early when `fd` can be read, and call `heard` with that.

        Args:
          fd: of a pipe or a socket; the caller closes it after this object.
          heard: gets what one `read` returns; by default it is dropped.
        """

        def take() -> bool:
            chunk = os.read(fd, _READ_BYTES)
            if heard is not None:
                heard(chunk)
            return False

        self._selector.register(fd, selectors.EVENT_READ, take)

    def pump(self, *, timeout_s: float) -> bool:
        """Forwards what there is, waiting at most `timeout_s` for something to come.

        Nothing is read while a reader of ours has not taken what was read before.

        Returns:
          Whether a process has written something.
        """
        self.flush(timeout_s=timeout_s)
        if self.has_backlog:
            return False
        has_read = False
        for key, _ in self._selector.select(self._wait_s(timeout_s)):
            has_read |= key.data()
        if self._partial_due_s is not None:
            if time.monotonic() >= self._partial_due_s:
                self._draw_unfinished()
        self.flush(timeout_s=0.0)
        return has_read

    def flush(self, *, timeout_s: float) -> None:
        """Gives the readers of ours `timeout_s` to take what was read."""
        for screen in {self.stdout, self.stderr}:
            screen.flush(timeout_s=timeout_s)

    def print_line(self, text: str) -> None:
        """Shows a line of the launcher itself, on stderr."""
        line = text.encode(errors="surrogateescape")
        if self.stderr.is_terminal:
            self.stderr.draw(-1, [line], b"")
        else:
            self.stderr.write(-1, b"", line + b"\n")

    def print_tail(self, process_id: int) -> None:
        """Shows the last lines of a process again, on stderr."""
        lines = self._tails.get(process_id, ())
        self.print_line(
            "jdp launch: its last lines were:"
            if lines
            else "jdp launch: it was silent."
        )
        start = prefix(
            process_id,
            num_processes=self._num_processes,
            is_colored=self._is_colored(self.stderr),
        )
        for line in lines:
            if self.stderr.is_terminal:
                self.stderr.draw(-1, [start + line + _RESET], b"")
            else:
                self.stderr.write(-1, start, line + b"\n")

    def resize(self) -> None:
        """Gives the pseudo-terminals of the processes the width of our terminal."""
        for stream in self._streams:
            if stream.screen.is_terminal:
                _copy_size(stream.screen.fd, stream.fd, margin=self._prefix_width())

    def close(self) -> None:
        """Ends every stream; what was read of them is shown, the rest is not."""
        for stream in list(self._streams):
            self._end(stream)
        for screen in {self.stdout, self.stderr}:
            screen.close()
        self._selector.close()

    def _open_stream(self, owner: int, process_id: int, screen: Screen) -> int:
        if screen.is_terminal:
            read_fd, write_fd = os.openpty()
            _copy_size(screen.fd, read_fd, margin=self._prefix_width())
        else:
            read_fd, write_fd = os.pipe()
        stream = _Stream(
            owner=owner,
            process_id=process_id,
            fd=read_fd,
            screen=screen,
            prefix=prefix(
                process_id,
                num_processes=self._num_processes,
                is_colored=self._is_colored(screen),
            ),
        )
        self._streams.append(stream)
        take = functools.partial(self._read, stream)
        self._selector.register(read_fd, selectors.EVENT_READ, take)
        return write_fd

    def _read(self, stream: _Stream) -> bool:
        try:
            chunk = os.read(stream.fd, _READ_BYTES)
        except OSError:
            chunk = b""  # Linux: the last writer of a pseudo-terminal has gone.
        if not chunk:
            self._end(stream)
            return False
        self._show(stream, stream.take(chunk))
        return True

    def _show(self, stream: _Stream, segments: list[bytes]) -> None:
        lines = []
        for segment in segments:
            if not stream.screen.is_terminal:
                stream.screen.write(stream.owner, stream.prefix, segment)
            text = segment.rstrip(b"\r\n") or stream.replaced
            if segment.endswith(b"\n"):
                lines.append(self._styled(stream, text))
                stream.style = carry_style(stream.style, text)
                self._tails[stream.process_id].append(text[:_TAIL_LINE_BYTES])
            stream.replaced = b"" if segment.endswith(b"\n") else text
        if not stream.screen.is_terminal:
            return
        if lines:
            stream.screen.draw(stream.owner, lines, b"")
        stream.is_changed = bool(stream.pieces or stream.replaced)
        if stream.is_changed and self._partial_due_s is None:
            self._partial_due_s = time.monotonic() + _PARTIAL_DELAY_S

    def _styled(self, stream: _Stream, text: bytes) -> bytes:
        """Puts the prefix before `text`, and keeps its colours out of other lines."""
        text = _MOVE.sub(b"", text)
        end = _RESET if carry_style(stream.style, text) else b""
        return stream.prefix + stream.style + text + end

    def _draw_unfinished(self) -> None:
        self._partial_due_s = None
        for stream in self._streams:
            if stream.is_changed:
                stream.is_changed = False
                text = b"".join(stream.pieces)[:_PARTIAL_BYTES] or stream.replaced
                stream.screen.draw(stream.owner, [], self._styled(stream, text))

    def _end(self, stream: _Stream) -> None:
        """Shows what has no final newline, and lets go of the stream."""
        self._streams.remove(stream)
        self._selector.unregister(stream.fd)
        os.close(stream.fd)
        is_terminal = stream.screen.is_terminal
        if is_terminal and not _ESCAPE.sub(b"", b"".join(stream.pieces)):
            stream.pieces.clear()  # Such as the cursor that a progress bar gives back.
            stream.screen.draw(stream.owner, [], b"")
        if stream.pieces or (is_terminal and stream.replaced):
            self._show(stream, stream.take(b"\n"))
        stream.screen.close_line(stream.owner)

    def _wait_s(self, timeout_s: float) -> float:
        if self._partial_due_s is None:
            return timeout_s
        return min(timeout_s, max(self._partial_due_s - time.monotonic(), 0.0))

    def _prefix_width(self) -> int:
        return len(prefix(0, num_processes=self._num_processes, is_colored=False))

    def _is_colored(self, screen: Screen) -> bool:
        return screen.is_terminal and not os.environ.get("NO_COLOR")


def _copy_size(from_fd: int, to_fd: int, *, margin: int) -> None:
    """Copies the size of a terminal, less the columns that the prefix takes."""
    size = fcntl.ioctl(from_fd, termios.TIOCGWINSZ, bytes(8))
    num_rows, num_columns, *pixels = struct.unpack("HHHH", size)
    if num_columns > margin:
        num_columns -= margin
    fcntl.ioctl(
        to_fd,
        termios.TIOCSWINSZ,
        struct.pack("HHHH", num_rows, num_columns, *pixels),
    )
