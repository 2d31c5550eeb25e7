"""Engine: the thread that negotiates with the other processes and runs operations.

Callers put requests into a queue. The thread takes them, reports them to the
coordinator, and runs the coordinator's responses in their order, which is the same on
all processes.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from jdp.eager import checks, lost_entries, messages, startup
from jdp.eager.coordinator import stall
from jdp.eager.coordinator.lead import Lead
from jdp.eager.diagnosis.flight_recorder import FlightRecorder
from jdp.eager.entries import Completion, Entry, Intake, as_error
from jdp.eager.execution import executor, small_tensors
from jdp.eager.messages import Batch, FromRank, ProtocolError, Response
from jdp.eager.options import EagerOptions
from jdp.eager.response_cache import ResponseCache
from jdp.replicas.mesh import World
from jdp.runtime.transport import transport

# A caller that submits at least this often is in the middle of a loop.
_BURST_PERIOD_S = 50e-6
_MAX_HELD_CYCLES = 10
_IDLE_PERIOD_S = 1.0  # between two cycles while a timeline has spans to write.
_logger = logging.getLogger("jdp")


class Engine:
    """Engine of one process; every process of the world constructs it.

    Raises:
      RuntimeError: on every process, if a process did not come or has other options.
    """

    def __init__(self, world: World, options: EagerOptions):
        self.world = world
        self.options = options
        self.rank = world.process_index
        self.size = world.process_count
        self.hosts, has_cores = startup.agree(world, options)
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
            if self.rank == 0:
                self.lead = Lead(world, options, self._link, self._apply)
            wake = self._link.wake
            self.executor = executor.Executor(
                world, options, self._completion, key=key, on_failure=wake
            )
        except BaseException:  # Tells the others that this process is gone.
            self._link.close()
            raise
        self.cycle_time_s = options.cycle_time_s
        self._spin_s = options.spin_s if has_cores else 0.0
        self._recorder = FlightRecorder(
            rank=self.rank,
            size=self.size,
            capacity=max(1, options.flight_recorder_capacity),
        )
        self._cache = ResponseCache()
        # Checked options of earlier calls; see `submission.find_options`.
        self.known_options: dict[Any, Any] = {}
        self.why_dead = ""  # why the engine has ended; "" while it runs.
        self.intake = Intake(self._recorder)
        # Shared by callers and the thread.
        self._is_sleeping = False  # whether the thread waits for news.
        self._is_waking = False  # whether a caller is about to wake it.
        self._wants_to_leave = False
        self._asks = False
        self._who_waits = ""  # the coordinator's last answer about late ranks.
        # Used by the thread alone.
        self._says_last = False
        self._agreed: list[Entry | None] = []  # of the batch that is being executed.
        self._watch = lost_entries.LossWatch()
        self._thread = threading.Thread(target=self._run, name="jdp-eager", daemon=True)
        self._thread.start()

    def submit(self, entries: Sequence[Entry]) -> None:
        """Queues requests, all or none; see `Intake.put`."""
        try:
            if self.intake.put(entries):
                self._notify()
        except BaseException:  # A signal handler may raise after they were queued.
            self._link.wake()
            raise

    def submit_join(self, entry: Entry) -> None:
        """Queues the `join` of this process; see `Intake.put_join`."""
        try:
            self.intake.put_join(entry)
            self._notify()
        except BaseException:  # See `submit`.
            self._link.wake()
            raise

    def wait(self, entries: Sequence[Entry], timeout_s: float | None) -> bool:
        """Waits for entries; see `Intake.expect` and `Completion.wait`."""
        if self.intake.expect():
            self._notify()
        return self._completion.wait(entries, timeout_s)

    def ask_who_waits(self, *, timeout_s: float = 1.0) -> str:
        """Returns the coordinator's report on the names that some ranks wait for."""
        with self._completion.changed:
            self._who_waits = ""
            self._asks = True
            self._notify()
            self._completion.changed.wait_for(
                lambda: self._who_waits or self.why_dead, timeout_s
            )
            return self._who_waits or "The coordinator did not answer."

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        """Starts a trace; does nothing if one is under way."""
        self.executor.start_timeline(path, mark_cycles=mark_cycles)
        self._notify()  # A sleeping thread would not write it.

    def stop_timeline(self) -> None:
        """Ends the trace and closes its file."""
        self.executor.stop_timeline()

    def finish_own(self, *, timeout_s: float) -> None:
        """Waits until the requests of this process are done, or the engine ends."""
        self.wait(self.intake.list_pending(), timeout_s)

    def shutdown(self, *, timeout_s: float) -> None:
        """Ends the engine on all processes; returns once it has ended here."""
        self._wants_to_leave = True
        self._notify()
        if not (self.intake.is_interrupted() or self._completion.is_interrupted()):
            self._thread.join(timeout_s)  # Else it ends after the signal handler.
        self.stop_timeline()

    def _notify(self) -> None:
        """Wakes the thread, which then looks at the queue."""
        if self._is_sleeping or self._is_waking:
            try:
                with self.intake.waking:
                    self._is_waking = True  # A signal handler in between wakes it, too.
                    self._is_sleeping = False
                    self._link.wake()
                    self._is_waking = False
            except BaseException:  # No later call would wake it.
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
        """Reports new requests, receives decisions, and runs them."""
        if self.executor.failure is not None:
            raise self.executor.failure
        if self.intake.queue and not (self.intake.is_awaited or self.intake.refusal):
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
        self._is_sleeping = True
        # Requests since `_say` found `_is_sleeping` False, so did not wake the thread.
        is_idle = not (self.intake.queue or self._is_asked())
        self._hear(self._longest_wait_s() if is_idle else 0.0)
        self._is_sleeping = False

    def _hold_back(self) -> None:
        """Waits for more requests to fuse, unless a caller waits for the queue."""
        begin_s, due_s = time.perf_counter(), self.intake.queued_s + self.cycle_time_s
        latest_s = self.intake.queued_s + _MAX_HELD_CYCLES * self.cycle_time_s
        while begin_s < due_s:
            num_before = len(self.intake.queue)
            self._is_sleeping = True
            self._hear(0.0 if self.intake.is_awaited else due_s - begin_s)
            self._is_sleeping = False
            now_s = time.perf_counter()
            num_new = len(self.intake.queue) - num_before
            # Do not split the requests of a loop: other ranks would split elsewhere.
            if self.intake.is_awaited or num_new * _BURST_PERIOD_S < now_s - begin_s:
                return
            begin_s, due_s = now_s, min(now_s + self.cycle_time_s, latest_s)

    def _spin(self) -> bool:
        """Polls for `spin_s` without sleeping; returns whether there was something."""
        until_s = time.perf_counter() + self._spin_s
        while time.perf_counter() < until_s:
            if self._hear(0.0) or self.intake.queue or self._is_asked():
                return True
        return False

    def _is_asked(self) -> bool:
        """Whether there is something to report besides the queue."""
        joins, asks = self.intake.has_new_join, self._asks
        return joins or asks or self._says_last or self._wants_to_leave

    def _longest_wait_s(self) -> float | None:
        """Returns how long to sleep; None: until there is news."""
        if self.lead is not None and self.lead.has_waiting:
            return stall.LOOK_PERIOD_S
        if self.executor.timeline is not None:
            return _IDLE_PERIOD_S
        return lost_entries.PERIOD_S if self._is_waiting else None

    @property
    def _is_waiting(self) -> bool:
        """Whether this process waits for other ranks."""
        return bool(self.intake.pending.entries) or self.intake.join_entry is not None

    def _say(self) -> None:
        """Tells the coordinator which operations have become ready here."""
        entries, has_joined = self.intake.take()
        is_last, self._says_last = self._says_last, False
        leaves, asks = self._wants_to_leave, self._asks
        self._asks = False
        is_due = self._is_waiting and time.perf_counter() >= self._watch.due_s
        doubts = self._watch.ask(*self.intake.taken()) if is_due else ()
        if not (entries or has_joined or leaves or asks or is_last or doubts):
            return
        parts = self._cache.abbreviate(entries, self.executor.places)
        for entry in parts.refused:
            self._refuse(entry)
        is_cached = len(parts.slots) == len(entries)
        data = small_tensors.collect(entries, parts.slots) if is_cached else ()
        message = FromRank(
            self._cache.num_seen,
            tuple(parts.full),
            parts.hits,
            data,
            has_joined,
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

    def _hear(self, timeout_s: float | None) -> bool:
        events = self._link.wait(timeout_s)
        for event in events:
            if isinstance(event, transport.Received):
                try:
                    self._take(event)
                    continue
                except ProtocolError as error:
                    why = (
                        f"process {event.peer} sent a message that no engine sends: "
                        f"{error}"
                    )
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
        # Take all before any is done: a caller that learns of a failed leaf may submit
        # all names of its tree again.
        take, rank = self.intake.pending.take_agreed, self.rank
        taken = [take(response, rank=rank, agreed_s=agreed_s) for response in whole]
        self._agreed = list(itertools.chain(*taken))
        for response, entries, result in zip(whole, taken, data, strict=True):
            self._execute(response, entries, result)
        self._agreed = []
        if batch.last_joined >= 0:
            self._finish_join(batch.last_joined)
        if batch.closing:
            self.intake.refuse(batch.closing)
            self._says_last = True
        if batch.stop:
            if batch.is_asked:
                self.executor.drain(self.options.timeout_s)
            self._fail(batch.stop)

    def _apply_note(self, batch: Batch) -> None:
        """Applies a batch that decides nothing."""
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
            pending, join = self.intake.pending.entries, self.intake.join_entry
            entry = lost_entries.find_lost(batch.unknown, pending, join)
            if entry is not None:
                self._fail(lost_entries.describe(self.rank, entry), tell=True)

    def _finish_join(self, last_joined: int) -> None:
        entry = self.intake.take_join(self.why_dead)
        if entry is not None:
            self.executor.finish_in_order([entry], [last_joined])

    def _execute(
        self, response: Response, entries: list[Entry | None], data: bytes
    ) -> None:
        set_id = response.process_set
        if response.error:
            self._completion.fail(entries, RuntimeError(response.error))
            return
        if set_id not in self.executor.sets:
            return  # This process is not in the set.
        has_joined = self.intake.join_entry is not None
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
        self.intake.pending.drop(entry)
        error = ValueError(
            f"{request.name!r}: process set {request.process_set} has been removed."
        )
        self._completion.fail([entry], error)

    def _fail(self, why: str, *, tell: bool = False) -> None:
        """Ends the engine on this process; waiting callers raise `why`."""
        if self.why_dead:
            return
        self.why_dead = why
        entries = [*self._agreed, *self.intake.close(why)]
        if tell:
            self._tell(why)
        entries += self.executor.close()
        join = self.intake.take_join(why)
        if join is not None:
            entries.append(join)
        self._completion.fail(entries, as_error(why))
        if entries:
            self.dump(why)

    def dump(self, reason: str) -> None:
        """Writes the last requests of this process to a file, and logs its path."""
        if self.options.flight_recorder_capacity:
            self._recorder.dump_into(self.options.flight_recorder_dir, reason)

    def _tell(self, why: str) -> None:
        """Tells the other processes, if the link is still open."""
        with contextlib.suppress(RuntimeError):  # The link is closed.
            if self.lead is not None:
                self.lead.tell(why)
            else:
                message = FromRank(self._cache.num_seen, failure=why)
                self._link.send(0, messages.encode(message))
