"""Exit order: of several children that have ended, which ended first?"""

import contextlib
import os
import select


class ExitOrder:
    """Children in the order in which they end.

    Polling each in turn would report two that end between polls in the order of the
    polls. `epoll` on Linux reports descriptors in the order in which they become ready.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._children: dict[int, int] = {}  # process ids, by descriptor.

    def add(self, process_id: int, pid: int) -> None:
        """Begins to watch a child that has not been waited for."""
        with contextlib.suppress(OSError):  # A kernel without `pidfd_open`.
            fd = os.pidfd_open(pid)
            self._children[fd] = process_id
            self._poll.register(fd, select.EPOLLIN)

    def take(self) -> list[int]:
        """Returns the processes that have ended since the last call, in order."""
        found = []
        for fd, _ in self._poll.poll(0, max(1, len(self._children))):
            self._poll.unregister(fd)
            os.close(fd)
            found.append(self._children.pop(fd))
        return found

    def close(self) -> None:
        """Stops watching."""
        for fd in self._children:
            os.close(fd)
        self._children.clear()
        self._poll.close()
