"""Descriptors: how many connections may a process hold before it has none left?"""

import contextlib
import resource

_MOST = 1 << 16  # Some programs loop over all descriptors when they start another.


def raise_limit() -> None:
    """Raises the soft limit of open descriptors to the hard one, at most to 65536.

    The usual soft limit is 1024. Strangers that reach a port can use up that many, and
    gloo, which XLA uses on CPU, then aborts the process. Child processes inherit the
    limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS has a lower limit of its own.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_guests(num_expected: int) -> int:
    """Returns how many unauthenticated connections a listener may hold.

    Args:
      num_expected: number of connections of the job, which may all come at once.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    known = _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)
    return num_expected + known // 4
