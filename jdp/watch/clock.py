"""Clock: how far ahead is the monotonic clock of the first host of the clock here?

Pure. Half of the round trip is the error at most, so the quickest round trip counts.
Clocks drift, by up to 50 us per second, so that an old one counts less.
"""

from typing import NamedTuple

_DRIFT = 50e-6  # seconds per second, of two quartz clocks.


class ClockState(NamedTuple):
    """Knowledge about the other clock.

    Attributes:
      offset_ns: difference to add to a time here, for the time there.
      error_ns: the largest error of that when it was measured; None: not measured.
      at_ns: when it was measured, on the clock here.
    """

    offset_ns: int = 0
    error_ns: int | None = None
    at_ns: int = 0


def measure(
    state: ClockState,
    *,
    sent_ns: int,
    received_there_ns: int,
    sent_there_ns: int,
    received_ns: int,
) -> ClockState:
    """Returns the state after a round trip, by the formula of NTP (RFC 5905, 8).

    Args:
      state: the state before.
      sent_ns: when the question was sent, on the clock here.
      received_there_ns: when it came, on the clock there.
      sent_there_ns: when it was answered, on the clock there.
      received_ns: when the answer came, on the clock here.
    """
    trip_ns = (received_ns - sent_ns) - (sent_there_ns - received_there_ns)
    if trip_ns < 0:
        return state
    error_ns = trip_ns // 2
    if state.error_ns is not None:
        aged_ns = state.error_ns + int(_DRIFT * (received_ns - state.at_ns))
        if error_ns > aged_ns:
            return state
    ahead_ns = (received_there_ns - sent_ns) + (sent_there_ns - received_ns)
    return ClockState(ahead_ns // 2, error_ns, received_ns)


def read_boot_id() -> str:
    """Returns an identifier of the running kernel, with its clock; "": not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
