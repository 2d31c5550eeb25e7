"""Leaving: how does a process leave its job and go on?"""

import os
import threading
from collections.abc import Callable

from jdp.replicas import mesh, progress, world_end
from jdp.runtime import cluster, environment
from jdp.runtime.lifeline import lifeline
from jdp.runtime.store import DistributedStore


def shutdown() -> None:
    """Ends what `jdp.init` has begun; `jdp.init` may be called again.

    Every process calls it. It closes the eager engine and the loops over
    `jdp.join_batches`, waits until all processes have called it or have come to the end
    of their programs, and ends JAX's distributed runtime, so that no process aborts
    another one by ending first. Every process does the same at its exit, so a program
    needs no call at its end, except before `os._exit`.

    Afterwards there is no world. A step that was decorated without `world=` takes the
    world of the next `jdp.init`. In a job of several processes, JAX then chooses its
    devices anew: arrays made before can be read, if this process has all of their
    parts, and not used in programs. In a job of one process this is so only if the next
    `jdp.init` asks for other devices.

    It does nothing without a world, and in a process that a process of a job has
    forked.

    Raises:
      RuntimeError: another process has failed, was killed, or has left by `os._exit`.
    """
    world = mesh.find_current_world()
    if world is None:
        return
    is_in_job = world.process_count > 1
    if is_in_job and os.environ.get(environment.JOINED) != str(os.getpid()):
        return
    world_end.close_all()
    if is_in_job:
        lifeline.leave(None)
        lifeline.wait_at_end(_run_beside)
        failure = lifeline.close()
        del os.environ[environment.JOINED]
        if isinstance(world.store, DistributedStore):
            world.store.close()
        if failure is not None:
            text = (
                f"`jdp.shutdown` has waited in vain: {failure.text} End this process."
            )
            raise progress.blame(RuntimeError(text), failure.culprit)
    cluster.forget()


def _run_beside(task: Callable[[], None]) -> None:
    threading.Thread(target=task, name="jdp-shutdown", daemon=True).start()
