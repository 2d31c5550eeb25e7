"""Folder lock: does another process use the checkpoints of this server?"""

import errno
import fcntl
import logging
import os
import pathlib
import socket
import weakref

_logger = logging.getLogger("jdp")


class FolderLock:
    """A lock on the file `lock` of a folder, held until `close` or death."""

    def __init__(self, folder: pathlib.Path):
        """Takes the lock.

        Raises:
          RuntimeError: another process holds the lock.
          OSError: the file cannot be opened.
        """
        # A link made by another account could lead to a file of this account.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(folder / "lock", flags, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                _logger.warning(
                    "`%s` cannot be locked: %s. No other job may use this folder.",
                    folder,
                    error.strerror,
                )
                return
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            self._close()
            raise RuntimeError(
                f"`checkpoint_dir` {str(folder)!r} is used by another server that "
                f"runs: {ascii(holder)}. End that job, or give another folder."
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}".encode(), 0)

    def close(self) -> None:
        """Releases the lock."""
        self._close()
