"""Lifeline rules: which message of a process ends another, and which is the culprit?

Pure: no clock and no link; see `lifeline` for what is done about it.
"""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from jdp.replicas import wire
from jdp.replicas.progress import Snapshot

# Steps that run when a process ends get this long: if the number of its last step is
# known, and if it died without a message.
ENDED_GRACE_S = 2.0
LOST_GRACE_S = 4.0
# A process that reports a failure ends the others, whatever they do. Process 0 stays
# longer, for JAX aborts those that are left when it ends; see `lifeline`. Where a
# launcher ends them by SIGKILL, they get a little less than its grace time.
FAILED_GRACE_S = 3.5
_BEFORE_KILL_S = 0.5
# A process that died may have done its part and left by `os._exit(0)`, so work on the
# host goes on for a while. JAX aborts the others 100 s after the last heartbeat, of
# which there is one every 50 s: measured 99, 70 and 55 s after a death 1, 30 and 45 s
# after `jdp.init` (jax 0.10.2).
DIED_GRACE_S = 40.0
_MOST_TEXT = 4000  # characters of the reason of another process.


def failed_grace_s(launcher_grace_s: float | None) -> float:
    """Returns how long a process goes on after another one has failed, in seconds.

    Args:
      launcher_grace_s: grace time of the launcher; None: there is no launcher.
    """
    if launcher_grace_s is None:
        return FAILED_GRACE_S
    return max(launcher_grace_s - _BEFORE_KILL_S, launcher_grace_s / 2)


class Left(msgspec.Struct, frozen=True, tag="left"):
    """This process has ended its program."""

    steps: dict[str, int]  # begun calls, by decorated step.
    error: str | None = None  # the reason, if it failed.
    culprit: int | None = None  # the process that is the reason, if another one.


class AtEnd(msgspec.Struct, frozen=True, tag="at_end"):
    """The exit handlers of this process have run; only JAX has to end still."""

    may_begin: bool = False  # whether JAX may end, whatever the others have sent.


class LeftJax(msgspec.Struct, frozen=True, tag="left_jax"):
    """This process has left JAX's coordination service, which process 0 may end."""


class Stuck(msgspec.Struct, frozen=True, tag="stuck"):
    """This process is being ended, because it waits for another one."""

    culprit: int
    text: str


Message = Left | AtEnd | LeftJax | Stuck


def check(message: Message, count: int) -> Message:
    """Returns the message of one of `count` processes, cleaned for a terminal.

    Raises:
      DecodeError: it names a process that the job does not have.
    """
    if isinstance(message, Left):
        steps = {wire.printable(name): n for name, n in message.steps.items()}
        error = None if message.error is None else wire.printable(message.error)
        culprit = message.culprit if message.culprit in range(count) else None
        return Left(steps, error, culprit)
    if isinstance(message, AtEnd | LeftJax):
        return message
    if not 0 <= message.culprit < count:
        raise wire.DecodeError(f"there is no process {message.culprit}")
    return Stuck(message.culprit, wire.printable(message.text, most=_MOST_TEXT))


class Gone(NamedTuple):
    """A process that has ended its program, failed or died.

    Attributes:
      process: index of the process.
      arrived_s: when this process heard of it.
      steps: begun calls, by step; None: it died without a message.
      error: the reason of its failure; None: it did not report a failure.
      culprit: the process that it blames, if another one.
      broke_s: when its line broke after its message; None: the line holds.
      has_died: whether it has ended without a message. False: that is not known, and
        the network may have failed.
    """

    process: int
    arrived_s: float
    steps: Mapping[str, int] | None = None
    error: str | None = None
    culprit: int | None = None
    broke_s: float | None = None
    has_died: bool = False

    @property
    def is_bad(self) -> bool:
        """Whether it failed, or is gone without a message."""
        return self.steps is None or self.error is not None

    @property
    def has_ended(self) -> bool:
        """Whether the process itself has ended, not only its program."""
        return self.steps is None or self.broke_s is not None

    @property
    def aborts_others(self) -> bool:
        """Whether JAX aborts the others soon, if this is process 0."""
        return self.has_died or self.broke_s is not None


class LifelineVerdict(NamedTuple):
    """The reason to end this process."""

    culprit: int
    text: str


class AfterLoss(NamedTuple):
    """Steps that this process has begun since another one died without a message.

    They are told from earlier steps by their number: JAX runs a step later than it is
    called, and a step without the other process fails without an error in the caller.

    Attributes:
      num_begun: begun calls of all steps when this process heard of the loss.
      since_s: when the first call after these was seen; None: there was none yet.
    """

    num_begun: int
    since_s: float | None = None


def count_after_loss(
    before: AfterLoss | None, num_begun: int, has_result: bool, *, now_s: float
) -> AfterLoss:
    """Updates the steps since a loss; pure.

    Args:
      before: the previous value; None: this process has just heard of the loss.
      num_begun: begun calls of all steps of this process.
      has_result: whether the last of them has succeeded: then it did not need the lost
        process, or only a line was lost.
      now_s: the time of a monotonic clock.
    """
    if before is None or (has_result and num_begun > before.num_begun):
        return AfterLoss(num_begun)
    if before.since_s is None and num_begun > before.num_begun:
        return before._replace(since_s=now_s)
    return before


def judge(
    own: int,
    has_ended: bool,
    now: Snapshot,
    gone: Sequence[Gone],
    *,
    now_s: float,
    after_loss_s: float | None = None,
    failed_grace_s: float = FAILED_GRACE_S,
    ends_by_s: float | None = None,
) -> LifelineVerdict | None:
    """Returns whether process `own` waits in vain, or has to end soon; pure.

    Args:
      own: index of this process.
      has_ended: whether its program has come to its end.
      now: where its main thread is.
      gone: processes in the order in which this process heard of them.
      now_s: the time of a monotonic clock.
      after_loss_s: since when a step begun after a loss has not ended; see `AfterLoss`.
      failed_grace_s: how long it goes on after another one has failed.
      ends_by_s: when it has to end, because the launcher ends the job; None: it does
        not.
    """
    for other in gone:
        gone_s = now_s - other.arrived_s
        both_s = now_s - max(other.arrived_s, now.since_s)
        who = describe(other)
        if has_ended:
            # JAX waits at its end for all; a dead process does not come.
            if other.is_bad:
                is_own = other.culprit == own  # It failed because this one ended.
                if is_own or gone_s > ENDED_GRACE_S:
                    return LifelineVerdict(
                        own if is_own else other.process,
                        f"{who}; process {own} had come to the end of its program.",
                    )
            continue
        where = f"process {own} is in no step"
        is_stuck = False
        if now.waits_since_s is not None:
            where = f"process {own} waits for it on the host"
            is_stuck = both_s > ENDED_GRACE_S
        elif now.step is not None:
            number = now.steps[now.step]
            where = f"process {own} is in call {number} of the step `{now.step}`"
            if other.steps is None:
                is_stuck = both_s > LOST_GRACE_S
            elif number > other.steps.get(now.step, 0):
                is_stuck = both_s > ENDED_GRACE_S
        if other.steps is None and after_loss_s is not None and not is_stuck:
            where = f"process {own} has begun a step since, which cannot end"
            is_stuck = now_s - after_loss_s > LOST_GRACE_S
        is_over = (
            (other.error is not None and gone_s > failed_grace_s)
            or (other.has_died and gone_s > DIED_GRACE_S)
            or (other.is_bad and ends_by_s is not None and now_s > ends_by_s)
        )
        if is_stuck or is_over:
            return LifelineVerdict(
                other.process, f"{who}, and {where}. {_advice(other, now)}"
            )
    return None


def judge_end(
    own: int, ended_s: float, gone: Sequence[Gone], *, now_s: float
) -> LifelineVerdict | None:
    """Returns whether process `own` waits in vain at the end of JAX; pure.

    Args:
      own: index of this process, which has not returned from JAX's end yet.
      ended_s: when its program came to its end.
      gone: processes in the order in which this process heard of them.
      now_s: the time of a monotonic clock.
    """
    for other in gone:
        if other.broke_s is None:
            continue
        if now_s - max(other.broke_s, ended_s) > LOST_GRACE_S:
            return LifelineVerdict(
                other.process,
                f"{describe(other)}, but was killed or left by `os._exit` before its "
                f"exit handlers had run; process {own} waits for it at its own end.",
            )
    return None


def find_first(
    own: int, gone: Sequence[Gone], *, is_consequence: bool = False
) -> int | None:
    """Returns the process that failed or died first, or the process that it blames.

    A process that blames process `own` is skipped: its failure follows from this one.
    It counts only if process `own` itself reports nothing but broken links.

    Args:
      own: index of this process, which has failed.
      gone: processes in the order in which this process heard of them.
      is_consequence: whether its error only tells that a link broke.
    """
    bad = [other for other in gone if other.is_bad]
    for other in bad:
        if other.culprit != own:
            return other.process if other.culprit is None else other.culprit
    return bad[0].process if bad and is_consequence else None


def describe(gone: Gone) -> str:
    """Describes the end of a process, such as `process 1 ended after no step`."""
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


def describe_waiting(
    own: int, count: int, gone: Sequence[Gone], running: Set[int], ended_s: float
) -> str:
    """Describes for which processes JAX keeps process `own` at its end.

    Args:
      own: index of this process, whose program has come to its end.
      count: number of processes.
      gone: processes in the order in which this process heard of them.
      running: processes whose exit handlers have not all run.
      ended_s: how long ago its program came to its end, in seconds.
    """
    ended = {other.process for other in gone}
    others = [i for i in range(count) if i != own]
    awaited = [i for i in others if i not in ended]
    what = "which still runs"
    if not awaited and own in running:
        return (
            f"process {own} came to the end of its program {ended_s:g} s ago, and an "
            "exit handler or a thread of it has not ended."
        )
    if not awaited:
        awaited = [i for i in others if i in running] or others
        what = "whose exit handlers or threads have not ended"
    shown = ", ".join(map(str, awaited[:10])) + (", ..." if awaited[10:] else "")
    return (
        f"process {own} came to the end of its program {ended_s:g} s ago, and JAX "
        f"waits for process {shown}, {what}."
    )


def _advice(gone: Gone, now: Snapshot) -> str:
    if gone.error is not None or gone.steps is None:
        return f"Look at what process {gone.process} wrote last."
    what = "A step needs all processes."
    if now.waits_since_s is not None:
        what = (
            "Steps, evaluations, checks and `jdp.replicate` need all processes, so "
            "none may be under `if world.is_main_process:`."
        )
    return (
        f"{what} Give each the same number of steps, or use "
        "`jdp.join_batches` or `jdp.Join` where they have different amounts of data. "
        f"If process {gone.process} called `sys.exit`, look at what it wrote last."
    )
