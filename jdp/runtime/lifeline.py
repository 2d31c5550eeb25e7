"""Lifeline: does this process wait for one that is gone?

From `jdp.init` to the end, every process holds a line to the others. One that ends says
how many steps it has begun, and whether it failed; one that dies breaks its line. A
process that is in a step which another will never begin, or waits on the host for one
that is gone, can wait for ever: this ends it soon, with a message on all that names
the process which ended first.

No process is ended because another ended before it: after equal numbers of steps each
may take as long as it likes.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from jdp import compat_distributed, progress, wire
from jdp.mesh import World
from jdp.progress import Snapshot
from jdp.runtime import environment, forks, lifeline_store, star, worker

_PURPOSE = "processes"
_KEY = "jdp/lifeline"  # in the store: where process 0 listens.
_CHECK_PERIOD_S = 0.1
_MEET_TIMEOUT_S = 10.0
# What was under way when a process ended gets this long: to hear of its last step,
# where that is known, and where it died without a word.
_ENDED_GRACE_S = 2.0
_LOST_GRACE_S = 4.0
# A process that says that it failed ends the others, whatever they do.
_FAILED_GRACE_S = 5.0
_LINGER_S = 0.7  # of process 0, whose end lets JAX abort the others.
_STILL_RUNS_S = 60.0
_WAITS_AT_END_S = 60.0  # until a process says for whom JAX waits; there is no limit.
_MOST_TEXT = 4000  # characters of what another process gives as its reason.
_logger = logging.getLogger("jdp")


class Left(msgspec.Struct, frozen=True, tag="left"):
    """This process has ended its program."""

    steps: dict[str, int]  # calls of each decorated step that it has begun.
    error: str | None = None  # why, if it failed.
    culprit: int | None = None  # the process that is the reason, if another.


class Stuck(msgspec.Struct, frozen=True, tag="stuck"):
    """This process is ended, because it waits for another one."""

    culprit: int
    text: str


_DECODER = msgspec.msgpack.Decoder(Left | Stuck)


def check(message: Left | Stuck, count: int) -> Left | Stuck:
    """Returns what one of `count` processes has said, fit to be shown.

    Raises:
      DecodeError: it names a process that the job does not have.
    """
    if isinstance(message, Left):
        steps = {wire.printable(name): n for name, n in message.steps.items()}
        error = None if message.error is None else wire.printable(message.error)
        culprit = message.culprit if message.culprit in range(count) else None
        return Left(steps, error, culprit)
    if not 0 <= message.culprit < count:
        raise wire.DecodeError(f"there is no process {message.culprit}")
    return Stuck(message.culprit, wire.printable(message.text, most=_MOST_TEXT))


class Gone(NamedTuple):
    """A process that takes no more part in anything.

    Attributes:
      process: its number.
      arrived_s: when this process heard of it.
      steps: calls of each step that it has begun; None: it died without a word.
      error: why it failed; None: it did not, as far as it could say.
      culprit: the process that it says is the reason, if another.
      broke_s: when its line broke after it had said that it ended; None: it did not.
    """

    process: int
    arrived_s: float
    steps: Mapping[str, int] | None = None
    error: str | None = None
    culprit: int | None = None
    broke_s: float | None = None


class Verdict(NamedTuple):
    """Why this process is to be ended."""

    culprit: int
    text: str


def judge(
    own: int, has_ended: bool, now: Snapshot, gone: Sequence[Gone], *, now_s: float
) -> Verdict | None:
    """Returns whether process `own` waits in vain; pure.

    Args:
      own: number of this process.
      has_ended: whether its program has come to its end.
      now: where its main thread is.
      gone: in the order in which they were heard of.
      now_s: the clock.
    """
    for other in gone:
        gone_s = now_s - other.arrived_s
        both_s = now_s - max(other.arrived_s, now.since_s)
        who = describe(other)
        if has_ended:
            # JAX waits at its end for all; one that died does not come.
            if other.steps is None or other.error is not None:
                is_own = other.culprit == own  # It failed because this one ended.
                if is_own or gone_s > _ENDED_GRACE_S:
                    return Verdict(
                        own if is_own else other.process,
                        f"{who}; process {own} had come to the end of its program.",
                    )
            continue
        where = f"process {own} is in no step"
        is_stuck = False
        if now.waits_since_s is not None:
            where = f"process {own} waits for it on the host"
            is_stuck = both_s > _ENDED_GRACE_S
        elif now.step is not None:
            number = now.steps[now.step]
            where = f"process {own} is in call {number} of the step `{now.step}`"
            if other.steps is None:
                is_stuck = both_s > _LOST_GRACE_S
            elif number > other.steps.get(now.step, 0):
                is_stuck = both_s > _ENDED_GRACE_S
        if is_stuck or (other.error is not None and gone_s > _FAILED_GRACE_S):
            return Verdict(other.process, f"{who}, and {where}. {_advice(other)}")
    return None


def judge_end(
    own: int, ended_s: float, gone: Sequence[Gone], *, now_s: float
) -> Verdict | None:
    """Returns whether process `own` waits in vain at the end of JAX; pure.

    Args:
      own: number of this process, which has not come out of JAX's end yet.
      ended_s: when its program came to its end.
      gone: in the order in which they were heard of.
      now_s: the clock.
    """
    for other in gone:
        if other.broke_s is None:
            continue
        if now_s - max(other.broke_s, ended_s) > _LOST_GRACE_S:
            return Verdict(
                other.process,
                f"{describe(other)}, but was killed or left by `os._exit` before its "
                f"exit handlers had run; process {own} waits for it at its own end.",
            )
    return None


def find_first(own: int, gone: Sequence[Gone]) -> int | None:
    """Returns the process that failed or died first, or that such a one names.

    One that names process `own` followed from that, and explains nothing there.
    """
    for other in gone:
        is_bad = other.steps is None or other.error is not None
        if is_bad and other.culprit != own:
            return other.process if other.culprit is None else other.culprit
    return None


def describe(gone: Gone) -> str:
    """Says what became of a process, such as `process 1 ended after no step`."""
    if gone.error is not None:
        return f"process {gone.process} failed ({gone.error})"
    if gone.steps is None:
        return (
            f"process {gone.process} ended without a word: it was killed, crashed, or "
            "called `os._exit`, or its host or the network failed"
        )
    steps = [
        f"{count} call{'s' * (count != 1)} of the step `{name}`"
        for name, count in gone.steps.items()
    ]
    return f"process {gone.process} ended after {', '.join(steps) or 'no step'}"


def _advice(gone: Gone) -> str:
    if gone.error is not None or gone.steps is None:
        return f"Look at what process {gone.process} wrote last."
    return (
        "A step needs all processes. Give each the same number of steps, or use "
        "`jdp.join_batches` or `jdp.Join` where they have different amounts of data."
    )


class _Lifeline:
    """This process' part; the thread of the star runs all but `leave`."""

    def __init__(self, world: World, key: bytes):
        self._own, self._count = world.process_index, world.process_count
        self._pid = os.getpid()
        self._has_launcher = environment.LAUNCH_ID in os.environ
        self._gone: tuple[Gone, ...] = ()
        self._stuck: Verdict | None = None
        self._shown: set[int] = set()
        self._ended_s: float | None = None
        self._has_failed = False
        self._has_noted = False
        self._is_over = threading.Lock()
        # Until `_star` is there, its thread waits in `_tick`.
        self._is_made = threading.Event()
        self._star = self._join(world, key)
        self._is_made.set()
        self._ends: lifeline_store.EndsInStore | None = None
        if not self._star.wait_until_whole(timeout_s=_MEET_TIMEOUT_S):
            _logger.warning(
                "The link between the processes is not whole after %g s: a process "
                "that waits for one that has ended may be found late, by JAX.",
                _MEET_TIMEOUT_S,
            )
            tell = self._heard, self._star.wake
            self._ends = lifeline_store.EndsInStore(world, *tell)

    def _join(self, world: World, key: bytes) -> star.Star:
        assert world.store is not None
        listener = address = None
        if world.is_main_process:
            port = b""
            try:
                listener = star.listen(world.host, 0)
                port = str(listener.getsockname()[1]).encode()
            finally:
                world.store.set(_KEY, port, overwrite=True)
        else:
            port = world.store.get(_KEY, timeout_s=world.timeout_s)
            if len(port) > 5 or not port.isdigit() or not 0 < int(port) < 1 << 16:
                raise OSError("process 0 does not listen")
            address = world.host, int(port)
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
        )

    def leave(self, error: str | None, culprit: int | None) -> None:
        """Says that the program of this process has ended; at most once."""
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

    def find_culprit(self) -> int | None:
        """Returns the first process that failed or died."""
        if self._stuck is not None:
            return self._stuck.culprit
        return find_first(self._own, self._gone)

    def abandon_in_child(self) -> None:
        """Lets go of what a child of this process has inherited."""
        self._star.abandon_in_child()

    def _heard(self, process: int, body: bytes) -> None:
        now_s = time.monotonic()
        try:
            message = check(wire.decode_with(_DECODER.decode, body), self._count)
        except wire.DecodeError:
            _logger.warning("Process %d has said what is no message.", process)
            return
        if isinstance(message, Left):
            said = message.steps, message.error, message.culprit
            self._add(Gone(process, now_s, *said))
            return
        verdict = Verdict(message.culprit, message.text)
        if self._stuck is None:
            self._stuck = verdict
        self._shown.add(message.culprit)

    def _lost(self, process: int) -> None:
        now_s = time.monotonic()
        for i, gone in enumerate(self._gone):
            if gone.process == process:
                broken = gone._replace(broke_s=gone.broke_s or now_s)
                self._gone = (*self._gone[:i], broken, *self._gone[i + 1 :])
                return
        if process != self._own:
            worker.report_loss(process)
            self._add(Gone(process, now_s))

    def _add(self, gone: Gone) -> None:
        if gone.process not in (known.process for known in self._gone):
            self._gone = (*self._gone, gone)

    def _tick(self) -> float | None:
        self._is_made.wait()
        if self._has_failed:
            return None
        now_s = time.monotonic()
        note_s = self._note_waiting(now_s)
        if not self._gone and self._stuck is None:
            return note_s
        verdict = self._find_verdict(now_s)
        if verdict is not None:
            self._end(verdict)
        self._tell(now_s)
        if self._ended_s is not None and len(self._gone) == self._count - 1:
            if not compat_distributed.is_connected():
                return None  # Nothing is left to wait for.
        return _CHECK_PERIOD_S

    def _note_waiting(self, now_s: float) -> float | None:
        """Says once for whom JAX waits at the end; returns in how many seconds."""
        if self._ended_s is None or self._has_noted:
            return None
        if not compat_distributed.is_connected():
            return None
        left_s = self._ended_s + _WAITS_AT_END_S - now_s
        if left_s > 0.0:
            return left_s
        self._has_noted = True
        ended = {gone.process for gone in self._gone}
        others = [i for i in range(self._count) if i != self._own]
        awaited = [i for i in others if i not in ended]
        what = "which still runs"
        if not awaited:
            awaited, what = others, "whose exit handlers or threads have not ended"
        shown = ", ".join(map(str, awaited[:10])) + (", ..." if awaited[10:] else "")
        _show(
            f"process {self._own} came to the end of its program {_WAITS_AT_END_S:g} s "
            f"ago, and JAX waits for process {shown}, {what}."
        )
        return None

    def _find_verdict(self, now_s: float) -> Verdict | None:
        has_ended = self._ended_s is not None
        verdict = judge(
            self._own, has_ended, progress.snapshot(), self._gone, now_s=now_s
        )
        if verdict is None and self._ended_s is not None:
            if compat_distributed.is_connected():
                verdict = judge_end(self._own, self._ended_s, self._gone, now_s=now_s)
        if self._stuck is None:
            return verdict
        # Another process is ended, so this one has nothing to wait for: the culprit,
        # which may be this one, and whichever waits, at once.
        first = self._gone[0].arrived_s if self._gone else now_s - _FAILED_GRACE_S
        if has_ended or verdict is not None or now_s - first > _FAILED_GRACE_S:
            return self._stuck
        return None

    def _tell(self, now_s: float) -> None:
        """Says what is worth knowing before it is known to hurt."""
        for gone in self._gone:
            age_s = now_s - gone.arrived_s
            is_bad = gone.steps is None or gone.error is not None
            # A launcher says it better; without one, JAX may abort us in a moment.
            wait_s = 1.5 if self._has_launcher else 0.0
            wait_s = wait_s if is_bad else _STILL_RUNS_S
            if gone.process in self._shown or age_s < wait_s:
                continue
            self._shown.add(gone.process)
            if is_bad:
                _show(f"{describe(gone)}.")
            elif self._ended_s is None:
                _logger.info("%s; process %d still runs.", describe(gone), self._own)

    def _end(self, verdict: Verdict) -> None:
        """Ends this process, after it has told the others and its launcher."""
        with self._is_over:
            _show(verdict.text)
            worker.report_failure(1, culprit=verdict.culprit)
            self._star.say_now(msgspec.msgpack.encode(Stuck(*verdict)))
            if self._own == 0:
                time.sleep(_LINGER_S)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    stream.flush()
            os._exit(1)


class _Current:
    """The lifeline of this process."""

    lifeline: _Lifeline | None = None


def start(world: World, key: bytes) -> None:
    """Opens the lines of a job of several processes; each calls it once.

    Args:
      world: the job; `lifeline` uses its store once.
      key: of this run, shape (32,).
    """
    try:
        _Current.lifeline = _Lifeline(world, key)
    except OSError as error:
        _logger.warning(
            "The link between processes cannot be opened at %s (%s): a process that "
            "waits for one that has ended is found later, by JAX.",
            *(world.host, error),
        )
        return
    atexit.register(forks.only_here(_leave_at_exit))
    os.register_at_fork(after_in_child=_abandon)


def leave(error: str | None, *, culprit: int | None = None) -> None:
    """Tells the others that this process has ended its program, or that it failed.

    Args:
      error: why it failed; None: it did not.
      culprit: the process that is the reason, if another.
    """
    if _Current.lifeline is not None:
        _Current.lifeline.leave(error, culprit)


def find_culprit(*, timeout_s: float = 0.0) -> int | None:
    """Returns the first process that failed or died.

    Args:
      timeout_s: how long to wait for the word that one did, in seconds.

    Returns:
      None where this process has not heard of any.
    """
    if _Current.lifeline is None:
        return None
    deadline_s = time.monotonic() + timeout_s
    while (found := _Current.lifeline.find_culprit()) is None:
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(0.02)
    return found


def _leave_at_exit() -> None:
    error = getattr(sys, "last_value", None)  # Python's own: nobody caught it.
    if error is None:
        leave(None)
    else:
        leave(worker.describe_error(error), culprit=worker.find_culprit(error))


def _abandon() -> None:
    if _Current.lifeline is not None:
        _Current.lifeline.abandon_in_child()
        _Current.lifeline = None


def _show(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        print(f"jdp: {text}", file=sys.stderr, flush=True)
