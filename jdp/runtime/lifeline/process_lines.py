"""Process lines: what has this process heard of the others, and must it end?

The thread of the star runs all of it but `leave` and the calls at the end.
"""

import collections
import logging
import math
import os
import threading
import time
from collections.abc import Callable

import msgspec

from jdp.compat import jax_distributed
from jdp.replicas import progress, wire
from jdp.replicas.mesh import World
from jdp.runtime import environment, user_program
from jdp.runtime.lifeline import by_store, rules, star, star_line
from jdp.runtime.lifeline.jax_end import JaxEnd
from jdp.runtime.lifeline.rules import AtEnd, Gone, Left, LeftJax, LifelineVerdict
from jdp.watch.messages import Told

_PURPOSE = "processes"
_KEY = "jdp/lifeline"  # key in the store: where process 0 listens.
_CHECK_PERIOD_S = 0.1
_MOST_TOLD = 4000  # messages of watches that wait to be taken.
_MEET_TIMEOUT_S = 10.0
# Process 0 ends later: its end lets JAX abort the others. It waits for them so long
# after they have to end, and for their exit handlers.
_STAYS_S = 1.5
_STAYS_FOR_EXITS_S = 30.0
_STILL_RUNS_S = 60.0
_WAITS_AT_END_S = 60.0  # until a process names the processes JAX waits for.
_logger = logging.getLogger("jdp")


_DECODER = msgspec.msgpack.Decoder(rules.Message)


class ProcessLines:
    """The lines of this process to the others."""

    def __init__(self, world: World, key: bytes):
        self._own, self._count = world.process_index, world.process_count
        self._pid = os.getpid()
        self._has_launcher = user_program.has_launcher()
        environ = os.environ if self._has_launcher else {}
        self._failed_grace_s = rules.failed_grace_s(environment.find_grace_s(environ))
        self._ends_by_s: float | None = None  # The launcher's SIGKILL follows.
        self._gone: tuple[Gone, ...] = ()
        self._stuck: LifelineVerdict | None = None
        self._verdict: LifelineVerdict | None = None  # the reason of its own end.
        self._after_loss: rules.AfterLoss | None = None
        self._shown: set[int] = set()
        self._told = collections.deque[Told](maxlen=_MOST_TOLD)
        self._ended_s: float | None = None
        self._has_failed = False
        self._has_noted = False
        self._num_bad = 0  # of `_gone`, when open files were flushed last.
        self._ends_since_s: float | None = None
        self._jax_end = JaxEnd(self._own, self._count)
        # The thread of the star waits in `_tick` until `_star` is set.
        self._is_made = threading.Event()
        self._star = self._join(world, key)
        self._is_made.set()
        self._ends: by_store.EndsInStore | None = None
        if not self._star.wait_until_whole(timeout_s=_MEET_TIMEOUT_S):
            _logger.warning(
                "The link between the processes is incomplete after %g s: a process "
                "that waits for an ended process may be found late, by JAX.",
                _MEET_TIMEOUT_S,
            )
            tell = self._heard, self._star.wake
            self._ends = by_store.EndsInStore(world, *tell)
        jax_distributed.call_between_ends(self._leave_jax)

    def _join(self, world: World, key: bytes) -> star.Star:
        assert world.store is not None
        listener = address = None
        if world.is_main_process:
            port = b""
            try:
                listener = star_line.listen(world.host, 0)
                port = str(listener.getsockname()[1]).encode()
            finally:
                world.store.set(_KEY, port, overwrite=True)
        else:
            port = world.store.get(_KEY, timeout_s=world.timeout_s)
            if len(port) > 5 or not port.isdigit() or not 0 < int(port) < 1 << 16:
                raise OSError("process 0 does not listen")
            address = world.host, int(port)
        fd = user_program.find_ending_fd()
        return star.Star(
            self._own,
            self._count,
            key=key,
            purpose=_PURPOSE,
            listener=listener,
            address=address,
            connect_timeout_s=min(30.0, world.timeout_s),
            heard=self._heard,
            lost=self._lost,
            tick=self._tick,
            alarm=None if fd is None else (fd, self._hear_launcher),
            told=self._note_told,
        )

    def tell(self, body: bytes) -> None:
        """Sends a message of the watch; see `star`."""
        self._star.say(body, is_kept=False)

    def _note_told(self, process: int, body: bytes) -> None:
        del process  # Messages name it themselves.
        self._told.append(Told(body, time.monotonic_ns()))

    def take_told(self) -> list[Told]:
        """Returns the messages of other watches since the last call."""
        told = []
        while self._told:
            told.append(self._told.popleft())
        return told

    def leave(self, error: str | None, culprit: int | None) -> None:
        """Tells the others that the program of this process has ended; once."""
        if self._ended_s is not None or os.getpid() != self._pid:
            return
        self._has_failed = error is not None
        message = Left(dict(progress.snapshot().steps), error, culprit)
        self._ended_s = time.monotonic()
        body = msgspec.msgpack.encode(message)
        self._star.say(body)
        if self._ends is not None:
            self._ends.post(body)
        self._star.flush(timeout_s=1.0)

    def say_at_end(self) -> None:
        """Tells the others that the exit handlers of this process have run."""
        if os.getpid() != self._pid:
            return
        # Without a line, a process does not hear of the others: JAX waits for them.
        may_begin = self._ends is not None
        self._star.say(msgspec.msgpack.encode(AtEnd(may_begin)))
        self._jax_end.note(self._own, may_begin=may_begin)

    def wait_at_end(self, run_beside: Callable[[Callable[[], None]], None]) -> None:
        """Tells the others that the exit handlers have run, and waits for JAX's end."""
        self.say_at_end()
        try:
            self._jax_end.wait(run_beside)
        finally:
            if self._ends is not None:  # Its thread calls JAX too.
                self._ends.close()

    def close(self) -> LifelineVerdict | None:
        """Closes the lines after JAX's end; returns why that was given up, or None."""
        self._star.close()
        return self._verdict if self._jax_end.is_in_vain else None

    def _leave_jax(self) -> None:
        """Process 0 ends JAX's coordination service once all others have left it."""
        if self._own == 0:
            self._jax_end.wait_for_clients()
            return
        self._star.say(msgspec.msgpack.encode(LeftJax()))
        self._star.flush(timeout_s=1.0)

    def find_culprit(self, *, is_consequence: bool) -> int | None:
        """Returns the first process that failed or died; see `find_first`."""
        if self._stuck is not None:
            return self._stuck.culprit
        return rules.find_first(self._own, self._gone, is_consequence=is_consequence)

    def abandon_in_child(self) -> None:
        """Closes connections that a forked child has inherited."""
        self._star.abandon_in_child()

    def _heard(self, process: int, body: bytes) -> None:
        now_s = time.monotonic()
        try:
            message = rules.check(wire.decode_with(_DECODER.decode, body), self._count)
        except wire.DecodeError:
            _logger.warning("Process %d has sent an invalid message.", process)
            return
        if isinstance(message, Left):
            said = message.steps, message.error, message.culprit
            self._add(Gone(process, now_s, *said))
            return
        if isinstance(message, AtEnd):
            self._jax_end.note(process, may_begin=message.may_begin)
            return
        if isinstance(message, LeftJax):
            self._jax_end.note_left(process)
            return
        verdict = LifelineVerdict(message.culprit, message.text)
        if self._stuck is None:
            self._stuck = verdict
        self._shown.add(message.culprit)

    def _hear_launcher(self) -> None:
        self._ends_by_s = time.monotonic() + self._failed_grace_s

    def _lost(self, process: int, has_died: bool) -> None:
        now_s = time.monotonic()
        self._jax_end.note_left(process)
        for i, gone in enumerate(self._gone):
            if gone.process == process:
                broken = gone._replace(broke_s=gone.broke_s or now_s)
                self._gone = (*self._gone[:i], broken, *self._gone[i + 1 :])
                return
        if process != self._own:
            user_program.report(user_program.LOST, culprit=process)
            self._add(Gone(process, now_s, has_died=has_died))

    def _add(self, gone: Gone) -> None:
        if gone.process not in (known.process for known in self._gone):
            self._gone = (*self._gone, gone)

    def _tick(self) -> float | None:
        self._is_made.wait()
        if self._has_failed:
            return None
        if self._ends_since_s is not None:
            return self._end_when_others_have(self._ends_since_s)
        now_s = time.monotonic()
        note_s = self._note_waiting(now_s)
        if not self._gone and self._stuck is None and self._ends_by_s is None:
            return note_s
        self._flush(now_s)  # First: JAX may abort this process in a moment.
        verdict = self._find_verdict(now_s)
        if verdict is not None:
            self._end(verdict)
            return 0.0
        self._tell(now_s)
        if self._ended_s is not None and len(self._gone) == self._count - 1:
            if not jax_distributed.is_connected():
                return None  # Nothing is left to wait for.
        return _CHECK_PERIOD_S

    def _note_waiting(self, now_s: float) -> float | None:
        """Names once the processes JAX waits for; returns when to look again, in s."""
        if self._ended_s is None or self._has_noted:
            return None
        if not jax_distributed.is_connected():
            return None
        left_s = self._ended_s + _WAITS_AT_END_S - now_s
        if left_s > 0.0:
            return left_s
        self._has_noted = True
        place, running = (self._own, self._count), self._jax_end.running
        text = rules.describe_waiting(*place, self._gone, running, _WAITS_AT_END_S)
        user_program.show(text)
        return None

    def _flush(self, now_s: float) -> None:
        """Flushes open files at bad news, and where an end without a flush comes soon.

        After the end of process 0, JAX aborts this process; else the launcher kills it.
        """
        num_bad = sum(gone.is_bad for gone in self._gone)
        is_last = any(gone.process == 0 and gone.aborts_others for gone in self._gone)
        is_last |= self._ends_by_s is not None and now_s > self._ends_by_s
        if is_last or num_bad > self._num_bad:
            self._num_bad = num_bad
            user_program.flush_files(is_last=is_last)

    def _find_verdict(self, now_s: float) -> LifelineVerdict | None:
        has_ended = self._ended_s is not None
        now = progress.snapshot()
        if any(gone.steps is None for gone in self._gone):
            num_begun, has_result = sum(now.steps.values()), progress.has_result()
            self._after_loss = rules.count_after_loss(
                self._after_loss, num_begun, has_result, now_s=now_s
            )
        verdict = rules.judge(
            self._own,
            has_ended,
            now,
            self._gone,
            now_s=now_s,
            after_loss_s=self._after_loss and self._after_loss.since_s,
            failed_grace_s=self._failed_grace_s,
            ends_by_s=self._ends_by_s,
        )
        if verdict is None and self._ended_s is not None:
            if jax_distributed.is_connected():
                verdict = rules.judge_end(
                    self._own, self._ended_s, self._gone, now_s=now_s
                )
        if self._stuck is None:
            return verdict
        # Another process is being ended, so this one ends too: at once if it waits or
        # has ended its program, otherwise a while after the first end.
        first_s = self._gone[0].arrived_s if self._gone else -math.inf
        if has_ended or verdict is not None or now_s - first_s > self._failed_grace_s:
            return self._stuck
        return None

    def _tell(self, now_s: float) -> None:
        """Reports processes that are gone, before this process has to end for it."""
        for gone in self._gone:
            age_s = now_s - gone.arrived_s
            # A launcher reports it better; without one, JAX may abort us in a moment.
            wait_s = 1.5 if self._has_launcher else 0.0
            wait_s = wait_s if gone.is_bad else _STILL_RUNS_S
            if gone.process in self._shown or age_s < wait_s:
                continue
            self._shown.add(gone.process)
            text = rules.describe(gone)
            if gone.is_bad:
                user_program.show(f"{text}.")
            elif self._ended_s is None:
                _logger.info("%s; process %d still runs.", text, self._own)

    def _end(self, verdict: LifelineVerdict) -> None:
        """Begins to end this process, and tells the others and its launcher."""
        self._verdict = verdict
        user_program.show(verdict.text)
        is_own = verdict.culprit == self._own
        said = user_program.FAILED, 1, verdict.culprit
        user_program.report(*said, is_consequence=not is_own)
        self._star.say_now(msgspec.msgpack.encode(rules.Stuck(*verdict)))
        if self._own == 0:  # It waits, and the launcher's SIGKILL may come.
            user_program.flush_files(is_last=True)
        self._ends_since_s = time.monotonic()

    def _end_when_others_have(self, since_s: float) -> float | None:
        if self.is_needed_by_others(time.monotonic() - since_s):
            return _CHECK_PERIOD_S
        if self._jax_end.give_up():
            self._has_failed = True
            return None
        user_program.flush()
        os._exit(1)

    def is_needed_by_others(self, waited_s: float) -> bool:
        """Returns whether this process stays, because its end would abort another one.

        JAX aborts it, though it may be about to end with an exit code of its own, and
        what its files hold would be lost.

        Args:
          waited_s: how long this process has waited for the others to end, in seconds.
        """
        num_ended = sum(gone.has_ended for gone in self._gone)
        if self._own != 0 or num_ended == self._count - 1:
            return False
        are_at_exit = len(self._gone) > num_ended
        limit_s = self._failed_grace_s + _STAYS_S
        return waited_s < (_STAYS_FOR_EXITS_S if are_at_exit else limit_s)
