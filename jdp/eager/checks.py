"""Checks: does a message of another process make sense here?

A process that holds the key of the job may still be broken. Its messages are checked on
arrival, so that the engine ends with an error that names the process and the message
instead of an error from somewhere inside.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from jdp.eager import numerics
from jdp.eager.coordinator import fusion
from jdp.eager.entries import Entry
from jdp.eager.execution.base import CollectiveTask
from jdp.eager.messages import (
    HAS_LOCAL_FIRST,
    SCALAR,
    Batch,
    ProtocolError,
    Request,
    Response,
    Spec,
    decode_spec,
)

# The only operations to which ranks that have joined can contribute.
_WITH_JOIN = ("all_reduce", "barrier")
_MAX_ROWS = 1 << 48


def check_request(
    rank: int, request: Request, members: Sequence[int], *, size: int
) -> None:
    """Checks a request that the coordinator has received.

    Args:
      rank: sender of the request.
      request: the request.
      members: ranks of the process set.
      size: number of all ranks.

    Raises:
      ProtocolError: no engine sends such a request.
    """
    spec = decode_spec(request.spec)
    fault = ""
    if not _is_local(request.local, spec, len(members)):
        fault = f"rows {request.local[:8]}"
    elif spec.kind == "broadcast" and spec.root not in members:
        fault = f"root {spec.root}"
    elif spec.kind.endswith("_process_set"):
        if request.process_set != 0:
            fault = f"process set {request.process_set}"
        elif spec.kind == "add_process_set" and spec.shape[-1] >= size:
            fault = f"ranks up to {spec.shape[-1]}"
    if fault:
        raise ProtocolError(
            f"rank {rank} has submitted {request.name!r}, {spec.kind}, with {fault}"
        )


def check_response(response: Response) -> None:
    """Checks a response that has names, without any context.

    Raises:
      ProtocolError: no coordinator sends such a response.
    """
    names, num = response.names, len(response.names)
    lengths = {len(response.specs), len(response.slots or names)}
    if not num or lengths | {len(response.locals or names)} != {num}:
        raise ProtocolError(
            f"a response has {num} names and {len(response.specs)} specs"
        )
    if len(set(names)) != num:
        raise ProtocolError(f"a response has a name twice, among {names[:4]}")
    if response.error:
        return
    specs = [decode_spec(spec) for spec in set(response.specs)]
    if num > 1:
        keys = {fusion.key_of(response.process_set, spec) for spec in specs}
        if len(keys) > 1 or None in keys:
            raise ProtocolError(f"{names[0]!r} and {names[1]!r} cannot run as one")


def check_places(
    response: Response, specs: Sequence[Spec], members: Sequence[int], *, size: int
) -> None:
    """Checks a response against its process set.

    Args:
      response: a response without an error.
      specs: its specs, decoded.
      members: ranks of the process set.
      size: number of all ranks.

    Raises:
      ProtocolError: no coordinator sends such a response.
    """
    for i, spec in enumerate(specs):
        name = response.names[i]
        locals_ = response.locals[i] if response.locals else ()
        if spec.kind == "add_process_set":
            is_right = len(locals_) == 1 and len(locals_[0]) == 1 and locals_[0][0] > 0
            is_right = is_right and spec.shape[-1] < size
        elif spec.kind in HAS_LOCAL_FIRST:
            is_right = len(locals_) == len(members) and spec.shape != SCALAR
            is_right = is_right and all(
                _is_local(each, spec, len(members)) for each in locals_
            )
        else:
            is_right = not any(locals_)
            is_right = is_right and (spec.kind != "broadcast" or spec.root in members)
        if not is_right or spec.kind == "reduce_scatter" and not spec.shape:
            raise ProtocolError(f"{name!r}, {spec.kind}, does not fit its process set")


def check_entries(
    response: Response, entries: Sequence[Entry | None], *, has_joined: bool, place: int
) -> None:
    """Checks a response against the requests of this process.

    Args:
      response: a response without an error.
      entries: by name, the request of this process.
      has_joined: whether this process contributes neutral elements instead.
      place: position of this process among the members of the set.

    Raises:
      ProtocolError: a name is to run that this process has not submitted, or has
        submitted as another operation.
    """
    for i, (entry, spec) in enumerate(zip(entries, response.specs, strict=True)):
        if entry is None:
            if not has_joined or find_join_fault(decode_spec(spec)):
                raise ProtocolError(
                    f"{response.names[i]!r} is to run, which this process has not "
                    "submitted"
                )
        elif entry.request.spec != spec:
            raise ProtocolError(
                f"{response.names[i]!r} is to run as {decode_spec(spec)}, but was "
                f"submitted as {decode_spec(entry.request.spec)}"
            )
        elif entry.request.local and response.locals[i][place] != entry.request.local:
            raise ProtocolError(
                f"{response.names[i]!r} is to run with other rows than were submitted"
            )


def find_join_fault(spec: Spec) -> str:
    """Returns the operation that cannot run once a rank has joined; "" if it can.

    The rank would have to contribute a neutral element, and there may be none.
    """
    if spec.kind not in _WITH_JOIN:
        return spec.kind
    adds = spec.op in ("sum", "average", "adasum")
    if adds and not numerics.has_zero(jnp.dtype(spec.dtype)):
        return f"{spec.kind} ({spec.op} of {spec.dtype}, which has no zero)"
    return ""


def check_data(response: Response, data: bytes, task: CollectiveTask) -> None:
    """Checks the result that came with a response; b"" if none did.

    Raises:
      ProtocolError: the operation cannot have such a result.
    """
    is_right = task.kind == "all_reduce" and task.op != "adasum"
    if data and not (is_right and len(data) == task.num_bytes):
        raise ProtocolError(
            f"{response.names[0]!r}, {task.kind}, came with {len(data)} bytes of result"
        )


def check_batch(batch: Batch, *, size: int) -> None:
    """Checks the fields of a batch other than its responses.

    Raises:
      ProtocolError: no coordinator sends such a batch.
    """
    if batch.data and len(batch.data) != len(batch.responses):
        raise ProtocolError(
            f"{len(batch.responses)} responses have data of {len(batch.data)}"
        )
    if not -1 <= batch.last_joined < size:
        raise ProtocolError(f"rank {batch.last_joined} was the last to join")
    tuned = batch.tuned
    if tuned is not None and not (
        0 <= tuned.cycle_time_s < 1e6 and tuned.fusion_bytes >= 0
    ):
        raise ProtocolError(
            f"a cycle is to take {tuned.cycle_time_s} s, and {tuned.fusion_bytes} "
            "bytes are to run as one"
        )


def _is_local(local: Sequence[int], spec: Spec, num_members: int) -> bool:
    """Whether `local` is a valid `Request.local`."""
    if spec.kind not in HAS_LOCAL_FIRST or spec.shape == SCALAR:
        return not local
    wanted = num_members if spec.kind == "all_to_all" else 1
    return len(local) == wanted and all(0 <= n < _MAX_ROWS for n in local)
