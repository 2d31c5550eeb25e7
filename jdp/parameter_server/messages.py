"""Messages: what workers and servers say to each other, and the log of the servers.

A message is a frame with its header, and for arrays more frames behind it. A header
begins with a byte for the version; what follows a `REFUSED` is text in every version,
so that two versions can still tell each other that they differ.

The types say which values a field may have, and `decode` refuses all others. What a
value means is checked where it is used: by `service`, `protocol` and `follower` on the
servers, by `connection` on a worker.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jdp.replicas import wire

VERSION = 4
MESSAGE, REFUSED = range(2)  # the second byte.

Outcome = Literal["applied", "late", "rejected"]

# Counts have space for one more in 64 bits, and for as many as there may ever be.
Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Index = Annotated[int, Meta(ge=0, lt=1 << 31)]  # of a server or a worker.
Identity = Annotated[bytes, Meta(min_length=1, max_length=64)]  # random bytes.
Name = Annotated[str, Meta(max_length=4096)]
# As float32, neither zero nor infinity, also in a sum.
LEAST_WEIGHT, MOST_WEIGHT = 1e-30, 1e30
Weight = Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]
Seconds = Annotated[float, Meta(ge=0.01, le=1e6)]
_MOST_PUSHES = 1 << 16  # that servers hold at once.
_MOST_REFUSAL = 10_000  # characters of a refusal that are shown.


class Version(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Which parameters: they never go back, as tuples are ordered.

    Attributes:
      epoch: how often the servers began, or began again from a checkpoint.
      count: how many updates the parameters have.
    """

    epoch: Count = 0
    count: Count = 0

    def __str__(self) -> str:
        """As logs show it."""
        return f"{self.epoch}.{self.count}"


PushId = tuple[Identity, Count]  # session and sequence number of a push.


class SharedMemoryOffer(msgspec.Struct, frozen=True, array_like=True):
    """Shared memory that a worker has made for a server; see `shared_memory`."""

    path: Name
    token: Annotated[bytes, Meta(max_length=64)]
    num_bytes: Count  # for what is pushed, and as much for what is pulled.


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker comes, or comes back.

    Attributes:
      session: of this worker, random.
      worker: its number.
      server, num_servers: whom it thinks it talks to, and of how many.
      leaves: path, and dtype and shape as text, of each parameter.
      hook_name: "" for none.
      known: the newest version that it has seen.
      shared_memory: shared memory, for a server on the same host.
      process: where it runs, as text.
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
    """A worker lives; `push` is the number of one that is not settled, or 0."""

    session: Identity
    push: Count


class Push(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A server's part of a gradient.

    Attributes:
      session: who pushes.
      sequence: 1, 2, ...; one at a time is under way. Sent again under the same number,
        it is applied once.
      version: of the parameters that it is the gradient at.
      weight: its number of samples.
      is_finite: whether the whole gradient, not this part alone, is.
      is_compressed: whether the arrays are what the hook makes of it.
      is_in_shared_memory: whether they lie in shared memory, and no frames follow.
    """

    session: Identity
    sequence: Annotated[int, Meta(ge=1, le=1 << 60)]
    version: Version
    weight: Weight
    is_finite: bool
    is_compressed: bool
    is_in_shared_memory: bool


class Pull(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks server 0 that all servers hand out parameters, once a push is settled."""

    session: Identity
    pull: Count
    after: Count  # the sequence number of the push; 0: at once.


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker goes on purpose."""

    session: Identity


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker may push and pull."""

    version: Version
    mode: Name
    is_sync: bool
    lease_s: Seconds
    has_shared_memory: bool


class SessionUnknown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server does not know the session: say hello (again)."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server lives.

    Attributes:
      wants: number of a push to send again, or 0.
      awaited: of server 0, the workers that pushes wait for.
    """

    wants: Count
    awaited: Annotated[tuple[Index, ...], Meta(max_length=16)] = ()


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outcome of the last push of a session, and the version after it."""

    sequence: Count
    outcome: Outcome
    version: Version


class Params(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A server's part of the parameters; behind it the arrays, or in shared memory."""

    pull: Count
    version: Version
    is_in_shared_memory: bool


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server has heard that a worker leaves."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server cannot go on."""

    text: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server ends.

    Attributes:
      is_over: whether the job is; False: it was told to end, and may come back.
    """

    is_over: bool = False


class Apply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One update with the weighted mean of these pushes.

    Attributes:
      pushes: session and sequence number of each, in the order in which they are added.
      weights: of each.
      staleness: the updates since the oldest of the versions that they are made from.
    """

    pushes: Annotated[tuple[PushId, ...], Meta(min_length=1, max_length=_MOST_PUSHES)]
    weights: Annotated[tuple[Weight, ...], Meta(min_length=1)]
    staleness: Index


class Discard(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A push that is not applied, and why."""

    session: Identity
    sequence: Count
    outcome: Outcome


class HandOut(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hand parameters to a worker."""

    session: Identity
    pull: Count


class DropSession(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker has gone, or is silent: what is held for it is dropped."""

    session: Identity


class SaveCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write a checkpoint."""


class KeepCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All servers have the checkpoint with this count: older ones may be dropped."""

    count: Count


class Restore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin a new epoch at a checkpoint; the first entry of every log."""

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
    """Where another server than 0 is.

    Attributes:
      server: its number.
      incarnation: random, of this process.
      leader: the incarnation of the server 0 whose log it follows; b"" for none.
      epoch: the highest that it knows.
      next_index: of the log, the entry that it waits for.
      checkpoints: their counts; 0 stands for the parameters it was given, where it may
        begin with them.
      held: session and sequence number of the parts that are not settled.
      is_stopping: whether it was told to end, and wants a checkpoint before.
      runs: in which log each of `checkpoints` was written; (): it does not say.
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
    """Entries that every server executes in this order."""

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
    """A received message is malformed; the text goes on after "it "."""


class RefusedError(Exception):
    """The other side refuses this process, and says why."""


def encode(message: ToServer | ToWorker | ToFollower) -> bytes:
    """Returns the first frame of a message."""
    return bytes((VERSION, MESSAGE)) + _encoder.encode(message)


def encode_refusal(text: str) -> bytes:
    """Returns a frame that every version can read."""
    return bytes((VERSION, REFUSED)) + text[:_MOST_REFUSAL].encode(errors="replace")


def decode(frame: memoryview | bytes, decoder: msgspec.msgpack.Decoder):
    """Returns the message of a first frame.

    Raises:
      MessageError: it is none.
      RefusedError: it is a refusal.
    """
    if len(frame) < 2:
        raise MessageError("sent what is too short for a message")
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
        raise MessageError(f"sent what is no message: {error}") from None
