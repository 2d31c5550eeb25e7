"""Messages: what do the watchers of the hosts of a job tell each other?"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from jdp.replicas import wire
from jdp.watch.process_report import ProcessReport
from jdp.watch.record import Entry
from jdp.watch.shares import StepSample
from jdp.watch.status import ProcessStatus

_T = TypeVar("_T")
# A message has up to 16 KiB.
_REPORTS_PER_MESSAGE = 40  # of about 150 bytes.
_SAMPLES_PER_MESSAGE = 160  # of about 40 bytes.
_STACK_CHARACTERS, _NUM_ENTRIES, _NUM_PARTS = 6000, 50, 4  # of a part.
_ROWS_PER_MESSAGE = 25  # of about 500 bytes.


class Reports(msgspec.Struct, frozen=True, tag="reports"):
    """Reports of one host, to host 0."""

    host: int
    host_name: str
    reports: tuple[ProcessReport, ...]


class Samples(msgspec.Struct, frozen=True, tag="samples"):
    """Samples of steps of one process, to host 0; see `stragglers`."""

    process: int
    offset_ns: int  # see `clock.ClockState`.
    samples: tuple[StepSample, ...]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Request of host 0: all processes write their stacks, and hosts send them."""


class Part(msgspec.Struct, frozen=True, tag="part"):
    """Part of the stacks and of the record of one process, to host 0."""

    process: int
    offset_ns: int
    stacks: str
    entries: tuple[Entry, ...]


class Lines(msgspec.Struct, frozen=True, tag="lines"):
    """Lines of host 0 that all hosts show."""

    lines: tuple[str, ...]
    is_alarm: bool  # whether the hosts then write the file about it.


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Status of some processes, of host 0 to all."""

    rows: tuple[ProcessStatus, ...]
    is_last: bool = False  # Host 0 watches no longer.


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Order of host 0 to end the job, whose reason is a stall."""

    process: int
    note: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Question of a host for the time of host 0."""

    host: int
    sent_ns: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer of host 0; see `clock`."""

    host: int
    sent_ns: int
    received_there_ns: int
    sent_there_ns: int
    boot_id: str


class Told(NamedTuple):
    """A message that has come.

    Attributes:
      body: the message.
      at_ns: when it came, on the monotonic clock.
    """

    body: bytes
    at_ns: int


Message = Reports | Samples | Ask | Part | Lines | Rows | Stop | Ping | Pong
_DECODER = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Encodes a message."""
    return msgspec.msgpack.encode(message)


def decode(body: bytes) -> Message:
    """Decodes a message.

    Raises:
      wire.DecodeError: it is not a message.
    """
    return wire.decode_with(_DECODER.decode, body)


def split_reports(
    host: int, host_name: str, reports: Sequence[ProcessReport]
) -> Iterator[Reports]:
    """Yields the messages that tell reports."""
    for part in _cut(reports, _REPORTS_PER_MESSAGE):
        yield Reports(host, host_name, part)


def split_samples(
    samples: Mapping[int, Sequence[StepSample]], offset_ns: int
) -> Iterator[Samples]:
    """Yields the messages that tell samples."""
    for process, each in samples.items():
        for part in _cut(each, _SAMPLES_PER_MESSAGE):
            yield Samples(process, offset_ns, part)


def split_record(
    process: int, offset_ns: int, stacks: str, entries: Sequence[Entry]
) -> Iterator[Part]:
    """Yields the messages that tell the end of a record, and the begin of stacks."""
    last = entries[-_NUM_ENTRIES * _NUM_PARTS :]
    for i in range(_NUM_PARTS):
        text = stacks[i * _STACK_CHARACTERS : (i + 1) * _STACK_CHARACTERS]
        some = tuple(last[i * _NUM_ENTRIES : (i + 1) * _NUM_ENTRIES])
        if text or some:
            yield Part(process, offset_ns, text, some)


def split_rows(rows: Sequence[ProcessStatus]) -> Iterator[Rows]:
    """Yields the messages that tell the status of processes."""
    for part in _cut(rows, _ROWS_PER_MESSAGE):
        yield Rows(part)


def _cut(values: Sequence[_T], most: int) -> Iterator[tuple[_T, ...]]:
    for i in range(0, len(values), most):
        yield tuple(values[i : i + most])
