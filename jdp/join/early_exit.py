"""Departures: what happens to the others when one process leaves a loop early?

The process that leaves posts a notice. The others raise when they come to an iteration
that it never begins. Those that already hang in a device collective with it cannot be
interrupted, so a thread ends their process after a while, with a message.
"""

import atexit
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

from jdp.replicas import progress, wire
from jdp.replicas.mesh import World
from jdp.runtime import forks, user_program
from jdp.types import Store

# Nothing is polled before the first notice: a `get` that times out leaves memory behind
# in process 0 (see `DistributedStore.get`), and all who leave or close set the key.
_GET_TIMEOUT_S = 3600.0
_POLL_PERIOD_S = 0.2
_JOIN_TIMEOUT_S = 2.0
_LOOKS = 20  # within `timeout_s`, for what a stranger has deleted.
_logger = logging.getLogger("jdp")


class DepartureNotice(msgspec.Struct, frozen=True):
    """A process has left."""

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
    since_s: float  # when it began the last of them.


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
    """Returns whether this process is to be ended; pure.

    It is, once it has stayed longer than `timeout_s` in an iteration that a process
    has not begun, or has left from: it may wait for that process in a collective.

    Args:
      progress: where the main thread is.
      notices: what has been read so far.
      now_s: the clock.
      timeout_s: how long an iteration may take from the notice on.
    """
    for notice, arrived_s in notices:
        start_s = max(progress.since_s, arrived_s)
        if 0 < progress.num_begun >= notice.num_begun and now_s - start_s > timeout_s:
            return "exit"
    return "wait"


class ExitWatch:
    """One process' view of who has left a loop.

    The thread that runs the loop calls `begin` before each iteration and, once, either
    `leave` or `close`.
    """

    def __init__(self, world: World, directory: str, *, loop: str):
        """Starts the watch.

        Args:
          world: the job.
          directory: where the notices go in the store; the same on all processes, and
            of this loop alone.
          loop: the loop in words, such as "the loop over `jdp.join_batches`".
        """
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
        """Raises if a process has left before the next iteration.

        Raises:
          RuntimeError: it names the process.
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
        """Counts the next iteration; call it before, not after. No store traffic.

        Raises:
          RuntimeError: a process has left before it.
        """
        self.check()
        self._progress = LoopProgress(self.num_begun + 1, time.monotonic())

    def leave(self, reason: str | None = None) -> None:
        """Tells the others that this process begins no further iteration.

        Args:
          reason: why, such as "ValueError: boom"; None if it is not known.
        """
        if self._stopped.is_set():
            return
        store, own = self._world.store, self._world.process_index
        # After one who left no later, a notice would tell the others nothing new.
        if store is not None and not find_departed(self.num_begun, self._notices):
            notice = msgspec.msgpack.encode(
                DepartureNotice(own, self.num_begun, reason)
            )
            others = (p for p in range(self._world.process_count) if p != own)
            # It is also what wakes: one that waits gets it though it is deleted then.
            keys = [f"{self._directory}/left/{own}", *map(self._wake_key, others)]
            _NoticeKeeper.start(
                store, dict.fromkeys(keys, notice), self._world.timeout_s
            )
        self.close()

    def close(self) -> None:
        """Ends the watch, because the loop has ended for all; posts nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread is None or self._thread is threading.current_thread():
            return
        if not self._notices:  # Else it has been woken already.
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
            # The coordination service is gone with process 0: the lifeline tells that.
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
        """Takes the notice that woke this process; none came where it woke itself."""
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
            f"that process, and nothing else can end this. {_WHAT_TO_DO}",
            file=sys.stderr,
            flush=True,
        )
        user_program.report_failure(1, culprit=notice.process)
        user_program.flush()
        os._exit(1)


class _NoticeKeeper:
    """Posts again what a stranger at JAX's store deletes or writes over.

    It ends once the others have had the time to be ended, with the next notice of this
    process, or with its program: then the lifeline tells the others.
    """

    _of_store: "weakref.WeakKeyDictionary[Store, _NoticeKeeper]" = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, store: Store, posts: Mapping[str, bytes], timeout_s: float):
        """Posts, and goes on in a thread; use `start`."""
        self._store, self._posts = store, posts
        self._period_s = min(10.0, max(0.2, timeout_s / _LOOKS))
        # An iteration may take `timeout_s` from the notice on; the rest is for looking.
        self._until_s = time.monotonic() + 2 * timeout_s
        self._stopped = threading.Event()
        self._stop = forks.only_here(self._end)
        for key, value in posts.items():
            store.set(key, value, overwrite=True)
        self._thread = threading.Thread(
            target=self._keep, name="jdp-departures-keeper", daemon=True
        )
        if threading.main_thread().is_alive():  # Else the program is at its end.
            atexit.register(self._stop)  # It runs before JAX leaves the store.
            self._thread.start()

    @classmethod
    def start(cls, store: Store, posts: Mapping[str, bytes], timeout_s: float) -> None:
        """Posts, and has this process keep it; it keeps one notice at a time."""
        before = cls._of_store.pop(store, None)
        if before is not None:
            before._end()
            atexit.unregister(before._stop)
        cls._of_store[store] = cls(store, posts, timeout_s)

    def _keep(self) -> None:
        try:
            while not self._stopped.wait(self._period_s):
                if time.monotonic() > self._until_s:
                    atexit.unregister(self._stop)
                    break
                for key, value in self._posts.items():
                    if self._store.try_get(key) is None:
                        self._store.set(key, value, overwrite=True)
        except RuntimeError as error:  # The store has ended, and with it the job.
            _logger.debug("A notice is kept no longer: %s", error)
        if self._of_store.get(self._store) is self:
            del self._of_store[self._store]

    def _end(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)


def _decode(value: bytes, process: int) -> DepartureNotice:
    """Reads the notice of a process; one that cannot be is a notice all the same."""
    try:
        notice = wire.decode(value, DepartureNotice, what="It")
        if notice.process != process or notice.num_begun < 0:
            raise wire.Malformed("It names another process, or fewer iterations than 0")
    except wire.Malformed as error:
        return DepartureNotice(process, 0, f"with a notice that is none: {error}")
    reason = None if notice.reason is None else wire.printable(notice.reason, most=4000)
    return DepartureNotice(process, notice.num_begun, reason)


_WHAT_TO_DO = (
    "Leave the loop on all processes at the same iteration, or look above for what "
    "made that process leave."
)
