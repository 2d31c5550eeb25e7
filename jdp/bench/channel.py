"""Channel: how does a benchmark tell its processes what to time, and when?

Each process connects to the driver and sleeps in `recv` until it is asked, so that idle
processes leave the cores to the running ones.
"""

import contextlib
import json
import os
import pathlib
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import typer

RunSteps = Callable[[int], list[float]]


class StepConfig(NamedTuple):
    """Model that every system trains in `jdp bench step`."""

    num_blocks: int
    width: int
    batch_size: int  # samples of one process.
    learning_rate: float = 1e-3


class JsonChannel:
    """Messages as lines of JSON, over a connected socket, which it takes over."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._file = connection.makefile("rw", encoding="utf-8", newline="\n")

    def send(self, message: Any) -> None:
        """Sends one message."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self, *, timeout_s: float | None) -> Any:
        """Receives one message.

        Raises:
          EOFError: the other side is gone.
          TimeoutError: nothing came for `timeout_s` seconds.
        """
        self._socket.settimeout(timeout_s)
        text = self._file.readline()
        if not text:
            raise EOFError("the other side of the channel is gone")
        return json.loads(text)

    def close(self) -> None:
        """Closes the connection."""
        self._file.close()
        self._socket.close()


def serve(
    port: int,
    group: str,
    rank: int,
    variants: Mapping[str, RunSteps],
    *,
    losses: Mapping[str, Callable[[], float]] | None = None,
) -> None:
    """Times variants for the driver at `port` until the driver hangs up.

    Args:
      port: the port of the driver on this host.
      group: the name of the group of processes.
      rank: the number of this process in the group.
      variants: by name, a function that runs the given number of steps, together with
        the other processes of the group, and returns the seconds of each.
      losses: by name, a function that returns the loss of a variant after a turn.
    """
    line = JsonChannel(socket.create_connection(("127.0.0.1", port), timeout=30.0))
    line.send({"group": group, "rank": rank, "variants": list(variants)})
    try:
        while True:
            request = line.receive(timeout_s=None)
            before = sent_bytes()
            seconds = variants[request["variant"]](request["num_steps"])
            reply = {"seconds": seconds, "sent_bytes": sent_bytes() - before}
            if losses is not None:
                reply["loss"] = losses[request["variant"]]()
            line.send(reply)
    except (EOFError, ConnectionError):
        return
    finally:
        line.close()


def sent_bytes() -> int:
    """Returns the bytes sent by this process' TCP connections; 0 except on Linux."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for fd in os.listdir("/proc/self/fd"):
            # Other threads may close a descriptor, and most are not TCP connections.
            with contextlib.suppress(OSError):
                total += _written_bytes(int(fd))
    return total


def _written_bytes(fd: int) -> int:
    copy = os.dup(fd)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    # `tcpi_notsent_bytes`, `tcpi_bytes_sent` and `tcpi_bytes_retrans` of `struct
    # tcp_info` (linux/tcp.h), since Linux 4.19. What the other end has acknowledged
    # comes too late to be of the steps that have sent it.
    (waiting,) = struct.unpack_from("=I", info, 144)
    sent, again = struct.unpack_from("=QQ", info, 200)
    return sent - again + waiting


def time_steps(step: Callable[[], Any], num_steps: int) -> list[float]:
    """Returns the seconds of each of `num_steps` calls; `step` waits for its result."""
    seconds = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start_s)
    return seconds


def check_can_write(path: pathlib.Path | None, option: str = "--json") -> None:
    """Raises typer.BadParameter for a file that cannot be written."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise typer.BadParameter(
            f"{str(path)!r} cannot be written: {error.strerror}.", param_hint=option
        ) from None
