"""Barriers: `barrier` and `join`, calls without arrays."""

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
    """Waits until all processes of the set have called it.

    Args:
      timeout_s: longest wait, in seconds; None or infinite: until all have called it
        or the engine ends.
      process_set: the processes that take part.

    Raises:
      TimeoutError: a process is missing; the message names the ranks. The call of this
        process still counts: its next call is for the next barrier.
      ValueError: `timeout_s` is negative or NaN, or this process is not in the set.
      TypeError: `timeout_s` is not a number.
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
    """Declares that this process has no more data, and waits for the others.

    Until all have called it, the others may go on with `all_reduce` and `barrier`. This
    process contributes neutral elements to them and cannot begin anything else.

    Returns:
      The last rank to join, the same on all processes.

    Raises:
      RuntimeError: see `synchronize`.
    """
    return join_async().result()


def join_async() -> Handle[int]:
    """Begins `join`; this process cannot begin anything else until it is done."""
    engine = session.current_engine()
    entry = Entry(Request("join", b""), submission.started(Record("join", "join")))
    engine.submit_join(entry)
    session.count_names_anew()  # This process begins nothing until all have joined.
    return Handle([entry], _only)


def _only(values: list[Any]) -> Any:
    return values[0]
