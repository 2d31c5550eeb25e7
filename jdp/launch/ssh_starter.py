"""SSH starter: how does one command run the launchers of several hosts, over ssh?

One `ssh` per host runs `ssh_end` there. Its output is shown as it comes. Signals, and
failures of hosts, go to the launchers as lines on the stdin of `ssh`. A launcher whose
stdin ends, as when this process is killed, ends its job.
"""

import collections
import contextlib
import errno
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jdp.launch import endings, output, signal_inbox, ssh_hosts
from jdp.launch.endings import Exit
from jdp.launch.output import TAIL_LINES
from jdp.launch.screen import Screen, split_segments
from jdp.launch.ssh_hosts import Host, SshOptions

_TICK_S = 0.05
_START_S = 60.0  # for Python to start on a host, after ssh has connected.
# After the launchers were told to end: for their SIGKILL, and for ssh to notice.
_END_S = 15.0
# An unfinished line is shown after this many seconds, or this many bytes.
_HOLD_S = 1.0
_HOLD_BYTES = 1 << 16
_MOST_CHARGE_BYTES = 60_000  # A pipe takes them before ssh reads.
_OF_SSH = 255  # the exit code of ssh where it failed itself.


class _Session:
    """One `ssh`, and what is known about its host."""

    def __init__(self, node: int, host: Host, process: "subprocess.Popen[bytes]"):
        self.node, self.host, self.process = node, host, process
        self.is_ready = False
        self.meets_at = ""  # the address of the coordinator, from node 0.
        self.code: int | None = None  # of its launcher.
        self.problem = ""  # why its launcher failed.
        self.is_over = False
        self.held = {1: b"", 2: b""}  # unfinished lines.
        self.held_since_s = {1: 0.0, 2: 0.0}
        self.last = collections.deque[str](maxlen=TAIL_LINES)  # before it is ready.

    def order(self, signum: int, code: int, note: str, *, is_first: bool) -> None:
        """Tells the launcher of the host to end its job, and why."""
        content = dict(signal=signum, code=code, note=note, is_first=is_first)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # It has ended.
            os.write(self.process.stdin.fileno(), json.dumps(content).encode() + b"\n")

    def explain(self) -> str:
        """Describes an end without the last word of the launcher."""
        name, code = self.host.name, self.process.returncode
        if self.problem:
            return f"host {name} (node {self.node}) failed: {self.problem}"
        said = f": {self.last[-1]}" if self.last else ""
        if not self.is_ready and code == 127:
            return f"host {name} (node {self.node}) has no such Python{said}"
        if not self.is_ready and code == _OF_SSH:
            return f"host {name} (node {self.node}) cannot be reached by ssh{said}"
        if not self.is_ready:
            return f"host {name} (node {self.node}) could not start jdp{said}"
        how = endings.describe_exit(Exit(0, code)).removeprefix("process 0 ")
        return (
            f"the connection to host {name} (node {self.node}) was lost, or its "
            f"launcher was killed: ssh {how}"
        )


class Starter:
    """Runs one job on several hosts."""

    def __init__(
        self,
        hosts: Sequence[Host],
        ssh: SshOptions,
        charge: Mapping[str, Any],
        *,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
    ) -> None:
        """Starts nothing yet.

        Args:
          hosts: node 0 first.
          ssh: how they are reached.
          charge: facts that all hosts get; "options" are of `launch.LaunchOptions`.
          stdout_fd: descriptor for the stdout of all processes.
          stderr_fd: the same for stderr, and for messages of the launchers.
        """
        self._hosts, self._ssh = hosts, ssh
        self._mark = secrets.token_hex(16)
        self._charge = {**charge, "mark": self._mark}
        self._grace_s = float(charge["options"]["grace_s"])
        self._screens = {1: Screen(stdout_fd), 2: Screen(stderr_fd)}
        if os.path.sameopenfile(stdout_fd, stderr_fd):
            self._screens[2] = self._screens[1]
        self._selector = output.selectors.DefaultSelector()
        self._sessions: list[_Session] = []
        self._inbox = signal_inbox.SignalInbox()
        self._cause: str | None = None
        self._exit_code = 0
        self._end_by_s: float | None = None
        self._start_by_s = time.monotonic() + _START_S

    def run(self) -> int:
        """Runs the job; no `ssh` is left when it returns.

        Returns:
          0, or the exit code of the host that failed first.
        """
        with self._inbox.listening():
            try:
                self._begin(0)
                while self._is_running():
                    self._pump()
                    self._obey_signals()
                    self._check_times()
                if self._cause:
                    self._print(f"jdp launch: {self._cause}.")
            finally:
                self._close()
        return self._exit_code

    def _is_running(self) -> bool:
        return any(not session.is_over for session in self._sessions)

    def _begin(self, node: int, address: str | None = None) -> None:
        """Starts the launcher of a host; the others follow when node 0 is ready."""
        host = self._hosts[node]
        options = {
            **self._charge["options"],
            "num_processes": host.num_processes,
            "num_nodes": len(self._hosts),
            "node_rank": node,
        }
        if address is not None:
            options["coordinator_address"] = address
        charge = ssh_hosts.encode_charge({**self._charge, "options": options})
        if len(charge) > _MOST_CHARGE_BYTES:
            raise OSError(
                errno.E2BIG,
                f"arguments and variables of the program take {len(charge)} bytes, "
                f"more than {_MOST_CHARGE_BYTES}",
            )
        try:
            process = subprocess.Popen(
                ssh_hosts.ssh_arguments(self._ssh, host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the launchers.
            )
        except OSError as error:
            raise OSError(
                error.errno, f"`ssh` cannot be started: {error.strerror}"
            ) from None
        session = _Session(node, host, process)
        self._sessions.append(session)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(charge)
        for number, pipe in ((1, process.stdout), (2, process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, 1, (session, number))

    def _pump(self) -> None:
        """Shows what has come, and notices ends."""
        for screen in self._screens.values():
            screen.flush(timeout_s=0.0)
        is_broken = any(screen.is_broken for screen in self._screens.values())
        if is_broken and self._end_by_s is None:
            self._stop(signal.SIGTERM, 128 + signal.SIGPIPE)
        if any(screen.backlog for screen in self._screens.values()):
            time.sleep(_TICK_S)
            return
        for key, _ in self._selector.select(_TICK_S):
            session, number = key.data
            chunk = os.read(key.fd, 1 << 16)
            if chunk:
                self._take(session, number, chunk)
            else:
                self._selector.unregister(key.fileobj)
                self._take(session, number, b"\n" if session.held[number] else b"")
        for session in self._sessions:
            self._show_held(session)
            has_output = any(
                key.data[0] is session for key in self._selector.get_map().values()
            )
            if not session.is_over and session.process.poll() is not None:
                if not has_output or session.code is not None:
                    self._end(session)

    def _take(self, session: _Session, number: int, chunk: bytes) -> None:
        if not session.held[number]:
            session.held_since_s[number] = time.monotonic()
        lines, session.held[number] = split_segments(session.held[number] + chunk)
        for line in lines:
            before, mark, said = line.partition(self._mark.encode())
            if before:
                self._show(session, number, before + (b"\n" if mark else b""))
            if mark:
                self._hear(session, said.decode(errors="replace").split())

    def _show(self, session: _Session, number: int, line: bytes) -> None:
        """Shows a line; lines of ssh and of launchers name the host."""
        start = b"jdp launch: "
        if not session.is_ready:
            session.last.append(line.decode(errors="replace").strip())
            line = f"[{session.host.name}] ".encode() + line
        elif number == 2 and line.startswith(start):
            where = f"jdp launch on {session.host.name}: "
            line = where.encode() + line[len(start) :]
        self._screens[number].write(2 * session.node + number, b"", line)

    def _show_held(self, session: _Session) -> None:
        """Shows lines that have been unfinished for a while; they continue."""
        before_s = time.monotonic() - _HOLD_S
        for number, held in session.held.items():
            is_due = session.held_since_s[number] < before_s or len(held) > _HOLD_BYTES
            if held and is_due and session.is_ready:
                self._screens[number].write(2 * session.node + number, b"", held)
                session.held[number] = b""

    def _hear(self, session: _Session, words: list[str]) -> None:
        match words:
            case ["ready"]:
                session.is_ready = True
            case ["meet", address]:
                for node in range(1, len(self._hosts)):
                    if self._cause is None and len(self._sessions) <= node:
                        self._begin(node, address)
            case ["ended", code]:
                session.code = int(code)
            case ["failed", *text]:
                session.problem = " ".join(text).removesuffix(".")

    def _end(self, session: _Session) -> None:
        """Notes the end of a host; the launchers of the others hear of a failure."""
        session.is_over = True
        if session.code is not None:
            if session.code and not self._exit_code:
                self._exit_code = session.code  # The launchers tell each other.
            return
        text = session.explain()
        if self._cause is None and self._end_by_s is None:
            self._cause, self._exit_code = text, self._exit_code or 1
            self._order(signal.SIGTERM, 1, text)

    def _obey_signals(self) -> None:
        for signum in self._inbox.take():
            if signum in signal_inbox.STOP_SIGNALS:
                self._stop(signum, 128 + signum)

    def _stop(self, signum: int, code: int) -> None:
        self._exit_code = self._exit_code or code
        name = endings.signal_name(signum)
        self._order(signum, code, f"the job was ended by {name}")

    def _order(self, signum: int, code: int, note: str) -> None:
        is_first = self._end_by_s is None
        if is_first:
            self._end_by_s = time.monotonic() + 2 * self._grace_s + _END_S
        for session in self._sessions:
            session.order(int(signum), code, note, is_first=is_first)

    def _check_times(self) -> None:
        """Ends what takes too long to start or to end."""
        now_s = time.monotonic()
        late = self._end_by_s is not None and now_s > self._end_by_s
        for session in self._sessions:
            is_slow = not session.is_ready and now_s > self._start_by_s
            if session.is_over or not (late or is_slow):
                continue
            session.process.kill()
            if late:
                self._print(
                    f"jdp launch: host {session.host.name} does not answer; look there "
                    "for processes of this job."
                )
            else:
                session.last.append(f"it was silent for {_START_S:.0f} s")

    def _print(self, text: str) -> None:
        self._screens[2].write(-1, b"", text.encode(errors="surrogateescape") + b"\n")

    def _close(self) -> None:
        for session in self._sessions:
            assert session.process.stdin is not None
            session.process.stdin.close()
            if session.process.poll() is None:
                session.process.kill()
            session.process.wait()
        deadline_s = time.monotonic() + self._grace_s
        for screen in {*self._screens.values()}:
            screen.close()
            screen.flush(timeout_s=max(0.0, deadline_s - time.monotonic()))
        self._selector.close()
