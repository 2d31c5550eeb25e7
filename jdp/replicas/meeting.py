"""Meeting: how do all processes get one outcome from their records, by a deadline?

Records and the outcome are in a folder of the job's store that no other meeting uses.
The outcome is set once, by the process that decides or by a process that fails earlier,
so that no process waits for records that will not come.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from jdp.replicas import progress, wire
from jdp.types import Store

# A blocking get wakes at once, but cannot be interrupted, and leaks memory in process 0
# if it times out. So only the first wait blocks; afterwards the store is polled.
_FIRST_WAIT_S = 0.3
_POLL_PERIOD_S = 0.05
# Process 0 serves the store: values that the others have not read are lost with it.
_READ_TIMEOUT_S = 4.0
_READ_PERIOD_S = 0.02
_RAISE_S = 0.2  # for the others to raise the error that they have read.
OUTCOME = "outcome"

Decide = Callable[[list[bytes]], bytes]


class MeetingRecord(msgspec.Struct, frozen=True):
    """Contribution of one process to a meeting."""

    topic: str
    body: bytes = b""
    error: str | None = None  # why the process cannot take part.


class MeetingOutcome(msgspec.Struct, frozen=True):
    """Outcome of a meeting, the same for all processes."""

    body: bytes = b""
    error: str | None = None
    culprit: int | None = None  # the process that caused the error.


@dataclasses.dataclass(frozen=True)
class StoreMeeting:
    """One process' view of a meeting.

    Attributes:
      store: the store of the job.
      folder: the key under which the records and the outcome lie.
      own: index of this process.
      timeout_s: longest wait of the deciding process for the records, in seconds.
      is_stopping: returns whether to end a wait early; called every 0.05 s.
    """

    store: Store
    folder: str
    own: int
    timeout_s: float
    is_stopping: Callable[[], bool] | None = None

    def leave_record(self, body: bytes) -> None:
        """Publishes the record of this process."""
        self.store.set(self._key(self.own), body)

    def gather(
        self, processes: Iterable[int], *, until_outcome: bool = False
    ) -> dict[int, bytes] | None:
        """Collects the records of other processes.

        Args:
          processes: indices of the processes.
          until_outcome: whether to stop once the outcome is set.

        Returns:
          The records that came within `timeout_s`, by process; None if `is_stopping`
          ended the wait.
        """
        found: dict[int, bytes] = {}
        awaited = list(processes)
        start_s = now_s = time.monotonic()
        with progress.waiting():
            while len(found) < len(awaited):
                left_s = start_s + self.timeout_s - now_s
                if self.is_stopping is not None and self.is_stopping():
                    return None
                if left_s <= 0:
                    break
                if until_outcome and self.store.try_get(self._key(OUTCOME)):
                    break
                missing = [p for p in awaited if p not in found]
                if len(missing) > 1:
                    names = {str(p): p for p in missing}
                    listed = self.store.list_directory(self.folder)
                    found |= {names[n]: x for n, x in listed.items() if n in names}
                    missing = [p for p in missing if p not in found]
                if missing:
                    is_first = now_s - start_s < _FIRST_WAIT_S
                    record = self._wait_a_little(missing[-1], left_s, is_first)
                    found |= {} if record is None else {missing[-1]: record}
                now_s = time.monotonic()
        return found

    def _wait_a_little(
        self, name: int | str, left_s: float, is_first: bool
    ) -> bytes | None:
        if not is_first:
            time.sleep(min(left_s, _POLL_PERIOD_S))
            return self.store.try_get(self._key(name))
        try:
            return self.store.get(self._key(name), timeout_s=min(left_s, _FIRST_WAIT_S))
        except TimeoutError:
            return None

    def announce(self, value: bytes, name: str = OUTCOME) -> bytes:
        """Sets the outcome, unless it is set; returns the outcome that is set.

        Args:
          value: the outcome.
          name: the stage, for a meeting in stages.
        """
        try:
            self.store.set(self._key(name), value)
        except RuntimeError:
            earlier = self.store.try_get(self._key(name))
            if earlier is None:
                raise
            return earlier
        return value

    def hear(
        self, name: str = OUTCOME, *, timeout_s: float | None = None
    ) -> bytes | None:
        """Waits for the outcome.

        Args:
          name: see `announce`.
          timeout_s: longest wait; None: a little longer than the deciding process waits
            for the records.

        Returns:
          The outcome; None if `is_stopping` ended the wait.

        Raises:
          TimeoutError: the outcome was not set in time.
        """
        timeout_s = self.answer_timeout_s if timeout_s is None else timeout_s
        if self.is_stopping is None:
            return self.store.get(self._key(name), timeout_s=timeout_s)
        deadline_s = time.monotonic() + timeout_s
        value = self._wait_a_little(name, timeout_s, is_first=True)
        while value is None and not self.is_stopping():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            value = self._wait_a_little(name, left_s, is_first=False)
        return value

    @property
    def answer_timeout_s(self) -> float:
        """Longest wait of the others for the deciding process, in seconds."""
        return 1.2 * self.timeout_s + 5.0

    def explain_refused(self, name: int | str) -> str:
        """Explains that the store distrusts a record or outcome, or returns ""."""
        try:
            self.store.get(self._key(name), timeout_s=0.0)
        except TimeoutError as error:
            return f" {error}" if error.__cause__ is not None else ""
        return ""

    def note_read(self) -> None:
        """Notes that this process has read the outcome; see `keep_until_read`."""
        self.store.set(self._key(f"read/{self.own}"), b"read")

    def keep_until_read(self, processes: Iterable[int]) -> None:
        """Waits in process 0, for a few seconds, until `processes` have read an error.

        A process that failed does not read it, and may have ended.
        """
        left = set(processes)
        deadline_s = time.monotonic() + min(_READ_TIMEOUT_S, self.timeout_s)
        with progress.working(needs_others=False):
            while left:
                listed = self.store.list_directory(self.folder)
                left = {
                    p
                    for p in left
                    if f"read/{p}" not in listed and not _is_error(listed.get(str(p)))
                }
                if left and time.monotonic() > deadline_s:
                    return
                time.sleep(_READ_PERIOD_S if left else _RAISE_S)

    def drop_record(self) -> None:
        """Deletes the record of this process, which has been read."""
        self.store.delete(self._key(self.own))

    def _key(self, name: int | str) -> str:
        return f"{self.folder}/{name}"


def hold(
    meeting: StoreMeeting,
    record: MeetingRecord,
    decide: Decide,
    *,
    processes: Sequence[int],
    then_raises: bool = False,
) -> MeetingOutcome:
    """Holds a meeting; every process in `processes` must call it.

    A process with an error does not wait: it sets the outcome, unless it is set. All
    others get that outcome.

    Args:
      meeting: the meeting.
      record: contribution of this process.
      decide: pure function of the bodies of all records, in the order of `processes`.
        It runs on the first process, if all came to one topic without an error.
      processes: indices of the processes that meet.
      then_raises: whether all processes will raise the decision. The store may end
        with process 0, which then waits a few seconds until the others have read it.
    """
    first, *others = processes
    if meeting.own != first:
        meeting.leave_record(msgspec.msgpack.encode(record))
    readers = others
    if record.error is not None:
        error = f"In the {record.topic}, {record.error}"
        outcome = MeetingOutcome(error=error, culprit=meeting.own)
        outcome = _settle(meeting, record.topic, outcome, processes)
    elif meeting.own == first:
        found = meeting.gather(others, until_outcome=True) or {}
        own = _conclude(meeting, record, found, decide, processes)
        outcome = _settle(meeting, record.topic, own, processes)
        if own.culprit not in found and outcome == own:
            readers = list(found)  # The outcome names a process that did not come.
    else:
        outcome = _hear(meeting, record.topic, processes)
    if then_raises or outcome.error is not None:
        if meeting.own == 0:
            meeting.keep_until_read(readers)
        elif record.error is None:
            meeting.note_read()
    return outcome


def judge(
    records: Sequence[MeetingRecord], decide: Decide, processes: Sequence[int]
) -> MeetingOutcome:
    """Decides on a full set of records, in the order of `processes`; pure."""
    topic = records[0].topic
    for process, record in zip(processes, records, strict=True):
        if record.error is not None:
            return MeetingOutcome(
                error=f"In the {topic}, {record.error}", culprit=process
            )
    for process, record in zip(processes, records, strict=True):
        if record.topic != topic:
            return MeetingOutcome(
                error="The processes do not do the same thing: process "
                f"{processes[0]} is in the {topic}, process {process} in the "
                f"{record.topic}."
            )
    try:
        return MeetingOutcome(body=decide([record.body for record in records]))
    except Exception as error:  # The others wait for an outcome.
        why = wire.printable(f"{type(error).__name__}: {error}")
        return MeetingOutcome(
            error=f"In the {topic}, process {processes[0]} could not decide: {why}"
        )


def _conclude(
    meeting: StoreMeeting,
    own: MeetingRecord,
    found: dict[int, bytes],
    decide: Decide,
    processes: Sequence[int],
) -> MeetingOutcome:
    """Returns the outcome of the first process, from the records that came."""
    records = [own]
    for process in processes[1:]:
        if process not in found:
            return _blame_missing(meeting, process, own.topic)
        what = f"The message of process {process} in the {own.topic}"
        try:
            records.append(wire.decode(found[process], MeetingRecord, what=what))
        except wire.Malformed as error:
            return MeetingOutcome(error=str(error))
    return judge(records, decide, processes)


def _settle(
    meeting: StoreMeeting, topic: str, outcome: MeetingOutcome, processes: Sequence[int]
) -> MeetingOutcome:
    """Announces an outcome, and returns the outcome that is set."""
    encoded = msgspec.msgpack.encode(outcome)
    held = meeting.announce(encoded)
    return outcome if held == encoded else _decode(held, topic, processes)


def _hear(
    meeting: StoreMeeting, topic: str, processes: Sequence[int]
) -> MeetingOutcome:
    first = processes[0]
    try:
        value = meeting.hear()
    except TimeoutError:
        # The first process says within `timeout_s` which others are missing.
        outcome = _blame_missing(meeting, first, topic, "outcome")
        return _settle(meeting, topic, outcome, processes)
    assert value is not None
    meeting.drop_record()
    return _decode(value, topic, processes)


def _decode(value: bytes, topic: str, processes: Sequence[int]) -> MeetingOutcome:
    what = f"The outcome of the {topic}"
    try:
        outcome = wire.decode(value, MeetingOutcome, what=what)
    except wire.Malformed as error:
        return MeetingOutcome(error=str(error))
    if outcome.culprit not in (None, *processes):
        return MeetingOutcome(error=f"{what} blames no process.")
    return outcome


def _blame_missing(
    meeting: StoreMeeting, process: int, topic: str, name: int | str | None = None
) -> MeetingOutcome:
    # For example, a value that no process of the job has signed.
    why = meeting.explain_refused(process if name is None else name)
    error = (
        f"Process {process} did not come to the {topic} within "
        f"{meeting.timeout_s:g} s; it may have stopped, or be in another part of the "
        "program (one step more or less). Or this process alone traces anew, for a "
        "batch or state of another size or dtype, or under another `jax.config` than "
        f"there.{why}"
    )
    return MeetingOutcome(error=error, culprit=process)


def _is_error(record: bytes | None) -> bool:
    if record is None:
        return False
    try:
        what = "A record"
        return wire.decode(record, MeetingRecord, what=what).error is not None
    except wire.Malformed:
        return False
