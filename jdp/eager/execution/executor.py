"""Executor: runs operations that all ranks have agreed on, in their common order.

Operations that end in bounded time, whatever other processes do, run on the calling
thread. Operations that might not return, such as a program that waits in NCCL for a
dead process, run on a second thread, and so does everything behind them. The first
thread remains free to learn which process is lost.
"""

import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.eager import checks, messages
from jdp.eager.diagnosis.timeline import RankTimeline, rank_path
from jdp.eager.entries import Completion, Entry
from jdp.eager.execution import fused, registry, small_tensors
from jdp.eager.execution.base import CollectiveTask, Implementation, SetMembers
from jdp.eager.execution.fused import FusedJob, Scratch
from jdp.eager.messages import ProtocolError, Response, Spec
from jdp.eager.options import EagerOptions
from jdp.replicas.mesh import World

_MAX_PREPARED = 64
_NOTHING = contextlib.nullcontext()


class SetState(NamedTuple):
    """Process set that this process is in."""

    members: SetMembers
    implementations: list[Implementation]


class _Prepared(NamedTuple):
    """Cached execution plan of a response that comes repeatedly."""

    response: Response
    specs: list[Spec]
    task: CollectiveTask
    state: SetState
    implementation: Implementation


class Executor:
    """Runs the operations of one process.

    Args:
      world: the processes.
      options: the same on all processes.
      completion: where callers wait.
      key: prefix of the keys under which the processes meet in the store.
      on_failure: called on the second thread after `failure` has been set.
    """

    def __init__(
        self,
        world: World,
        options: EagerOptions,
        completion: Completion,
        *,
        key: str,
        on_failure: Callable[[], None],
    ):
        self.timeline: RankTimeline | None = None
        # Ranks of all sets by number; and the sets that this process is in.
        self.known_sets: dict[int, tuple[int, ...]] = {}
        self.sets: dict[int, SetState] = {}
        # Position of this process in each set that accepts requests. A removed set is
        # dropped at once, though its operations may still run.
        self.places: dict[int, int] = {}
        self.failure: Exception | None = None  # why nothing can go on.
        self._world = world
        self._options = options
        self._completion = completion
        self._key = key
        self._on_failure = on_failure
        self._num_sets_made = 0
        self._prepared: dict[int, _Prepared] = {}
        self._running: dict[int, Sequence[Entry | None]] = {}
        self._scratch = Scratch()
        # Work of the second thread; None ends it.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._num_queued = 0
        self._queued_scratch = Scratch()
        self._is_closed = False
        self._add_set(0, tuple(range(world.process_count)))
        if options.timeline:
            self.start_timeline(
                options.timeline, mark_cycles=options.timeline_mark_cycles
            )

    def execute(
        self,
        response: Response,
        entries: Sequence[Entry | None],
        data: bytes,
        *,
        has_joined: bool,
    ) -> None:
        """Runs one response, now or after the work of the second thread.

        Args:
          response: the operation of all members of the set.
          entries: by name, the request of this process; None if it has joined.
          data: the result, if it came with the response; b"" otherwise.
          has_joined: whether this process has no more data.

        Raises:
          ProtocolError: the response makes no sense for its process set.
        """
        prepared = self._prepare(response)
        task = prepared.task
        kind = task.kind
        place = prepared.state.members.place
        checks.check_entries(response, entries, has_joined=has_joined, place=place)
        checks.check_data(response, data, task)
        if kind == "barrier":
            self._completion.finish(entries, [None])
        elif kind == "submit":
            self._enqueue(functools.partial(self._run_program, entries), entries)
        elif kind in ("add_process_set", "remove_process_set"):
            if kind == "remove_process_set":
                self.places.pop(prepared.specs[0].shape[0], None)
            self._run_in_order(
                functools.partial(self._change_sets, prepared, entries), entries
            )
        elif (prepared.implementation.is_bounded or data) and not self._num_queued:
            self._run_job(prepared, entries, data, self._scratch)
        else:
            scratch = self._queued_scratch
            fn = functools.partial(self._run_job, prepared, entries, data, scratch)
            self._enqueue(fn, entries)

    def num_bytes(self, response: Response) -> int:
        """Returns the number of bytes that a response moves."""
        return self._prepare(response).task.num_bytes

    def switch_hierarchical(self, *, all_reduce: bool, all_gather: bool) -> None:
        """Switches hierarchical operations; all ranks do so after the same response."""
        for implementation in self.sets[0].implementations:
            implementation.switch(all_reduce=all_reduce, all_gather=all_gather)
        self._prepared.clear()

    def finish_in_order(
        self, entries: Sequence[Entry | None], values: Sequence[Any]
    ) -> None:
        """Gives entries their values, after the work of the second thread."""

        def finish() -> None:
            self._completion.finish(entries, values)
            self._running.pop(id(entries), None)

        self._run_in_order(finish, entries)

    def _run_in_order(
        self, fn: Callable[[], None], entries: Sequence[Entry | None]
    ) -> None:
        """Calls `fn` now, or after the work of the second thread."""
        if self._num_queued:
            self._enqueue(fn, entries)
        else:
            fn()

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        """Starts a trace; does nothing if one is under way."""
        if self.timeline is None:
            rank = self._world.process_index
            self.timeline = RankTimeline(
                rank_path(path, rank), rank=rank, mark_cycles=mark_cycles
            )

    def stop_timeline(self) -> None:
        """Ends the trace and closes its file."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    def drain(self, timeout_s: float) -> None:
        """Waits until the second thread has no work left."""
        with self._completion.changed:
            self._completion.changed.wait_for(lambda: not self._num_queued, timeout_s)

    def close(self) -> list[Entry]:
        """Ends the second thread; returns the entries that it will not finish."""
        self._is_closed = True
        if self._jobs is not None:
            self._jobs.put(None)
        if not self._num_queued:  # Otherwise the second thread may still use them.
            for state in self.sets.values():
                _close(state)
        # The second thread may still remove some of them.
        running = [entry for some in list(self._running.values()) for entry in some]
        return [entry for entry in running if entry is not None]

    def _prepare(self, response: Response) -> _Prepared:
        prepared = self._prepared.get(id(response))
        if prepared is not None and prepared.response is response:
            return prepared
        specs = [messages.decode_spec(spec) for spec in response.specs]
        spec = specs[0]
        dtype = np.dtype(spec.dtype or "uint8")
        num_bytes = sum([messages.num_bytes_of(each, ()) for each in specs])
        is_on_device = spec.device != "cpu"
        task = CollectiveTask(spec.kind, spec.op, dtype, num_bytes, is_on_device)
        state = self.sets[response.process_set]
        size = self._world.process_count
        checks.check_places(response, specs, state.members.ranks, size=size)
        implementation = next(i for i in state.implementations if i.is_enabled(task))
        prepared = _Prepared(response, specs, task, state, implementation)
        if len(self._prepared) == _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[id(response)] = prepared
        return prepared

    def _run_job(
        self,
        prepared: _Prepared,
        entries: Sequence[Entry | None],
        data: bytes,
        scratch: Scratch,
    ) -> None:
        """Runs operations that were fused."""
        started_s = time.perf_counter()
        arrays = []
        for entry in entries:
            if entry is None:
                arrays.append(None)
            else:
                arrays.append(entry.array)
                entry.record.started_s = started_s
        job = FusedJob(prepared.specs, prepared.response.locals, arrays)
        members, implementation = prepared.state.members, prepared.implementation
        self._running[id(entries)] = entries
        timeline = self.timeline  # Callers may end it at any time.
        scratch.marks = None if timeline is None else []
        with jax.enable_x64(True) if prepared.task.is_on_device else _NOTHING:
            try:
                if data:
                    values = fused.run_carried(job, data, members, scratch)
                else:
                    values = fused.run(job, implementation, members, scratch)
            except (TypeError, ValueError, NotImplementedError) as error:
                # Wrong arguments, the same on all members: nothing was sent.
                self._completion.fail(entries, error)
                values = None
        if timeline is not None:  # Callers that see the result may end it.
            facts = {
                "implementation": small_tensors.NAME if data else implementation.name,
                "fused": len(entries),
                "num_bytes": prepared.task.num_bytes,
            }
            end_s, marks = time.perf_counter(), scratch.marks or []
            for entry in entries:
                if entry is not None:
                    _trace(timeline, entry, end_s, facts, marks)
        if values is not None:
            self._completion.finish(entries, values)
        del self._running[id(entries)]

    def _run_program(self, entries: Sequence[Entry | None]) -> None:
        """Runs a submitted program; the caller that waits for it gets its exception."""
        (entry,) = entries
        assert entry is not None and entry.run is not None
        entry.record.started_s = time.perf_counter()
        value, failure = None, None
        try:
            value = jax.block_until_ready(entry.run())
        except Exception as error:
            failure = error
        timeline = self.timeline
        if timeline is not None:
            _trace(timeline, entry, time.perf_counter(), {}, [])
        if failure is None:
            self._completion.finish([entry], [value])
        else:
            self._completion.fail([entry], failure)
        del self._running[id(entries)]

    def _change_sets(
        self, prepared: _Prepared, entries: Sequence[Entry | None]
    ) -> None:
        (spec,) = prepared.specs
        if spec.kind == "add_process_set":
            ((set_id,),) = prepared.response.locals[0]
            if set_id in self.known_sets:
                raise ProtocolError(f"process set {set_id} is added twice")
            self._add_set(set_id, spec.shape)
        else:
            (set_id,) = spec.shape
            if self.known_sets.pop(set_id, None) is None:
                raise ProtocolError(f"process set {set_id} to remove does not exist")
            state = self.sets.pop(set_id, None)
            self._prepared.clear()
            if state is not None:
                _close(state)
        self._completion.finish(entries, [set_id])
        self._running.pop(id(entries), None)

    def _add_set(self, set_id: int, ranks: tuple[int, ...]) -> None:
        self._num_sets_made += 1
        self.known_sets[set_id] = ranks
        if self._world.process_index in ranks:
            members = SetMembers(self._world, set_id, ranks)
            key = f"{self._key}/set/{self._num_sets_made}"
            implementations = registry.make_implementations(
                members, self._options, key=key
            )
            self.sets[set_id] = SetState(members, implementations)
            self.places[set_id] = members.place

    def _enqueue(self, fn: Callable[[], None], entries: Sequence[Entry | None]) -> None:
        """Makes the second thread call `fn`, which finishes `entries`."""
        self._running[id(entries)] = entries  # For `close`, until they are finished.
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(
                target=self._run, args=(self._jobs,), name="jdp-eager-run", daemon=True
            ).start()
        with self._completion.changed:
            self._num_queued += 1
        self._jobs.put(fn)

    def _run(self, jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while (fn := jobs.get()) is not None:
            try:
                if not self._is_closed:
                    fn()
            except Exception as error:
                self.failure = error
                self._on_failure()
            with self._completion.changed:
                self._num_queued -= 1
                self._completion.changed.notify_all()


def _close(state: SetState) -> None:
    for implementation in state.implementations:
        implementation.close()


def _trace(
    timeline: RankTimeline,
    entry: Entry,
    end_s: float,
    facts: dict[str, Any],
    marks: Sequence[tuple[str, float]],
) -> None:
    """Writes the spans of an entry that is done at `end_s`, and of its phases."""
    record = entry.record
    name, phase = record.name, record.kind.upper()
    if name.startswith(messages.UNNAMED):  # They share one row.
        name = f"{messages.UNNAMED}{record.kind}"
    timeline.add_span(name, f"NEGOTIATE_{phase}", record.submitted_s, record.agreed_s)
    timeline.add_span(name, "QUEUE", record.agreed_s, record.started_s)
    timeline.add_span(name, phase, record.started_s, end_s, **facts)
    for (_, start_s), (part, end_s) in itertools.pairwise(marks):
        if part:
            timeline.add_span(name, part, start_s, end_s)
