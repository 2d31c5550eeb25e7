"""Job key: which messages come from a process of this job?

Every process of a job holds the same secret. `sign` prepends an HMAC-SHA256 code to a
message, and `verify` refuses a message whose code was made with another secret.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping

from jdp.replicas import wire
from jdp.runtime import addresses, environment

VARIABLE = environment.JOB_KEY  # 64 hexadecimal digits.
KEY_BYTES = 32
CODE_BYTES = 32  # of HMAC-SHA256; the code precedes the signed bytes.
_MOST_FILE_BYTES = 1 << 16
_MOST_NAME = 400  # characters of the name of a job.
_FILE_CONTEXT = "jdp job key 1"


class WrongKey(RuntimeError):
    """A message was made without the key of this job, or for another use."""


def make() -> bytes:
    """Returns a new key, shape (32,)."""
    return secrets.token_bytes(KEY_BYTES)


def sign(key: bytes, context: str, body: bytes) -> bytes:
    """Prepends to `body` a code that only holders of `key` can make.

    Args:
      key: key of the job.
      context: the use, such as "store jdp/meet/3/verdict". A message that was signed
        for one use is refused in every other.
      body: any bytes. They are not encrypted.
    """
    return _code(key, context, body) + body


def verify(key: bytes, context: str, signed: bytes) -> bytes:
    """Returns the body of a message that `sign` made with the same key and context.

    Raises:
      WrongKey: `signed` is not such a message.
    """
    code, body = signed[:CODE_BYTES], signed[CODE_BYTES:]
    if not hmac.compare_digest(code, _code(key, context, body)):
        raise WrongKey(
            f"`{context}` is not signed with the key of this job: a stranger wrote it, "
            "or a process that was started with another key."
        )
    return body


def derive(key: bytes, context: str) -> bytes:
    """Derives a separate key for one use, shape (32,)."""
    return _code(key, context, b"")


def name_job(address: str, environ: Mapping[str, str]) -> str:
    """Names a job: the same in all its processes, different from jobs with its key.

    Without the name, a stranger could lead a process of one job to process 0 of another
    job with the same key, by copying bytes.

    Args:
      address: "host:port" of the coordinator, as every process was given it.
      environ: may have `JDP_JOB_ID`, any text.
    """
    host, port = addresses.split(address)
    place = addresses.join(host.lower(), port)
    job_id = environ.get(environment.JOB_ID, "")
    name = f"{place} {job_id}" if job_id else place
    return wire.printable(name, most=_MOST_NAME)


def to_environ(key: bytes) -> dict[str, str]:
    """Returns the variable that `from_environ` reads."""
    return {VARIABLE: key.hex()}


def from_environ(environ: Mapping[str, str]) -> bytes | None:
    """Returns the key in the environment of this process, or None.

    Raises:
      ValueError: the variable is set, but not to a key. The text does not show it.
    """
    text = environ.get(VARIABLE)
    if text is None:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"`{VARIABLE}` must be {2 * KEY_BYTES} hexadecimal digits, got {len(text)} "
            "characters that are not. Make one with `openssl rand -hex 32`, give every "
            "process of the job the same, or unset it."
        )
    return key


def read_file(path: str) -> bytes:
    """Returns the key that a file stands for: a digest of its content.

    Any 32 bytes or more will do: the digits of `openssl rand -hex 32`, or the keys that
    `jdp.parameter_server.make_keys` writes. Surrounding white space does not count.

    Raises:
      ValueError: the file cannot be read, is not of this user, can be read by others,
        or is too short or too long.
    """
    try:
        content = read_private(path, most_bytes=_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"`key_file` {path!r} cannot be read: {error.strerror}. Write it with "
            f"`(umask 077; openssl rand -hex 32 > {path})`, and copy it to all hosts."
        ) from None
    content = content.strip()
    if not KEY_BYTES <= len(content) <= _MOST_FILE_BYTES:
        raise ValueError(
            f"`key_file` {path!r} must have from {KEY_BYTES} to {_MOST_FILE_BYTES} "
            f"bytes beside white space, got {len(content)}."
        )
    return derive(hashlib.sha256(content).digest(), _FILE_CONTEXT)


def read_private(path: str, *, most_bytes: int) -> bytes:
    """Returns the first bytes of a private file of this user; never blocks on a pipe.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a regular file, not of this user, or open to others.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        _check_owner(path, os.fstat(file.fileno()))
        return file.read(most_bytes)


def _check_owner(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"`key_file` {path!r} must be a regular file.")
    if found.st_uid != os.geteuid():
        raise ValueError(
            f"`key_file` {path!r} must be of the user who runs the job, number "
            f"{os.geteuid()}; it is of number {found.st_uid}, which could replace it."
        )
    if found.st_mode & 0o077:
        raise ValueError(
            f"`key_file` {path!r} can be read or written by other users of this host, "
            f"which could join the job. Make it private: `chmod 600 {path}`."
        )


def _code(key: bytes, context: str, body: bytes) -> bytes:
    # The length keeps the end of the context apart from the start of the body.
    name = context.encode()
    return hmac.digest(key, len(name).to_bytes(4, "big") + name + body, "sha256")
