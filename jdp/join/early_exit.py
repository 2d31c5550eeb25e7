"""Early exit: what happens to the other processes when one leaves a loop early?

The leaving process posts a notice. The others raise when they come to an iteration that
it never begins. A process that already hangs in a device collective with it cannot be
interrupted. A thread ends such a process after a while, with a message.
"""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import msgspec

from jdp.replicas import forked, progress, wire, world_end
from jdp.replicas.mesh import World
from jdp.runtime import forks, user_program
from jdp.types import Store

# Nothing is polled before the first notice: a `get` that times out leaks memory in
# process 0 (see `DistributedStore.get`). A process that leaves or closes sets the key.
_GET_TIMEOUT_S = 3600.0
_POLL_PERIOD_S = 0.2
_JOIN_TIMEOUT_S = 2.0
_LOOKS = 20  # per `timeout_s`, for keys that an intruder has deleted.
_logger = logging.getLogger("jdp")


class DepartureNotice(msgspec.Struct, frozen=True):
    """Message of a process that has left."""

    process: int
    num_begun: int  # iterations that it had begun.
    reason: str | None = None


class ReceivedNotice(NamedTuple):
    """A notice, and when this process read it."""

    notice: DepartureNotice
    arrived_s: float


class LoopProgress(NamedTuple):
    """Where the main thread of this process is."""

    num_begun: int
    since_s: float  # time when it began the last of them.


def find_departed(
    num_begun: int, notices: Sequence[ReceivedNotice]
) -> DepartureNotice | None:
    """Returns the notice of a process that begins no more than `num_begun`; pure."""
    for notice, _ in notices:
        if notice.num_begun <= num_begun:
            return notice
    return None


def judge(
    progress: LoopProgress,
    notices: Sequence[ReceivedNotice],
    *,
    now_s: float,
    timeout_s: float,
) -> Literal["wait", "exit"]:
    """Returns whether this process must be ended; pure.

    It must once it has spent more than `timeout_s` in an iteration that another process
    has not begun, or has left: it may wait for that process in a collective.

    Args:
      progress: progress of the main thread.
      notices: all notices read so far.
      now_s: the time.
      timeout_s: longest duration of an iteration after the notice.
    """
    for notice, arrived_s in notices:
        start_s = max(progress.since_s, arrived_s)
        if 0 < progress.num_begun >= notice.num_begun and now_s - start_s > timeout_s:
            return "exit"
    return "wait"


class ExitWatch:
    """One process's view of the processes that have left a loop.

    The thread of the loop calls `begin` before each iteration, and `leave` or `close`
    once.
    """

    def __init__(self, world: World, directory: str, *, loop: str):
        """Starts the watch.

        Args:
          world: the job.
          directory: directory of the notices in the store; the same on all processes,
            and used by this loop only.
          loop: the loop in words, such as "the loop over `jdp.join_batches`".

        Raises:
          RuntimeError: this process was forked from a process of a job.
        """
        forked.check_is_not_child()
        self._world = world
        self._directory = directory
        self._loop = loop
        self._progress = LoopProgress(0, time.monotonic())
        self._notices: tuple[ReceivedNotice, ...] = ()
        self._stopped = threading.Event()
        self._thread = None
        if world.store is not None:
            self._thread = threading.Thread(
                target=self._watch_job, name="jdp-departures", daemon=True
            )
            self._thread.start()

    @property
    def num_begun(self) -> int:
        """Iterations that this process has begun."""
        return self._progress.num_begun

    def check(self) -> None:
        """Raises if another process has left before the next iteration.

        Raises:
          RuntimeError: a process has left; the message names it.
        """
        if self._notices:
            notice = find_departed(self.num_begun, self._notices)
            if notice is not None:
                error = RuntimeError(
                    f"{self._describe(notice)}, and process "
                    f"{self._world.process_index} is about to begin iteration "
                    f"{self.num_begun} (counted from 0). {_WHAT_TO_DO}"
                )
                raise progress.blame(error, notice.process)

    def begin(self) -> None:
        """Counts the next iteration; call it before the iteration. No store traffic.

        Raises:
          RuntimeError: another process has left before this iteration.
        """
        self.check()
        self._progress = LoopProgress(self.num_begun + 1, time.monotonic())

    def leave(self, reason: str | None = None) -> None:
        """Tells the others that this process begins no further iteration.

        Args:
          reason: for example "ValueError: boom"; None: unknown.
        """
        if self._stopped.is_set():
            return
        store, own = self._world.store, self._world.process_index
        # A notice of an earlier departure already tells the others enough.
        if store is not None and not find_departed(self.num_begun, self._notices):
            notice = msgspec.msgpack.encode(
                DepartureNotice(own, self.num_begun, reason)
            )
            others = (p for p in range(self._world.process_count) if p != own)
            # The wake key holds the notice too: a waiter gets it before any deletion.
            keys = [f"{self._directory}/left/{own}", *map(self._wake_key, others)]
            _NoticeKeeper.start(
                store, dict.fromkeys(keys, notice), self._world.timeout_s
            )
        self.close()

    def close(self) -> None:
        """Ends the watch after the loop has ended on all processes; posts no notice."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread is None or self._thread is threading.current_thread():
            return
        if not self._notices:  # Otherwise the thread is awake already.
            assert self._world.store is not None
            key = self._wake_key(self._world.process_index)
            self._world.store.set(key, b"", overwrite=True)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _wake_key(self, process: int) -> str:
        return f"{self._directory}/wake/{process}"

    def _describe(self, notice: DepartureNotice) -> str:
        why = notice.reason or "by `break` or an exception"
        count = f"{notice.num_begun} iteration{'s' * (notice.num_begun != 1)}"
        return f"Process {notice.process} left {self._loop} after {count}, {why}"

    def _watch_job(self) -> None:
        try:
            self._watch()
        except jax.errors.JaxRuntimeError as error:
            # The coordination service died with process 0; the lifeline reports that.
            _logger.debug("The watch over %s has ended: %s", self._loop, error)

    def _watch(self) -> None:
        store, own = self._world.store, self._world.process_index
        assert store is not None
        while not self._stopped.is_set():
            try:
                value = store.get(self._wake_key(own), timeout_s=_GET_TIMEOUT_S)
            except TimeoutError:
                continue
            self._take_first(value)
            break
        while not self._stopped.is_set():
            found = store.list_directory(f"{self._directory}/left")
            now_s = time.monotonic()
            known = {notice.process for notice, _ in self._notices} | {own}
            new = [
                ReceivedNotice(_decode(found[str(process)], process), now_s)
                for process in range(self._world.process_count)
                if str(process) in found and process not in known
            ]
            self._notices += tuple(new)
            timeout_s = self._world.timeout_s
            verdict = judge(
                self._progress, self._notices, now_s=now_s, timeout_s=timeout_s
            )
            if verdict == "exit":
                self._exit()
            self._stopped.wait(_POLL_PERIOD_S)

    def _take_first(self, value: bytes) -> None:
        """Takes the notice in the wake key; `close` sets the key without a notice."""
        try:
            process = wire.decode(value, DepartureNotice, what="It").process
        except wire.Malformed:
            return
        if process in range(self._world.process_count):
            if process != self._world.process_index:
                arrived = ReceivedNotice(_decode(value, process), time.monotonic())
                self._notices = (arrived,)

    def _exit(self) -> None:
        notice = find_departed(self.num_begun, self._notices)
        if notice is None or self._stopped.is_set():
            return
        print(
            f"jdp: {self._describe(notice)}, and process {self._world.process_index} "
            f"has been in its iteration {self.num_begun - 1} (counted from 0) for more "
            f"than {self._world.timeout_s:g} s since; it may wait in a collective for "
            f"that process, which cannot be interrupted. {_WHAT_TO_DO}",
            file=sys.stderr,
            flush=True,
        )
        user_program.report(user_program.FAILED, 1, notice.process)
        user_program.flush()
        os._exit(1)


class _NoticeKeeper:
    """Restores notices that an intruder in JAX's store deletes.

    It ends once the others have had time to end, with the next notice of this process,
    or with its program: then the lifeline informs the others.
    """

    _of_store: "weakref.WeakKeyDictionary[Store, _NoticeKeeper]" = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, store: Store, posts: Mapping[str, bytes], timeout_s: float):
        """Posts, and starts the thread; use `start`."""
        self._store, self._posts = store, posts
        self._period_s = min(10.0, max(0.2, timeout_s / _LOOKS))
        # An iteration may take `timeout_s` after the notice, and reading it takes time.
        self._until_s = time.monotonic() + 2 * timeout_s
        self._stopped = threading.Event()
        self._stop = forks.only_here(self._end)
        for key, value in posts.items():
            store.set(key, value, overwrite=True)
        self._thread = threading.Thread(
            target=self._keep, name="jdp-departures-keeper", daemon=True
        )
        if threading.main_thread().is_alive():  # Otherwise the program is ending.
            world_end.register(self._stop)  # It runs before JAX leaves the store.
            self._thread.start()

    @classmethod
    def start(cls, store: Store, posts: Mapping[str, bytes], timeout_s: float) -> None:
        """Posts a notice and keeps it posted, in place of the previous notice."""
        before = cls._of_store.pop(store, None)
        if before is not None:
            before._end()
            world_end.unregister(before._stop)
        cls._of_store[store] = cls(store, posts, timeout_s)

    def _keep(self) -> None:
        try:
            while not self._stopped.wait(self._period_s):
                if time.monotonic() > self._until_s:
                    world_end.unregister(self._stop)
                    break
                for key, value in self._posts.items():
                    if self._store.try_get(key) is None:
                        self._store.set(key, value, overwrite=True)
        except RuntimeError as error:  # The store has ended, and the job with it.
            _logger.debug("A notice is kept no longer: %s", error)
        if self._of_store.get(self._store) is self:
            del self._of_store[self._store]

    def _end(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)


def _decode(value: bytes, process: int) -> DepartureNotice:
    """Reads the notice of a process; a malformed one counts as a departure too."""
    try:
        notice = wire.decode(value, DepartureNotice, what="It")
        if notice.process != process or notice.num_begun < 0:
            raise wire.Malformed("It names another process, or fewer iterations than 0")
    except wire.Malformed as error:
        return DepartureNotice(process, 0, f"with a malformed notice: {error}")
    reason = None if notice.reason is None else wire.printable(notice.reason, most=4000)
    return DepartureNotice(process, notice.num_begun, reason)


_WHAT_TO_DO = (
    "Leave the loop on all processes at the same iteration, or look above for the "
    "reason why that process left."
)
