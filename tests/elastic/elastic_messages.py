"""One message of each kind that replica groups send each other."""

from jdp.elastic.messages import (
    NO_STEP,
    Accept,
    Accepted,
    Ballot,
    Beat,
    Decided,
    MemberId,
    Prepare,
    Promise,
    Refusal,
    View,
)

_A, _B = MemberId(0, 1), MemberId(1, 1)
ALL = [
    Beat(3, 4, 5, "leave"),
    Prepare(1, Ballot(2, _A), 7, (0, 2)),
    Promise(1, Ballot(2, _A), Ballot(1, _B), View(2, (_A, _B), 3), 3, 4),
    Refusal(1, Ballot(2, _A)),
    Accept(1, Ballot(2, _A), View(2, (_A,), 3)),
    Accepted(1, Ballot(2, _A)),
    Decided(View(2, (), NO_STEP)),
]
