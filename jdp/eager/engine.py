"""Engine: the thread that agrees with the other processes, and then runs.

Callers put what is ready into a queue. The thread takes it, tells the coordinator, and
runs what the coordinator says, in its order, which is the same on all processes. What
might not come back, such as a program that waits in NCCL for a process that has died,
runs on a second thread, so that the first goes on to hear who is lost.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from jdp.eager import controller, execution, messages, stall
from jdp.eager.controller import Coordinator, ProtocolError
from jdp.eager.execution import Job, Scratch
from jdp.eager.flight_recorder import FlightRecorder, Record
from jdp.eager.messages import Batch, FromRank, Request, Response, Spec
from jdp.eager.ops import registry
from jdp.eager.ops.base import Implementation, Members, Task
from jdp.eager.ops.shared_memory import SharedMemory
from jdp.eager.options import EagerOptions
from jdp.eager.response_cache import ResponseCache
from jdp.eager.stall import StallState
from jdp.eager.timeline import Timeline, rank_path
from jdp.mesh import World
from jdp.runtime import transport
from jdp.runtime.transport import Link, LinkOptions, Lost, Received

_logger = logging.getLogger("jdp")
_encode = msgspec.msgpack.Encoder().encode
_decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
_decode_batch = msgspec.msgpack.Decoder(Batch).decode
_MAX_PREPARED = 64
_LOOK_PERIOD_S = 1.0  # how often the coordinator looks who is late.
# Options that a process may have for itself.
_OWN = {"timeline", "flight_recorder_capacity", "flight_recorder_dir", "autotune_log"}


class Entry:
    """One request of this process, until it is done."""

    __slots__ = ("request", "array", "run", "record", "is_done", "value", "error")

    def __init__(self, request: Request, array: Any, record: Record):
        """Makes a request that nobody knows of yet."""
        self.request = request
        self.array = array
        self.run: Callable[[], Any] | None = None  # of a program.
        self.record = record
        self.is_done = False
        self.value: Any = None
        self.error: Exception | None = None


class ProcessSetState(NamedTuple):
    """A process set that this process is in."""

    members: Members
    implementations: list[Implementation]


class _Prepared(NamedTuple):
    """What is known of a response that comes over and over."""

    response: Response
    keys: list[tuple[int, str]]
    specs: list[Spec]
    task: Task
    implementation: Implementation
    members: Members


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
        self._key = f"jdp/eager/{number}"
        self._link = transport.open_link(
            world,
            key=f"{self._key}/link",
            options=LinkOptions(heartbeat_timeout_s=options.timeout_s),
        )
        _agree_on_options(self._link, world, options)
        self.cycle_time_s = options.cycle_time_s
        self.recorder = FlightRecorder(
            rank=self.rank,
            size=self.size,
            capacity=max(1, options.flight_recorder_capacity),
        )
        self.timeline: Timeline | None = None
        if options.timeline:
            self.start_timeline(
                options.timeline, mark_cycles=options.timeline_mark_cycles
            )
        self._coordinator: Coordinator | None = None
        if self.rank == 0:
            self._coordinator = Coordinator(
                self.size,
                controller.Options(
                    fusion_bytes=options.fusion_bytes,
                    cache_capacity=options.cache_capacity,
                    fuse_groups=options.fuse_groups,
                ),
            )
        self._cache = ResponseCache()
        self._sets: dict[int, ProcessSetState] = {}  # with this process.
        self.known_sets: dict[int, tuple[int, ...]] = {}  # all, with their ranks.
        self._num_sets_made = 0
        # What callers and the thread share; the lock is for the first three.
        self._lock = threading.Lock()
        self._queue: list[Entry] = []
        self._pending: dict[tuple[int, str], Entry] = {}
        self._dead = ""  # why nothing goes on; "" while it does.
        self._done = threading.Condition()
        self._is_waiting = False
        self._wants_to_leave = False
        self._join_entry: Entry | None = None
        self._says_joined = False
        self._asks = False
        self._who_waits = ""  # what the coordinator last said of names that wait.
        # Of the thread alone.
        self._scratch = Scratch()
        self._executor_scratch = Scratch()
        self._prepared: dict[int, _Prepared] = {}
        self._order = 0
        self._stall = StallState(time.monotonic())
        self._looked_s = time.monotonic()
        self._executor: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._num_queued = 0
        self._running: dict[int, Sequence[Entry | None]] = {}  # popped, not done.
        self._failure = ""  # of the second thread.
        self._add_set(0, tuple(range(self.size)))
        self._thread = threading.Thread(target=self._run, name="jdp-eager", daemon=True)
        self._thread.start()

    # What callers use, on any thread

    def submit(self, entries: Sequence[Entry]) -> None:
        """Puts requests into the queue, all or none.

        Raises:
          ValueError: a name is in use.
          RuntimeError: the engine has ended.
        """
        keys = [(e.request.process_set, e.request.name) for e in entries]
        with self._lock:
            if self._dead:
                raise RuntimeError(self._dead)
            pending = self._pending
            for i, key in enumerate(keys):
                if key in pending:
                    for earlier in keys[:i]:
                        del pending[earlier]
                    raise ValueError(
                        f"`name={key[1]!r}` is the name of an operation that is still "
                        "being processed. Wait for it with `synchronize`, or use "
                        "another name."
                    )
                pending[key] = entries[i]
            self._queue.extend(entries)
            for entry in entries:
                self.recorder.add(entry.record)
        self._notify()

    def submit_join(self, entry: Entry) -> None:
        """Says that this process has no more data.

        Raises:
          RuntimeError: it has said so before, or the engine has ended.
        """
        with self._lock:
            if self._dead:
                raise RuntimeError(self._dead)
            if self._join_entry is not None:
                raise RuntimeError(
                    "`join` was called again before all processes had joined."
                )
            self._join_entry = entry
            self._says_joined = True
        self._notify()

    def wait(self, entries: Sequence[Entry], timeout_s: float | None) -> bool:
        """Waits until all entries are done; returns whether they are."""
        for entry in entries:
            if not entry.is_done:
                break
        else:
            return True
        with self._done:
            return self._done.wait_for(
                lambda: all(entry.is_done for entry in entries), timeout_s
            )

    def ask_who_waits(self, *, timeout_s: float = 1.0) -> str:
        """Returns what the coordinator knows of names that some ranks wait for."""
        with self._done:
            self._who_waits = ""
            self._asks = True
            self._notify()
            self._done.wait_for(lambda: self._who_waits or self._dead, timeout_s)
            return self._who_waits or "The coordinator did not answer."

    def is_member(self, set_id: int) -> bool:
        """Whether this process is in a set, and the set still there."""
        return set_id in self._sets

    def get_set(self, set_id: int) -> ProcessSetState:
        """Returns a set that this process is in."""
        return self._sets[set_id]

    @property
    def why_dead(self) -> str:
        """Why nothing goes on; "" while it does."""
        return self._dead

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        """Begins a trace; nothing happens if one is under way."""
        if self.timeline is None:
            self.timeline = Timeline(
                rank_path(path, self.rank), rank=self.rank, mark_cycles=mark_cycles
            )

    def stop_timeline(self) -> None:
        """Ends the trace and closes its file."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    def shutdown(self, *, timeout_s: float) -> None:
        """Ends the engine on all processes; returns once it has ended here."""
        self._wants_to_leave = True
        self._notify()
        self._thread.join(timeout_s)
        self.stop_timeline()

    def _notify(self) -> None:
        """Makes the thread look at the queue."""
        if self._is_waiting:
            self._is_waiting = False
            self._link.wake()

    # The thread

    def _run(self) -> None:
        try:
            while not self._dead:
                self._cycle()
        except Exception as error:
            _logger.debug("The eager engine ends.", exc_info=True)
            self._fail(f"rank {self.rank}: {error}", tell=True)
        finally:
            if self._executor is not None:
                self._executor.put(None)
            if not self._num_queued:  # Else the second thread may still use them.
                for state in self._sets.values():
                    _close(state)
            self._link.close()

    def _cycle(self) -> None:
        """Says what is new here, hears what is new elsewhere, and runs it."""
        if self._failure:
            raise RuntimeError(self._failure)
        if self._queue and self.cycle_time_s > 0:
            self._hear(self.cycle_time_s)
        self._say()
        if self._coordinator is not None:
            self._decide()
        if self.timeline is not None:
            self.timeline.mark_cycle(time.perf_counter())
        if self._dead:
            return
        self._is_waiting = True
        # What came since `_say` found `_is_waiting` False, and did not wake.
        is_idle = not (
            self._queue or self._says_joined or self._wants_to_leave or self._asks
        )
        self._hear(self._longest_wait_s() if is_idle else 0.0)
        self._is_waiting = False

    def _longest_wait_s(self) -> float | None:
        is_late_possible = self._coordinator is not None and (
            self._coordinator.has_waiting
        )
        return _LOOK_PERIOD_S if is_late_possible else None

    def _say(self) -> None:
        """Tells the coordinator what has become ready here."""
        with self._lock:
            entries, self._queue = self._queue, []
            joined, self._says_joined = self._says_joined, False
        leaves, asks = self._wants_to_leave, self._asks
        self._asks = False
        if not (entries or joined or leaves or asks):
            return
        find, full, hits = self._cache.find, [], 0
        for entry in entries:
            request = entry.request
            state = self._sets.get(request.process_set)
            if state is None:
                self._finish(entry, error=_no_such_set(request))
                continue
            slot = find(request, state.members.place)
            if slot is None:
                full.append(request)
            else:
                hits |= 1 << slot
        message = FromRank(
            self._cache.num_seen,
            tuple(full),
            hits.to_bytes((hits.bit_length() + 7) // 8, "little"),
            joined,
            leaves,
            asks=asks,
        )
        if self._coordinator is not None:
            self._receive(0, message)
        else:
            self._link.send(0, _encode(message))
        if leaves:
            self._wants_to_leave = False

    def _hear(self, timeout_s: float | None) -> None:
        for event in self._link.wait(timeout_s):
            if isinstance(event, Received):
                if self._coordinator is not None:
                    self._receive(event.peer, _decode_from_rank(event.payload))
                else:
                    self._apply(_decode_batch(event.payload))
            else:
                self._lose(event)

    def _lose(self, lost: Lost) -> None:
        if self._coordinator is not None:
            self._coordinator.stop(lost.why)
        else:
            self._fail(lost.why)

    # The coordinator

    def _receive(self, rank: int, message: FromRank) -> None:
        assert self._coordinator is not None
        now_s = time.monotonic()
        try:
            self._coordinator.receive(rank, message, now_s=now_s)
        except ProtocolError as error:
            self._coordinator.stop(str(error))
        if message.asks:
            stalls = self._coordinator.find_stalls(now_s=now_s, after_s=0.0)
            self._send_to_all(Batch(who_waits=stall.describe(stalls)))
        if self.timeline is not None:
            for request in message.requests:
                self.timeline.add_instant(
                    request.name, f"rank {rank} is ready", time.perf_counter()
                )

    def _decide(self) -> None:
        assert self._coordinator is not None
        now_s = time.monotonic()
        while not self._dead:
            batch = self._coordinator.decide(now_s=now_s)
            if batch is None:
                break
            self._send_to_all(batch)
        if now_s - self._looked_s >= _LOOK_PERIOD_S:
            self._looked_s = now_s
            self._look_who_is_late(now_s)

    def _send_to_all(self, batch: Batch) -> None:
        payload = _encode(batch)
        for peer in range(1, self.size):
            self._link.send(peer, payload)
        self._apply(batch)

    def _look_who_is_late(self, now_s: float) -> None:
        assert self._coordinator is not None
        options = self.options
        if options.stall_warning_s == 0:
            return
        stalls = self._coordinator.find_stalls(
            now_s=now_s, after_s=options.stall_warning_s
        )
        self._stall, verdict = stall.observe(
            self._stall,
            stalls,
            now_s=now_s,
            warn_after_s=options.stall_warning_s,
            stop_after_s=options.stall_shutdown_s or None,
        )
        if verdict.warning is not None:
            _logger.warning(verdict.warning)
        if verdict.stop is not None:
            self._coordinator.stop(verdict.stop)

    # What was decided

    def _apply(self, batch: Batch) -> None:
        agreed_s = time.perf_counter()
        for response in self._cache.apply(batch):
            self._execute(response, agreed_s)
        if batch.last_joined >= 0:
            entry, self._join_entry = self._join_entry, None
            if entry is not None:
                self._in_order(lambda: self._finish(entry, batch.last_joined))
        if batch.who_waits:
            with self._done:
                self._who_waits = batch.who_waits
                self._done.notify_all()
        if batch.stop:
            if batch.is_asked:
                with self._done:
                    self._done.wait_for(
                        lambda: not self._num_queued, self.options.timeout_s
                    )
            self._fail(batch.stop)

    def _execute(self, response: Response, agreed_s: float) -> None:
        set_id = response.process_set
        state = self._sets.get(set_id)
        order, self._order = self._order, self._order + 1
        if state is None:
            return  # Of others.
        pop = self._pending.pop
        if response.error:
            for name in response.names:
                entry = pop((set_id, name), None)
                if entry is not None:
                    entry.record.order = order
                    self._finish(entry, error=RuntimeError(response.error))
            return
        prepared = self._prepare(response, state)
        entries = [pop(key, None) for key in prepared.keys]
        for entry in entries:
            if entry is not None:
                entry.record.agreed_s = agreed_s
                entry.record.order = order
        kind = prepared.task.kind
        if kind == "barrier":
            self._finish_all(entries, [None])
        elif kind == "submit":
            (entry,) = entries
            assert entry is not None
            self._enqueue(lambda: self._run_program(entry))
        elif kind in ("add_process_set", "remove_process_set"):
            self._in_order(lambda: self._change_sets(entries[0], prepared))
        elif prepared.implementation.is_bounded and not self._num_queued:
            self._run_job(entries, prepared, self._scratch)
        else:
            self._enqueue(
                lambda: self._run_job(entries, prepared, self._executor_scratch)
            )

    def _prepare(self, response: Response, state: ProcessSetState) -> _Prepared:
        prepared = self._prepared.get(id(response))
        if prepared is not None and prepared.response is response:
            return prepared
        specs = [messages.decode_spec(spec) for spec in response.specs]
        spec = specs[0]
        dtype = np.dtype(spec.dtype or "uint8")
        task = Task(
            spec.kind,
            spec.op,
            dtype,
            sum(dtype.itemsize * int(np.prod(each.shape)) for each in specs),
            spec.device != "cpu",
        )
        prepared = _Prepared(
            response,
            [(response.process_set, name) for name in response.names],
            specs,
            task,
            registry.pick(state.implementations, task),
            state.members,
        )
        if len(self._prepared) == _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[id(response)] = prepared
        return prepared

    def _run_job(
        self,
        entries: Sequence[Entry | None],
        prepared: _Prepared,
        scratch: Scratch,
    ) -> None:
        """Moves the data of operations that run as one."""
        started_s = time.perf_counter()
        self._running[id(entries)] = entries
        job = Job(
            prepared.specs,
            prepared.response.locals,
            [None if entry is None else entry.array for entry in entries],
        )
        for entry in entries:
            if entry is not None:
                entry.record.started_s = started_s
        implementation, members = prepared.implementation, prepared.members
        with jax.enable_x64(True) if prepared.task.on_device else _NOTHING:
            try:
                values = execution.run(job, implementation, members, scratch)
            except (TypeError, ValueError, NotImplementedError) as error:
                # Of what was asked, the same on all members; nothing has been sent.
                for entry in entries:
                    if entry is not None:
                        self._finish(entry, error=error)
                values = None
        if values is not None:
            self._finish_all(entries, values)
        del self._running[id(entries)]
        if self.timeline is not None:
            self._trace(entries, prepared, started_s)

    def _run_program(self, entry: Entry) -> None:
        """Runs a submitted program; what it raises is for its caller."""
        assert entry.run is not None
        self._running[id(entry)] = [entry]
        entry.record.started_s = time.perf_counter()
        try:
            value = entry.run()
            jax.block_until_ready(value)
        except Exception as error:
            self._finish(entry, error=error)
        else:
            self._finish(entry, value)
        del self._running[id(entry)]
        if self.timeline is not None:
            self._trace_one(self.timeline, entry, "SUBMIT", {})

    def _change_sets(self, entry: Entry | None, prepared: _Prepared) -> None:
        (spec,) = prepared.specs
        if spec.kind == "add_process_set":
            ((set_id,),) = prepared.response.locals[0]
            self._add_set(set_id, spec.shape)
        else:
            (set_id,) = spec.shape
            self.known_sets.pop(set_id)
            state = self._sets.pop(set_id, None)
            self._prepared.clear()
            if state is not None:
                _close(state)
        if entry is not None:
            self._finish(entry, set_id)

    def _add_set(self, set_id: int, ranks: tuple[int, ...]) -> None:
        self.known_sets[set_id] = ranks
        self._num_sets_made += 1
        if self.rank not in ranks:
            return
        members = Members(self.world, set_id, ranks)
        key = f"{self._key}/set/{'-'.join(map(str, ranks))}/{self._num_sets_made}"
        self._sets[set_id] = ProcessSetState(
            members, registry.make_implementations(members, self.options, key=key)
        )

    def _finish_all(self, entries: Sequence[Entry | None], values: list[Any]) -> None:
        now_s = time.perf_counter()
        for entry, value in zip(entries, values, strict=True):
            if entry is not None and not entry.is_done:
                entry.record.finished_s = now_s
                entry.array = None
                entry.value = value
                entry.is_done = True
        with self._done:
            self._done.notify_all()

    def _finish(
        self, entry: Entry, value: Any = None, *, error: Exception | None = None
    ) -> None:
        if error is not None and not entry.is_done:
            entry.error = error
            entry.record.error = str(error)
        self._finish_all([entry], [value])

    # The second thread

    def _in_order(self, fn: Callable[[], None]) -> None:
        """Runs now, or after what the second thread still has to run."""
        if self._num_queued:
            self._enqueue(fn)
        else:
            fn()

    def _enqueue(self, fn: Callable[[], None]) -> None:
        if self._executor is None:
            self._executor = queue.SimpleQueue()
            threading.Thread(
                target=self._run_executor,
                args=(self._executor,),
                name="jdp-eager-executor",
                daemon=True,
            ).start()
        with self._done:
            self._num_queued += 1
        self._executor.put(fn)

    def _run_executor(
        self, jobs: "queue.SimpleQueue[Callable[[], None] | None]"
    ) -> None:
        while (fn := jobs.get()) is not None:
            try:
                if not self._dead:
                    fn()
            except Exception as error:
                self._failure = str(error)
                self._link.wake()
            with self._done:
                self._num_queued -= 1
                self._done.notify_all()

    # The end

    def _fail(self, why: str, *, tell: bool = False) -> None:
        """Ends the engine here; all that wait raise `why`."""
        with self._lock:
            if self._dead:
                return
            self._dead = why
            entries: list[Entry | None] = list(self._pending.values())
            self._pending.clear()
            self._queue = []
        if tell:
            self._tell(why)
        for running in list(self._running.values()):
            entries += running
        entries.append(self._join_entry)
        self._join_entry = None
        for entry in entries:
            if entry is not None:
                self._finish(entry, error=RuntimeError(why))
        if any(entry is not None for entry in entries):
            self.dump(why)
        with self._done:
            self._done.notify_all()

    def dump(self, reason: str) -> None:
        """Writes the last requests of this process to a file, and logs where it is."""
        if not self.options.flight_recorder_capacity:
            return
        folder = self.options.flight_recorder_dir or tempfile.gettempdir()
        path = pathlib.Path(folder, f"jdp_flight_{os.getpid()}.rank{self.rank}.json")
        try:
            self.recorder.dump(path, reason)
        except OSError as error:
            _logger.warning("The flight recorder cannot be written: %s", error)
        else:
            _logger.warning(
                "Rank %d wrote its last requests to %s; compare two ranks with "
                "`jdp timeline diff`.",
                self.rank,
                path,
            )

    def _tell(self, why: str) -> None:
        """Lets the other processes know, if they can be reached."""
        if self._coordinator is None:
            self._link.send(0, _encode(FromRank(failure=why)))
        else:
            for peer in range(1, self.size):
                self._link.send(peer, _encode(Batch(stop=why)))

    # The timeline

    def _trace(
        self, entries: Sequence[Entry | None], prepared: _Prepared, started_s: float
    ) -> None:
        timeline = self.timeline
        facts = {
            "implementation": prepared.implementation.name,
            "fused": len(entries),
            "num_bytes": prepared.task.num_bytes,
        }
        for entry in entries:
            if entry is not None and timeline is not None:
                self._trace_one(timeline, entry, prepared.task.kind.upper(), facts)

    def _trace_one(
        self, timeline: Timeline, entry: Entry, phase: str, facts: dict[str, Any]
    ) -> None:
        record, name = entry.record, entry.request.name
        timeline.add_span(
            name, f"NEGOTIATE_{phase}", record.submitted_s, record.agreed_s
        )
        timeline.add_span(name, "QUEUE", record.agreed_s, record.started_s)
        timeline.add_span(name, phase, record.started_s, record.finished_s, **facts)


_NOTHING = contextlib.nullcontext()


def _close(state: ProcessSetState) -> None:
    for implementation in state.implementations:
        if isinstance(implementation, SharedMemory):
            implementation.close()


def _no_such_set(request: Request) -> Exception:
    return ValueError(
        f"{request.name!r}: process set {request.process_set} has been removed."
    )


def _agree_on_options(link: Link, world: World, options: EagerOptions) -> None:
    """Compares the options of all processes with those of process 0.

    Raises:
      RuntimeError: they differ, or a process is lost; on every process.
    """
    own = {k: v for k, v in dataclasses.asdict(options).items() if k not in _OWN}
    if world.process_index > 0:
        link.send(0, _encode(own))
        (verdict,) = _collect(link, 1, world.timeout_s).values()
        error = msgspec.msgpack.decode(verdict, type=str)
    else:
        found = _collect(link, world.process_count - 1, world.timeout_s)
        error = ""
        for peer, payload in sorted(found.items()):
            theirs = msgspec.msgpack.decode(payload)
            for name, value in own.items():
                if theirs.get(name) != value and not error:
                    error = (
                        f"`{name}` is {value!r} on process 0 and {theirs.get(name)!r} "
                        f"on process {peer}; `EagerOptions` must be the same on all."
                    )
        for peer in found:
            link.send(peer, _encode(error))
    if error:
        link.close()
        raise RuntimeError(error)


def _collect(link: Link, count: int, timeout_s: float) -> dict[int, bytes]:
    """Waits for one message of each of `count` peers."""
    found: dict[int, bytes] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(found) < count:
        left_s = deadline_s - time.monotonic()
        events = link.wait(left_s) if left_s > 0 else []
        for event in events:
            if isinstance(event, Lost):
                link.close()
                raise RuntimeError(f"While the eager engine starts: {event.why}.")
            found[event.peer] = event.payload
        if left_s <= 0:
            link.close()
            raise RuntimeError(
                f"{count - len(found)} processes did not say their options within "
                f"{timeout_s:g} s."
            )
    return found
