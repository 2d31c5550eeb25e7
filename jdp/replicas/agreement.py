"""Agreement: one decision for all processes, in bounded time."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from jdp.replicas import progress, wire
from jdp.replicas.mesh import World

# Process 0 serves the store: with it goes what the others have not read yet.
_READ_TIMEOUT_S = 4.0
_RAISE_S = 0.2  # from there until the others have said so.


class Record(msgspec.Struct, frozen=True):
    """Contribution of one process to a meeting."""

    topic: str
    body: bytes = b""
    error: str | None = None  # why the process cannot take part.


class Verdict(msgspec.Struct, frozen=True):
    """Decision of process 0, the same for all processes."""

    body: bytes = b""
    error: str | None = None
    culprit: int | None = None  # the process that is the reason for the error.


class _Missing(Exception):
    """A process did not come."""

    def __init__(self, text: str, process: int):
        super().__init__(text)
        self.process = process


Decide = Callable[[list[bytes]], bytes]


def meet(
    world: World, topic: str, body: bytes, decide: Decide, *, then_raises: bool = False
) -> bytes:
    """Brings one record of every process together and returns one decision.

    Every process calls it, the same number of times and in the same order. Process 0
    collects the records and decides; the others wait for what it decided.

    Args:
      world: the job; with one process `decide` is called at once.
      topic: what the meeting is about, in words; must be the same everywhere.
      body: this process' record.
      decide: pure function of the records, by process; runs on process 0.
      then_raises: whether all processes raise what was decided. Process 0, with which
        the store may end, then waits a few seconds until the others have read it.

    Raises:
      RuntimeError: a process failed, came with another topic, or did not come within
        `world.timeout_s` seconds; on every process.
    """
    if world.store is None:
        return decide([body])
    round_index = world.store.next_round()
    verdict = _meet(world, round_index, Record(topic, body), decide, then_raises)
    if verdict.error is not None:
        culprit = None if verdict.culprit == world.process_index else verdict.culprit
        raise progress.blame(RuntimeError(verdict.error), culprit)
    return verdict.body


def report_failure(world: World, topic: str, error: BaseException) -> None:
    """Tells the processes that wait in `meet` that this one will not come."""
    if world.store is None:
        return
    text = f"process {world.process_index} failed: {type(error).__name__}: {error}"
    round_index = world.store.next_round()
    if world.is_main_process:
        verdict = Verdict(error=f"In the {topic}, {text}", culprit=0)
        encoded = msgspec.msgpack.encode(verdict)
        world.store.set(_key(round_index, "verdict"), encoded)
        _wait_until_read(world, round_index, range(1, world.process_count))
    else:
        record = Record(topic, error=text)
        key = _key(round_index, str(world.process_index))
        world.store.set(key, msgspec.msgpack.encode(record))


@contextlib.contextmanager
def reporting(world: World, topic: str) -> Iterator[None]:
    """Around local work before a `meet`: if it raises, the others are told."""
    try:
        yield
    except Exception as error:
        report_failure(world, topic, error)
        raise


def judge(records: Sequence[Record], decide: Decide) -> Verdict:
    """Decides on a full set of records, by process; pure."""
    topic = records[0].topic
    for process, record in enumerate(records):
        if record.error is not None:
            return Verdict(error=f"In the {topic}, {record.error}", culprit=process)
    for process, record in enumerate(records):
        if record.topic != topic:
            return Verdict(
                error="The processes do not do the same thing: process 0 is in the "
                f"{topic}, process {process} in the {record.topic}."
            )
    try:
        return Verdict(body=decide([record.body for record in records]))
    except Exception as error:  # Else the others would wait for the verdict in vain.
        why = wire.printable(f"{type(error).__name__}: {error}")
        return Verdict(error=f"In the {topic}, process 0 could not decide: {why}")


def _meet(
    world: World, round_index: int, record: Record, decide: Decide, then_raises: bool
) -> Verdict:
    assert world.store is not None
    own_key = _key(round_index, str(world.process_index))
    verdict_key = _key(round_index, "verdict")
    if not world.is_main_process:
        world.store.set(own_key, msgspec.msgpack.encode(record))
        # Process 0 says within `timeout_s` who is missing; a little longer than that
        # and it is process 0 that is.
        timeout_s = 1.2 * world.timeout_s + 5.0
        try:
            verdict = _wait(world, verdict_key, 0, record.topic, timeout_s)
        except _Missing as error:
            return Verdict(error=str(error), culprit=error.process)
        world.store.delete(own_key)
        try:
            found = wire.decode(verdict, Verdict, what=_name(0, record.topic))
        except wire.Malformed as error:
            return Verdict(error=str(error))
        if found.culprit not in (None, *range(world.process_count)):
            return Verdict(error=f"{_name(0, record.topic)} blames no process.")
        if then_raises or found.error is not None:
            world.store.set(_read_key(round_index, world.process_index), b"read")
        return found
    records = [record]
    deadline_s = time.monotonic() + world.timeout_s  # one for all of them.
    try:
        for process in range(1, world.process_count):
            key = _key(round_index, str(process))
            left_s = max(0.0, deadline_s - time.monotonic())
            found = _wait(world, key, process, record.topic, left_s)
            what = _name(process, record.topic)
            records.append(wire.decode(found, Record, what=what))
        verdict = judge(records, decide)
    except _Missing as error:
        verdict = Verdict(error=str(error), culprit=error.process)
    except wire.Malformed as error:
        verdict = Verdict(error=str(error))
    world.store.set(verdict_key, msgspec.msgpack.encode(verdict))
    if then_raises or verdict.error is not None:
        # One that has failed, or that is not there, reads nothing.
        came = [p for p, other in enumerate(records) if p and other.error is None]
        _wait_until_read(world, round_index, came)
    if round_index > 0:  # A process in this round has read the last verdict.
        world.store.delete(_key(round_index - 1, "verdict"))
    return verdict


def _wait_until_read(world: World, round_index: int, processes: Iterable[int]) -> None:
    """Waits on process 0, not for long, until others have read an error."""
    assert world.store is not None
    deadline_s = time.monotonic() + min(_READ_TIMEOUT_S, world.timeout_s)
    for process in processes:
        key = _read_key(round_index, process)
        try:
            left_s = max(0.0, deadline_s - time.monotonic())
            world.store.get(key, timeout_s=left_s)
        except TimeoutError:
            return
        world.store.delete(key)
    time.sleep(_RAISE_S)


def _read_key(round_index: int, process: int) -> str:
    return _key(round_index, f"read/{process}")


def _wait(world: World, key: str, process: int, topic: str, timeout_s: float) -> bytes:
    assert world.store is not None
    try:
        return world.store.get(key, timeout_s=timeout_s)
    except TimeoutError as error:
        # Such as a value there that no process of the job has signed.
        why = f" {error}" if error.__cause__ is not None else ""
        raise _Missing(
            f"Process {process} did not come to the {topic} within "
            f"{world.timeout_s:g} s; "
            "it may have stopped, or be in another part of the program (one step more "
            "or less). Or this process alone traces anew, for a batch or state of "
            f"another size or dtype, or under another `jax.config` than there.{why}",
            process,
        ) from None


def _name(process: int, topic: str) -> str:
    return f"The message of process {process} in the {topic}"


def _key(round_index: int, name: str) -> str:
    return f"jdp/meet/{round_index}/{name}"
