"""Engine: the thread that agrees with the other processes, and then runs.

Callers put what is ready into a queue. The thread takes it, tells the coordinator, and
runs what the coordinator says, in its order, which is the same on all processes.
"""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from jdp.eager import checks, lost_entries, messages, startup
from jdp.eager.coordinator import stall
from jdp.eager.coordinator.lead import Lead
from jdp.eager.diagnosis.flight_recorder import FlightRecorder
from jdp.eager.entries import (
    JOINED,
    JOINED_TWICE,
    Completion,
    Entry,
    Pending,
    Submitted,
)
from jdp.eager.execution import executor, small_tensors
from jdp.eager.messages import Batch, Doubt, FromRank, ProtocolError, Response
from jdp.eager.options import EagerOptions
from jdp.eager.response_cache import ResponseCache
from jdp.replicas.mesh import World
from jdp.runtime.transport import transport

# A caller that submits at least as often is in the middle of a loop.
_BURST_PERIOD_S = 50e-6
_MAX_HELD_CYCLES = 10
_logger = logging.getLogger("jdp")
_IDLE_PERIOD_S = 1.0  # after which a timeline writes what it has.


class Engine:
    """The part of one process; every process of the world makes it."""

    def __init__(self, world: World, options: EagerOptions):
        """Meets the other processes and starts the thread.

        Raises:
          RuntimeError: a process did not come, or has other options; on every process.
        """
        self.world = world
        self.options = options
        self.rank = world.process_index
        self.size = world.process_count
        number = 0 if world.store is None else world.store.next_round()
        key = f"jdp/eager/{number}"
        self._link = transport.open_link(
            world,
            key=f"{key}/link",
            options=transport.LinkOptions(heartbeat_timeout_s=options.timeout_s),
        )
        self._completion = Completion()
        self.lead: Lead | None = None  # on process 0.
        try:
            self.nodes, self._early = startup.meet(self._link, world, options)
            if self.rank == 0:
                self.lead = Lead(world, options, self._link, self._apply)
            wake = self._link.wake
            self.executor = executor.Executor(
                world, options, self._completion, key=key, on_failure=wake
            )
            if options.timeline:
                self.executor.start_timeline(
                    options.timeline, mark_cycles=options.timeline_mark_cycles
                )
        except BaseException:  # The others hear that this process is gone.
            self._link.close()
            raise
        self.cycle_time_s = options.cycle_time_s
        has_cores = len(os.sched_getaffinity(0)) >= self.size
        self._spin_s = options.spin_s if has_cores else 0.0
        self._recorder = FlightRecorder(
            rank=self.rank,
            size=self.size,
            capacity=max(1, options.flight_recorder_capacity),
        )
        self._cache = ResponseCache()
        # What calls have found out of their arguments; see `requests.find_options`.
        self.known_options: dict[Any, Any] = {}
        self.why_dead = ""  # why nothing goes on; "" while it does.
        self._refusal = ""  # why nothing can be submitted; "" while it can.
        self.submitted = Submitted()
        # What callers and the thread share; the lock is for what follows it.
        self._is_waiting = False  # the thread, for news.
        self._is_awaited = False  # something that is in the queue.
        self._wants_to_leave = False
        self._says_last = False
        self._asks = False
        self._who_waits = ""  # what the coordinator last said of names that wait.
        self._lock = threading.Lock()
        self._queue: list[Entry] = []
        self._queued_s = 0.0  # when the first of them came.
        self._pending = Pending()
        self._join_entry: Entry | None = None
        self._says_joined = False
        # Of the thread alone.
        self._order = 0
        self._agreed: list[Entry | None] = []  # of the batch that is being executed.
        self._watch = lost_entries.Watch()
        self._thread = threading.Thread(target=self._run, name="jdp-eager", daemon=True)
        self._thread.start()

    def submit(self, entries: Sequence[Entry]) -> None:
        """Puts requests into the queue, all or none.

        Raises:
          ValueError: a name is in use.
          RuntimeError: the engine has ended, or this process has joined.
        """
        try:
            with self._lock:
                if self._refusal:
                    raise lost_entries.as_error(self._refusal)
                is_first = not self._queue
                if is_first:
                    self._queued_s = entries[0].record.submitted_s
                self._pending.put(entries, self._queue)
                self.submitted.count += 1
                for entry in entries:
                    self._recorder.add(entry.record)
            if is_first:
                self._notify()
        except BaseException:  # Of a signal's handler, perhaps after they were put.
            self._link.wake()
            raise

    def check_is_open(self) -> None:
        """Raises RuntimeError if the engine has ended, or this process has joined."""
        if self._refusal:
            raise lost_entries.as_error(self._refusal)

    def submit_join(self, entry: Entry) -> None:
        """Says that this process has no more data.

        Raises:
          RuntimeError: it has said so before, or the engine has ended.
        """
        try:
            with self._lock:
                if self._join_entry is not None:
                    raise RuntimeError(JOINED_TWICE)
                self.check_is_open()
                self._join_entry, self._says_joined = entry, True
                self._refusal = JOINED
                self._recorder.add(entry.record)
            self._notify()
        except BaseException:  # See `submit`.
            self._link.wake()
            raise

    def wait(self, entries: Sequence[Entry], timeout_s: float | None) -> bool:
        """Waits until all entries are done, or one has failed; returns whether so."""
        with self._lock:  # What comes later into the queue is not awaited yet.
            self._is_awaited = is_awaited = bool(self._queue)
        if is_awaited:
            self._notify()
        return self._completion.wait(entries, timeout_s)

    def ask_who_waits(self, *, timeout_s: float = 1.0) -> str:
        """Returns what the coordinator knows of names that some ranks wait for."""
        with self._completion.changed:
            self._who_waits = ""
            self._asks = True
            self._notify()
            self._completion.changed.wait_for(
                lambda: self._who_waits or self.why_dead, timeout_s
            )
            return self._who_waits or "The coordinator did not answer."

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        """Begins a trace; nothing happens if one is under way."""
        self.executor.start_timeline(path, mark_cycles=mark_cycles)
        self._notify()  # A thread that sleeps would not write it.

    def stop_timeline(self) -> None:
        """Ends the trace and closes its file."""
        self.executor.stop_timeline()

    def finish_own(self, *, timeout_s: float) -> None:
        """Waits until what this process has submitted is done, or the engine ends."""
        with self._lock:
            entries = list(self._pending.entries.values())
        self.wait(entries, timeout_s)

    def shutdown(self, *, timeout_s: float) -> None:
        """Ends the engine on all processes; returns once it has ended here."""
        self._wants_to_leave = True
        self._notify()
        self._thread.join(timeout_s)
        self.stop_timeline()

    def _notify(self) -> None:
        """Makes the thread look at the queue."""
        if self._is_waiting:
            try:
                self._is_waiting = False
                self._link.wake()
            except BaseException:  # No other call would wake it.
                self._link.wake()
                raise

    def _run(self) -> None:
        try:
            while not self.why_dead:
                self._cycle()
        except Exception as error:
            _logger.debug("The eager engine ends.", exc_info=True)
            self._fail(lost_entries.explain(self.rank, error), tell=True)
        finally:
            self._link.close()

    def _cycle(self) -> None:
        """Says what is new here, hears what is new elsewhere, and runs it."""
        if self.executor.failure is not None:
            raise self.executor.failure
        if self._queue and not (self._is_awaited or self._refusal):
            self._hold_back()
        self._say()
        if self.lead is not None:
            self.lead.decide(is_over=lambda: bool(self.why_dead))
        timeline = self.executor.timeline
        if timeline is not None:
            timeline.mark_cycle(time.perf_counter())
        if self.why_dead:
            return
        if self._spin():
            return
        self._is_waiting = True
        # What came since `_say` found `_is_waiting` False, and did not wake.
        is_idle = not (self._queue or self._is_asked())
        self._hear(self._longest_wait_s() if is_idle else 0.0)
        self._is_waiting = False

    def _hold_back(self) -> None:
        """Waits for more to come, so that it runs as one; not once somebody waits."""
        begin_s, due_s = time.perf_counter(), self._queued_s + self.cycle_time_s
        latest_s = self._queued_s + _MAX_HELD_CYCLES * self.cycle_time_s
        while begin_s < due_s:
            num_before = len(self._queue)
            self._is_waiting = True
            self._hear(0.0 if self._is_awaited else due_s - begin_s)
            self._is_waiting = False
            now_s = time.perf_counter()
            num_new = len(self._queue) - num_before
            # What comes in a loop is cut nowhere: other ranks would cut it elsewhere.
            if self._is_awaited or num_new * _BURST_PERIOD_S < now_s - begin_s:
                return
            begin_s, due_s = now_s, min(now_s + self.cycle_time_s, latest_s)

    def _spin(self) -> bool:
        """Looks for news for a moment without sleeping; whether there was something."""
        until_s = time.perf_counter() + self._spin_s
        while time.perf_counter() < until_s:
            if self._hear(0.0) or self._queue or self._is_asked():
                return True
        return False

    def _is_asked(self) -> bool:
        """Whether there is something to say besides what is in the queue."""
        joins, asks = self._says_joined, self._asks
        return joins or asks or self._says_last or self._wants_to_leave

    def _longest_wait_s(self) -> float | None:
        """How long to sleep; longer where nothing is to be looked after."""
        if self.lead is not None and self.lead.has_waiting:
            return stall.LOOK_PERIOD_S
        if self.executor.timeline is not None:
            return _IDLE_PERIOD_S
        is_waiting = self._pending.entries or self._join_entry is not None
        return lost_entries.PERIOD_S if is_waiting else None

    def _say(self) -> None:
        """Tells the coordinator what has become ready here."""
        with self._lock:
            entries, self._queue = self._queue, []
            self._is_awaited = False
            joined, self._says_joined = self._says_joined, False
            is_last, self._says_last = self._says_last, False
        leaves, asks = self._wants_to_leave, self._asks
        self._asks = False
        waits = self._pending.entries or self._join_entry
        is_due = waits and time.perf_counter() >= self._watch.due_s
        doubts = self._find_doubts() if is_due else ()
        if not (entries or joined or leaves or asks or is_last or doubts):
            return
        find, full, hits, slots = self._cache.find, [], 0, []
        for entry in entries:
            request = entry.request
            place = self.executor.places.get(request.process_set)
            slot = None if place is None else find(request, place)
            if place is None:
                self._refuse(entry)
            elif slot is None:
                full.append(request)
            else:
                hits |= 1 << slot
                slots.append(slot)
        is_cached = len(slots) == len(entries)
        data = small_tensors.collect(entries, slots) if is_cached else ()
        message = FromRank(
            self._cache.num_seen,
            tuple(full),
            hits.to_bytes((hits.bit_length() + 7) // 8, "little"),
            data,
            joined,
            leaves,
            asks=asks,
            is_last=is_last,
            doubts=doubts,
        )
        if self.lead is not None:
            self.lead.receive(0, message, timeline=self.executor.timeline)
        else:
            self._link.send(0, messages.encode(message))
        if leaves:
            self._wants_to_leave = False

    def _find_doubts(self) -> tuple[Doubt, ...]:
        """Returns the names to ask the coordinator about; see `lost`."""
        with self._lock:
            unsaid = set(map(id, self._queue))
            entries = self._pending.entries.values()
            said = [each for each in entries if id(each) not in unsaid]
            join = None if self._says_joined else self._join_entry
        return self._watch.ask(said, join)

    def _hear(self, timeout_s: float | None) -> bool:
        events = self._early or self._link.wait(timeout_s)
        self._early = []
        for event in events:
            if isinstance(event, transport.Received):
                try:
                    self._take(event)
                    continue
                except ProtocolError as error:
                    why = f"process {event.peer} sent what no engine sends: {error}"
            else:
                why = event.why
            if self.lead is not None:
                self.lead.stop(why)
            else:
                self._fail(why, tell=isinstance(event, transport.Received))
        return bool(events)

    def _take(self, event: transport.Received) -> None:
        if self.lead is None:
            self._apply(messages.decode_batch(event.payload))
        else:
            message = messages.decode_from_rank(event.payload)
            self.lead.receive(event.peer, message, timeline=self.executor.timeline)

    def _apply(self, batch: Batch) -> None:
        checks.check_batch(batch, size=self.size)
        if batch.who_waits or batch.tuned is not None or batch.unknown:
            self._apply_note(batch)
            return
        agreed_s = time.perf_counter()
        whole = self._cache.apply(batch)
        data = batch.data or itertools.repeat(b"", len(whole))
        # All before one is done: a caller that hears that a leaf has failed may submit
        # all names of its tree again.
        taken = [self._take_pending(response, agreed_s) for response in whole]
        self._agreed = list(itertools.chain(*taken))
        for response, entries, carried_ in zip(whole, taken, data, strict=True):
            self._execute(response, entries, carried_)
        self._agreed = []
        if batch.last_joined >= 0:
            self._finish_join(batch.last_joined)
        if batch.closing:
            with self._lock:
                self._refusal = self._refusal or batch.closing
                self._says_last = True
        if batch.stop:
            if batch.is_asked:
                self.executor.drain(self.options.timeout_s)
            self._fail(batch.stop)

    def _apply_note(self, batch: Batch) -> None:
        """Takes what is no decision."""
        tuned = batch.tuned
        if batch.who_waits:
            with self._completion.changed:
                self._who_waits = batch.who_waits
                self._completion.changed.notify_all()
        elif tuned is not None:
            self.cycle_time_s = tuned.cycle_time_s
            self.executor.switch_hierarchical(
                all_reduce=tuned.hierarchical_all_reduce,
                all_gather=tuned.hierarchical_all_gather,
            )
        else:
            join = self._join_entry
            entry = lost_entries.find_lost(batch.unknown, self._pending.entries, join)
            if entry is not None:
                self._fail(lost_entries.describe(self.rank, entry), tell=True)

    def _finish_join(self, last_joined: int) -> None:
        with self._lock:
            entry, self._join_entry = self._join_entry, None
            self._refusal = self.why_dead
        if entry is not None:
            self.executor.finish_in_order([entry], [last_joined])

    def _take_pending(self, response: Response, agreed_s: float) -> list[Entry | None]:
        order, self._order = self._order, self._order + 1
        if response.ranks and self.rank not in response.ranks:
            return [None] * len(response.names)
        keys = [(response.process_set, name) for name in response.names]
        return self._pending.take(keys, agreed_s=agreed_s, order=order)

    def _execute(
        self, response: Response, entries: list[Entry | None], data: bytes
    ) -> None:
        set_id = response.process_set
        if response.error:
            self._completion.fail(entries, RuntimeError(response.error))
            return
        if set_id not in self.executor.sets:
            return  # Of others.
        has_joined = self._join_entry is not None
        try:
            self.executor.execute(response, entries, data, has_joined=has_joined)
        except ProtocolError as error:
            self._completion.fail(entries, RuntimeError(str(error)))
            raise
        if self.lead is not None and self.lead.is_tuning:
            num_bytes = self.executor.num_bytes(response)
            self.lead.note_moved(response.names, num_bytes)

    def _refuse(self, entry: Entry) -> None:
        request = entry.request
        self._pending.drop(entry)
        error = ValueError(
            f"{request.name!r}: process set {request.process_set} has been removed."
        )
        self._completion.fail([entry], error)

    def _fail(self, why: str, *, tell: bool = False) -> None:
        """Ends the engine here; all that wait raise `why`."""
        with self._lock:
            if self.why_dead:
                return
            self.why_dead = self._refusal = why
            entries = [*self._agreed, *self._pending.take_all()]
            self._queue = []
        if tell:
            self._tell(why)
        entries += self.executor.close()
        if self._join_entry is not None:
            entries.append(self._join_entry)
            self._join_entry = None
        self._completion.fail(entries, lost_entries.as_error(why))
        if entries:
            self.dump(why)

    def dump(self, reason: str) -> None:
        """Writes the last requests of this process to a file, and logs where it is."""
        if self.options.flight_recorder_capacity:
            self._recorder.dump_into(self.options.flight_recorder_dir, reason)

    def _tell(self, why: str) -> None:
        """Lets the other processes know, if they can be reached."""
        with contextlib.suppress(RuntimeError):  # The link is closed already.
            if self.lead is None:
                message = FromRank(self._cache.num_seen, failure=why)
                self._link.send(0, messages.encode(message))
                return
            for peer in range(1, self.size):
                self._link.send(peer, messages.encode(Batch(stop=why)))
