"""Exit order: of several children that have ended, which ended first?"""

import contextlib
import os
import select


class ExitOrder:
    """Children in the order in which they end.

    A look at each in turn would find them in the order of the looks, where two end
    between one look and the next. Linux keeps what `epoll` waits for in the order in
    which it became ready.
    """

    def __init__(self) -> None:
        """Knows of no child yet."""
        self._poll = select.epoll()
        self._children: dict[int, int] = {}  # the numbers of processes by descriptor.

    def add(self, process_id: int, pid: int) -> None:
        """Begins to watch a child that has not been waited for."""
        with contextlib.suppress(OSError):  # A kernel without `pidfd_open`.
            fd = os.pidfd_open(pid)
            self._children[fd] = process_id
            self._poll.register(fd, select.EPOLLIN)

    def take(self) -> list[int]:
        """Returns the processes that have ended since the last call, in that order."""
        found = []
        for fd, _ in self._poll.poll(0, max(1, len(self._children))):
            self._poll.unregister(fd)
            os.close(fd)
            found.append(self._children.pop(fd))
        return found

    def close(self) -> None:
        """Watches no more."""
        for fd in self._children:
            os.close(fd)
        self._children.clear()
        self._poll.close()
