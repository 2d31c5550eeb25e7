"""Forks: what must a forked child leave to its parent?

A child made by `os.fork` inherits exit handlers, finalizers and open connections. It
is not a process of the job, so the handlers of jdp run only in the parent.
"""

import functools
import os
from collections.abc import Callable
from typing import Any


def only_here(fn: Callable[..., Any]) -> Callable[..., None]:
    """Wraps `fn` to do nothing in children that this process forks.

    Args:
      fn: exit handler, finalizer or hook; its result is dropped.
    """
    pid = os.getpid()

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> None:
        if os.getpid() == pid:
            fn(*args, **kwargs)

    return call
