"""Ports: at which free ports of this host does a job meet?

A port that is found free and released may be taken before the job listens there: the
system gives it to any connection or server that asks for no particular port. So the
launcher stays bound to the port without listening. Sockets with SO_REUSEADDR, as those
of servers are, may listen at such a port, and the system gives it to no other program.
"""

import contextlib
import socket
import sys
from collections.abc import Iterator

_TRIES = 100


@contextlib.contextmanager
def held(host: str, *, count: int = 1) -> Iterator[int]:
    """Yields the first of `count` free ports in a row, for servers of this job alone.

    The ports are held until the context ends; outside of Linux, they are only free now.

    Args:
      host: address of this host, of IPv4; "": all of them.
      count: how many ports.

    Raises:
      OSError: there are no such ports.
    """
    with contextlib.ExitStack() as stack:
        first = _hold(host, count, stack)
        if not sys.platform.startswith("linux"):
            stack.close()  # Elsewhere a bound port cannot be shared.
        yield first


def _hold(host: str, count: int, stack: contextlib.ExitStack) -> int:
    for _ in range(_TRIES):
        with contextlib.ExitStack() as attempt:
            first = _bind(host, 0, attempt)
            with contextlib.suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    _bind(host, port, attempt)
                stack.push(attempt.pop_all())
                return first
    raise OSError(None, f"no {count} ports in a row are free on this host")


def _bind(host: str, port: int, stack: contextlib.ExitStack) -> int:
    holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, port))
    return holder.getsockname()[1]
