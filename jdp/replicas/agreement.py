"""Agreement: which decision do all processes of a job take, in bounded time?"""

import contextlib
from collections.abc import Iterator

from jdp.replicas import meeting, progress, stamps
from jdp.replicas.meeting import Decide, MeetingOutcome, MeetingRecord, StoreMeeting
from jdp.replicas.mesh import World

_FOLDER = "jdp/meet"


def meet(
    world: World, topic: str, body: bytes, decide: Decide, *, then_raises: bool = False
) -> bytes:
    """Collects one record from every process and returns one decision.

    Every process must call it, the same number of times and in the same order. Process
    0 collects the records and decides; the others wait for the decision.

    Args:
      world: the job; with one process `decide` is called at once.
      topic: the subject of the meeting, in words; the same on every process.
      body: the record of this process.
      decide: pure function of the records, by process; runs on process 0.
      then_raises: whether all processes will raise the decision. The store may end
        with process 0, which then waits a few seconds until the others have read it.

    Raises:
      RuntimeError: a process failed, came with another topic, or did not come within
        `world.timeout_s` seconds. Every process raises it.
    """
    if world.store is None:
        return decide([body])
    outcome = _hold(world, MeetingRecord(topic, body), decide, then_raises)
    if outcome.error is not None:
        culprit = None if outcome.culprit == world.process_index else outcome.culprit
        raise progress.blame(RuntimeError(outcome.error), culprit)
    return outcome.body


def report_failure(world: World, topic: str, error: BaseException) -> None:
    """Tells the processes that wait in `meet` that this one will not come.

    The store may end with process 0, which therefore waits a few seconds until the
    processes that have not failed have read it.
    """
    if world.store is None:
        return
    text = f"process {world.process_index} failed: {type(error).__name__}: {error}"
    record = MeetingRecord(topic, error=text)
    with contextlib.suppress(RuntimeError):  # Process 0 and the store may be gone.
        _hold(world, record, _decide_nothing, False)


@contextlib.contextmanager
def reporting(world: World, topic: str, *, is_local: bool = False) -> Iterator[None]:
    """Reports to the other processes if the work before a `meet` raises.

    Args:
      world: the job.
      topic: see `meet`.
      is_local: whether the work waits for no other process. It then continues after
        another process has ended, and the meeting raises the reason.
    """
    try:
        with progress.working(needs_others=not is_local):
            yield
    except Exception as error:
        report_failure(world, topic, error)
        raise


def _hold(
    world: World, record: MeetingRecord, decide: Decide, then_raises: bool
) -> MeetingOutcome:
    store = world.store
    assert store is not None
    number = store.next_round()
    folder = f"{_FOLDER}/{number}"
    with stamps.during(stamps.MEETING_BEGUN, number, record.topic):
        outcome = meeting.hold(
            StoreMeeting(store, folder, world.process_index, world.timeout_s),
            record,
            decide,
            processes=range(world.process_count),
            then_raises=then_raises,
        )
    if world.is_main_process:
        if outcome.error is None:
            # All processes are in this round, so they have read earlier outcomes.
            for earlier in store.take_retired(_FOLDER):
                store.delete(earlier)
        store.retire(folder)
    return outcome


def _decide_nothing(bodies: list[bytes]) -> bytes:
    raise AssertionError(f"{len(bodies)} records were judged after a failure")
