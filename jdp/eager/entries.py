"""Entries: which requests has this process submitted, and which of them are done?"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdp.eager.diagnosis.flight_recorder import FlightRecorder, Record
from jdp.eager.messages import Request, Response
from jdp.replicas import progress, stamps

# Reasons why nothing more can be submitted.
JOINED = (
    "This process has called `join`, and has no more data until all processes have. "
    "Wait for it before another operation."
)
INTERRUPTED = (
    "A signal handler has interrupted a call of `jdp.eager` in this thread, which has "
    "to end before another operation can. Do not wait in signal handlers: begin the "
    "operation with a function whose name ends in `_async`, or set a flag, and wait "
    "outside of the handler."
)
JOINED_TWICE = "`join` was called again before all processes had joined."

# The beginning of a reason for which the engine ends on all ranks.
_CULPRIT = re.compile(r"(?:rank|process) (\d{1,9})\b")


class Entry:
    """Request of this process, until it is done.

    Args:
      request: the message to the coordinator.
      record: kept for errors.
      array: the tensor of this process.
      run: the program to run, for `submit`.
      is_small: whether the tensor may travel with the agreement.
      group: process set and name of the group it is a leaf of, or None.
    """

    __slots__ = (
        "key",
        "request",
        "record",
        "array",
        "run",
        "is_small",
        "group",
        "is_done",
        "value",
        "error",
        "was_late",
    )

    def __init__(
        self,
        request: Request,
        record: Record,
        array: Any = None,
        run: Callable[[], Any] | None = None,
        is_small: bool = False,
        group: tuple[int, str] | None = None,
    ):
        self.key = (request.process_set, request.name)
        self.request = request
        self.record = record
        self.array = array
        self.run = run
        self.is_small = is_small
        self.group = group
        self.is_done = False
        self.value: Any = None
        self.error: Exception | None = None
        self.was_late = False  # for a caller with a time limit, which was told.


class Completion:
    """Condition on which callers wait for their entries; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)

    def wait(self, entries: Sequence[Entry], timeout_s: float | None) -> bool:
        """Waits until all entries are done or one has failed; False on time-out.

        Raises:
          RuntimeError: a signal handler waits that has interrupted this function.
        """
        if _is_over(entries):
            return True
        if self.is_interrupted():
            raise RuntimeError(INTERRUPTED)
        name = entries[0].request.name
        with stamps.during_main(stamps.EAGER_BEGUN, name=name), self.changed:
            return self.changed.wait_for(lambda: _is_over(entries), timeout_s)

    def is_interrupted(self) -> bool:
        """Whether a signal handler calls that has interrupted a wait."""
        return _is_held(self._lock)

    def finish(self, entries: Sequence[Entry | None], values: Sequence[Any]) -> None:
        """Gives entries their values; None stands for an entry of another rank."""
        now_s = time.perf_counter()
        for entry, value in zip(entries, values, strict=True):
            if entry is not None and not entry.is_done:
                entry.record.finished_s = now_s
                entry.array = entry.run = None
                entry.value = value
                entry.is_done = True
        with self.changed:
            self.changed.notify_all()

    def fail(self, entries: Sequence[Entry | None], error: Exception) -> None:
        """Makes callers that wait for the entries raise `error`."""
        for entry in entries:
            if entry is not None and not entry.is_done:
                entry.error = error
                entry.record.error = str(error)
        self.finish(entries, [None] * len(entries))


class Submitted(threading.local):
    """Number of submissions of the current thread."""

    count = 0


class Pending:
    """Entries by process set and name, and the names of their groups.

    No two entries share a name. No two groups do: the coordinator could not tell their
    leaves apart.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], Entry] = {}
        self._groups: dict[tuple[int, str], Sequence[Entry]] = {}
        self._order = 0  # number of responses so far.

    def put(self, entries: Sequence[Entry], queue: list[Entry]) -> None:
        """Adds entries, all of one group or without a group, here and to `queue`.

        All or none are added, even if a signal handler raises meanwhile, or adds
        others: a name that is in use but not in the queue would stay in use for ever.

        Raises:
          ValueError: a name is in use.
        """
        try:
            self._add(entries)
            queue.extend(entries)
        except BaseException:
            added = set(map(id, entries))
            queue[:] = [entry for entry in queue if id(entry) not in added]
            for entry in entries:
                if self.entries.get(entry.key) is entry:
                    del self.entries[entry.key]
            group = entries[0].group
            if group is not None and self._groups.get(group) is entries:
                del self._groups[group]
            raise

    def _add(self, entries: Sequence[Entry]) -> None:
        # `setdefault` looks and adds in one step, between two signals.
        group = entries[0].group
        if group is not None and self._groups.setdefault(group, entries) is not entries:
            raise ValueError(_describe("a group", group[1]))
        for entry in entries:
            if self.entries.setdefault(entry.key, entry) is not entry:
                raise ValueError(_describe("an operation", entry.key[1]))

    def take_agreed(
        self, response: Response, *, rank: int, agreed_s: float
    ) -> list[Entry | None]:
        """Takes out the entries of a response.

        The ranks agree on all leaves of a group at once, so its name is free then.

        Args:
          response: the next one; call it once per response.
          rank: this process.
          agreed_s: the time, from `time.perf_counter`.

        Returns:
          By name, the entry; None where this process has not submitted it.
        """
        order, self._order = self._order, self._order + 1
        if response.ranks and rank not in response.ranks:
            return [None] * len(response.names)
        set_id = response.process_set
        entries = [self.entries.pop((set_id, name), None) for name in response.names]
        for entry in entries:
            if entry is not None:
                entry.record.agreed_s = agreed_s
                entry.record.order = order
                if entry.group is not None:
                    self._groups.pop(entry.group, None)
        return entries

    def drop(self, entry: Entry) -> None:
        """Takes out an entry that the other ranks have not heard of."""
        del self.entries[entry.key]
        if entry.group is not None:
            self._groups.pop(entry.group, None)

    def take_all(self) -> list[Entry]:
        """Takes out all entries."""
        entries = list(self.entries.values())
        self.entries.clear()
        self._groups.clear()
        return entries


class Intake:
    """Requests on their way from callers to the engine's thread.

    Any thread may use it.

    Attributes:
      refusal: why nothing can be submitted; "" while it can.
      queue: requests that the thread has not taken yet.
      queued_s: when the first of them came.
      is_awaited: whether a caller waits for something in the queue.
      pending: all requests that the ranks have not agreed on, queued ones included.
      join_entry: the `join` of this process, until all ranks have joined.
      has_new_join: whether the thread has not taken `join_entry` yet.
      submitted: counter of submissions, per thread.
      waking: held by a caller that wakes the thread.
    """

    def __init__(self, recorder: FlightRecorder):
        self.refusal = ""
        self.queue: list[Entry] = []
        self.queued_s = 0.0
        self.is_awaited = False
        self.pending = Pending()
        self.join_entry: Entry | None = None
        self.has_new_join = False
        self.submitted = Submitted()
        self._recorder = recorder
        # Reentrant, for a signal handler that submits in the middle of a submission.
        self._lock = threading.RLock()
        self.waking = threading.RLock()

    def put(self, entries: Sequence[Entry]) -> bool:
        """Queues requests, all or none; returns whether the queue was empty before.

        Raises:
          ValueError: a name is in use.
          RuntimeError: nothing can be submitted.
        """
        with self._lock:
            self.check_is_open()
            is_first = not self.queue
            if is_first:
                self.queued_s = entries[0].record.submitted_s
            self.pending.put(entries, self.queue)
            self.submitted.count += 1
            for entry in entries:
                self._recorder.add(entry.record)
        return is_first

    def is_interrupted(self) -> bool:
        """Whether a signal handler calls that has interrupted a submission."""
        return _is_held(self._lock) or _is_held(self.waking)

    def put_join(self, entry: Entry) -> None:
        """Queues the `join` of this process.

        Raises:
          RuntimeError: this process has joined before, or nothing can be submitted.
        """
        with self._lock:
            if self.join_entry is not None:
                raise RuntimeError(JOINED_TWICE)
            self.check_is_open()
            self.join_entry, self.has_new_join = entry, True
            self.refusal = JOINED
            self._recorder.add(entry.record)

    def check_is_open(self) -> None:
        """Raises RuntimeError if nothing can be submitted."""
        if self.refusal:
            raise as_error(self.refusal)

    def expect(self) -> bool:
        """Notes that a caller waits for the queue; returns whether there is one.

        Raises:
          RuntimeError: a signal handler waits in the middle of a submission.
        """
        if _is_held(self._lock):
            raise RuntimeError(INTERRUPTED)
        with self._lock:  # Requests that are queued later are not awaited yet.
            self.is_awaited = is_awaited = bool(self.queue)
        return is_awaited

    def take(self) -> tuple[list[Entry], bool]:
        """Takes the queue, and whether this process has joined since the last call."""
        with self._lock:
            entries, self.queue = self.queue, []
            self.is_awaited = False
            has_joined, self.has_new_join = self.has_new_join, False
        return entries, has_joined

    def taken(self) -> tuple[list[Entry], Entry | None]:
        """Returns the requests, and the `join`, that were taken and wait for ranks."""
        with self._lock:
            queued = set(map(id, self.queue))
            entries = self.pending.entries.values()
            taken = [each for each in entries if id(each) not in queued]
            return taken, None if self.has_new_join else self.join_entry

    def list_pending(self) -> list[Entry]:
        """Returns the requests that the ranks have not agreed on."""
        with self._lock:
            return list(self.pending.entries.values())

    def refuse(self, why: str) -> None:
        """Refuses requests from now on; the first reason counts."""
        with self._lock:
            self.refusal = self.refusal or why

    def take_join(self, refusal: str) -> Entry | None:
        """Takes the `join` of this process; `refusal` replaces why it refuses."""
        with self._lock:
            entry, self.join_entry = self.join_entry, None
            self.refusal = refusal
        return entry

    def close(self, why: str) -> list[Entry]:
        """Refuses requests for good; takes out all that wait, but not the `join`."""
        with self._lock:
            self.refusal = why
            self.queue = []
            return self.pending.take_all()


def as_error(why: str) -> RuntimeError:
    """Returns the error that an engine ends with; it names the culprit to launchers."""
    found = _CULPRIT.match(why)
    culprit = None if found is None else int(found[1])
    return progress.blame(RuntimeError(why), culprit)


def _is_held(lock: Any) -> bool:
    """Whether this thread holds an RLock before it takes it: a signal handler calls.

    What has to be done under the lock waits until the handler has returned.
    """
    try:
        threading.Condition(lock).notify(0)  # Raises if the lock is not held.
    except RuntimeError:
        return False
    return True


def _is_over(entries: Sequence[Entry]) -> bool:
    is_over = True
    for entry in entries:
        if entry.error is not None:
            return True
        is_over = is_over and entry.is_done
    return is_over


def _describe(what: str, name: str) -> str:
    return (
        f"`name={name!r}` is the name of {what} that is still being processed. Wait "
        "for it with `synchronize`, or use another name."
    )
