"""Lockstep checks: is the message of another process possible?

Decoding checks the types. A process that loses count, or has another version of jdp,
can still send an impossible message. This module finds it before it is used.
"""

import math

from jdp.join import batch_spec
from jdp.join.lockstep import Announcement, CoordinatorState, Decision, SpecChange

_MOST_SAMPLES = 1 << 31  # of a replica, in one batch.


def find_announcement_fault(
    state: CoordinatorState, process: int, announcement: Announcement
) -> str | None:
    """Returns what is wrong with an announcement, as "Process 1 says ..."; or None.

    Args:
      state: state before the announcement.
      process: process that announces.
      announcement: the decoded announcement.
    """
    fault = _find_announcement_fault(state, process, announcement)
    if fault is None:
        return None
    return (
        f"Process {process} {fault}, which no process of this jdp does. Install the "
        "same jdp in every process."
    )


def _find_announcement_fault(
    state: CoordinatorState, process: int, announcement: Announcement
) -> str | None:
    sizes, specs = announcement.sizes, announcement.specs
    if not all(0 <= size < _MOST_SAMPLES for size in sizes):
        return "announces a batch with a number of samples that none can have"
    if state.has_ended[process] and (sizes or not announcement.has_ended):
        return "announces batches after its last one"
    if state.has_ended[process] and announcement.error != state.errors[process]:
        return "announces another end than before"
    if announcement.error is not None and not announcement.has_ended:
        return "announces an error and no end"
    is_first = state.num_announced[process] == 0
    if is_first and sizes and (not specs or specs[0][0] != 0):
        return "announces batches without their structure"
    if not 0 <= announcement.reading_s < math.inf:
        return "announces a time that none is"
    return _find_specs_fault(specs, len(sizes))


def _find_specs_fault(specs: tuple[SpecChange, ...], num_batches: int) -> str | None:
    before = -1
    for offset, spec in specs:
        if not before < offset < num_batches:
            return "announces the structure of a batch that it does not announce"
        before = offset
        if (fault := batch_spec.find_fault(spec)) is not None:
            return f"announces a batch {fault}"
    return None


def find_decision_fault(
    decision: Decision, *, num_specs: int, spec: int, num_processes: int
) -> str | None:
    """Returns what is wrong with a decision of process 0; or None.

    Args:
      decision: the decoded decision.
      num_specs: number of specs that are agreed on.
      spec: index of the spec of the last iteration; -1 before the first.
      num_processes: number of processes of the job.
    """
    fault = _find_decision_fault(decision, num_specs, spec, num_processes)
    if fault is None:
        return None
    return (
        f"Process 0 decided on {fault}, which no process of this jdp does. Install the "
        "same jdp in every process."
    )


def _find_decision_fault(
    decision: Decision, num_specs: int, spec: int, num_processes: int
) -> str | None:
    sizes, specs = decision.sizes, decision.specs
    if not all(1 <= size < _MOST_SAMPLES for size in sizes):
        return "a number of samples that no batch can have"
    if decision.culprit is not None and not 0 <= decision.culprit < num_processes:
        return f"process {decision.culprit} as the culprit"
    if sizes and spec < 0 and (not specs or specs[0][0] != 0):
        return "batches without their structure"
    before = -1
    for offset, index in specs:
        if not before < offset < len(sizes) or not 0 <= index < num_specs:
            return "a structure that was not agreed on"
        before = offset
    if decision.proposal is not None:
        fault = batch_spec.find_fault(decision.proposal)
        return None if fault is None else f"a batch {fault}"
    return None
