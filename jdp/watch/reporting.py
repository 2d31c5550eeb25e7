"""Reporting: where does a process find the status of its job?"""

import os
from collections.abc import Callable

from jdp.watch import status
from jdp.watch.status import JobStatus

FOLDER = "JDP_LAUNCH_FOLDER"  # The launcher writes the status there.


class _Source:
    """Function that has the status in a job without a launcher."""

    find: Callable[..., JobStatus | None] | None = None


def set_source(find: Callable[[], JobStatus | None] | None) -> None:
    """Makes `report` return `find()`, in a job without a launcher; None: not so."""
    _Source.find = find


def report() -> JobStatus | None:
    """Returns the status of the job of this process, as of the last second.

    It has the place of each process, its last step, and how long it computes, waits for
    others and loads. Any thread may call it, in any process of a job that `jdp launch`
    has started or that has called `jdp.init`.

    Returns:
      The status; None in a job of one process, and before the watch has any.
    """
    if _Source.find is not None:
        return _Source.find()
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    try:
        return status.read(folder)
    except (OSError, ValueError):
        return None
