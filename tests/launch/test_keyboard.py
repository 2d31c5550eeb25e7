import os
import select
import subprocess
import sys
import termios
import time

import pytest

from jdp.launch import keyboard, screen
from jdp.launch.keyboard import HolderState
from tests import commands, rarely

JDP = f"{sys.executable} -m jdp.cli.main"
PROMPT = "(Pdb) "
ASK = "print('got', input('name? '))"


@pytest.mark.parametrize(
    ("state", "readers", "now_s", "expected", "new"),
    [
        ((None, 0.0, ()), [], 5.0, (None, 0.0, ()), []),
        ((None, 0.0, ()), [2, 1], 5.0, (2, 5.0, (1,)), [1]),
        ((1, 5.0, ()), [0, 1], 6.0, (1, 6.0, (0,)), [0]),
        ((1, 6.0, (0,)), [0], 6.9, (1, 6.0, (0,)), []),  # It may read on.
        ((1, 6.0, (0,)), [0], 7.0, (0, 7.0, ()), []),
        ((1, 6.0, (2, 0)), [0, 2], 7.0, (2, 7.0, (0,)), []),  # The first that came.
        ((1, 6.0, ()), [], 7.0, (None, 6.0, ()), []),
    ],
)
def test_the_keyboard_goes_to_the_process_that_has_waited_longest(
    state, readers, now_s, expected, new
):
    observed = keyboard.observe(HolderState(*state), readers, now_s=now_s)
    assert observed == (HolderState(*expected), new)


def test_only_the_line_of_the_process_with_the_keyboard_is_drawn():
    state = screen.TerminalState()
    state, _ = screen.render_terminal(state, 2, [], b"prompt", front=2)
    state, out = screen.render_terminal(state, 0, [b"line"], b"bar", front=2)
    assert out.startswith(b"\r\x1b[Kline\n") and b"prompt" in out and b"bar" not in out
    state, out = screen.render_terminal(state, 2, [b"prompt 1"], b"", front=2)
    assert out == b"\r\x1b[Kprompt 1\n"
    _, out = screen.render_terminal(state, 4, [b"line"], b"", front=None)
    assert b"bar" in out


# Its stdin becomes the terminal of its session. Signals of keys may be ignored here, as
# under `nohup`.
_SHELL = """
import fcntl, os, signal, sys, termios
for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
    signal.signal(signum, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv("/bin/bash", ["bash", "--norc", "-c", sys.argv[1]])
"""


class Terminal:
    """A shell in a real pseudo-terminal, which the test types at."""

    def __init__(self, line, folder):
        self.shown, self._seen = b"", 0
        environ = {**commands.environ(), "TERM": "xterm", "NO_COLOR": "1"}
        environ["INPUTRC"] = os.devnull
        self.fd, their_fd = os.openpty()
        self._shell = subprocess.Popen(
            [sys.executable, "-c", _SHELL, line],
            stdin=their_fd,
            stdout=their_fd,
            stderr=their_fd,
            cwd=folder,
            env=environ,
            start_new_session=True,
        )
        os.close(their_fd)

    def wait_for(self, text, timeout_s=60.0):
        """Returns what was shown since the last call, up to `text`."""
        deadline_s = time.monotonic() + timeout_s
        while text.encode() not in self.shown[self._seen :]:
            assert time.monotonic() < deadline_s, (text, self.shown[self._seen :])
            assert self._read(), (text, self.shown[self._seen :])
        start = self._seen
        self._seen = self.shown.index(text.encode(), start) + len(text)
        return self.shown[start : self._seen].decode()

    def type(self, keys):
        os.write(self.fd, keys.encode())

    def mode(self):
        return termios.tcgetattr(self.fd)

    def end(self):
        """Returns the exit code of the shell, and all that was shown."""
        deadline_s = time.monotonic() + 60.0
        while self._read():
            assert time.monotonic() < deadline_s, self.shown
        return self._shell.wait(10.0), self.shown.decode()

    def close(self):
        """Hangs up; what still runs gets SIGHUP."""
        os.close(self.fd)
        self._shell.wait(30.0)

    def _read(self):
        try:
            if select.select([self.fd], [], [], 0.5)[0]:
                self.shown += os.read(self.fd, 1 << 16)
        except OSError:  # The last process has closed it.
            return False
        return True


@pytest.fixture
def start(tmp_path):
    terminals = []

    def start(program, num_processes=2, line=f"{JDP} launch -n {{n}} train.py"):
        (tmp_path / "train.py").write_text(program)
        terminals.append(Terminal(line.format(n=num_processes), tmp_path))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


pytestmark = pytest.mark.multiprocess

RANK = "import os; rank = int(os.environ['JDP_PROCESS_ID'])\n"


@pytest.mark.slow
def test_the_process_at_a_breakpoint_has_the_keyboard(start):
    terminal = start(
        f"{RANK}import time\nx = 41\n"
        "if rank == 1:\n    breakpoint()\n    print('x is', x)\n"
        "for i in range(100 - 99 * rank):\n"
        "    print('tick', i, 'of', rank)\n    time.sleep(0.05)\n"
    )
    terminal.wait_for("[1] (Pdb) ")
    terminal.type("x =")
    terminal.wait_for("tick 20 of 0")
    terminal.wait_for("[1] (Pdb) x =")  # Below the lines of the other process.
    terminal.type(" 1000\b\b + 1\r")
    terminal.wait_for(" + 1\r\n")
    terminal.wait_for(PROMPT)
    terminal.type("\x1b[A\x1b[D2\r")  # The line before, and a 2 before its last digit.
    terminal.wait_for(PROMPT)
    terminal.type("c\r")
    code, shown = terminal.end()
    assert code == 0
    assert "[1] x is 31" in shown
    assert "\x1b[?2004" not in shown


def test_processes_at_the_same_breakpoint_take_turns(start):
    program = f"{RANK}breakpoint()\nprint(rank, 'goes on')\n"
    terminal = start(program)
    said = terminal.wait_for(" has.")
    waiting = int(said.split("process ")[1][0])
    terminal.type("p rank + 10\r")
    terminal.wait_for(f"[{1 - waiting}] {11 - waiting}\r\n")
    terminal.wait_for(PROMPT)
    terminal.type("c\r")
    terminal.wait_for(f"[{1 - waiting}] {1 - waiting} goes on")
    terminal.wait_for(f"[{waiting}] (Pdb) ")
    terminal.type("c\r")
    terminal.wait_for(f"[{waiting}] {waiting} goes on")
    assert terminal.end()[0] == 0


@pytest.mark.parametrize("leave", ["\x04", "q\r"])
def test_ctrl_c_ends_the_line_alone_and_leaving_the_debugger_ends_the_job(start, leave):
    terminal = start(
        f"{RANK}import time\nif rank == 1:\n    breakpoint()\n    pass\n"
        "time.sleep(100)\n"
    )
    terminal.wait_for("[1] (Pdb) ")
    terminal.type("p 1 +\x03")
    terminal.wait_for("KeyboardInterrupt")
    terminal.wait_for(PROMPT)
    terminal.type("p 3 * 4\r")
    terminal.wait_for("[1] 12")
    terminal.wait_for(PROMPT)
    terminal.type(leave)
    code, shown = terminal.end()
    assert code == 1
    assert "bdb.BdbQuit" in shown
    assert "process 1 failed with exit code 1." in shown


@pytest.mark.slow
def test_ctrl_c_twice_ends_the_job_at_a_prompt(start):
    terminal = start(f"{RANK}import time\nif rank: breakpoint()\ntime.sleep(100)\n")
    terminal.wait_for("[1] (Pdb) ")
    terminal.type("\x03")
    terminal.wait_for("KeyboardInterrupt")
    terminal.type("\x03")
    code, shown = terminal.end()
    assert code == 130
    assert "ended by SIGINT" in shown


def test_ctrl_c_ends_the_job_while_no_process_reads(start):
    terminal = start("import time\nprint('here')\ntime.sleep(100)\n")
    terminal.wait_for("here")
    terminal.type("\x03")
    code, shown = terminal.end()
    assert code == 130
    assert "ended by SIGINT" in shown


def test_a_password_reaches_the_process_and_is_not_shown(start):
    program = f"{RANK}import getpass\nif rank == 0:\n    word = getpass.getpass()\n"
    terminal = start(program + "    print('got', len(word), word[-1])\n")
    before = terminal.mode()
    terminal.wait_for("[0] Password: ")
    deadline_s = time.monotonic() + 30
    while terminal.mode() == before:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    terminal.type("secrex\x7ft\r")
    terminal.wait_for("[0] got 6 t")
    code, shown = terminal.end()
    assert code == 0
    assert "secre" not in shown


@pytest.mark.parametrize("num_processes", rarely.cases([1, 2], often=(2,)))
def test_a_program_asks_and_the_terminal_gets_its_mode_back(start, num_processes):
    program = f"{RANK}if rank == 0: {ASK}\nimport time; time.sleep(2)\n"
    line = f"{JDP} launch -n {{n}} train.py; stty -a; read -r x; echo x is $x"
    terminal = start(program, num_processes, line)
    before = terminal.mode()
    assert before[3] & termios.ICANON and before[3] & termios.ECHO
    terminal.wait_for("[0] name? ")
    assert not terminal.mode()[3] & (termios.ICANON | termios.ECHO)
    terminal.type("Ada\r")
    terminal.wait_for("[0] got Ada")
    deadline_s = time.monotonic() + 10
    while terminal.mode() != before:  # Already before the end of the job.
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    terminal.type("ahead\r")  # No process reads it, so it is for the shell.
    code, shown = terminal.end()
    assert code == 0
    assert "x is ahead" in shown


def test_a_job_in_the_background_leaves_the_terminal_to_the_shell(start):
    line = f"set -m; {JDP} launch -n {{n}} train.py & sleep 4; read -r x; echo x=$x; fg"
    terminal = start(ASK, 1, line)
    terminal.wait_for("[0] name? ")
    before = terminal.mode()
    time.sleep(1.0)
    assert terminal.mode() == before
    terminal.type("shell\r")
    terminal.wait_for("x=shell")
    terminal.wait_for("train.py")  # fg names the job.
    deadline_s = time.monotonic() + 30
    while terminal.mode()[3] & termios.ICANON:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    terminal.type("job\r")
    code, shown = terminal.end()
    assert code == 0
    assert "[0] got job" in shown


def test_ctrl_z_gives_the_terminal_its_mode_back_until_the_job_is_continued(start):
    line = f"set -m; {JDP} launch -n {{n}} train.py; read -r x; echo x=$x; fg"
    terminal = start(f"{RANK}breakpoint()\nprint('goes on')\n", 1, line)
    before = terminal.mode()
    terminal.wait_for("[0] (Pdb) ")
    terminal.type("p 6")
    terminal.wait_for("p 6")
    assert terminal.mode() != before
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    assert terminal.mode() == before
    terminal.type("shell\r")
    terminal.wait_for("x=shell")
    terminal.wait_for("[0] (Pdb) p 6")  # Drawn again, below what the shell wrote.
    deadline_s = time.monotonic() + 30  # The shell changes the mode meanwhile.
    while terminal.mode()[3] & (termios.ICANON | termios.ECHO):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    terminal.type(" * 7\r")
    terminal.wait_for("[0] 42")
    terminal.wait_for(PROMPT)
    terminal.type("c\r")
    code, shown = terminal.end()
    assert code == 0
    assert "[0] goes on" in shown
    assert terminal.mode() == before


def test_ctrl_backslash_gives_the_terminal_its_mode_back(start):
    line = f"ulimit -c 0; {JDP} launch -n {{n}} train.py; echo code $?; read -r x"
    terminal = start(ASK, 1, line)
    before = terminal.mode()
    terminal.wait_for("[0] name? ")
    assert terminal.mode() != before
    terminal.type("\x1c")
    terminal.wait_for("code 131")  # 128 + SIGQUIT.
    assert terminal.mode() == before
    terminal.type("\r")
    terminal.end()


def test_a_terminal_is_not_read_where_the_output_goes_elsewhere(start):
    terminal = start(ASK, 1, f"{JDP} launch -n {{n}} train.py 2>&1 | cat")
    code, shown = terminal.end()
    assert code == 0  # of cat.
    assert "EOFError" in shown


@pytest.mark.parametrize("how", ["pipe", "file", "null", "closed"])
def test_other_input_is_for_the_first_process(tmp_path, how):
    (tmp_path / "train.py").write_text(f"{RANK}import sys\nprint(sys.stdin.read(9))")
    (tmp_path / "input").write_text("some text")
    line = f"{JDP} launch -n 2 train.py"
    lines = {
        "pipe": f"cat input | {line}",
        "file": f"{line} < input",
        "null": f"{line} < /dev/null",
        "closed": f"{line} <&-",
    }
    result = subprocess.run(
        ["bash", "-c", lines[how]],
        cwd=tmp_path,
        env=commands.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    text = "some text" if how in ("pipe", "file") else ""
    assert sorted(result.stdout.splitlines()) == [f"[0] {text}", "[1] "]


def test_without_readline_the_input_is_empty(start):
    # A module of that name that fails, on the path before all others.
    line = "mkdir no; echo 'raise ImportError' > no/readline.py; "
    line += f"PYTHONPATH=no:$PYTHONPATH {JDP} launch -n {{n}} train.py"
    terminal = start(ASK, 1, line)
    code, shown = terminal.end()
    assert code == 1
    assert "EOFError" in shown
