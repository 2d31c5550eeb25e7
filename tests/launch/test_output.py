import fcntl
import os
import re
import struct
import termios
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.launch import output
from jdp.launch import screen as screens

TEXTS = st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"ab", b"\xff", b" "]))


class Pipes:
    """A forwarder whose processes are the test itself."""

    def __init__(self, num_processes, path):
        self.path = path
        self.out_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.forwarder = output.Forwarder(
            num_processes=num_processes, stdout_fd=self.out_fd, stderr_fd=self.out_fd
        )
        self.fds = [self.forwarder.open_streams(i) for i in range(num_processes)]

    def write(self, process_id, chunk, *, stream=0):
        if chunk:
            os.write(self.fds[process_id][stream], chunk)
            while self.forwarder.pump(timeout_s=0.0):
                pass

    def end(self):
        """Closes the processes' ends, and returns what was shown."""
        for fd in sum(self.fds, ()):
            os.close(fd)
        while self.forwarder.is_open:
            self.forwarder.pump(timeout_s=1.0)
        self.forwarder.close()
        self.forwarder.flush(timeout_s=1.0)
        os.close(self.out_fd)
        with open(self.path, "rb") as file:
            return file.read()


@pytest.fixture
def pipes(tmp_path):
    return lambda num_processes: Pipes(num_processes, tmp_path / "out")


@pytest.fixture
def terminal(monkeypatch):
    """A pseudo-terminal of 40 columns as our stdout and stderr."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    master_fd, slave_fd = os.openpty()
    fcntl.ioctl(slave_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 40, 0, 0))
    yield master_fd, slave_fd
    os.close(master_fd)
    os.close(slave_fd)


def show(data):
    """Returns the rows that a terminal shows for `data`, colours left out."""
    rows, column = [""], 0
    data = re.sub(rb"\x1b\[([0-9;]*m|\?7[hl])", b"", data)
    for token in re.findall(rb"\x1b\[A\x1b\[2K|\x1b\[K|[\r\n]|.", data):
        if token == b"\n":
            rows.append("")
            column = 0
        elif token == b"\r":
            column = 0
        elif token == b"\x1b[A\x1b[2K":
            assert not column
            rows[-2:] = [""]
        elif token == b"\x1b[K":
            rows[-1] = rows[-1][:column]
        else:
            row, char = rows[-1], token.decode()
            rows[-1] = row[:column] + char + row[column + 1 :]
            column += 1
    return rows


@given(TEXTS)
def test_segments_have_one_end_each_and_lose_nothing(texts):
    chunk = b"".join(texts)
    segments, rest = screens.split_segments(chunk)
    assert b"".join(segments) + rest == chunk
    assert all(re.fullmatch(rb"[^\r\n]*(\r|\n|\r\n)", item) for item in segments)
    assert not re.search(rb"[\r\n]", rest)


@pytest.mark.parametrize("num_processes, first", [(1, b"[3] "), (11, b"[3]  ")])
def test_prefixes_of_a_job_have_one_width(num_processes, first):
    start = screens.prefix(3, num_processes=num_processes, is_colored=False)
    assert start == first


def test_processes_have_different_colors():
    starts = {
        screens.prefix(i, num_processes=10, is_colored=True).split(b"[%d]" % i)[0]
        for i in range(10)
    }
    assert len(starts) == 10


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3)))
def test_the_cuts_between_reads_do_not_matter(tmp_path_factory, sizes):
    data = b"one\ntwo\r\nthree\r\r\n\n\nfour\rfive\rsix\n\r50%\r60%\r\nend"
    path = tmp_path_factory.mktemp("cuts") / "out"
    whole, cut = Pipes(1, path), Pipes(1, path.with_suffix(".cut"))
    whole.write(0, data)
    for size in sizes:
        cut.write(0, data[:size])
        data = data[size:]
    cut.write(0, data)
    assert cut.end() == whole.end()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([b"x", b"yy", b"\n"]))))
def test_lines_of_processes_never_mix(tmp_path_factory, writes):
    shared = Pipes(3, tmp_path_factory.mktemp("mix") / "out")
    written = [b"", b"", b""]
    for process_id, chunk in writes:
        shared.write(process_id, chunk)
        written[process_id] += chunk
    lines = shared.end().splitlines(keepends=True)
    for i in range(3):
        start = b"[%d] " % i
        own = [line.removeprefix(start) for line in lines if line.startswith(start)]
        assert [line.rstrip(b"\n") for line in own] == written[i].splitlines()
    assert all(re.match(rb"\[[0-2]\] [xy]*\n", line) for line in lines)


def test_a_progress_bar_has_its_prefix_after_each_return(pipes):
    shared = pipes(1)
    for percent in (10, 20, 100):
        shared.write(0, b"\r%d%%" % percent)
    shared.write(0, b"\n")
    assert shared.end() == b"[0] 10%\r[0] 20%\r[0] 100%\n"


def test_a_progress_bar_is_not_overwritten_by_another_process(pipes):
    shared = pipes(2)
    shared.write(0, b"10%|##   |\r")
    shared.write(1, b"hi\n")
    shared.write(0, b"20%|###  |\r")
    shared.write(0, b"\n")
    expected = b"[0] 10%|##   |\r\n[1] hi\n[0] 20%|###  |\r\n"
    assert shared.end() == expected


def test_stderr_and_a_progress_bar_of_one_process_do_not_mix(pipes):
    shared = pipes(1)
    shared.write(0, b"10%\r")
    shared.write(0, b"warning\n", stream=1)
    assert shared.end() == b"[0] 10%\r\n[0] warning\n"


def test_output_without_a_final_newline_appears(pipes):
    shared = pipes(2)
    shared.write(0, b"half")
    shared.write(1, b"whole\n")
    assert sorted(shared.end().splitlines()) == [b"[0] half", b"[1] whole"]


def test_a_last_line_that_ended_in_a_return_is_closed(pipes):
    shared = pipes(1)
    shared.write(0, b"99%\r")
    assert shared.end() == b"[0] 99%\r\n"


def test_any_bytes_and_very_long_lines_survive(pipes):
    data = bytes(b for b in range(256) if b not in b"\r\n") * (3 << 12)
    shared = pipes(1)
    for start in range(0, len(data), 1 << 15):
        shared.write(0, data[start : start + (1 << 15)])
    shared.write(0, b"\n")
    assert shared.end() == b"[0] " + data + b"\n"


def test_colors_of_a_process_pass_untouched(pipes):
    shared = pipes(1)
    shared.write(0, b"\x1b[1;31mred\x1b[0m \x1b[38;2;1;2;3mx\x1b[0m\n")
    assert shared.end() == b"[0] \x1b[1;31mred\x1b[0m \x1b[38;2;1;2;3mx\x1b[0m\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        (b"a\x1b[31mb", b"\x1b[31m"),
        (b"\x1b[31mb\x1b[0mc", b""),
        (b"\x1b[31mb\x1b[mc\x1b[1m", b"\x1b[1m"),
        (b"\x1b[2Jb", b""),
        (b"\x1b[39m" * 1000, b"\x1b[39m" * 8),
    ],
)
def test_carry_style_keeps_what_was_not_reset(text, expected):
    assert screens.carry_style(b"", text) == expected


def test_the_tail_holds_the_last_lines(pipes):
    shared = pipes(2)
    for i in range(output.TAIL_LINES + 3):
        shared.write(0, b"%d\n" % i)
    shared.write(0, b"10%\r90%\r")
    shared.write(0, b"\nlast", stream=1)
    os.ftruncate(shared.out_fd, 0)
    for fd in shared.fds[0]:
        os.close(fd)
    shared.fds[0] = ()
    shared.forwarder.pump(timeout_s=0.5)
    shared.forwarder.print_tail(0)
    shared.forwarder.print_tail(1)
    lines = shared.end().strip(b"\0").splitlines()
    start = lines.index(b"jdp launch: its last lines were:")
    tail, rest = lines[start + 1 : -1], lines[-1]
    assert len(tail) == output.TAIL_LINES
    assert tail[-2:] == [b"[0] ", b"[0] last"]
    assert tail[-3] == b"[0] %d" % (output.TAIL_LINES + 2)
    assert rest == b"jdp launch: it was silent."


def test_a_terminal_shows_bars_below_and_lines_above(terminal):
    master_fd, slave_fd = terminal
    forwarder = output.Forwarder(
        num_processes=2, stdout_fd=slave_fd, stderr_fd=slave_fd
    )
    fds = [forwarder.open_streams(i) for i in range(2)]
    shown = b""

    def write(process_id, text, *, expected):
        nonlocal shown
        os.write(fds[process_id][0], text)
        deadline_s = time.monotonic() + 5.0
        while show(shown) != expected and time.monotonic() < deadline_s:
            forwarder.pump(timeout_s=0.02)
            os.set_blocking(master_fd, False)
            try:
                shown += os.read(master_fd, 1 << 16).replace(b"\r\n", b"\n")
            except BlockingIOError:
                pass
        assert show(shown) == expected

    write(0, b"\r10%", expected=["[0] 10%"])
    write(1, b"hello\n", expected=["[1] hello", "[0] 10%"])
    write(0, b"\r20%", expected=["[1] hello", "[0] 20%"])
    write(1, b"half", expected=["[1] hello", "[1] half"])
    write(1, b" line\n", expected=["[1] hello", "[1] half line", "[0] 20%"])
    write(0, b"\r", expected=["[1] hello", "[1] half line", "[0] 20%"])
    done = ["[1] hello", "[1] half line", "[0] 20%", ""]
    write(0, b"\n", expected=done)
    write(0, b"\x1b[1A\x1b[2Kup\n", expected=[*done[:-1], "[0] up", ""])
    done = show(shown)
    write(0, b"\x1b[31mred\n", expected=[*done[:-1], "[0] red", ""])
    assert b"\x1b[31mred\x1b[0m\n" in shown
    shown = b""
    write(0, b"still\x1b[0m\n", expected=["[0] still", ""])
    assert b"\x1b[0m\x1b[31mstill\x1b[0m\n" in shown
    shown = b""
    write(1, b"plain\n", expected=["[1] plain", ""])
    assert shown == screens.prefix(1, num_processes=2, is_colored=True) + b"plain\n"
    for fd in sum(fds, ()):
        os.close(fd)
    while forwarder.is_open:
        forwarder.pump(timeout_s=1.0)
    forwarder.close()


def test_a_footer_stays_below_lines_and_above_the_unfinished_one():
    state = screens.TerminalState()
    shown = b""
    for lines, unfinished, footer, expected in (
        ([b"a"], b"", None, ["a", ""]),
        ([], b"", [b"1", b"2"], ["a", "1", "2", ""]),
        ([b"b", b"c"], b"10%", None, ["a", "b", "c", "1", "2", "10%"]),
        ([b"d"], b"20%", [b"3"], ["a", "b", "c", "d", "3", "20%"]),
        ([b"e"], b"", None, ["a", "b", "c", "d", "e", "3", ""]),
        ([], b"", [], ["a", "b", "c", "d", "e", ""]),
    ):
        state, out = screens.render_terminal(state, 0, lines, unfinished, footer)
        shown += out
        assert show(shown) == expected


def test_a_footer_is_no_higher_than_the_terminal(terminal):
    _, slave_fd = terminal
    screen = screens.Screen(slave_fd)
    screen.draw_footer([b"%d" % i for i in range(20)])
    assert show(bytes(screen.backlog)) == [*map(str, range(8)), ""]


def test_a_hidden_cursor_comes_back(terminal):
    master_fd, slave_fd = terminal
    forwarder = output.Forwarder(
        num_processes=1, stdout_fd=slave_fd, stderr_fd=slave_fd
    )
    fds = forwarder.open_streams(0)
    os.write(fds[0], b"\x1b[?25lbar\n\x1b[1m")
    forwarder.pump(timeout_s=1.0)
    for fd in fds:
        os.close(fd)
    forwarder.close()
    forwarder.flush(timeout_s=1.0)
    expected = screens.prefix(0, num_processes=1, is_colored=True)
    expected += b"\x1b[?25lbar\r\n\x1b[?25h"
    shown = b""
    while len(shown) < len(expected):  # A read may end anywhere.
        shown += os.read(master_fd, 1 << 16)
    assert shown == expected


def test_a_terminal_of_a_process_leaves_room_for_the_prefix(terminal):
    _, slave_fd = terminal
    forwarder = output.Forwarder(
        num_processes=1, stdout_fd=slave_fd, stderr_fd=slave_fd
    )
    fds = forwarder.open_streams(0)
    assert [os.get_terminal_size(fd) for fd in fds] == [(36, 10), (36, 10)]
    fcntl.ioctl(slave_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 80, 0, 0))
    forwarder.resize()
    assert [os.get_terminal_size(fd) for fd in fds] == [(76, 5), (76, 5)]
    for fd in fds:
        os.close(fd)
    forwarder.close()


def test_a_slow_reader_stops_the_reading_but_not_the_launcher():
    read_fd, write_fd = os.pipe()
    forwarder = output.Forwarder(
        num_processes=1, stdout_fd=write_fd, stderr_fd=write_fd
    )
    out_fd, err_fd = forwarder.open_streams(0)
    os.set_blocking(out_fd, False)
    num_bytes = 0
    for _ in range(100):
        try:
            num_bytes += os.write(out_fd, b"x" * 999 + b"\n")
        except BlockingIOError:
            pass
        start_s = time.monotonic()
        forwarder.pump(timeout_s=0.01)
        assert time.monotonic() - start_s < 1.0
    for _ in range(200):
        try:
            num_bytes += os.write(out_fd, b"x" * 999 + b"\n")
        except BlockingIOError:
            break
        forwarder.pump(timeout_s=0.0)
    else:
        pytest.fail("the process was never held back")
    os.close(out_fd)
    os.close(err_fd)
    os.set_blocking(read_fd, False)
    shown = b""
    while forwarder.is_open or forwarder.has_backlog:
        forwarder.pump(timeout_s=0.01)
        shown += os.read(read_fd, 1 << 20)
    while True:
        try:
            shown += os.read(read_fd, 1 << 20)
        except BlockingIOError:
            break
    assert shown.replace(b"[0] ", b"").count(b"x" * 999 + b"\n") == num_bytes // 1000
    forwarder.close()
    os.close(read_fd)
    os.close(write_fd)


def test_a_reader_that_has_gone_is_noticed():
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    forwarder = output.Forwarder(
        num_processes=1, stdout_fd=write_fd, stderr_fd=write_fd
    )
    out_fd, err_fd = forwarder.open_streams(0)
    os.write(out_fd, b"hello\n")
    forwarder.pump(timeout_s=1.0)
    assert forwarder.is_broken and not forwarder.has_backlog
    os.close(out_fd)
    os.close(err_fd)
    forwarder.close()
    os.close(write_fd)


def test_text_without_an_end_is_shown_in_a_file_and_goes_on(tmp_path):
    forwarder, paths = make_file_forwarder(tmp_path)
    first, second = (os.fdopen(forwarder.open_streams(i)[0], "wb", 0) for i in (0, 1))
    forwarder_closes = [first, second]
    first.write(b"...")
    pump_until(forwarder, lambda: b"[0] ..." in paths[0].read_bytes())
    first.write(b"..")
    pump_until(forwarder, lambda: b"[0] ....." in paths[0].read_bytes())
    second.write(b"other\n")
    pump_until(forwarder, lambda: b"other" in paths[0].read_bytes())
    first.write(b". done\n")
    pump_until(forwarder, lambda: b"done" in paths[0].read_bytes())
    assert paths[0].read_bytes() == b"[0] .....\n[1] other\n[0] . done\n"
    for file in forwarder_closes:
        file.close()
    forwarder.close()


def test_a_line_that_never_ends_takes_no_memory(tmp_path):
    forwarder, paths = make_file_forwarder(tmp_path)
    writer = os.fdopen(forwarder.open_streams(0)[0], "wb", 0)
    for _ in range(64):
        writer.write(b"x" * (1 << 15))
        forwarder.pump(timeout_s=1.0)
        held = sum(len(p) for s in forwarder._streams for p in s.pieces)
        assert held <= output._HOLD_BYTES
    writer.write(b"\n")
    writer.close()
    pump_until(forwarder, lambda: paths[0].read_bytes().endswith(b"\n"))
    assert paths[0].read_bytes() == b"[0] " + b"x" * (1 << 21) + b"\n"
    forwarder.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
def test_a_full_disk_is_told_once_and_the_job_goes_on(tmp_path):
    full_fd = os.open("/dev/full", os.O_WRONLY)
    with open(tmp_path / "err", "wb") as err:
        forwarder = output.Forwarder(
            num_processes=1, stdout_fd=full_fd, stderr_fd=err.fileno()
        )
        writer = os.fdopen(forwarder.open_streams(0)[0], "wb", 0)
        for _ in range(3):
            writer.write(b"lost\n")
            forwarder.pump(timeout_s=1.0)
        assert not forwarder.is_broken and not forwarder.has_backlog
        writer.close()
        forwarder.flush(timeout_s=0.1)
        forwarder.close()
    os.close(full_fd)
    assert (tmp_path / "err").read_text() == (
        "jdp launch: stdout cannot be written (No space left on device); the job goes "
        "on, and output is lost while that lasts.\n"
    )


def make_file_forwarder(tmp_path):
    paths = [tmp_path / "out", tmp_path / "err"]
    fds = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in paths]
    forwarder = output.Forwarder(num_processes=2, stdout_fd=fds[0], stderr_fd=fds[1])
    return forwarder, paths


def pump_until(forwarder, condition):
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        forwarder.pump(timeout_s=0.05)
