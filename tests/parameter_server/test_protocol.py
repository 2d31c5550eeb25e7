"""The protocol: pushes, pulls, losses, doubles, deaths and restarts in any order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from jdp.parameter_server import modes
from jdp.parameter_server.lead_options import LeadOptions
from jdp.parameter_server.messages import Apply, Follow, MessageError
from jdp.parameter_server.protocol import Lead
from tests.parameter_server.simulation import Job

MODES = [
    modes.sync(),
    modes.sync(backup=1),
    modes.asynchronous(),
    modes.bounded(staleness=1),
    modes.bounded(staleness=3),
]


class CheckedJob(Job):
    """Looks at each decision."""

    def after_decision(self, entries):
        lead = self.servers[0].lead
        clocks = [m.clock for m in lead._members.values()]
        mode = self.options.mode
        if isinstance(mode, modes.Bounded) and clocks:
            assert max(clocks) - min(clocks) <= mode.staleness
        if isinstance(mode, modes.Sync):
            for entry in entries:
                if isinstance(entry, Apply):
                    assert entry.staleness == 0


@pytest.mark.parametrize("mode", MODES, ids=str)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_servers=st.integers(1, 3),
    num_workers=st.integers(1, 4),
    checkpoint_every=st.sampled_from([0, 1, 3]),
)
def test_whatever_happens_nothing_is_applied_twice_and_versions_never_go_back(
    mode, seed, num_servers, num_workers, checkpoint_every
):
    job = CheckedJob(
        random.Random(seed),
        mode,
        num_servers=num_servers,
        num_workers=num_workers,
        checkpoint_every=checkpoint_every,
        lease_s=5.0,
        start_timeout_s=5.0,
    )
    job.run(600)
    # And then, when nothing bad happens any more, all get on.
    job.now_s += 20.0
    before = [w.num_done for w in job.workers]
    for _ in range(40):
        job.run(100, is_kind=True)
        if all(w.num_done > b for w, b in zip(job.workers, before, strict=True)):
            break
    else:
        raise AssertionError("a worker hangs")


def test_all_servers_go_back_to_the_newest_checkpoint_that_all_have():
    job = Job(
        random.Random(0),
        modes.asynchronous(),
        num_servers=2,
        num_workers=1,
        checkpoint_every=3,
        lease_s=5.0,
    )
    lead, follower = job.servers
    while lead.replica.version.count < 8:
        job.run(1, is_kind=True)
    assert max(lead.disk) == 6
    common = max(lead.disk.keys() & follower.disk.keys())
    assert common >= 3
    job.kill_server(1)
    while lead.replica.version.epoch == 1 or follower.replica.version.epoch != 2:
        job.run(1, is_kind=True)
    assert len(lead.params) >= common and len(follower.params) >= common
    assert lead.disk[common][0] == lead.params[:common] == follower.params[:common]


def test_an_entry_is_sent_until_the_other_server_has_it():
    job = Job(random.Random(0), modes.asynchronous(), num_servers=2, num_workers=1)
    lead, follower = job.servers
    lead.lead.follow(follower.status())
    job.decide()
    first = lead.lead.find_log(1)
    assert [type(e).__name__ for e in first.entries] == ["Restore"]
    assert lead.lead.find_log(1) == first and not lead.lead.has_all()
    follower.execute(follower.replica.receive(first))
    assert follower.replica.receive(first) == []
    lead.lead.follow(follower.status())
    assert lead.lead.find_log(1) is None and lead.lead.has_all()


@pytest.mark.parametrize(
    "change",
    [{"server": 2}, {"server": 7}, {"next_index": 9}, {"epoch": 1 << 50}],
    ids=str,
)
def test_a_server_that_is_where_it_cannot_be_is_refused(change):
    lead = Lead(LeadOptions(mode=modes.asynchronous(), num_servers=2), b"lead")
    lead.begin((0,), 0)
    lead.follow(Follow(1, b"i", b"", 0, 0, (0,), ()))
    (restore,) = lead.decide(now_s=0.0)
    lead.restored({})
    status = Follow(1, b"i", b"lead", restore.version.epoch, 1, (0,), ())
    with pytest.raises(MessageError, match="where it cannot be"):
        lead.follow(structs.replace(status, **change))
    lead.follow(status)
    assert lead.has_all()
