"""Star codec: how are the frames of a line of a `star` authenticated?

Each frame carries a code of the job key over both ends' nonces, the direction and a
running number, so a frame cannot be forged, replayed or left out. The greeting before
them proves nothing; it reveals an end that was given another key by mistake.
"""

import secrets
import struct
from typing import Literal

import msgspec

from jdp.replicas import wire
from jdp.runtime import job_key

_MAGIC = b"jdp-star-2\n"
_NONCE_BYTES = 32
_ID_BYTES = 8  # of the ids of the key and of the purpose.
_GREETING_BYTES = len(_MAGIC) + _NONCE_BYTES + 2 * _ID_BYTES
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 14


class FrameRefused(RuntimeError):
    """A message of another job or another protocol arrived."""


class OtherJob(FrameRefused):
    """The other end claims to be of another job with the same key."""


class OtherKey(OtherJob):
    """The other end claims to have another key."""


class Doubled(OtherJob):
    """Member 0 claims to have another member with this index."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One message on a line."""

    kind: Literal["hello", "say", "lost", "bye", "doubled", "tell"]
    member: int  # the sender, or the member that is lost.
    body: bytes = b""


_DECODER = msgspec.msgpack.Decoder(Frame)


class Codec:
    """The frames of one end of a line, without a socket."""

    def __init__(self, key: bytes, purpose: str, side: Literal["center", "member"]):
        """Starts a line with a new nonce.

        Args:
          key: key of the job, shape (32,).
          purpose: use of the star; frames of another purpose are refused.
          side: the end that this codec serves.
        """
        self._key = key
        self._purpose = purpose
        self._side = side
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._ids = [_name(key, "star key"), _name(key, f"star for {purpose}")]
        self._session: bytes | None = None
        self._num_sent = self._num_received = 0
        self._received = bytearray()
        self._held: list[Frame] = []  # until the other end has greeted.

    @property
    def has_held(self) -> bool:
        """Whether frames wait for the greeting of the other end."""
        return bool(self._held)

    def greet(self) -> bytes:
        """Returns the greeting, which is sent first."""
        return _MAGIC + self._nonce + b"".join(self._ids)

    def encode(self, frame: Frame) -> bytes:
        """Encodes a frame; held, with b"" returned, until the other end has greeted."""
        if self._session is None:
            self._held.append(frame)
            return b""
        return self._seal(frame)

    def feed(self, data: bytes) -> tuple[list[Frame], bytes]:
        """Decodes received bytes.

        Returns:
          The complete frames, and bytes to send now.

        Raises:
          FrameRefused: they are not of this job. The line must be closed.
        """
        self._received += data
        answer = b""
        if self._session is None:
            if not _MAGIC.startswith(self._received[: len(_MAGIC)]):
                raise FrameRefused("it does not begin as a line of jdp")
            if len(self._received) < _GREETING_BYTES:
                return [], b""
            greeting = bytes(self._received[len(_MAGIC) : _GREETING_BYTES])
            self._compare(greeting[_NONCE_BYTES:])
            self._begin(greeting[:_NONCE_BYTES])
            del self._received[:_GREETING_BYTES]
            answer = b"".join(map(self._seal, self._held))
            self._held.clear()
        frames = []
        while (frame := self._take()) is not None:
            frames.append(frame)
        return frames, answer

    def _compare(self, ids: bytes) -> None:
        if ids[:_ID_BYTES] != self._ids[0]:
            raise OtherKey("it has another key than this end")
        if ids[_ID_BYTES:] != self._ids[1]:
            raise OtherJob("it is of another job with the same key")

    def _begin(self, other: bytes) -> None:
        nonces = [self._nonce, other]
        if self._side == "member":
            nonces.reverse()
        context = f"{self._purpose} {nonces[0].hex()} {nonces[1].hex()}"
        self._session = job_key.derive(self._key, context)

    def _seal(self, frame: Frame) -> bytes:
        assert self._session is not None
        body = msgspec.msgpack.encode(frame)
        assert len(body) <= _MAX_FRAME_BYTES
        context = f"{self._side} {self._num_sent}"
        self._num_sent += 1
        sealed = job_key.sign(self._session, context, body)
        return _LENGTH.pack(len(sealed)) + sealed

    def _take(self) -> Frame | None:
        assert self._session is not None
        if len(self._received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size > _MAX_FRAME_BYTES + job_key.CODE_BYTES:
            raise FrameRefused(f"a frame of {size} bytes")
        if len(self._received) < _LENGTH.size + size:
            return None
        sealed = bytes(self._received[_LENGTH.size : _LENGTH.size + size])
        del self._received[: _LENGTH.size + size]
        other = "member" if self._side == "center" else "center"
        try:
            body = job_key.verify(
                self._session, f"{other} {self._num_received}", sealed
            )
            self._num_received += 1
            return wire.decode_with(_DECODER.decode, body)
        except job_key.WrongKey:
            raise FrameRefused(
                "it was made without the key of this job, or for another job with it"
            ) from None
        except wire.DecodeError as error:
            raise FrameRefused(f"an invalid frame: {error}") from None


def _name(key: bytes, context: str) -> bytes:
    """Returns an id that is equal for equal keys and does not reveal them."""
    return job_key.derive(key, context)[:_ID_BYTES]
