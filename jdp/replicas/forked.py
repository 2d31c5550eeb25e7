"""Forked: was this process forked from a process of a job?

A forked child inherits the connections and the shared memory of its parent, and its
place among the processes. A collective of the child would take part in the parent's
place, and the sums of all processes would be wrong.
"""

import os

from jdp.replicas import mesh


class _State:
    """State of this process."""

    is_child = False  # Forked from a process of a job of several.


def is_child() -> bool:
    """Whether this process was forked from a process of a job of several."""
    return _State.is_child


def check_is_not_child() -> None:
    """Raises RuntimeError in a child that was forked from a process of a job."""
    if _State.is_child:
        raise RuntimeError(
            "This process was forked from a process of a job. Its connections and its "
            "shared memory belong to the parent, whose place in the job it would take. "
            "Call steps, evaluations, checks and collectives in the parent, or start a "
            'job of its own in a child of `multiprocessing.get_context("spawn")`.'
        )


def _note_fork() -> None:
    world = mesh.find_current_world()
    _State.is_child |= world is not None and world.process_count > 1


os.register_at_fork(after_in_child=_note_fork)
