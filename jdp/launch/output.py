"""Output: how do the lines of many processes share one terminal or one file?

Every process writes into pipes or pseudo-terminals of its own. `Forwarder` reads them
and writes to `Screen`s, one for each place that our stdout and stderr lead to.
"""

import collections
import dataclasses
import fcntl
import functools
import os
import re
import selectors
import struct
import termios
import time
from collections.abc import Callable

from jdp.launch import keyboard as keyboards
from jdp.launch import screen as screens
from jdp.launch.logs import LogFiles
from jdp.launch.screen import Screen

TAIL_LINES = 20
_TAIL_LINE_BYTES = 2000
_READ_BYTES = 1 << 16
# How long an unfinished line may wait for its end before a terminal shows it.
_PARTIAL_DELAY_S = 0.05
_PARTIAL_BYTES = 4096
# Moves to other rows, and erasures that reach our prefix: on a terminal that is shared,
# a process owns one line. Displays of many lines come out one below the other.
# Brackets around pasted text are refused, since a terminal would keep them on.
_MOVE = re.compile(rb"\x1b\[(?:[0-9;]*[ABEFHJf]|[12]K|\?2004[hl])")
# An unfinished line is shown after this many seconds, or this many bytes.
_HOLD_S = 1.0
_HOLD_BYTES = 1 << 16
_ESCAPE = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]")


def open_missing() -> None:
    """Opens stdin, stdout and stderr if they are closed, as by `>&-` in a shell.

    Otherwise the next file that is opened would get their descriptor.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            null_fd = os.open(os.devnull, os.O_RDWR)
            if null_fd != fd:
                os.dup2(null_fd, fd)
                os.close(null_fd)


@dataclasses.dataclass(eq=False)
class _Stream:
    """Output of one process on stdout or stderr."""

    owner: int  # Unique among the streams.
    process_id: int
    fd: int
    screen: Screen
    prefix: bytes
    # The unfinished line.
    pieces: list[bytes] = dataclasses.field(default_factory=list)
    replaced: bytes = b""  # The text before a final `\r`.
    style: bytes = b""
    is_changed: bool = False  # Its unfinished line was not drawn yet.
    num_held: int = 0  # bytes of `pieces`.
    held_since_s: float = 0.0
    shown: bytes = b""  # the shown part of the unfinished line.

    def take(self, chunk: bytes) -> list[bytes]:
        """Adds `chunk` and returns the segments that it completes."""
        segments, rest = screens.split_segments(chunk)
        if segments:
            segments[0] = self.let_go() + segments[0]
        if rest:
            if not self.pieces:
                self.held_since_s = time.monotonic()
            self.pieces.append(rest)
            self.num_held += len(rest)
        return segments

    def let_go(self) -> bytes:
        """Removes and returns the unfinished line."""
        held = b"".join(self.pieces)
        self.pieces.clear()
        self.num_held = 0
        return held


class Forwarder:
    """Brings the output of processes to our own stdout and stderr, line by line."""

    def __init__(
        self,
        *,
        num_processes: int,
        stdout_fd: int,
        stderr_fd: int,
        logs: LogFiles | None = None,
        stdin_fd: int | None = None,
    ) -> None:
        """The width of the prefix follows from `num_processes`; closes `logs`."""
        out, err = os.fstat(stdout_fd), os.fstat(stderr_fd)
        self.stdout = self.stderr = Screen(stdout_fd)
        if (out.st_dev, out.st_ino) != (err.st_dev, err.st_ino):
            self.stderr = Screen(stderr_fd)
        self._num_processes = num_processes
        self._logs = logs
        self._selector = selectors.DefaultSelector()
        self.keyboard = keyboards.Keyboard(
            stdin_fd, self._selector, has_screen=self.stdout.is_terminal
        )
        self._streams: list[_Stream] = []
        self._tails: dict[int, collections.deque[bytes]] = {}
        self._partial_due_s: float | None = None
        # Screens, and logs, whose disk errors were reported.
        self._told: set[Screen | LogFiles] = set()

    @property
    def is_open(self) -> bool:
        """Whether a process may still write."""
        return bool(self._streams)

    @property
    def has_backlog(self) -> bool:
        """Whether a reader of our output is slower than the processes."""
        return bool(self.stdout.backlog or self.stderr.backlog)

    @property
    def is_broken(self) -> bool:
        """Whether a reader of our output is gone."""
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

    def find_stdin(self, process_id: int, stdout_fd: int) -> int:
        """Returns the stdin of a process, given its stdout, for `subprocess.Popen`."""
        ours = {stream.owner: stream.fd for stream in self._streams}
        return self.keyboard.connect(process_id, ours[2 * process_id], stdout_fd)

    def watch(self, fd: int, heard: Callable[[bytes], None] | None = None) -> None:
        """Makes `pump` return early when `fd` is readable, and read it.

        Args:
          fd: descriptor of a pipe or socket; the caller closes it after this object.
          heard: called with the bytes of each `read`; None: they are dropped.
        """

        def take() -> bool:
            chunk = os.read(fd, _READ_BYTES)
            if heard is not None:
                heard(chunk)
            return False

        self._selector.register(fd, selectors.EVENT_READ, take)

    def pump(self, *, timeout_s: float) -> bool:
        """Forwards output, waiting at most `timeout_s` for some to arrive.

        Nothing is read while a reader of our output has a backlog.

        Returns:
          Whether a process has written something.
        """
        self.flush(timeout_s=timeout_s)
        if self.has_backlog:
            return False
        has_read = False
        for key, _ in self._selector.select(self._wait_s(timeout_s)):
            has_read |= key.data()
        now_s = time.monotonic()
        self._poll_keyboard(now_s)
        if self._partial_due_s is not None and now_s >= self._partial_due_s:
            self._draw_unfinished()
        for stream in self._streams:
            if stream.pieces and not stream.screen.is_terminal:
                if now_s - stream.held_since_s >= _HOLD_S:
                    self._show_held(stream)
        self.flush(timeout_s=0.0)
        self._tell_disk_errors()
        return has_read

    def flush(self, *, timeout_s: float) -> None:
        """Writes the backlog, waiting at most `timeout_s` for our readers."""
        for screen in {self.stdout, self.stderr}:
            screen.flush(timeout_s=timeout_s)

    def print_line(self, text: str) -> None:
        """Prints a line of the launcher on stderr."""
        line = text.encode(errors="surrogateescape")
        if self.stderr.is_terminal:
            self.stderr.draw(-1, [line], b"")
        else:
            self.stderr.write(-1, b"", line + b"\n")

    def print_tail(self, process_id: int) -> None:
        """Prints the last lines of a process again, on stderr."""
        lines = self._tails.get(process_id, ())
        said = "its last lines were:" if lines else "it was silent."
        self.print_line(f"jdp launch: {said}")
        start = screens.prefix(
            process_id,
            num_processes=self._num_processes,
            is_colored=self._is_colored(self.stderr),
        )
        for line in lines:
            if self.stderr.is_terminal:
                self.stderr.draw(-1, [start + line + screens.RESET], b"")
            else:
                self.stderr.write(-1, start, line + b"\n")

    def resize(self) -> None:
        """Gives the pseudo-terminals of the processes the width of our terminal."""
        for stream in self._streams:
            if stream.screen.is_terminal:
                _copy_size(stream.screen.fd, stream.fd, margin=self._prefix_width())

    def close(self) -> None:
        """Ends every stream; shows the bytes read so far, not the rest."""
        self.keyboard.close()
        for stream in list(self._streams):
            self._end(stream)
        for screen in {self.stdout, self.stderr}:
            screen.close()
        if self._logs is not None:
            self._logs.close()
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
            prefix=screens.prefix(
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
        if self._logs is not None:
            self._logs.take(stream.process_id, stream.fd, chunk)
        self._show(stream, stream.take(chunk))
        if stream.num_held >= _HOLD_BYTES:
            if stream.screen.is_terminal:
                self._show(stream, stream.take(b"\n"))
            else:
                self._show_held(stream)
        return True

    def _show_held(self, stream: _Stream) -> None:
        """Shows an unfinished line in a file or a pipe; the line continues."""
        held = stream.let_go()
        stream.screen.write(stream.owner, stream.prefix, held)
        stream.shown = (stream.shown + held)[:_TAIL_LINE_BYTES]

    def _tell_disk_errors(self) -> None:
        """Reports each disk error once, on a screen that still works."""
        logs = self._logs
        if logs is not None and logs.error is not None and logs not in self._told:
            self._told.add(logs)
            self.print_line(
                f"jdp launch: the logs cannot be written ({logs.error.strerror}); the "
                "job goes on, and they lack lines."
            )
        for screen in {self.stdout, self.stderr} - self._told:
            if screen.disk_error is not None:
                self._told.add(screen)
                name = "stdout" if screen is self.stdout else "stderr"
                self.print_line(
                    f"jdp launch: {name} cannot be written ({screen.disk_error}); the "
                    "job goes on, and output is lost while that lasts."
                )

    def _show(self, stream: _Stream, segments: list[bytes]) -> None:
        lines = []
        for segment in segments:
            if not stream.screen.is_terminal:
                stream.screen.write(stream.owner, stream.prefix, segment)
            text = stream.shown + segment.rstrip(b"\r\n") or stream.replaced
            stream.shown = b""
            if segment.endswith(b"\n"):
                lines.append(self._styled(stream, text))
                stream.style = screens.carry_style(stream.style, text)
                self._tails[stream.process_id].append(text[:_TAIL_LINE_BYTES])
            stream.replaced = b"" if segment.endswith(b"\n") else text
        if not stream.screen.is_terminal:
            return
        if lines:
            stream.screen.draw(stream.owner, lines, b"")
        stream.is_changed = bool(stream.pieces or stream.replaced)
        if stream.is_changed and stream.owner == stream.screen.front:
            self._partial_due_s = 0.0  # The echo of a key.
        elif stream.is_changed and self._partial_due_s is None:
            self._partial_due_s = time.monotonic() + _PARTIAL_DELAY_S

    def _poll_keyboard(self, now_s: float) -> None:
        """Puts the line of the process that has the keyboard below the others."""
        waiting, holder = self.keyboard.poll(now_s), self.keyboard.holder
        for each in waiting:
            text = f"process {each} waits for the keyboard, which process {holder} has"
            self.print_line(f"jdp launch: {text}.")
        front = None
        if holder is not None:  # The prompt of `getpass` is on stderr.
            own = [each for each in self._streams if each.process_id == holder]
            lines = [stream.owner for stream in own if stream.pieces]
            front = min(lines, default=2 * holder)
        if front != self.stdout.front or self.keyboard.has_taken_over:
            self.stdout.front = front
            for stream in self._streams:
                if stream.owner == front and stream.pieces:
                    stream.is_changed, self._partial_due_s = True, 0.0

    def _styled(self, stream: _Stream, text: bytes) -> bytes:
        """Puts the prefix before `text`, and keeps its colors out of other lines."""
        text = _MOVE.sub(b"", text)
        end = screens.RESET if screens.carry_style(stream.style, text) else b""
        return stream.prefix + stream.style + text + end

    def _draw_unfinished(self) -> None:
        self._partial_due_s = None
        for stream in self._streams:
            if stream.is_changed:
                stream.is_changed = False
                text = b"".join(stream.pieces)[:_PARTIAL_BYTES] or stream.replaced
                stream.screen.draw(stream.owner, [], self._styled(stream, text))

    def _end(self, stream: _Stream) -> None:
        """Shows the unfinished line, and drops the stream."""
        self._streams.remove(stream)
        self._selector.unregister(stream.fd)
        if self._logs is not None:
            self._logs.end(stream.process_id, stream.fd)
        if stream.owner == 2 * stream.process_id:
            self.keyboard.disconnect(stream.process_id)
        os.close(stream.fd)
        is_terminal = stream.screen.is_terminal
        if is_terminal and not _ESCAPE.sub(b"", b"".join(stream.pieces)):
            stream.pieces.clear()  # Such as the cursor that a progress bar gives back.
            stream.screen.draw(stream.owner, [], b"")
        if stream.pieces or stream.shown or (is_terminal and stream.replaced):
            self._show(stream, stream.take(b"\n"))
        stream.screen.close_line(stream.owner)

    def _wait_s(self, timeout_s: float) -> float:
        if self._partial_due_s is None:
            return timeout_s
        return min(timeout_s, max(self._partial_due_s - time.monotonic(), 0.0))

    def _prefix_width(self) -> int:
        return len(
            screens.prefix(0, num_processes=self._num_processes, is_colored=False)
        )

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
