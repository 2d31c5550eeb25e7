"""Progress exchange: how does a process of a `jdp.Join` learn how far others are?

While no process has joined, an iteration costs a count. The first process that joins
wakes the others. From then on, each process posts its progress to a stream of its own,
which the joined processes follow, one iteration at a time. With `posts_always`, all
processes post from the beginning.
"""

import logging
import threading
import time
from collections.abc import Sequence

import msgspec

from jdp.join.early_exit import ExitWatch
from jdp.replicas import progress, wire
from jdp.replicas.mesh import World

_logger = logging.getLogger("jdp")
_GET_TIMEOUT_S = 3600.0
_THREAD_TIMEOUT_S = 2.0
_MOST_WAITS = 12  # longest wait for one iteration of another process, in `timeout_s`.
_LOOKS = 8  # per `timeout_s`, for keys that an intruder has deleted.
_MOST_REASON = 4000  # characters of the text of an exception.
_MOST_AHEAD = 1 << 20  # iterations by which a process may be ahead of another.


class ProcessProgress(msgspec.Struct, frozen=True):
    """Progress of one process, as it is posted."""

    num_begun: int = 0
    is_joined: bool = False
    reason: str | None = None  # the exception that the process left with.


class ProgressExchange:
    """Progress of all processes of one context, as this process knows it.

    Attributes:
      progress: per process, a lower bound of its progress.
    """

    def __init__(self, world: World, *, posts_always: bool):
        self._world = world
        self._own = world.process_index
        self._lock = threading.Lock()
        self._posts = self._throws = posts_always
        self._num_posted = 0
        self._posted: dict[str, bytes] = {}  # the last two.
        self._reposter: threading.Thread | None = None
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
        """Iterations that this process has begun or shadowed."""
        return self._watch.num_begun

    def begin(self) -> None:
        """Counts an iteration of this process."""
        self._watch.begin()
        with self._lock:
            self._num_begun += 1
            self._update(ProcessProgress(self._num_begun))

    def shadow(self) -> None:
        """Counts an iteration of the others."""
        self._watch.begin()

    def join(self) -> None:
        """Tells the others that this process has no more input."""
        with self._lock:
            self._posts = True
            self._update(ProcessProgress(self._num_begun, is_joined=True))
        if self._thread is not None:
            self._wake(range(self._world.process_count))
            self._thread.join(_THREAD_TIMEOUT_S)

    def meet(self) -> list[ProcessProgress]:
        """Waits for the next post of each process; returns the progress of all."""
        for process in range(self._world.process_count):
            if process != self._own:
                self.hear(process)
        if self._num_posted > 1 and self._world.store is not None:
            # All have posted this iteration, so all have read the one before.
            with self._lock:
                key = self._key(self._own, self._num_posted - 2)
                self._posted.pop(key, None)
                self._world.store.delete(key)
        return self.progress

    def hear(self, process: int) -> None:
        """Waits for the next post of a process."""
        index, value = self._wait(process)
        num_skipped = index - self._num_heard[process]
        found = wire.decode(
            value, ProcessProgress, what=f"The progress of process {process}"
        )
        before = self.progress[process]
        most = before.num_begun + 1 + num_skipped
        if self._num_heard[process] == 0:  # Posts begin when a process joins.
            most = self.num_begun + _MOST_AHEAD
        if before.is_joined or not before.num_begun <= found.num_begun <= most:
            raise wire.Malformed(
                f"The progress of process {process} is impossible: it had begun "
                f"{before.num_begun} iterations before, and now {found.num_begun}. "
                "Install the same jdp in every process."
            )
        if found.reason is not None:
            found = msgspec.structs.replace(
                found, reason=wire.printable(found.reason, most=_MOST_REASON)
            )
        self._num_heard[process] = index + 1
        self.progress[process] = found
        reason = self.progress[process].reason
        if reason is not None:
            error = RuntimeError(
                f"Process {process} left the `jdp.Join` after "
                f"{self.progress[process].num_begun} iterations, by {reason}"
            )
            raise progress.blame(error, process)

    def _wait(self, process: int) -> tuple[int, bytes]:
        """Returns the index and the value of the next post of a process.

        An intruder in JAX's store may have deleted it. Each process posts deleted keys
        again. A later post makes earlier ones superfluous.
        """
        store, timeout_s = self._world.store, self._world.timeout_s
        assert store is not None
        index = self._num_heard[process]
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
                key = self._key(process, index)
                wait_s = min(timeout_s, max(1.0, timeout_s / _LOOKS))
                return index, store.get(key, timeout_s=wait_s)
            except TimeoutError:
                if self._throws:
                    continue  # All are in the same iteration: there is no later post.
            found = store.list_directory(f"{self._directory}/progress/{process}")
            later = [n for n in map(_parse_index, found) if n >= index]
            if later:
                return max(later), found[str(max(later))]
        error = RuntimeError(
            f"Process {self._own} has waited {waited_s:.0f} s in the `jdp.Join` for "
            f"the next iteration of process {process}, {_MOST_WAITS} times `timeout_s`"
            ". That process may be stuck, or its post was deleted from JAX's store, "
            "see docs/security.md. If an iteration takes so long, pass a larger "
            "`timeout_s` to `jdp.init`."
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
            self._post_parted()
        self._watch.leave(reason)
        self._stop()

    def close(self) -> None:
        """Ends the context after all processes have joined."""
        self._part()
        self._watch.close()
        self._stop()
        store = self._world.store
        if store is not None and self._world.is_main_process:
            # All processes are in this context, and read keys of no earlier one.
            for directory in store.take_retired():
                store.delete(directory)
            store.retire(self._directory)

    def _part(self) -> None:
        """Waits until each process knows that all have joined.

        Until then, each process must go on to repair its posts.
        """
        store = self._world.store
        if store is None:
            return
        self._post_parted()
        deadline_s = time.monotonic() + self._world.timeout_s
        for process in range(self._world.process_count):
            left_s = max(0.001, deadline_s - time.monotonic())
            try:
                store.get(self._parted_key(process), timeout_s=left_s)
            except TimeoutError:  # Leaving without it is safe.
                _logger.warning("Process %d has not left the `jdp.Join` yet.", process)

    def _post_parted(self) -> None:
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
            if self._reposter is None:
                self._reposter = threading.Thread(
                    target=self._repost, name="jdp-join-reposter", daemon=True
                )
                self._reposter.start()

    def _repost(self) -> None:
        """Posts deleted keys again, until the context ends."""
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
            except RuntimeError:  # The store has ended, and the job with it.
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
        if self._reposter is not None:
            self._reposter.join(_THREAD_TIMEOUT_S)
        if self._thread is not None and self._thread.is_alive():
            self._wake([self._own])
            self._thread.join(_THREAD_TIMEOUT_S)

    def _wake(self, processes: Sequence[int]) -> None:
        assert self._world.store is not None
        for process in processes:
            self._world.store.set(self._wake_key(process), b"", overwrite=True)

    def _wake_key(self, process: int) -> str:
        return f"{self._directory}/joined/{process}"

    def _key(self, process: int, index: int) -> str:
        return f"{self._directory}/progress/{process}/{index}"


def _parse_index(name: str) -> int:
    """Returns the index at the end of a key of this module; -1 if it has none."""
    is_index = name.isascii() and name.isdecimal() and len(name) < 12
    return int(name) if is_index and str(int(name)) == name else -1
