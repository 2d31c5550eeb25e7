"""Uneven batches: a loop that goes on while any process has data.

Two threads a process keep everything off the critical path. The reader iterates over
the user's batches, ahead of the loop. The agent announces what was read, and learns the
iterations that all processes agree on; see `jdp.runtime.lockstep`.
"""

import atexit
import collections
import inspect
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.mesh import World
from jdp.runtime import batch_spec, lockstep
from jdp.runtime.batch_spec import Batch, Spec
from jdp.runtime.departures import Watch
from jdp.runtime.lockstep import Announcement, Decision
from jdp.runtime.rounds import Rounds
from jdp.types import PyTree

_CHECK_PERIOD_S = 0.1  # how often a loop that waits looks whether somebody has left.
_JOIN_TIMEOUT_S = 2.0
_PATIENCE_S = 0.05  # with a reader that seems to be in the user's code.


def join_batches(
    batches: Iterable[PyTree],
    *,
    world: World,
    prefetch: int = 4,
    like: PyTree | None = None,
) -> "UnevenBatches":
    """Iterates over `batches` for as long as any process has one left.

    Every process calls it, in the same order as other things that all processes do, and
    gets the same number of iterations: the largest number of batches of a process. At
    each iteration all get the same shapes, so that they can run one compiled step
    together. A batch that is smaller than the largest one is padded with zeros at its
    end; a process that has run out gets nothing but zeros. The number of samples never
    shrinks within the loop, so that a smaller last batch compiles no new program.

        for batch, weight in jdp.join_batches(loader, world=world):
            state, loss = train_step(state, batch, weight)

    and in the step `jdp.value_and_grad(loss_fn, weight=weight.sum())(params, batch,
    weight)`. Nothing runs on the devices here, and batches that are full are yielded as
    they are.

    Leave the loop on all processes at the same iteration, or on none. If one process
    leaves alone, by `break` or an exception, the others raise RuntimeError, or end with
    a message if they wait for that process in a collective for `world.timeout_s`.

    Args:
      batches: this process' batches, which may be none: pytrees of numeric arrays,
        shape (n, ...), with the same n in all leaves of a batch. The structure, dtypes
        and trailing shapes must be the same on all processes at each iteration.
      world: the replicas.
      prefetch: how many batches are read ahead, at least 1.
      like: an example batch, of arrays or `jax.ShapeDtypeStruct`s. Only needed where a
        process may have no batch at all and batches have nodes of types other than
        dict, list, tuple, namedtuple and None.

    Returns:
      An iterator of (batch, weight); `weight` is float32, shape (samples,), 1 for a
      true sample and 0 for padding. `close()` ends it early.

    Raises:
      ValueError: `prefetch` is below 1.
      TypeError: `batches` is not iterable.
      RuntimeError: while iterating, on all processes at the same iteration: reading
        failed on another process (the one where it failed raises what it caught), specs
        differ, a process has not read a batch or not come within `world.timeout_s`.
    """
    if prefetch < 1:
        raise ValueError(f"`prefetch` must be at least 1, got {prefetch}.")
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"`batches` must be iterable, got {type(batches).__name__}. Pass a list, a "
            "generator, or a data loader."
        )
    return UnevenBatches(batches, world, prefetch, like)


class UnevenBatches:
    """The iterator that `join_batches` returns."""

    def __init__(
        self,
        batches: Iterable[PyTree],
        world: World,
        prefetch: int,
        like: PyTree | None,
    ):
        """Use `join_batches`."""
        number = 0 if world.store is None else world.store.next_round()
        directory = f"jdp/join/{number}"
        self._rounds = Rounds(world, directory)
        self._watch = Watch(world, directory, loop="the loop over `jdp.join_batches`")
        self._engine = _Engine(batches, world, prefetch, like, self._rounds)
        self._weights: dict[tuple[int, int], np.ndarray] = {}
        self._zeros: dict[tuple[int, int], list[np.ndarray]] = {}
        # Threads hold the engine, never this object: when a `for` loop drops it, it
        # is closed. At exit it is closed before `jax.distributed`, and before
        # `jdp.init`'s own hook, which were both registered earlier.
        at_exit = _AtExit()
        self._close = weakref.finalize(
            self, _shut_down, self._engine, self._watch, self._rounds, at_exit
        )
        self._close.atexit = False
        at_exit.register(self._close)

    def __iter__(self) -> "UnevenBatches":
        """Returns itself."""
        return self

    def __next__(self) -> tuple[PyTree, np.ndarray]:
        """Returns the batch and the weights of the next iteration."""
        try:
            if not self._close.alive:
                raise StopIteration
            step = self._engine.take(self._watch)
        except BaseException:
            self.close()
            raise
        samples, spec, batch = step
        if batch is None:
            leaves = self._make_zeros(samples, spec)
            treedef = self._engine.treedefs[spec]
            return jax.tree.unflatten(treedef, leaves), self._make_weight(samples, 0)
        weight = self._make_weight(samples, batch.num_samples)
        return batch_spec.pad_batch(batch, samples), weight

    def close(self) -> None:
        """Ends the loop on this process and stops its threads.

        The other processes are told, unless the loop has ended for all.
        """
        self._close()

    def _make_weight(self, samples: int, num_true: int) -> np.ndarray:
        """Returns the weights; read-only, since those of full batches are reused."""
        weight = self._weights.get((samples, num_true))
        if weight is None:
            weight = (np.arange(samples) < num_true).astype(np.float32)
            weight.setflags(write=False)
            if num_true in (0, samples):
                self._weights[samples, num_true] = weight
        return weight

    def _make_zeros(self, samples: int, spec: int) -> list[np.ndarray]:
        leaves = self._zeros.get((samples, spec))
        if leaves is None:
            leaves = batch_spec.make_zeros(self._engine.specs[spec], samples)
            self._zeros = {(samples, spec): leaves}  # Marks grow; the last is enough.
        return leaves


class _Step(NamedTuple):
    """One agreed iteration on this process."""

    samples: int  # of this process.
    spec: int  # its number.
    batch: Batch | None  # None where this process has run out.


class _Engine:
    """What the loop, the reader and the agent of one process share."""

    def __init__(
        self,
        batches: Iterable[PyTree],
        world: World,
        prefetch: int,
        like: PyTree | None,
        rounds: Rounds,
    ):
        self.specs: list[Spec] = []  # agreed on, by number.
        self.treedefs: list[Any] = []  # per spec; None where all batches are our own.
        self._batches = batches
        self._world = world
        self._like = like
        self._rounds = rounds
        self._lock = threading.RLock()
        self._has_space = threading.Condition(self._lock)  # The reader waits.
        self._has_news = threading.Condition(self._lock)  # The agent waits.
        self._has_steps = threading.Condition(self._lock)  # The loop waits.
        self._member = lockstep.Member(prefetch=prefetch)
        self._queue: collections.deque[Batch] = collections.deque()
        self._steps: collections.deque[tuple[int, int]] = collections.deque()
        self._seen: dict[Any, None] = {}  # treedefs of our own batches.
        self._num_begun = 0
        self._proposal: Spec | None = None
        self._spec = -1  # number of the one of the last decided iteration.
        self._final: Decision | None = None
        self._failure: BaseException | None = None  # of the reader.
        self._is_stopping = False
        self._is_reading = False
        self._reading_since_s = math.inf
        self._waiting_since_s = math.inf
        self._announced_s = time.monotonic()
        self._threads = [
            threading.Thread(target=_read, args=(self,), name="jdp-join-reader"),
            threading.Thread(target=_agree, args=(self,), name="jdp-join-agent"),
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    # The loop.

    def take(self, watch: Watch) -> _Step:
        """Waits for the next iteration and begins it."""
        with self._lock:
            if not self._steps and self._final is None:
                self._waiting_since_s = time.monotonic()
                self._has_news.notify()
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
        return _Step(size * self._world.num_local_replicas, spec, batch)

    def _raise_final(self) -> None:
        assert self._final is not None
        if self._final.error is None:
            raise StopIteration
        member = self._member
        if (
            self._final.is_read_error
            and self._failure is not None
            and member.num_announced == member.num_decided
        ):
            raise self._failure
        raise RuntimeError(self._final.error)

    @property
    def has_ended(self) -> bool:
        """Whether the loop has come to what ends it on all processes."""
        return (
            self._final is not None and not self._steps and not self._rounds.has_failed
        )

    # The reader.

    def read_all(self) -> None:
        """Reads batches, until the end, an error or `stop`."""
        iterator: Any = None
        signature = None
        try:
            iterator = iter(self._batches)
            for index in range(sys.maxsize):
                if not self._wait_for_space():
                    return
                tree = next(iterator, _END)
                if tree is _END:
                    self._end(None)
                    return
                batch = batch_spec.inspect_batch(tree, index)
                spec = None
                if batch.signature != signature:
                    signature = batch.signature
                    spec = batch_spec.make_spec(signature)
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

    def _add(self, batch: Batch, spec: Spec | None) -> None:
        size = -(-batch.num_samples // self._world.num_local_replicas)
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

    # The agent.

    def agree_all(self) -> None:
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
        """Waits until this process has something to say, or has to say it is there."""
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
        """Returns when this process has to announce even if there is nothing new."""
        if self._world.store is None:
            return _FAR_S
        timeout_s = self._world.timeout_s
        stuck_s = self._find_reading_since() + timeout_s
        return min(self._announced_s + timeout_s / 2, stuck_s)

    def _find_reading_since(self) -> float:
        """Returns since when the loop has waited for the reader; infinity if not."""
        member = self._member
        if member.sizes or member.num_announced > member.num_decided:
            return math.inf
        return max(self._reading_since_s, self._waiting_since_s)

    def _receive(self, decision: Decision) -> None:
        with self._lock:
            self._member = lockstep.receive(self._member, decision)
            if self._proposal is not None and decision.error is None:
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

    def _check_proposal(self, spec: Spec) -> None:
        """Finds out whether this process can pad the spec, and objects if not."""
        seen = list(self._seen)
        if self._like is not None:
            seen.append(jax.tree.structure(self._like))
        treedef = batch_spec.find_treedef(spec, seen)
        self.treedefs.append(treedef)
        # One that has a batch at the iteration will know the treedef from it.
        member = self._member
        if treedef is None and member.num_announced <= member.num_decided:
            has_like = "" if self._like is None else ", which `like` does not have"
            self._member = lockstep.object_to(
                member,
                "has no batch of its own and cannot make an empty one with the "
                f"structure {spec.structure}{has_like}. Pass `like=`, an example "
                "batch, to `jdp.join_batches` on all processes.",
            )

    # All.

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


_END: Any = object()
_FAR_S = threading.TIMEOUT_MAX


def _read(engine: _Engine) -> None:
    engine.read_all()


def _agree(engine: _Engine) -> None:
    engine.agree_all()


class _AtExit:
    """Closes a loop that the end of the program finds open."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._close: Callable[[], Any] | None = None

    def register(self, close: Callable[[], Any]) -> None:
        self._close = close
        atexit.register(self._run)

    def unregister(self) -> None:
        atexit.unregister(self._run)

    def _run(self) -> None:
        assert self._close is not None
        error = getattr(sys, "last_value", None)  # Nobody caught it.
        if error is not None:
            self.reason = f"{type(error).__name__}: {error}"
        self._close()


def _shut_down(engine: _Engine, watch: Watch, rounds: Rounds, at_exit: _AtExit) -> None:
    at_exit.unregister()
    if engine.has_ended:
        watch.close()
    else:
        watch.leave(at_exit.reason)
    engine.stop()
    rounds.finish()
