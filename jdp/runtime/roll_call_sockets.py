"""Roll call's sockets: how do the processes meet at the address of process 0?

Plain sockets carry lines of JSON. (A ROUTER of libzmq 4.3 aborts the process when a
stranger writes to it while it closes, and the gRPC client of `jax.distributed`, at the
same address, is such a stranger.)
"""

import errno
import logging
import os
import platform
import socket
import time

import msgspec

from jdp.replicas import progress
from jdp.runtime import addresses, job_key, roll_call, roll_call_server
from jdp.runtime.roll_call import (
    Meeting,
    RollCallHello,
    RollCallRefused,
    RollCallVerdict,
)

_RETRY_S = 0.05
_RETRY_REFUSED_S = 0.5
_CHALLENGE_TIMEOUT_S = 10.0  # Process 0 sends it at once.
_logger = logging.getLogger("jdp")


def call_roll(
    own: RollCallHello,
    address: str,
    *,
    timeout_s: float,
    key: bytes | None = None,
    path: str = "",
) -> Meeting:
    """Meets the other processes at `address`; every process calls it once.

    Args:
      own: introduction of this process.
      address: "host:port" at which process 0 listens until all have come. An IPv6
        address stands in brackets.
      timeout_s: how long to wait for the others, in seconds.
      key: key of the job, the same everywhere; None if it has none.
      path: path that process 0 sends to the others.

    Raises:
      RuntimeError: a process is missing, came twice, does not fit or has another key;
        the address is taken; or process 0 cannot be reached. Raised on every process
        that can be told.
    """
    if own.process_id == 0:
        verdict, meeting = roll_call_server.RollCallServer(
            own, address, timeout_s, key, path
        ).serve()
    else:
        verdict, meeting = _Caller(own, address, timeout_s, key).attend()
    if verdict.error is not None:
        raise progress.blame(RuntimeError(verdict.error), verdict.missing)
    return meeting


class _Caller:
    """Another process: introduces itself to process 0 until it answers."""

    def __init__(
        self, own: RollCallHello, address: str, timeout_s: float, key: bytes | None
    ):
        self._own, self._address, self._key = own, address, key
        self._job = job_key.name_job(address, os.environ)
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._has_warned = False

    def attend(self) -> tuple[RollCallVerdict, Meeting]:
        """Calls until the verdict comes.

        Raises:
          RuntimeError: it does not come in time.
        """
        host, port = addresses.split(self._address)
        reason, refusal = "no process listens there", ""
        while (left_s := self._left_s()) > 0:
            wait_s = _RETRY_S
            try:
                with socket.create_connection((host, port), timeout=left_s) as line:
                    return self._ask(line)
            except RollCallRefused as error:
                reason, wait_s = str(error), _RETRY_REFUSED_S
                refusal = reason
                self._warn_once(reason)
            except TimeoutError:
                reason = "it did not answer"
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
            time.sleep(min(wait_s, max(0.0, self._left_s())))
        if refusal not in ("", reason):  # Process 0 may have ended since.
            reason = f"{reason}; before that, {refusal}"
        raise RuntimeError(
            f"Process {self._own.process_id} of {self._own.num_processes} had no "
            f"answer from the coordinator at {self._address!r} within "
            f"{self._timeout_s:g} s: {reason}. Is process 0 running there, is the "
            f"address right, and can this machine ({platform.node()}) reach it?"
        )

    def _ask(self, line: socket.socket) -> tuple[RollCallVerdict, Meeting]:
        most_bytes = roll_call.MOST_CHALLENGE_BYTES
        first = self._read_line(line, most_bytes, timeout_s=_CHALLENGE_TIMEOUT_S)
        try:
            challenge = roll_call.decode_challenge(first)
        except RollCallRefused as error:
            raise RollCallRefused(
                f"something else than jdp answers there: {error}"
            ) from None
        line.settimeout(max(0.001, self._left_s()))
        theirs = challenge.job
        # Signed for this job: process 0 of another job refuses it, even if a stranger
        # has changed the challenge.
        challenge = msgspec.structs.replace(challenge, job=self._job)
        line.sendall(roll_call.encode_hello(self._own, challenge, self._key))
        if challenge.key_id != roll_call.key_id(self._key):
            raise RollCallRefused(_describe_keys(challenge.key_id, self._key))
        if theirs != self._job:
            raise RollCallRefused(
                f"it is of the job {theirs!r}, and this process of the job "
                f"{self._job!r}; the address of the coordinator and `JDP_JOB_ID` must "
                "be the same in all processes of a job"
            )
        most_bytes = (1 << 14) + 600 * self._own.num_processes
        said = self._read_line(line, most_bytes, timeout_s=self._left_s())
        verdict = roll_call.decode_verdict(said, challenge, self._own, self._key)
        host = addresses.unmap(str(line.getpeername()[0]))
        own_host = addresses.unmap(str(line.getsockname()[0]))
        if addresses.is_loopback(host) and not addresses.is_loopback(verdict.host):
            # Processes of other hosts reach this host at that address.
            host = own_host = verdict.host
        session_key = roll_call.session_key(self._key, verdict.session)
        found = Meeting(verdict.nodes, host, own_host, "", session_key, verdict.path)
        return verdict, found

    def _read_line(
        self, line: socket.socket, most_bytes: int, *, timeout_s: float
    ) -> bytes:
        # One deadline for the whole line: a peer may drip.
        deadline_s = min(self._deadline_s, time.monotonic() + timeout_s)
        said = bytearray()
        while not said.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            line.settimeout(left_s)
            data = line.recv(1 << 14)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it hung up")
            said += data
            if len(said) > most_bytes:
                raise RollCallRefused(
                    "something else than jdp answers there: it says too much"
                )
        return bytes(said)

    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("The coordinator at %s: %s.", self._address, reason)


def _describe_keys(theirs: str, own: bytes | None) -> str:
    why = "it has another key of a job than this process"
    if own is None:
        why = "it takes only processes with the key of its job; this one has no key"
    elif not theirs:
        why = "it has no key of a job, and this process has one"
    return f"{why}; give all the same `--key-file` or `JDP_JOB_KEY`"
