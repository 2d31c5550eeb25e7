"""Supervisor: when do the processes of a job end, and how are they ended?

`endings.observe` decides, without a clock or a process. `Supervisor` is the thin shell
that starts the processes, forwards their output and sends the signals.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from jdp.launch import (
    core_shares,
    endings,
    failure_pipe,
    guard,
    guarding,
    held_ends,
    launcher_link,
    output,
    reports,
    signal_inbox,
    watching,
)
from jdp.launch.endings import Exit, StopState
from jdp.launch.exit_order import ExitOrder
from jdp.launch.policy import FirstFailurePolicy, Policy

BROKEN_OUTPUT_CODE = 128 + signal.SIGPIPE
_TICK_S = 0.05
_SILENT_S = 10.0  # For other hosts to fail, after an end that skipped exit handlers.
_SCAN_PERIOD_S = 0.1
# How long after SIGKILL a process may still be listed before it is given up.
_KILL_TIMEOUT_S = 10.0
# The kernel buffers the output of an ended process. After that, a stream is open only
# if a process outside the job holds it; it gets this long.
_DRAIN_IDLE_S = 0.5
_DRAIN_S = 5.0


class Supervisor:
    """Runs the processes of one job on this host, once."""

    def __init__(
        self,
        launch_id: str,
        forwarder: output.Forwarder,
        *,
        grace_s: float,
        policy: Policy | None = None,
        pass_fds: Sequence[int] = (),
        link: launcher_link.LauncherLink | None = None,
        folder: str = "",
        adopts_orphans: bool = False,
        cores: Mapping[int, frozenset[int]] | None = None,
        watch: watching.Watch | None = None,
    ) -> None:
        """Starts nothing yet; every process carries `launch_id` in its environment.

        The guard removes `folder` if this process is killed. `adopts_orphans` is for a
        process that does nothing else: all its children from now on are of the job.
        `cores` has the cores of each process, unless it gets the cores of this one.
        `watch` names a process that the others wait for.
        """
        self._watch = watching.NoWatch() if watch is None else watch
        self._cores = cores or {}
        self._kin = guarding.Kin(launch_id, folder, adopts_orphans=adopts_orphans)
        self._link = link
        self._ended_well: dict[int, float] = {}  # when, by process.
        self._absent: set[int] = set()  # processes that ended before others met them.
        self._pass_fds = tuple(pass_fds)
        self._policy = FirstFailurePolicy() if policy is None else policy
        self._arguments: Sequence[str] = ()
        self._environs: Mapping[int, Mapping[str, str]] = {}
        self._told: set[int] = set()  # processes named as superfluous.
        self._forwarder = forwarder
        self._grace_s = grace_s
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._exits = ExitOrder()
        self._state = StopState()
        self._inbox = signal_inbox.SignalInbox()
        self._failures = failure_pipe.FailurePipe()
        self._held = held_ends.HeldEnds(self._failures, has_link=link is not None)

    def run(
        self, arguments: Sequence[str], environs: Mapping[int, Mapping[str, str]]
    ) -> int:
        """Runs `arguments` once per process id of `environs`, until all have ended.

        No process of the job is left when it returns or raises.

        Returns:
          0, or the exit code of the first failure.
        """
        self._arguments, self._environs = arguments, environs
        if self._link is not None:
            self._forwarder.watch(self._link.fd)
        with self._inbox.listening() as wake_fd:
            if wake_fd is not None:
                self._forwarder.watch(wake_fd)
            try:
                with self._guarded():
                    for process_id in environs:
                        self._start(process_id)
                    self._wait_for_processes()
                    self._sweep()
                    self._drain()
                    reports.show_cause(
                        self._forwarder, self._state.cause, self._environs
                    )
                    self._tell_late_hosts()
            finally:
                self._forwarder.close()
                self._flush()
                self._failures.close()
                self._exits.close()
                self._watch.close()
        return self._state.exit_code

    def _start(self, process_id: int) -> None:
        try:
            self._try_start(process_id)
        except OSError as error:
            raise OSError(
                error.errno,
                f"process {process_id} could not be started: {error.strerror}",
            ) from None

    def _try_start(self, process_id: int) -> None:
        stdout_fd, stderr_fd = self._forwarder.open_streams(process_id)
        try:
            with core_shares.inherited(self._cores.get(process_id)):
                process = subprocess.Popen(
                    self._arguments,
                    stdin=self._forwarder.find_stdin(process_id, stdout_fd),
                    stdout=stdout_fd,
                    stderr=stderr_fd,
                    env={
                        **self._environs[process_id],
                        **self._failures.environ,
                        **self._watch.environ(process_id),
                    },
                    pass_fds=(*self._failures.fds, *self._pass_fds),
                    start_new_session=True,
                )
        finally:
            os.close(stdout_fd)
            os.close(stderr_fd)
        self._running[process_id] = process
        self._exits.add(process_id, process.pid)
        self._kin.add(process.pid)
        self._watch.add(process_id, process.pid)

    def _wait_for_processes(self) -> None:
        while self._running:
            self._forwarder.pump(timeout_s=_TICK_S)
            self._observe()
            if self._is_given_up():
                return
        self._wait_for_hosts()

    def _wait_for_hosts(self) -> None:
        """Waits for failures elsewhere that follow from a silent end here."""
        deadline_s = time.monotonic() + _SILENT_S
        while self._link is not None and self._find_silent():
            if self._state.cause is not None or time.monotonic() > deadline_s:
                return
            self._forwarder.pump(timeout_s=_TICK_S)
            self._observe()

    def _observe(self) -> None:
        """Collects ends, failures and signals, and acts on them."""
        for process_id in dict.fromkeys([*self._exits.take(), *self._running]):
            process = self._running.get(process_id)
            if process is not None and process.poll() is not None:
                del self._running[process_id]
                self._watch.note_end(process_id, process.returncode)
                if process_id not in self._failures.staying:
                    self._take_end(Exit(process_id, process.returncode))
        for process_id, failure in self._failures.take_staying().items():
            self._take_end(endings.as_failed(process_id, failure))
        if (text := self._kin.check()) is not None:
            self._forwarder.print_line(f"jdp launch: {text}.")
        self._kin.look(process.pid for process in self._running.values())
        self._end_superfluous()
        self._hear_of_failures()
        if self._state.cause is None:
            keyboard = self._forwarder.keyboard.holder
            if (stalled := self._watch.look(keyboard=keyboard)) is not None:
                self._hold(stalled)
        signals = self._take_signals()
        if self._forwarder.is_broken and self._state.cause is None:
            signals.append(signal.SIGPIPE)
        now_s = time.monotonic()
        self._state, send = endings.observe(
            self._state,
            self._release(now_s, is_urgent=bool(signals)),
            signals,
            now_s=now_s,
            grace_s=self._grace_s,
        )
        if send is not None:
            self._signal(send)
            self._tell_cause()

    def _hear_of_failures(self) -> None:
        """Reads the reports of the processes here, and of other hosts."""
        now_s = time.monotonic()
        failures = self._failures.read()
        if self._link is not None:
            for process_id, failure in failures.items():
                self._link.say(endings.as_failed(process_id, failure))
            for end in self._link.take():
                self._hold(end)
            for refusal in self._link.take_refusals():
                self._forwarder.print_line(f"jdp launch: {refusal}.")
        waiting = self._failures.in_init & self._running.keys()
        waiting -= self._failures.ended.keys()
        ended = self._failures.ended | self._ended_well
        absent = {i: s for i, s in ended.items() if i not in self._failures.joined}
        if self._link is not None:
            for process_id in absent:
                self._link.say_absent(process_id)
            absent = self._link.take_absent() | absent
        for process_id, ended_s in absent.items():
            is_new = process_id not in self._absent
            if waiting and is_new and now_s - ended_s > held_ends.SETTLE_RAISED_S:
                self._absent.add(process_id)
                note = endings.describe_absence(process_id, waiting)
                self._hold(Exit(process_id, 1, 0.0, note=note))

    def _tell_cause(self) -> None:
        """Tells the other hosts why this one ends its processes."""
        cause = self._state.cause
        if self._link is None or cause is None:
            return
        if not isinstance(cause, Exit):
            cause = endings.as_launcher_ended(cause, self._link.node_rank)
        self._link.say(cause)

    def _take_end(self, end: Exit) -> None:
        """Does what the policy decides about the end of a process."""
        verdict = "count"
        if self._state.cause is None:
            verdict = self._policy.judge(end, self._running)
        if verdict == "count":
            if end.returncode == 0:
                self._ended_well[end.process_id] = time.monotonic()
            self._hold(end)
            return
        then = "it is started again" if verdict == "restart" else "the others go on"
        if end.process_id not in self._told:
            self._forwarder.print_line(
                f"jdp launch: {endings.describe_exit(end)}; {then}."
            )
        if verdict == "restart":
            self._failures.forget(end.process_id)
            self._start(end.process_id)

    def _end_superfluous(self) -> None:
        found = set(self._policy.find_superfluous(self._running)) - self._told
        if not found or self._state.cause is not None:
            return
        self._told |= found
        self._state = self._state._replace(kill_at_s=time.monotonic() + self._grace_s)
        for process_id in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._running[process_id].pid, signal.SIGTERM)

    def _hold(self, end: Exit) -> None:
        self._held.add(end, now_s=time.monotonic())
        if self._link is not None and self._state.cause is None:
            failure = self._failures.read().get(end.process_id)
            self._link.say(endings.as_it_said(end, failure))

    def _release(self, now_s: float, *, is_urgent: bool) -> list[Exit]:
        return self._held.release(
            self._running.keys() - self._failures.staying,
            self._environs,
            self._find_silent(),
            now_s=now_s,
            is_urgent=is_urgent,
            has_cause=self._state.cause is not None,
        )

    def _find_silent(self) -> dict[int, float]:
        """Returns when processes ended with 0 and without a report, by id."""
        silent = self._failures.joined - self._failures.ended.keys()
        return {i: s for i, s in self._ended_well.items() if i in silent}

    def _is_given_up(self) -> bool:
        state, now_s = self._state, time.monotonic()
        return state.is_killed and now_s > (state.kill_at_s or now_s) + _KILL_TIMEOUT_S

    def _signal(self, signum: int) -> None:
        """Signals the group of each process, and processes that left these groups."""
        if signum == signal.SIGKILL:
            self._kill(self._kin.find())
            return
        if signum == signal.SIGTERM:
            self._failures.tell_ending()
        for pid in (groups := {each.pid for each in self._running.values()}):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signum)
        # An inner job gets the signal from its own launcher.
        others = [
            process
            for process in self._kin.find()
            if guarding.group_of(process) not in groups and not process.is_of_inner_job
        ]
        guard.signal_processes(others, signum)

    def _kill(self, left: Sequence[guard.Process]) -> None:
        assert self._state.kill_at_s is not None
        guard.kill(left, since_s=self._state.kill_at_s)

    def _sweep(self) -> None:
        """Ends the descendants that the processes have left behind."""
        left = self._kin.find()
        if left and not self._state.is_killed:
            outer = [process for process in left if not process.is_of_inner_job]
            guard.signal_processes(outer, signal.SIGTERM)
        if self._state.kill_at_s is None:
            kill_at_s = time.monotonic() + self._grace_s
            self._state = self._state._replace(kill_at_s=kill_at_s)
        while left:
            next_scan_s = time.monotonic() + _SCAN_PERIOD_S
            while time.monotonic() < next_scan_s:
                self._forwarder.pump(timeout_s=_TICK_S)
            self._observe()
            left = self._kin.find()
            if self._state.is_killed:  # Also processes that were started since.
                self._kill(left)
            if self._is_given_up():
                pids = [process.pid for process in left]
                self._forwarder.print_line(
                    f"jdp launch: processes {pids} did not end after SIGKILL."
                )
                return

    def _drain(self) -> None:
        """Forwards the rest of the output of the ended processes."""
        left_s, idle_s = _DRAIN_S, 0.0
        while self._forwarder.is_open and left_s > 0.0 and idle_s < _DRAIN_IDLE_S:
            start_s = time.monotonic()
            has_waited_for_reader = self._forwarder.has_backlog
            has_read = self._forwarder.pump(timeout_s=_TICK_S)
            self._observe()
            if not has_waited_for_reader or self._state.cause is not None:
                elapsed_s = time.monotonic() - start_s
                left_s -= elapsed_s
                idle_s = 0.0 if has_read else idle_s + elapsed_s

    def _tell_late_hosts(self) -> None:
        """Waits a while for hosts that have not come yet, to tell them of a failure."""
        link = self._link
        if link is None or not isinstance(self._state.cause, Exit):
            return
        if link.meets_for_s():
            self._forwarder.print_line(
                "jdp launch: not all hosts have come yet; this launcher waits up to "
                f"{link.meets_for_s():.0f} s to tell them. Ctrl-C ends that."
            )
        while link.meets_for_s() and not self._take_signals():
            self._forwarder.pump(timeout_s=_TICK_S)

    def _flush(self) -> None:
        """Waits for the readers of our output.

        Once the job has been told to end, they get `grace_s`.
        """
        start_s = time.monotonic()
        while self._forwarder.has_backlog:
            self._forwarder.flush(timeout_s=_TICK_S)
            self._observe()
            deadline_s = max(start_s + self._grace_s, self._state.kill_at_s or 0.0)
            if self._state.cause is not None and time.monotonic() > deadline_s:
                return

    def _take_signals(self) -> list[int]:
        received = self._inbox.take()
        received = self._forwarder.keyboard.keep_interrupts(received, self._running)
        if signal.SIGWINCH in received:
            self._forwarder.resize()
        return [signum for signum in received if signum in signal_inbox.STOP_SIGNALS]

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Runs the guard, which ends the job if this process is killed."""
        try:
            self._kin.open()
            yield
            self._kin.say_done()
        finally:
            self._kin.close()  # After an error, the guard ends the job.
            for process in self._running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TICK_S)
