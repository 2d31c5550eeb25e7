"""Join context: which processes still go on, and what the others do meanwhile.

While no process has joined, an iteration costs a count. The first that joins wakes the
others; from then on each posts what it does to a stream of its own, which those that
have joined follow, one iteration at a time. With `throw_on_early_termination` all post
from the beginning, and each waits for all others in each iteration.
"""

import logging
import threading
import time
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

import msgspec

from jdp.join.early_exit import ExitWatch
from jdp.replicas import progress, wire
from jdp.replicas.joinable import Joinable, as_list, common_world, make_hooks
from jdp.replicas.mesh import World

_logger = logging.getLogger("jdp")
_SKEW_WARNING = 1000  # iterations; as torch's Join.
_GET_TIMEOUT_S = 3600.0
_THREAD_TIMEOUT_S = 2.0
_MOST_WAITS = 12  # times `timeout_s` that a process waits for one iteration of another.
_LOOKS = 8  # a `timeout_s`: for what a stranger has deleted.
_MOST_REASON = 4000  # characters of the text of an exception.
_MOST_AHEAD = 1 << 20  # iterations that a process may be before another one.


class ProcessProgress(msgspec.Struct, frozen=True):
    """How far a process is."""

    num_begun: int = 0
    is_joined: bool = False
    reason: str | None = None  # why it left with an exception, if it did.


class JoinTask(NamedTuple):
    """Next action of a process that has joined."""

    kind: Literal["shadow", "wait", "end"]
    process: int = -1  # whom to wait for.


def next_task(num_shadowed: int, progress: Sequence[ProcessProgress]) -> JoinTask:
    """Returns what follows from how far all are; pure.

    Args:
      num_shadowed: iterations that this process has begun or stood in for.
      progress: how far each process is, at least.
    """
    if any(p.num_begun > num_shadowed for p in progress):
        return JoinTask("shadow")
    going_on = [i for i, p in enumerate(progress) if not p.is_joined]
    return JoinTask("wait", going_on[0]) if going_on else JoinTask("end")


def find_last_joiner(progress: Sequence[ProcessProgress]) -> int:
    """Returns who had the most iterations, of several the last; pure."""
    return max(range(len(progress)), key=lambda i: (progress[i].num_begun, i))


class Join:
    """A context in which processes may have different numbers of iterations.

    A process whose input has ended leaves the context, and there runs the main hooks
    of its joinables in place of the iterations that others still have; when all have
    joined, all run the post hooks.

        with jdp.Join([step]):
            for batch in batches:  # as many as this process has.
                state, metrics = step(state, batch)
        state = step.last_state

    Every process enters it. An exception inside of it reaches the others, too, when
    they come to an iteration that the process that raised never begins; one that waits
    for that process in a collective ends after `world.timeout_s` seconds. A process
    that has joined waits for an iteration of another one up to 12 times as long, with
    a warning each time, and then raises RuntimeError. For batches
    of different sizes, and for nothing but a train step, `jdp.join_batches` does more.
    """

    last_joiner: int | None = None

    def __init__(
        self,
        joinables: Sequence[Joinable],
        *,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ):
        """Makes the hooks of the joinables.

        Args:
          joinables: at least one, all of one world. Their hooks run in this order; the
            first alone has to notify the context.
          enable: False makes it do nothing but note `last_state`, for inputs that are
            known to be even.
          throw_on_early_termination: whether all processes raise RuntimeError as soon
            as one has no more input and others do. Then each iteration waits for all
            processes on the host.
          **kwargs: options of the joinables; each `join_hook` gets those that it takes.

        Raises:
          ValueError: there is no joinable, or they are of several worlds.
          TypeError: one is no joinable, or none takes an option of that name.
        """
        self._joinables = as_list(joinables)
        self._world = common_world(self._joinables)
        self.is_enabled = enable
        self._throws = throw_on_early_termination
        self._hooks = make_hooks(self._joinables, kwargs)
        self._members: _Members | None = None

    @staticmethod
    def notify_join_context(joinable: Joinable) -> None:
        """Tells the context of `joinable`, if it is in one, that an iteration begins.

        Called in each iteration, before anything is communicated. Joinables that are
        not the first of their context need not call it; it does nothing for them.

        Raises:
          RuntimeError: a process left with an exception; or one has no more input, with
            `throw_on_early_termination`.
        """
        if joinable.join_context is not None:
            joinable.join_context.notify(joinable)

    def notify(self, joinable: Joinable) -> None:
        """See `notify_join_context`."""
        if joinable is not self._joinables[0] or self._members is None:
            return
        self._members.begin()
        if self._throws and any(p.is_joined for p in self._members.meet()):
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all "
                "ranks."
            )

    def __enter__(self) -> "Join":
        """Begins; every process comes here."""
        for joinable in self._joinables:
            if joinable.join_context is not None:
                raise RuntimeError(
                    f"`{joinable!r}` is in another `Join` already; leave that first."
                )
        for joinable in self._joinables:
            joinable.join_context = self
        if self.is_enabled:
            self._members = _Members(self._world, posts_always=self._throws)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Joins: stands in for the iterations of others, then ends with all."""
        members = self._members
        try:
            if members is None:
                return
            if error is None:
                self._join(members)
            else:
                members.leave(error)
        except BaseException as failure:
            assert members is not None
            members.leave(failure)
            raise
        finally:
            self._members = None
            for joinable in self._joinables:
                joinable.join_context = None

    def _join(self, members: "_Members") -> None:
        members.join()
        if self._throws:
            if not all(p.is_joined for p in members.meet()):
                raise RuntimeError(
                    f"Rank {self._world.process_index} exhausted all inputs."
                )
        else:
            self._shadow(members)
        progress = members.progress
        self.last_joiner = find_last_joiner(progress)
        own, last = progress[self._world.process_index], progress[self.last_joiner]
        for hook in self._hooks:
            hook.post_hook(own.num_begun == last.num_begun)
        members.close()

    def _shadow(self, members: "_Members") -> None:
        num_own = members.num_begun
        while True:
            task = next_task(members.num_begun, members.progress)
            if task.kind == "end":
                return
            if task.kind == "wait":
                members.hear(task.process)
                continue
            if members.num_begun - num_own == _SKEW_WARNING:
                warnings.warn(
                    f"Detected uneven input skew of greater than {_SKEW_WARNING}. This "
                    "means that process "
                    f"{self._world.process_index} has at least {_SKEW_WARNING} fewer "
                    "inputs than another. It stands in for their iterations at full "
                    "cost; distribute the inputs more evenly.",
                    stacklevel=4,
                )
            members.stand_in()
            for hook in self._hooks:
                hook.main_hook()


class _Members:
    """How far the processes of one context are, as far as this one knows."""

    def __init__(self, world: World, *, posts_always: bool):
        self._world = world
        self._own = world.process_index
        self._lock = threading.Lock()
        self._posts = self._throws = posts_always
        self._num_posted = 0
        self._posted: dict[str, bytes] = {}  # the last two.
        self._announcer: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._num_begun = 0  # own iterations.
        self._num_heard = [0] * world.process_count
        self.progress = [ProcessProgress() for _ in range(world.process_count)]
        self._thread = None
        store = world.store
        self._directory = "" if store is None else f"jdp/context/{store.next_round()}"
        self._watch = ExitWatch(world, self._directory, loop="the `jdp.Join`")
        if store is not None and not posts_always:
            self._thread = threading.Thread(
                target=self._wait_for_first, name="jdp-join", daemon=True
            )
            self._thread.start()

    @property
    def num_begun(self) -> int:
        """Iterations that this process has begun, or stood in for."""
        return self._watch.num_begun

    def begin(self) -> None:
        """Counts an iteration of this process."""
        self._watch.begin()
        with self._lock:
            self._num_begun += 1
            self._update(ProcessProgress(self._num_begun))

    def stand_in(self) -> None:
        """Counts an iteration of others."""
        self._watch.begin()

    def join(self) -> None:
        """Tells all others that this process has no more input."""
        with self._lock:
            self._posts = True
            self._update(ProcessProgress(self._num_begun, is_joined=True))
        if self._thread is not None:
            self._wake(range(self._world.process_count))
            self._thread.join(_THREAD_TIMEOUT_S)

    def meet(self) -> list[ProcessProgress]:
        """Hears all processes once; returns how far they are."""
        for process in range(self._world.process_count):
            if process != self._own:
                self.hear(process)
        if self._num_posted > 1 and self._world.store is not None:
            # All have posted this one, and so have read the one before.
            with self._lock:
                key = self._key(self._own, self._num_posted - 2)
                self._posted.pop(key, None)
                self._world.store.delete(key)
        return self.progress

    def hear(self, process: int) -> None:
        """Waits for the next of what a process posts."""
        number, value = self._wait(process)
        num_later = number - self._num_heard[process]
        found = wire.decode(
            value, ProcessProgress, what=f"The progress of process {process}"
        )
        before = self.progress[process]
        most = before.num_begun + 1 + num_later
        if self._num_heard[process] == 0:  # Nothing was posted before one had joined.
            most = self.num_begun + _MOST_AHEAD
        if before.is_joined or not before.num_begun <= found.num_begun <= most:
            raise wire.Malformed(
                f"The progress of process {process} cannot be: it had begun "
                f"{before.num_begun} iterations before, and now {found.num_begun}. "
                "Install the same jdp in every process."
            )
        if found.reason is not None:
            found = msgspec.structs.replace(
                found, reason=wire.printable(found.reason, most=_MOST_REASON)
            )
        self._num_heard[process] = number + 1
        self.progress[process] = found
        reason = self.progress[process].reason
        if reason is not None:
            error = RuntimeError(
                f"Process {process} left the `jdp.Join` after "
                f"{self.progress[process].num_begun} iterations, by {reason}"
            )
            raise progress.blame(error, process)

    def _wait(self, process: int) -> tuple[int, bytes]:
        """Returns the next that a process posts, and its number.

        A stranger at JAX's store may have deleted it. All post again what is deleted,
        and an iteration that is known from a later one is not waited for.
        """
        store, timeout_s = self._world.store, self._world.timeout_s
        assert store is not None
        number = self._num_heard[process]
        start_s = time.monotonic()
        num_warnings = 0
        while (waited_s := time.monotonic() - start_s) < _MOST_WAITS * timeout_s:
            if waited_s > (num_warnings + 1) * timeout_s:
                num_warnings += 1
                _logger.warning(
                    "Process %d has joined and has waited more than %g s for the next "
                    "iteration of process %d.",
                    *(self._own, num_warnings * timeout_s, process),
                )
            try:
                key = self._key(process, number)
                wait_s = min(timeout_s, max(1.0, timeout_s / _LOOKS))
                return number, store.get(key, timeout_s=wait_s)
            except TimeoutError:
                if self._throws:
                    continue  # All are in the same iteration: there is none later.
            found = store.list_directory(f"{self._directory}/progress/{process}")
            later = [n for n in map(_as_number, found) if n >= number]
            if later:
                return max(later), found[str(max(later))]
        error = RuntimeError(
            f"Process {self._own} has waited {waited_s:.0f} s in the `jdp.Join` for "
            f"the next iteration of process {process}, {_MOST_WAITS} times `timeout_s`"
            ". That process may be stuck, or what it posted was deleted from JAX's "
            "store, see docs/security.md. Where an iteration takes so long, give "
            "`jdp.init` a larger `timeout_s`."
        )
        raise progress.blame(error, process)

    def leave(self, error: BaseException) -> None:
        """Tells the others that this process has failed."""
        reason = f"{type(error).__name__}: {error}"
        with self._lock:
            self._posts = True
            if not self.progress[self._own].reason:
                self._update(
                    ProcessProgress(self._num_begun, is_joined=True, reason=reason)
                )
        if self._world.store is not None:
            self._say_parted()
        self._watch.leave(reason)
        self._stop()

    def close(self) -> None:
        """Ends the context, because all have joined."""
        self._part()
        self._watch.close()
        self._stop()
        store = self._world.store
        if store is not None and self._world.is_main_process:
            # All are in this context, and read no other.
            for directory in store.take_retired():
                store.delete(directory)
            store.retire(self._directory)

    def _part(self) -> None:
        """Waits until all know that all have joined: till then, all post it again."""
        store = self._world.store
        if store is None:
            return
        self._say_parted()
        deadline_s = time.monotonic() + self._world.timeout_s
        for process in range(self._world.process_count):
            left_s = max(0.001, deadline_s - time.monotonic())
            try:
                store.get(self._parted_key(process), timeout_s=left_s)
            except TimeoutError:  # All that follows is safe without it.
                _logger.warning("Process %d has not left the `jdp.Join` yet.", process)

    def _say_parted(self) -> None:
        assert self._world.store is not None
        with self._lock:
            key = self._parted_key(self._own)
            self._posted[key] = b""
            self._world.store.set(key, b"", overwrite=True)

    def _parted_key(self, process: int) -> str:
        return f"{self._directory}/parted/{process}"

    def _update(self, progress: ProcessProgress) -> None:
        self.progress[self._own] = progress
        if self._posts and self._world.store is not None:
            key = self._key(self._own, self._num_posted)
            value = msgspec.msgpack.encode(progress)
            self._world.store.set(key, value)
            self._num_posted += 1
            self._posted = dict([*self._posted.items(), (key, value)][-2:])
            if self._announcer is None:
                self._announcer = threading.Thread(
                    target=self._announce, name="jdp-join-announcer", daemon=True
                )
                self._announcer.start()

    def _announce(self) -> None:
        """Posts again what a stranger has deleted, until the context ends."""
        store = self._world.store
        assert store is not None
        period_s = min(10.0, max(0.2, self._world.timeout_s / _LOOKS))
        while not self._has_ended.wait(period_s):
            try:
                with self._lock:
                    for key, value in self._posted.items():
                        if store.try_get(key) is None:
                            store.set(key, value, overwrite=True)
                if self.progress[self._own].is_joined and self._thread is not None:
                    self._wake([i for i, n in enumerate(self._num_heard) if n == 0])
            except RuntimeError:  # The store has ended, and with it the job.
                return

    def _wait_for_first(self) -> None:
        """Begins to post when the first process joins."""
        store = self._world.store
        assert store is not None
        while True:
            try:
                store.get(self._wake_key(self._own), timeout_s=_GET_TIMEOUT_S)
                break
            except TimeoutError:
                continue
        with self._lock:
            if not self._posts:
                self._posts = True
                self._update(self.progress[self._own])

    def _stop(self) -> None:
        self._has_ended.set()
        if self._announcer is not None:
            self._announcer.join(_THREAD_TIMEOUT_S)
        if self._thread is not None and self._thread.is_alive():
            self._wake([self._own])
            self._thread.join(_THREAD_TIMEOUT_S)

    def _wake(self, processes: Sequence[int]) -> None:
        assert self._world.store is not None
        for process in processes:
            self._world.store.set(self._wake_key(process), b"", overwrite=True)

    def _wake_key(self, process: int) -> str:
        return f"{self._directory}/joined/{process}"

    def _key(self, process: int, number: int) -> str:
        return f"{self._directory}/progress/{process}/{number}"


def _as_number(name: str) -> int:
    """Returns the number that ends a key of this module; -1: it is none."""
    is_number = name.isascii() and name.isdecimal() and len(name) < 12
    return int(name) if is_number and str(int(name)) == name else -1
