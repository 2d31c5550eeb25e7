"""Messages: which messages do workers and servers exchange, and what is in the log?

A message is a frame with a header; a message with arrays has a second frame for them.
A header begins with a byte for the version. A `REFUSED` byte is followed by text in
every version, so processes of different versions can report that they differ.

The types restrict the values of each field, and `decode` refuses all others. The
meaning of a value is checked where it is used: by `service`, `leader` and `follower` on
servers, by `connection` on a worker.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jdp.replicas import wire

VERSION = 4
MESSAGE, REFUSED = range(2)  # the second byte.

Outcome = Literal["applied", "late", "rejected"]

# Large enough for any job, and a sum of two still fits into 64 bits.
Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Index = Annotated[int, Meta(ge=0, lt=1 << 31)]  # of a server or a worker.
Identity = Annotated[bytes, Meta(min_length=1, max_length=64)]  # random bytes.
Name = Annotated[str, Meta(max_length=4096)]
# Neither zero nor infinite as float32, nor are their sums.
LEAST_WEIGHT, MOST_WEIGHT = 1e-30, 1e30
Weight = Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]
Seconds = Annotated[float, Meta(ge=0.01, le=1e6)]
_MOST_PUSHES = 1 << 16  # that servers hold at once.
_MOST_REFUSAL = 10_000  # characters of a refusal that are shown.


class Version(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Version of the parameters; versions never decrease.

    Attributes:
      epoch: number of starts of the servers, restarts from a checkpoint included.
      count: number of updates in the parameters.
    """

    epoch: Count = 0
    count: Count = 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.count}"


PushId = tuple[Identity, Count]  # session and sequence number of a push.


class SharedMemoryOffer(msgspec.Struct, frozen=True, array_like=True):
    """Shared memory of a worker for a server; see `shared_memory_lane`."""

    path: Name
    token: Annotated[bytes, Meta(max_length=64)]
    num_bytes: Count  # in each direction.


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First message of a worker, also when it comes back.

    Attributes:
      session: random bytes that identify the worker.
      worker: index of the worker.
      server, num_servers: index and number of servers that the worker was given.
      leaves: path, and dtype and shape as text, of each parameter.
      hook_name: name of the communication hook; "" for none.
      known: the newest version that the worker has seen.
      shared_memory: shared memory for a server on the same host; None for none.
      process: host and process, as text.
    """

    session: Identity
    worker: Index
    server: Index
    num_servers: Index
    leaves: list[tuple[Name, Name]]
    hook_name: Name
    known: Version
    shared_memory: SharedMemoryOffer | None
    process: Name = ""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sign of life; `push` is the sequence number of the unsettled push, or 0."""

    session: Identity
    push: Count


class Push(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A server's part of a gradient.

    Attributes:
      session: session of the worker.
      sequence: 1, 2, ...; a session has one unsettled push at a time. A push that is
        sent again keeps its number and is applied once.
      version: version of the parameters that the gradient was computed at.
      weight: number of samples.
      is_finite: whether the whole gradient, beyond this part, is finite.
      is_compressed: whether the arrays are the output of the hook.
      is_in_shared_memory: whether the arrays lie in shared memory; no frame follows.
    """

    session: Identity
    sequence: Annotated[int, Meta(ge=1, le=1 << 60)]
    version: Version
    weight: Weight
    is_finite: bool
    is_compressed: bool
    is_in_shared_memory: bool


class Pull(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request to server 0: all servers hand out parameters, once a push is settled."""

    session: Identity
    pull: Count
    after: Count  # the sequence number of the push; 0: at once.


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Goodbye of a worker."""

    session: Identity


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to a hello: the worker can push and pull."""

    version: Version
    mode: Name
    is_sync: bool
    lease_s: Seconds
    has_shared_memory: bool


class SessionUnknown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to an unknown session: the worker has to send its hello again."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to a ping.

    Attributes:
      wants: sequence number of a push to send again, or 0.
      awaited: from server 0, the indices of workers that pushes wait for.
    """

    wants: Count
    awaited: Annotated[tuple[Index, ...], Meta(max_length=16)] = ()


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outcome of the last push of a session, and the version after it."""

    sequence: Count
    outcome: Outcome
    version: Version


class Params(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A server's part of the parameters; the arrays follow, or are in shared memory."""

    pull: Count
    version: Version
    is_in_shared_memory: bool


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to a goodbye."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Last message of a server that failed, with the reason."""

    text: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Last message of a server that ends.

    Attributes:
      is_over: whether the job is over; False: the server was told to end, and may be
        started again.
    """

    is_over: bool = False


class Apply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One update with the weighted mean of pushes.

    Attributes:
      pushes: session and sequence number of each push, in the order of the sum.
      weights: weight of each push.
      staleness: number of updates since the oldest version among the pushes.
    """

    pushes: Annotated[tuple[PushId, ...], Meta(min_length=1, max_length=_MOST_PUSHES)]
    weights: Annotated[tuple[Weight, ...], Meta(min_length=1)]
    staleness: Index


class Discard(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A push that is not applied, with the reason."""

    session: Identity
    sequence: Count
    outcome: Outcome


class HandOut(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every server sends its parameters to a worker."""

    session: Identity
    pull: Count


class DropSession(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker has left or is silent: servers drop its session and unsettled push."""

    session: Identity


class SaveCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every server writes a checkpoint."""


class KeepCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All servers have the checkpoint with this count, and can drop older ones."""

    count: Count


class Restore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A new epoch begins at a checkpoint; the first entry of every log."""

    version: Version


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The job is over."""


LogEntry = (
    Apply
    | Discard
    | HandOut
    | DropSession
    | SaveCheckpoint
    | KeepCheckpoint
    | Restore
    | Stop
)


class FollowerStatus(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Status of a server other than server 0.

    Attributes:
      server: index of the server.
      incarnation: random bytes that identify the process.
      leader: incarnation of the server 0 whose log it follows; b"" for none.
      epoch: the highest epoch that it knows.
      next_index: log index of the entry that it executes next.
      checkpoints: update counts of its checkpoints; 0 stands for the initial
        parameters, if it can begin with them.
      held: session and sequence number of each unsettled push that it holds.
      is_stopping: whether it was told to end, and needs a checkpoint first.
      runs: the run that wrote each of `checkpoints`; (): unknown.
    """

    server: Annotated[int, Meta(ge=1, lt=1 << 31)]
    incarnation: Identity
    leader: Annotated[bytes, Meta(max_length=64)]
    epoch: Count
    next_index: Count
    checkpoints: Annotated[tuple[Count, ...], Meta(max_length=1 << 10)]
    held: Annotated[tuple[PushId, ...], Meta(max_length=_MOST_PUSHES)]
    is_stopping: bool = False
    runs: Annotated[
        tuple[Annotated[bytes, Meta(max_length=64)], ...], Meta(max_length=1 << 10)
    ] = ()


class LeaderLog(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Entries of the log, in the order in which every server executes them."""

    leader: Identity
    epoch: Count
    first_index: Count
    entries: Annotated[tuple[LogEntry, ...], Meta(max_length=1 << 16)]


ToServer = WorkerHello | Ping | Push | Pull | Leave | FollowerStatus
ToWorker = (
    Welcome | SessionUnknown | Pong | Settled | Params | Farewell | Failed | Ended
)
ToFollower = LeaderLog

_encoder = msgspec.msgpack.Encoder()
to_server = msgspec.msgpack.Decoder(ToServer)
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_follower = msgspec.msgpack.Decoder(ToFollower)


class MessageError(Exception):
    """A received message is malformed or impossible; the text continues "it "."""


class RefusedError(Exception):
    """The other side refuses this process; the text has the reason."""


def encode(message: ToServer | ToWorker | ToFollower) -> bytes:
    """Returns the first frame of a message."""
    return bytes((VERSION, MESSAGE)) + _encoder.encode(message)


def encode_refusal(text: str) -> bytes:
    """Returns a frame that every version can read."""
    return bytes((VERSION, REFUSED)) + text[:_MOST_REFUSAL].encode(errors="replace")


def decode(frame: memoryview | bytes, decoder: msgspec.msgpack.Decoder):
    """Returns the message of a first frame.

    Raises:
      MessageError: the frame is not a message of this version.
      RefusedError: the frame is a refusal.
    """
    if len(frame) < 2:
        raise MessageError("sent a frame that is too short for a message")
    if frame[1] == REFUSED:
        text = bytes(frame[2 : 2 + 4 * _MOST_REFUSAL]).decode(errors="replace")
        lines = text[:_MOST_REFUSAL].split("\n")
        raise RefusedError("\n".join(map(wire.printable, lines)))
    if frame[0] != VERSION:
        raise MessageError(
            f"speaks version {frame[0]} of the parameter server's protocol, and this "
            f"process version {VERSION}; install the same jdp everywhere"
        )
    try:
        return wire.decode_with(decoder.decode, frame[2:])
    except wire.DecodeError as error:
        raise MessageError(f"sent a malformed message: {error}") from None
