"""Own watch: which process watches a job that no launcher of jdp has started?

Each process looks at itself in a thread, and tells process 0, which judges. So a
process that cannot run a thread is only seen to be silent, and process 0 by the others.
"""

import contextlib
import os
import shutil
import threading
import time

from jdp.replicas import world_end
from jdp.replicas.mesh import World
from jdp.runtime import forks, private_folder, user_program
from jdp.runtime.lifeline import lifeline
from jdp.watch import job_watch, recording, reporting, status
from jdp.watch.job_watch import JobWatch, OnStall, Outlets, WatchOptions
from jdp.watch.local_processes import LocalProcesses
from jdp.watch.status import JobStatus

# A process that runs no thread is known to be silent after 4 s, and not before.
_LEAST_STALL_S = 5.0
_SILENT_S = 4.0  # beyond `stall_s`, until process 0 is named.
_PERIOD_S = 0.5  # A look costs about a millisecond.
_OTHERS_END_S = 1.5  # JAX aborts them when process 0 has ended.


class _Own:
    """State of this process, kept also for a later job."""

    local: LocalProcesses | None = None
    process: int = 0


def begin_record(process: int) -> None:
    """Begins the record of this process, before it meets the others; once.

    Args:
      process: index of this process.
    """
    if _Own.local is None:
        local = LocalProcesses(process)
        with contextlib.suppress(OSError):  # No memory: the job runs without a watch.
            recording.begin(local.make_memory(process))
            local.add(process, os.getpid())
            _Own.local, _Own.process = local, process


def start(world: World, *, stall_s: float, on_stall: OnStall) -> None:
    """Begins to watch the job, until this process leaves it.

    Args:
      world: the job, whose processes are linked.
      stall_s: see `jdp.init`.
      on_stall: see `jdp.init`.
    """
    if _Own.local is None or _Own.process != world.process_index:
        return
    least_s = _LEAST_STALL_S if stall_s else 0.0
    options = WatchOptions(stall_s=max(stall_s, least_s), on_stall=on_stall)
    watch = _OwnWatch(world, options, _Own.local)
    world_end.register(forks.only_here(watch.close))


class _OwnWatch:
    """Watch of this process, and of the job if it is process 0."""

    def __init__(self, world: World, options: WatchOptions, local: LocalProcesses):
        self._own, self._options = world.process_index, options
        self._status: JobStatus | None = None
        self._folders = contextlib.ExitStack()
        self._folder = ""
        if self._own == 0:
            with contextlib.suppress(OSError):
                self._folder = self._folders.enter_context(private_folder.make())
                remove = forks.only_here(shutil.rmtree)
                self._folders.callback(remove, self._folder, ignore_errors=True)
        outlets = Outlets(
            show=user_program.show,
            publish=self._publish,
            tell=lifeline.tell,
            has_launchers=False,
        )
        self._job = JobWatch(
            options,
            local,
            outlets,
            num_processes=world.process_count,
            host=self._own,
        )
        self._is_told = False  # that process 0 is silent.
        self._has_left = threading.Event()
        lifeline.take_told()  # Earlier messages are of no use.
        reporting.set_source(lambda: self._status)
        self._thread = threading.Thread(target=self._run, name="jdp-own-watch")
        self._thread.daemon = True
        self._thread.start()

    def close(self) -> None:
        """Tells the others that this process needs no watch any more."""
        self._has_left.set()
        self._thread.join()
        self._job.leave()
        reporting.set_source(None)
        self._folders.close()

    def _run(self) -> None:
        while not self._has_left.wait(_PERIOD_S):
            end = self._job.look(lifeline.take_told())
            if end is not None:
                user_program.show(f"{end.note}. The job ends.")
                user_program.flush()
                if self._own == 0:
                    time.sleep(_OTHERS_END_S)
                os._exit(job_watch.STALLED_CODE)
            if self._own != 0 and self._options.stall_s:
                self._look_at_watcher()

    def _look_at_watcher(self) -> None:
        """Names process 0, which watches, if nothing comes from it."""
        heard_s = self._job.heard_s
        if heard_s is None or self._job.has_ended:
            return
        silent_s = time.monotonic() - heard_s
        if silent_s < self._options.stall_s + _SILENT_S:
            self._is_told = False
        elif not self._is_told:
            self._is_told = True
            user_program.show(
                f"process 0, which watches this job, has not been heard for "
                f"{silent_s:.0f} s: it is stopped or in C code that holds Python's "
                "lock, or its host or the network failed."
            )

    def _publish(self, found: JobStatus) -> None:
        self._status = found
        if self._folder:
            status.write(self._folder, found)
