"""Private folder: where do sockets of one host lie, out of reach of other accounts?

Only this user can enter the folder, and its name is random, so that no other account
can have made it first. A launcher makes it before it starts anything and removes it at
the end; without a launcher, the process that needs it does. Its maker holds a lock on
it. A folder whose maker was killed is removed when the next folder is made.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator

from jdp.runtime import environment, forks

PREFIX = "jdp-"
_LOCKED_PREFIX = (
    f"{PREFIX}o"  # and eight random characters; other folders may be in use unlocked.
)
_LOCKED_CHARACTERS = len(_LOCKED_PREFIX) + 8
_LOCKING_S = 60.0  # from the name of a folder to its lock, at most.
_MOST_BYTES = 80  # Linux limits a Unix socket's path to 107; the name has up to 27.
_ODD = frozenset("%?#")
_OPEN_TO_ALL = stat.S_IWOTH | stat.S_ISVTX


@contextlib.contextmanager
def make() -> Iterator[str]:
    """Yields a folder of this user alone, in TMPDIR if its path is short enough.

    The caller removes it; until then this process, or a child it forks, has its lock.

    Raises:
      OSError: the folder cannot be made.
    """
    problem: OSError | None = None
    for parent in _find_parents():
        try:
            _check_parent(parent)
            folder = tempfile.mkdtemp(prefix=_LOCKED_PREFIX, dir=parent)
        except OSError as error:
            problem = problem or error
            continue
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # Not every file system has locks.
                stack.callback(os.close, _lock(folder))
            _remove_ownerless(parent)
            yield folder
        return
    assert problem is not None
    raise problem


@contextlib.contextmanager
def for_launch() -> Iterator[str]:
    """Yields the folder of a launcher, and removes it afterwards.

    It is "" if the folder cannot be made. Processes of the job then try themselves, and
    report the consequences.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(make())
        except OSError:
            folder = ""
        else:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextlib.contextmanager
def enter() -> Iterator[str]:
    """Yields a folder of this user alone, for sockets that the caller removes.

    It is the folder of the launcher, which stays, or a new one, which is removed.

    Raises:
      OSError: the folder cannot be made.
    """
    folder = os.environ.get(environment.LAUNCH_FOLDER, "")
    if is_private(folder):
        yield folder
        return
    remove = forks.only_here(shutil.rmtree)
    with make() as folder:
        try:
            yield folder
        finally:
            remove(folder, ignore_errors=True)


def find_all() -> Iterator[str]:
    """Yields the folders of this user that launchers and processes have made."""
    for parent in dict.fromkeys(_find_parents()):
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                folder = os.path.join(parent, name)
                if name.startswith(_LOCKED_PREFIX) and is_private(folder):
                    yield folder


def is_private(folder: str) -> bool:
    """Returns whether only this user can enter `folder`, which is not a link."""
    try:
        found = os.lstat(folder)
    except (OSError, ValueError):
        return False
    is_owned = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_owned and not found.st_mode & 0o077


def remove_socket(path: str) -> None:
    """Removes a socket, and its folder unless it is the launcher's."""
    folder = os.path.dirname(path)
    if not is_private(folder):
        return
    with contextlib.suppress(OSError):
        os.unlink(path)
    if folder != os.environ.get(environment.LAUNCH_FOLDER):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _lock(folder: str) -> int:
    """Locks a folder; returns the descriptor that holds the lock.

    Raises:
      OSError: another process has it, or there is no such folder or lock.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_ownerless(parent: str) -> None:
    """Removes the folders of this user in `parent` whose process was killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            folder = os.path.join(parent, name)
            if (
                name.startswith(_LOCKED_PREFIX)
                and len(name) == _LOCKED_CHARACTERS
                and is_private(folder)
                and time.time() - os.lstat(folder).st_mtime > _LOCKING_S
            ):
                with contextlib.suppress(OSError):
                    fd = _lock(folder)
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(fd)


def _find_parents() -> list[str]:
    given = os.environ.get("TMPDIR")
    return [*([os.path.abspath(given)] if given else []), "/tmp", "/dev/shm"]


def _check_parent(parent: str) -> None:
    if len(os.fsencode(parent)) + len("/jdp-o12345678") > _MOST_BYTES:
        raise OSError(f"{parent}: too long for the path of a Unix socket")
    # gRPC parses the path as a URI, and the roll call shows it.
    if not parent.isprintable() or not _ODD.isdisjoint(parent):
        raise OSError(f"{parent!r}: odd characters for the path of a Unix socket")
    # Without the sticky bit, other accounts could replace the folder.
    if os.stat(parent).st_mode & _OPEN_TO_ALL == stat.S_IWOTH:
        raise PermissionError(f"{parent}: others may remove folders there")
