"""Messages: how do replica groups agree on the members of a step?"""

from typing import Literal

import msgspec

from jdp.replicas import wire

Wish = Literal["", "join", "leave"]
NO_STEP = -1  # of a member without the state of the run.
NO_VIEW = -1  # epoch of a group without a view.


class MemberId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A replica group: one life of the group at a slot.

    Attributes:
      slot: place of the group; at most one lives there.
      life: larger for every further life at the slot.
    """

    slot: int
    life: int


class View(msgspec.Struct, frozen=True, array_like=True):
    """Members that take part in steps together.

    Attributes:
      epoch: number of the view; each follows from the one before.
      members: the members, the oldest first.
      step: step with whose result they begin; `NO_STEP`: no member has one.
    """

    epoch: int
    members: tuple[MemberId, ...]
    step: int


class Ballot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An attempt to decide on the next view; of two, the larger one counts."""

    number: int
    proposer: MemberId


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Sign of life, and vote: `ready` says that a step has ended well.

    Attributes:
      epoch: number of the sender's view; -1: it has none.
      committed: last step that the sender has committed.
      ready: last step whose result the sender has.
      wish: whether it wants to join or leave.
    """

    epoch: int
    committed: int
    ready: int
    wish: Wish = ""


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Asks for a promise, to decide on the view after `epoch`.

    Attributes:
      epoch: number of the view that ends.
      ballot: the attempt.
      after: last step that the members still do; `NO_STEP`: they promise at once.
      empty: slots at which no group lives: what is still under way from there must not
        be heard any more.
    """

    epoch: int
    ballot: Ballot
    after: int = NO_STEP
    empty: tuple[int, ...] = ()


class Promise(msgspec.Struct, frozen=True, array_like=True, tag="promise"):
    """Promises to take no part in smaller attempts, and not to vote in this view.

    A group without a view says by it that it has none.

    Attributes:
      epoch: number of the view that ends.
      ballot: the attempt.
      accepted: attempt whose view the sender has accepted, if any.
      view: view of that attempt.
      committed: see `Beat`.
      ready: see `Beat`.
    """

    epoch: int
    ballot: Ballot
    accepted: Ballot | None
    view: View | None
    committed: int
    ready: int


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """Refuses an attempt, for a larger one."""

    epoch: int
    ballot: Ballot


class Accept(msgspec.Struct, frozen=True, array_like=True, tag="accept"):
    """Asks to accept a view."""

    epoch: int
    ballot: Ballot
    view: View


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """Has accepted the view of an attempt."""

    epoch: int
    ballot: Ballot


class Decided(msgspec.Struct, frozen=True, array_like=True, tag="decided"):
    """A view that has been decided."""

    view: View


Message = Beat | Prepare | Promise | Refusal | Accept | Accepted | Decided
_DECODER = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Inverts `decode`."""
    return msgspec.msgpack.encode(message)


def decode(body: bytes) -> Message:
    """Returns the message in `body`.

    Raises:
      wire.DecodeError: there is none.
    """
    return wire.decode_with(_DECODER.decode, body)
