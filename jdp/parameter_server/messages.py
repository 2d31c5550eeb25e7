"""Messages: what workers and servers say to each other, and the log of the servers.

A message is a frame with its header, and for arrays more frames behind it. A header
begins with a byte for the version; what follows a `REFUSED` is text in every version,
so that two versions can still tell each other that they differ.
"""

from typing import Literal

import msgspec

VERSION = 1
MESSAGE, REFUSED = range(2)  # the second byte.

Outcome = Literal["applied", "late", "rejected"]


class Version(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Which parameters: they never go back, as tuples are ordered.

    Attributes:
      epoch: how often the servers began, or began again from a checkpoint.
      count: how many updates the parameters have.
    """

    epoch: int = 0
    count: int = 0

    def __str__(self) -> str:
        """As logs show it."""
        return f"{self.epoch}.{self.count}"


class LaneOffer(msgspec.Struct, frozen=True, array_like=True):
    """Shared memory that a worker has made for a server; see `lane`."""

    path: str
    token: bytes
    num_bytes: int  # for what is pushed, and as much for what is pulled.


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker comes, or comes back.

    Attributes:
      session: of this worker, random.
      worker: its number.
      server, num_servers: whom it thinks it talks to, and of how many.
      leaves: path, and dtype and shape as text, of each parameter.
      compression: name of its hook; "" for none.
      known: the newest version that it has seen.
      lane: shared memory, for a server on the same host.
    """

    session: bytes
    worker: int
    server: int
    num_servers: int
    leaves: list[tuple[str, str]]
    compression: str
    known: Version
    lane: LaneOffer | None


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker lives; `push` is the number of one that is not settled, or 0."""

    session: bytes
    push: int


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
      is_in_lane: whether they lie in shared memory, and no frames follow.
    """

    session: bytes
    sequence: int
    version: Version
    weight: float
    is_finite: bool
    is_compressed: bool
    is_in_lane: bool


class Pull(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks server 0 that all servers hand out parameters, once a push is settled."""

    session: bytes
    pull: int
    after: int  # the sequence number of the push; 0: at once.


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker goes on purpose."""

    session: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker may push and pull."""

    version: Version
    mode: str
    is_sync: bool
    lease_s: float
    has_lane: bool


class Who(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server does not know the session: say hello (again)."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server lives; `wants` is the number of a push to send again, or 0."""

    wants: int


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What became of the last push of a session, and the version after it."""

    sequence: int
    outcome: Outcome
    version: Version


class Params(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A server's part of the parameters; behind it the arrays, or in shared memory."""

    pull: int
    version: Version
    is_in_lane: bool


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server cannot go on."""

    text: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server ends since it was told to; it may come back."""


class Apply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One update with the weighted mean of these pushes.

    Attributes:
      pushes: session and sequence number of each, in the order in which they are added.
      weights: of each.
      staleness: the updates since the oldest of the versions that they are made from.
    """

    pushes: tuple[tuple[bytes, int], ...]
    weights: tuple[float, ...]
    staleness: int


class Discard(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A push that is not applied, and why."""

    session: bytes
    sequence: int
    outcome: Outcome


class Hand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hand parameters to a worker."""

    session: bytes
    pull: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker has gone, or is silent: what is held for it is dropped."""

    session: bytes


class Save(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write a checkpoint."""


class Restore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin a new epoch at a checkpoint; the first entry of every log."""

    version: Version


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The job is over."""


Entry = Apply | Discard | Hand | Forget | Save | Restore | Stop


class Follow(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where another server than 0 is.

    Attributes:
      server: its number.
      incarnation: random, of this process.
      lead: the incarnation of the server 0 whose log it follows; b"" for none.
      epoch: the highest that it knows.
      next_index: of the log, the entry that it waits for.
      checkpoints: their counts; 0 stands for the parameters it was given.
      held: session and sequence number of the parts that are not settled.
      is_stopping: whether it was told to end, and wants a checkpoint before.
    """

    server: int
    incarnation: bytes
    lead: bytes
    epoch: int
    next_index: int
    checkpoints: tuple[int, ...]
    held: tuple[tuple[bytes, int], ...]
    is_stopping: bool = False


class Log(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Entries that every server executes in this order."""

    lead: bytes
    epoch: int
    first_index: int
    entries: tuple[Entry, ...]


ToServer = Hello | Ping | Push | Pull | Leave | Follow
ToWorker = Welcome | Who | Pong | Settled | Params | Failed | Ended
ToFollower = Log

_encoder = msgspec.msgpack.Encoder()
to_server = msgspec.msgpack.Decoder(ToServer)
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_follower = msgspec.msgpack.Decoder(ToFollower)


class MessageError(Exception):
    """What came is no message; the text goes on after "it "."""


class RefusedError(Exception):
    """The other side refuses this process, and says why."""


def encode(message: ToServer | ToWorker | ToFollower) -> bytes:
    """Returns the first frame of a message."""
    return bytes((VERSION, MESSAGE)) + _encoder.encode(message)


def encode_refusal(text: str) -> bytes:
    """Returns a frame that every version can read."""
    return bytes((VERSION, REFUSED)) + text.encode()


def decode(frame: memoryview | bytes, decoder: msgspec.msgpack.Decoder):
    """Returns the message of a first frame.

    Raises:
      MessageError: it is none.
      RefusedError: it is a refusal.
    """
    if len(frame) < 2:
        raise MessageError("sent what is too short for a message")
    if frame[1] == REFUSED:
        raise RefusedError(bytes(frame[2:]).decode(errors="replace"))
    if frame[0] != VERSION:
        raise MessageError(
            f"speaks version {frame[0]} of the parameter server's protocol, and this "
            f"process version {VERSION}; install the same jdp everywhere"
        )
    try:
        return decoder.decode(frame[2:])
    except msgspec.DecodeError as error:
        raise MessageError(f"sent what is no message: {error}") from None
