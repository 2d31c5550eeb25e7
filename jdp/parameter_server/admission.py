"""Admission: does a worker belong to this job, and do its pushes fit the model?"""

import dataclasses
from typing import Any

from jdp.parameter_server import shards
from jdp.parameter_server.messages import MessageError, Push, Version, WorkerHello


@dataclasses.dataclass(frozen=True)
class Admission:
    """Facts that a server compares a hello with."""

    server: int
    num_servers: int
    leaves: list[tuple[str, str]]  # path, and dtype and shape as text.
    hook_name: str
    has_checkpoints: bool  # whether there is a `checkpoint_dir`.
    num_workers: int | None = None


def find_objection(hello: WorkerHello, own: Admission, version: Version) -> str:
    """Returns why a worker is refused; "" if it is welcome.

    Args:
      hello: the hello of the worker.
      own: the facts that it must match.
      version: version of the parameters on server 0, once it has begun; else 0.0.
    """
    name = f"worker {hello.worker}"
    if (hello.server, hello.num_servers) != (own.server, own.num_servers):
        return (
            f"Server {own.server} of {own.num_servers} listens here, and {name} looks "
            f"for server {hello.server} of {hello.num_servers}. Give all processes the "
            "same `addresses`."
        )
    if own.num_workers is not None and hello.worker >= own.num_workers:
        return (
            f"Worker index {hello.worker} is out of range: the servers expect workers "
            f"0 to {own.num_workers - 1}. Give each worker an index below "
            "`num_workers`, or the servers the number of all workers: `--all-workers` "
            "of `jdp launch`, `num_workers` of `Place`."
        )
    if text := shards.find_difference(own.leaves, hello.leaves, name):
        return (
            f"The model of {name} differs from the model of the servers: {text}. Make "
            "the same parameters everywhere."
        )
    if hello.hook_name not in ("", own.hook_name):
        return (
            f"`hook` is {hello.hook_name!r} on {name} and {own.hook_name!r} on "
            "the servers. Give both the same hook."
        )
    known = hello.known
    # Without checkpoints, a new epoch begins with the initial parameters.
    is_lost = known.count and known.epoch != version.epoch and not own.has_checkpoints
    if version.epoch and (known > version or is_lost):
        return (
            f"The servers have version {version}, and {name} has seen {known}: "
            "they started again without a checkpoint. Start the workers again, and "
            "give a `checkpoint_dir`."
        )
    return ""


def check_push(
    push: Push,
    version: Version,
    layout: shards.MemoryLayout,
    compressed_layout: shards.MemoryLayout | None,
) -> shards.MemoryLayout:
    """Returns the layout of the arrays of a push, compressed or not.

    Args:
      push: the header of the push.
      version: the newest version of the server.
      layout: layout of an uncompressed push.
      compressed_layout: layout of a compressed push; None: the servers have no hook.

    Raises:
      MessageError: the servers have no hook, or no such version.
    """
    if push.is_compressed and compressed_layout is None:
        raise MessageError("compressed a push, but the servers have no hook")
    if push.version > version:
        raise MessageError(
            f"pushed a gradient of version {push.version}, but the newest version is "
            f"{version}"
        )
    return compressed_layout if push.is_compressed and compressed_layout else layout


def check_arrays(
    push: Push, payload: Any, layout: shards.MemoryLayout, *, rejects: bool
) -> None:
    """Raises MessageError if the arrays of a push do not fit its header.

    Args:
      push: the header, which claims whether the gradient is finite.
      payload: bytes of this server's part; None for none.
      layout: layout of the arrays.
      rejects: whether gradients that are not finite are rejected.
    """
    num_bytes = 0 if payload is None else len(payload)
    if num_bytes != layout.num_bytes:
        raise MessageError(f"pushed {num_bytes} bytes instead of {layout.num_bytes}")
    if rejects and push.is_finite:
        if not all(map(shards.is_finite, layout.views(payload))):
            raise MessageError("claims that a gradient is finite, but it is not")
