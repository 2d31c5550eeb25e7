"""Coordination: where does JAX's coordination service listen, which asks for no key?

If one launcher has started all processes, on a Unix socket in a folder that only this
user can enter. The socket's name is removed once all are connected. Otherwise only at
the address that the processes used for the roll call.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator

import jax

from jdp.compat import jax_distributed
from jdp.runtime import addresses, forks, private_folder
from jdp.runtime.roll_call import Meeting

_NAME = "coordination"
_PATH = re.compile(rf"/([^\0\n]*/)?{private_folder.PREFIX}[a-z0-9_]+/{_NAME}", re.ASCII)
# JAX's own limit ends a job whose processes do not end within 300 s of each other. The
# lifeline finds a process that is gone, and so do JAX's heartbeats, within 100 s.
_SHUTDOWN_TIMEOUT_S = 10**8
_logger = logging.getLogger("jdp")


@contextlib.contextmanager
def make_path(*, is_one_launch: bool) -> Iterator[str]:
    """Yields the path of a Unix socket for process 0; removes it afterwards.

    The path is "" where Unix sockets cannot be used. If no folder can be made, it is
    "" too, with a warning.

    Args:
      is_one_launch: whether one launcher has started all processes, so that they see
        the same files; if not, the path is "".
    """
    if not is_one_launch or sys.platform != "linux":
        yield ""
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(private_folder.enter())
        except OSError as error:
            _logger.warning(
                "There is no folder of this user alone (%s), so JAX's coordination "
                "service listens at a port of the loopback interface. It asks for no "
                "key: other accounts of this host can end the job. Set TMPDIR to a "
                "folder with a short path; see docs/security.md.",
                error,
            )
            yield ""
            return
        path = os.path.join(folder, _NAME)
        stack.callback(forks.only_here(private_folder.remove_socket), path)
        yield path


def remove(path: str) -> None:
    """Removes a path that `start` has used; any process may call it.

    Args:
      path: path of the Unix socket, once all processes are connected; or "".
    """
    if _PATH.fullmatch(path):
        private_folder.remove_socket(path)


def start(
    process_id: int,
    num_processes: int,
    address: str,
    meeting: Meeting,
    timeout_s: float,
) -> None:
    """Starts `jax.distributed`; every process calls it after the roll call.

    Args:
      process_id: index of this process.
      num_processes: number of processes of the job.
      address: "host:port" of the coordinator, which the roll call used.
      meeting: the result of the roll call.
      timeout_s: how long to wait for the others, in seconds.

    Raises:
      RuntimeError: the path from process 0 is not in a folder of this user.
    """
    port = addresses.split(address)[1]
    if meeting.path:
        if process_id != 0:
            _check_path(meeting.path)
        address = bind_address = f"unix:{meeting.path}"
    else:
        bind_address = _bind_address(process_id, meeting, port)
        if "%" not in meeting.host:  # gRPC does not accept a zone.
            address = addresses.join(meeting.host, port)
    try:
        with jax_distributed.patient_client(_SHUTDOWN_TIMEOUT_S):
            jax.distributed.initialize(
                address,
                num_processes,
                process_id,
                cluster_detection_method="deactivate",
                initialization_timeout=max(1, int(timeout_s)),
                shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
                coordinator_bind_address=bind_address,
            )
    except BaseException:
        remove(meeting.path)
        raise
    os.register_at_fork(after_in_child=jax_distributed.abandon)


def _check_path(path: str) -> None:
    """Raises RuntimeError unless `path` is in a private folder of this user."""
    if not (_PATH.fullmatch(path) and private_folder.is_private(os.path.dirname(path))):
        raise RuntimeError(
            f"Process 0 offers {path!r} for JAX's coordination service. It is not in "
            "a folder of this user alone. All processes of a `jdp launch` must see the "
            "same files; start them elsewhere with one launch for each host."
        )


def _bind_address(process_id: int, meeting: Meeting, port: int) -> str | None:
    """Returns where process 0 listens; None: on all interfaces, or another process."""
    if process_id != 0:
        return None
    if meeting.bind_host and "%" not in meeting.bind_host:
        return addresses.join(meeting.bind_host, port)
    _logger.warning(
        "Processes reach the coordinator at several addresses of this host, so that "
        "JAX's port %d listens on all interfaces. It asks for no key: see "
        "docs/security.md.",
        port,
    )
    return None
