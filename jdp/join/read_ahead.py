"""Read-ahead: which batches are read and agreed on, and which one is next?

Two threads per process keep everything off the critical path. The reader iterates over
the user's batches, ahead of the loop. The agent announces what was read, and learns the
iterations that all processes agree on; see `jdp.join.lockstep`.
"""

import collections
import inspect
import itertools
import math
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jdp.join import batch_spec, lockstep, lockstep_checks
from jdp.join.batch_spec import BatchSpec, ReadBatch
from jdp.join.early_exit import ExitWatch
from jdp.join.lockstep import Announcement, Decision
from jdp.join.rounds import Rounds
from jdp.replicas import progress, stamps
from jdp.replicas.mesh import World
from jdp.types import PyTree

_CHECK_PERIOD_S = 0.1  # a waiting loop checks so often whether a process has left.
_JOIN_TIMEOUT_S = 2.0
_PATIENCE_S = 0.05  # with a reader that seems to be in the user's code.
_ITERATION_BITS = 40  # of a number in the record; above them is the loop's.
_END: Any = object()


class AgreedIteration(NamedTuple):
    """One agreed iteration on this process."""

    samples: int  # on this process.
    spec: int  # index of the spec.
    batch: ReadBatch | None  # None where this process has run out.


class ReadAhead:
    """State that the loop, the reader and the agent of one process share."""

    def __init__(
        self,
        batches: Iterable[PyTree],
        world: World,
        prefetch: int,
        like: PyTree | None,
        rounds: Rounds,
    ):
        """Starts the reader and the agent; `stop` ends them."""
        self.specs: list[BatchSpec] = []  # agreed on, by index.
        self.treedefs: list[Any] = []  # per spec; None where all batches are our own.
        self.has_ended = False  # the loop has ended on all processes.
        self._batches = batches
        self._world = world
        self._like = like
        self._rounds = rounds
        self._lock = threading.RLock()
        self._has_space = threading.Condition(self._lock)  # The reader waits.
        self._has_news = threading.Condition(self._lock)  # The agent waits.
        self._has_steps = threading.Condition(self._lock)  # The loop waits.
        self._member = lockstep.MemberState(prefetch=prefetch)
        self._queue: collections.deque[ReadBatch] = collections.deque()
        self._steps: collections.deque[tuple[int, int]] = collections.deque()
        self._seen: dict[Any, None] = {}  # treedefs of our own batches.
        self._num_begun = 0
        self._proposal: BatchSpec | None = None
        self._spec = -1  # index of the spec of the last decided iteration.
        self._final: Decision | None = None
        self._failure: BaseException | None = None  # of the reader.
        self._is_stopping = False
        self._is_reading = False
        self._reading_since_s = math.inf
        self._waiting_since_s = math.inf
        self._announced_s = time.monotonic()
        self._threads = [
            threading.Thread(target=self._read_all, name="jdp-join-reader"),
            threading.Thread(target=self._agree_all, name="jdp-join-agent"),
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def take(self, watch: ExitWatch) -> AgreedIteration:
        """Waits for the next iteration and begins it."""
        with self._lock:
            if not self._steps and self._final is None:
                self._waiting_since_s = time.monotonic()
                self._has_news.notify()
                number = self._rounds.number << _ITERATION_BITS | self._num_begun
                waits = stamps.ITERATION_BEGUN, number, "jdp.join_batches"
                with progress.waiting(), stamps.during(*waits):
                    while not self._steps and self._final is None:
                        watch.check()
                        self._has_steps.wait(_CHECK_PERIOD_S)
                self._waiting_since_s = math.inf
            if not self._steps:
                self._raise_final()
            watch.begin()
            size, spec = self._steps.popleft()
            self._num_begun += 1
            batch = None
            if self._queue:
                batch = self._queue.popleft()
                self._has_space.notify()
            self._wake_agent()
        return AgreedIteration(size * self._world.num_local_rows, spec, batch)

    def stop(self) -> None:
        """Stops the threads, and waits for them unless one is in the user's code."""
        with self._lock:
            self._is_stopping = True
            self._rounds.is_stopping = True
            for condition in (self._has_space, self._has_news, self._has_steps):
                condition.notify_all()
        reader, agent = self._threads
        current = threading.current_thread()
        if agent is not current:
            agent.join(_JOIN_TIMEOUT_S)
        if reader is not current:
            reader.join(_PATIENCE_S if self._is_reading else _JOIN_TIMEOUT_S)
        self._queue.clear()

    def _raise_final(self) -> None:
        assert self._final is not None
        self.has_ended = not self._rounds.has_failed
        if self._final.error is None:
            raise StopIteration
        member = self._member
        if (
            self._final.is_read_error
            and self._failure is not None
            and member.num_announced == member.num_decided
        ):
            raise self._failure
        culprit = self._final.culprit
        if culprit == self._world.process_index:
            culprit = None
        raise progress.blame(RuntimeError(self._final.error), culprit)

    def _read_all(self) -> None:
        """Reads batches, until the end, an error or `stop`."""
        iterator: Any = None
        signature = None
        try:
            iterator = iter(self._batches)
            for index in itertools.count():
                if not self._wait_for_space():
                    return
                with stamps.during(stamps.READ_BEGUN, index):
                    tree = next(iterator, _END)
                if tree is _END:
                    self._end(None)
                    return
                batch = batch_spec.inspect_batch(tree, index)
                spec = None
                if batch.signature != signature:
                    signature = batch.signature
                    spec = batch_spec.make_spec(batch)
                self._add(batch, spec)
        except BaseException as error:  # Raised again by `take`.
            self._end(error)
        finally:
            self._is_reading = False
            if inspect.isgenerator(iterator):
                iterator.close()

    def _wait_for_space(self) -> bool:
        with self._lock:
            self._is_reading = False
            self._reading_since_s = math.inf
            while len(self._queue) >= self._member.prefetch and not self._is_stopping:
                self._has_space.wait()
            if self._is_stopping:
                return False
            self._is_reading = True
            self._reading_since_s = time.monotonic()
            return True

    def _add(self, batch: ReadBatch, spec: BatchSpec | None) -> None:
        size = -(-batch.num_samples // self._world.num_local_rows)
        with self._lock:
            specs = () if spec is None else ((0, spec),)
            self._seen[batch.signature[0]] = None
            self._queue.append(batch)
            self._member = lockstep.read(self._member, (size,), specs)
            self._wake_agent()

    def _end(self, error: BaseException | None) -> None:
        text = None if error is None else f"{type(error).__name__}: {error}"
        with self._lock:
            self._reading_since_s = math.inf
            self._failure = error
            self._member = lockstep.end(self._member, text)
            self._wake_agent()

    def _agree_all(self) -> None:
        """Takes part in the rounds, until the end, an error or `stop`."""
        try:
            while True:
                announcement = self._wait_for_announcement()
                if announcement is None:
                    return
                decision = self._rounds.exchange(announcement)
                if decision is None:
                    return
                self._receive(decision)
                if decision.is_final:
                    return
        except Exception as error:  # Raised again by `take`.
            self._rounds.has_failed = True
            text = f"The processes could not agree: {type(error).__name__}: {error}"
            self._receive(Decision(error=text))

    def _wake_agent(self) -> None:
        if lockstep.has_to_announce(self._member, self._num_begun):
            self._has_news.notify()

    def _wait_for_announcement(self) -> Announcement | None:
        """Waits for news, or until a keep-alive is due."""
        with self._lock:
            while not lockstep.has_to_announce(self._member, self._num_begun):
                if self._is_stopping:
                    return None
                left_s = self._find_deadline() - time.monotonic()
                if left_s <= 0:
                    break
                self._has_news.wait(left_s)
            if self._is_stopping:
                return None
            self._announced_s = now_s = time.monotonic()
            waited_s = max(0.0, now_s - self._find_reading_since())
            self._member, announcement = lockstep.announce(self._member, waited_s)
            return announcement

    def _find_deadline(self) -> float:
        """Returns the time of the next keep-alive."""
        if self._world.store is None:
            return threading.TIMEOUT_MAX
        timeout_s = self._world.timeout_s
        stuck_s = self._find_reading_since() + timeout_s
        return min(self._announced_s + timeout_s / 2, stuck_s)

    def _find_reading_since(self) -> float:
        """Returns the time since which the loop waits for the reader, or infinity."""
        member = self._member
        if member.sizes or member.num_announced > member.num_decided:
            return math.inf
        return max(self._reading_since_s, self._waiting_since_s)

    def _receive(self, decision: Decision) -> None:
        with self._lock:
            # Agreed on, unless the error is an objection: such a decision is empty.
            is_agreed = self._proposal is not None and (
                decision.error is None or bool(decision.sizes)
            )
            fault = lockstep_checks.find_decision_fault(
                decision,
                num_specs=len(self.specs) + is_agreed,
                spec=self._spec,
                num_processes=self._world.process_count,
            )
            if fault is not None:
                self._rounds.has_failed = True
                decision = Decision(error=fault, culprit=0)
            self._member = lockstep.receive(self._member, decision)
            if is_agreed and fault is None:
                assert self._proposal is not None
                self.specs.append(self._proposal)
            changes = dict(decision.specs)
            for i, size in enumerate(decision.sizes):
                self._spec = changes.get(i, self._spec)
                self._steps.append((size, self._spec))
            self._proposal = decision.proposal
            if decision.proposal is not None:
                self._check_proposal(decision.proposal)
            if decision.is_final:
                self._final = decision
            if decision.sizes or decision.is_final:
                self._has_steps.notify()

    def _check_proposal(self, spec: BatchSpec) -> None:
        """Finds out whether this process can pad the spec, and objects if not."""
        seen = list(self._seen)
        if self._like is not None:
            seen.append(jax.tree.structure(self._like))
        treedef = batch_spec.find_treedef(spec, seen)
        self.treedefs.append(treedef)
        # A process with a batch at that iteration takes the treedef from it.
        member = self._member
        if treedef is None and member.num_announced <= member.num_decided:
            has_like = "" if self._like is None else ", which `like` does not have"
            self._member = lockstep.object_to(
                member,
                "has no batch of its own and cannot make an empty one with the "
                f"structure {spec.structure}{has_like}. Pass `like=`, an example "
                "batch, to `jdp.join_batches` on all processes.",
            )
