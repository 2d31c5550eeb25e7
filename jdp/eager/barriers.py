"""Meeting: calls without arrays, with which processes wait for each other."""

from typing import Any

from jdp.eager import argument_types, session, submission
from jdp.eager.diagnosis.flight_recorder import Record
from jdp.eager.entries import Entry
from jdp.eager.messages import Request, Spec, encode_spec
from jdp.eager.process_set import ProcessSet, global_process_set
from jdp.eager.submission import Handle


def barrier(
    *, timeout_s: float | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Waits until all processes of the set have come to it.

    Args:
      timeout_s: longest wait, in seconds; None or infinite: until they have, or the
        engine ends.
      process_set: who takes part.

    Raises:
      TimeoutError: they have not come in time; the ranks that are missing are named.
        This process has come all the same: the next call is for the next barrier.
      ValueError: `timeout_s` is negative or no number, or this process is not in the
        set.
      TypeError: `timeout_s` is of another type.
      RuntimeError: see `synchronize`.
    """
    engine = session.current_engine()
    timeout_s = argument_types.check_timeout(timeout_s)
    submission.check_set(process_set)
    set_id = submission.find_set(engine, "barrier", process_set)
    with session.numbered("barrier", set_id) as name:
        request = Request(name, encode_spec(Spec("barrier")), set_id)
        record = Record(name, "barrier", process_set=set_id)
        entry = Entry(request, submission.started(record))
        engine.submit([entry])
    session.wait_for([entry], timeout_s)


def join() -> int:
    """Says that this process has no more data, and waits for the others.

    Until all have called it, the others may go on with `all_reduce` and `barrier`; this
    process stands in for them with what changes nothing, and can begin nothing else.

    Returns:
      The last rank to join, the same on all processes.

    Raises:
      RuntimeError: see `synchronize`.
    """
    return join_async().result()


def join_async() -> Handle:
    """Begins `join`; until it is done this process can begin nothing else."""
    engine = session.current_engine()
    entry = Entry(Request("join", b""), submission.started(Record("join", "join")))
    engine.submit_join(entry)
    session.count_names_anew()  # Nothing else begins here until all have joined.
    return Handle([entry], _only)


def _only(values: list[Any]) -> Any:
    return values[0]
