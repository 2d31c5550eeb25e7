"""Keys: which processes can join a job, and where are they?"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from jdp.parameter_server import option_checks
from jdp.replicas import wire
from jdp.runtime import job_key

ROLE = "JDP_PARAMETER_SERVER_ROLE"
INDEX = "JDP_PARAMETER_SERVER_INDEX"
NUM_WORKERS = "JDP_PARAMETER_SERVER_NUM_WORKERS"
ADDRESSES = "JDP_PARAMETER_SERVER_ADDRESSES"
KEY_FILE = "JDP_PARAMETER_SERVER_KEY_FILE"
REPORT = "JDP_PARAMETER_SERVER_REPORT"
DISPLAY_FD = "JDP_PARAMETER_SERVER_DISPLAY_FD"
_MOST_KEY_BYTES = 1 << 16
VARIABLES = (ROLE, INDEX, NUM_WORKERS, ADDRESSES, KEY_FILE)


class Keys(msgspec.Struct, frozen=True):
    """The pairs of CURVE keys of a job, in Z85."""

    server_public: str
    server_secret: str
    worker_public: str
    worker_secret: str


_decode_keys = msgspec.json.Decoder(Keys).decode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Place of one process in a job.

    Attributes:
      role: "server" or "worker".
      index: index of this server or worker, from 0.
      addresses: "host:port" of each server, the same everywhere. Each server listens at
        its own address.
      num_workers: number of workers of the job; None: workers come and go.
      key_file: file of `make_keys`. Any process that can read it can join.
    """

    role: Literal["server", "worker"]
    index: int
    addresses: tuple[str, ...]
    num_workers: int | None = None
    key_file: str = ""

    def __post_init__(self) -> None:
        if self.role not in ("server", "worker"):
            raise ValueError(f'`role` must be "server" or "worker", got {self.role!r}.')
        if not isinstance(self.addresses, tuple | list):
            raise TypeError(
                "`addresses` must be a tuple of texts, host:port of each server, got "
                f"{self.addresses!r}."
            )
        if not self.addresses:
            raise ValueError("`addresses` must have one per server, got none.")
        for address in self.addresses:
            check_address(address)
        if not isinstance(self.key_file, str | os.PathLike):
            raise TypeError(f"`key_file` must be a path, got {self.key_file!r}.")
        object.__setattr__(self, "addresses", tuple(self.addresses))
        object.__setattr__(self, "key_file", os.fspath(self.key_file))
        index = option_checks.check_count("index", self.index, 0)
        object.__setattr__(self, "index", index)
        if self.num_workers is not None:
            count = option_checks.check_count("num_workers", self.num_workers, 1)
            object.__setattr__(self, "num_workers", count)
        least = len(self.addresses) if self.role == "server" else None
        if least is not None and self.index >= least:
            raise ValueError(
                "`index` of a server must be at least 0 and less than the "
                f"{least} servers, got {self.index}."
            )
        if self.num_workers is None:
            return
        if self.role == "worker" and self.index >= self.num_workers:
            raise ValueError(
                f"`index` of a worker must be less than `num_workers`, got "
                f"{self.index} of {self.num_workers}. `num_workers` counts the "
                "workers of all hosts: `--all-workers` of `jdp launch`."
            )

    def to_environ(self) -> dict[str, str]:
        """Returns the variables that `from_environ` reads back."""
        return {
            ROLE: self.role,
            INDEX: str(self.index),
            NUM_WORKERS: "" if self.num_workers is None else str(self.num_workers),
            ADDRESSES: ",".join(self.addresses),
            KEY_FILE: self.key_file,
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "Place":
        """Reads the variables that `jdp launch --servers --workers` sets.

        Raises:
          RuntimeError: a variable is not set.
          ValueError: a variable has an impossible value.
        """
        environ = os.environ if environ is None else environ
        missing = [name for name in VARIABLES if name not in environ]
        if missing:
            raise RuntimeError(
                f"This process has no place in a job: {missing[0]} is not set. Start "
                "the script with `jdp launch --servers 1 --workers 2 script.py`, or "
                "give `place=jdp.parameter_server.Place(...)`."
            )
        role: Any = environ[ROLE]  # `Place` checks it.
        has_number = bool(environ[NUM_WORKERS])
        return cls(
            role=role,
            index=_read_number(environ, INDEX),
            addresses=tuple(environ[ADDRESSES].split(",")),
            num_workers=_read_number(environ, NUM_WORKERS) if has_number else None,
            key_file=environ[KEY_FILE],
        )


def _read_number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(
            f"{name} must be a whole number, got {text!r}. Let `jdp launch` set it."
        )
    return int(text)


def make_keys(path: str | os.PathLike[str]) -> None:
    """Writes new keys for one job to a file that only this user can read.

    Copy it only to the other hosts of the job: a holder can push, pull, and pose as a
    server.

    Raises:
      FileExistsError: the file exists; keys are not overwritten.
      TypeError: `path` is not a path.
    """
    option_checks.check_is("path", path, (str, os.PathLike), "the path of a file")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_encode_new())


def open_new_keys() -> int:
    """Opens new keys in memory; they do not outlive the processes.

    Returns:
      A descriptor N, which the caller closes. In this process, and in children that
      inherit it, `read_keys` reads /proc/self/fd/N.

    Raises:
      OSError: this system has no anonymous files; only Linux has.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("there is no memfd_create")
    descriptor = os.memfd_create("jdp keys")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, _encode_new())
    return descriptor


def _encode_new() -> bytes:
    import zmq

    pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
    return msgspec.json.encode(Keys(*pairs))


def read_keys(path: str) -> Keys:
    """Reads a file that `make_keys` has written.

    Raises:
      RuntimeError: the file cannot be read, has no keys, belongs to another user, or
        other users can read it.
    """
    try:
        data = job_key.read_private(path, most_bytes=_MOST_KEY_BYTES)
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    except OSError as error:
        raise RuntimeError(
            f"`key_file` {path!r} cannot be read: {error.strerror}. Write it with "
            "`jdp.parameter_server.make_keys(path)`, once per job, and copy it to "
            "its hosts."
        ) from None
    try:
        found = wire.decode_with(_decode_keys, data)
        _check_keys(found)
    except wire.DecodeError as error:
        raise RuntimeError(
            f"`key_file` {path!r} has no keys: {error}. Write a new one with "
            "`jdp.parameter_server.make_keys(path)`."
        ) from None
    return found


def _check_keys(found: Keys) -> None:
    """Raises DecodeError unless the keys are pairs of CURVE keys."""
    import zmq

    for role, public, secret in (
        ("server", found.server_public, found.server_secret),
        ("worker", found.worker_public, found.worker_secret),
    ):
        # Characters that Z85 lacks are zeros to libzmq; then the pair does not match.
        try:
            is_pair = zmq.curve_public(secret.encode()) == public.encode()
        except (ValueError, zmq.ZMQError):
            is_pair = False
        if not is_pair:
            raise wire.DecodeError(f"`{role}_public` and `{role}_secret` do not match")


def check_address(address: str) -> None:
    """Raises TypeError or ValueError unless `address` is host:port."""
    if not isinstance(address, str):
        raise TypeError(f"`addresses` must be texts, host:port, got {address!r}.")
    host, _, port = address.rpartition(":")
    # Digits of other scripts are decimal too.
    is_number = port.isascii() and port.isdecimal() and len(port) < 6
    if not host or "/" in host or not is_number or not 0 < int(port) < 1 << 16:
        raise ValueError(
            "`addresses` must be host:port with a port from 1 to 65535, such as "
            f"10.0.0.1:5555, got {address!r}."
        )
