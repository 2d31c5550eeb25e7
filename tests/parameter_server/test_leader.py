"""The protocol: pushes, pulls, losses, doubles, deaths and restarts in any order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from jdp.parameter_server import modes
from jdp.parameter_server.attendance import Gathering
from jdp.parameter_server.leader import Leader
from jdp.parameter_server.leader_options import LeaderOptions
from jdp.parameter_server.messages import (
    Apply,
    FollowerStatus,
    MessageError,
    Push,
    Settled,
    Stop,
    Version,
)
from jdp.parameter_server.worker_indices import WorkerIndices
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
        leader = self.servers[0].leader
        clocks = [m.clock for m in leader._members.values()]
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


class EndingJob(Job):
    """Workers leave one after the other, at any moment."""

    def after_decision(self, entries):
        if not any(isinstance(entry, Stop) for entry in entries):
            return
        assert all(w.has_left for w in self.workers), "a worker was left behind"
        server = self.servers[0]
        count = server.follower.version.count
        has_end = count in server.disk or not count or server.is_full
        assert has_end, "no checkpoint at the end"


@pytest.mark.parametrize("mode", MODES[:3], ids=str)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_servers=st.integers(1, 3),
    num_workers=st.integers(1, 4),
    checkpoint_every=st.sampled_from([0, 5]),
)
def test_a_job_is_over_when_all_workers_have_left_and_not_before(
    mode, seed, num_servers, num_workers, checkpoint_every
):
    job = EndingJob(
        random.Random(seed),
        mode,
        num_servers=num_servers,
        num_workers=num_workers,
        checkpoint_every=checkpoint_every,
        lease_s=5.0,
        start_timeout_s=30.0,
        launch="one",
    )
    has_come = set()
    while not all(w.has_left for w in job.workers):
        job.run(10)
        has_come |= {w.index for w in job.workers if w.client.is_welcome}
        for worker in job.workers:
            # All have come: there is a job that can be over.
            if len(has_come) == num_workers and job.rng.random() < 0.1:
                if worker.client.is_welcome and not worker.has_left:
                    worker.leave()
    # All servers may still die, and messages be lost.
    job.run(200)
    job.now_s += 40.0
    for _ in range(300):
        job.run(10, is_kind=True)
        job.now_s += 1.0
        if all(server.is_over for server in job.servers):
            return
    raise AssertionError("servers serve for ever")


def _leader(num_workers, **options):
    options = LeaderOptions(
        mode=modes.asynchronous(), num_workers=num_workers, lease_s=5.0, **options
    )
    leader = Leader(options, b"leader")
    leader.set_checkpoints((0,), 0)
    leader.decide(now_s=0.0)
    leader.restored({})
    return leader


def _is_over(leader, now_s):
    return any(isinstance(e, Stop) for e in leader.decide(now_s=now_s))


def test_sessions_of_one_worker_are_one_worker():
    leader = _leader(2)
    for session in (b"a", b"b", b"c"):
        leader.join(session, 0, now_s=0.0)
        leader.leave(session)
    leader.restored({b"d": Settled(1, "applied", Version(1, 1))})
    assert not _is_over(leader, 1000.0)
    leader.join(b"e", 1, now_s=1000.0)
    assert not _is_over(leader, 1001.0)
    leader.leave(b"e")
    assert _is_over(leader, 1002.0)


@pytest.mark.parametrize("seed", range(20))
def test_of_two_processes_with_one_number_the_second_is_refused(seed):
    rng = random.Random(seed)
    indices = WorkerIndices(8.0)
    assert indices.take(3, b"a", "process 1", now_s=0.0) == (True, None)
    now_s, refused_s = 0.0, None
    while refused_s is None and now_s < 60.0:
        now_s += 0.3
        if rng.random() < 0.4:  # Each message may be lost.
            indices.hear(3, b"a", now_s=now_s)
        if rng.random() < 0.7:
            assert indices.take(3, b"b", "process 2", now_s=now_s) == (False, None)
        assert indices.take(3, b"a", "process 1", now_s=now_s) == (True, None)
        if text := indices.pop_objection(b"b"):
            refused_s = now_s
            assert "process 1 has it and is alive, and process 2 uses" in text
        indices.hear(3, b"a", now_s=now_s)
    assert refused_s is not None and refused_s < 5.0


@pytest.mark.parametrize("late_s", [0.0, 0.4])
def test_a_worker_that_comes_back_is_not_refused(late_s):
    indices = WorkerIndices(8.0)
    indices.take(3, b"a", "", now_s=0.0)
    # Of the dead one, something is still under way.
    indices.take(3, b"b", "", now_s=1.0)
    for _ in range(9):
        indices.hear(3, b"a", now_s=1.0 + late_s)
    assert indices.take(3, b"b", "", now_s=4.9) == (False, None)
    assert indices.take(3, b"b", "", now_s=5.5) == (True, b"a")
    assert indices.take(3, b"a", "", now_s=5.6) == (False, None)
    indices.release(3, b"a")
    assert indices.take(3, b"b", "", now_s=5.7) == (True, None)
    indices.release(3, b"b")
    assert indices.take(3, b"a", "", now_s=5.8) == (True, None)
    assert not indices.pop_objection(b"a") and not indices.pop_objection(b"b")


def test_one_that_says_goodbye_while_another_waits_for_its_number_has_lived():
    indices = WorkerIndices(8.0)
    indices.take(3, b"a", "", now_s=0.0)
    indices.take(3, b"b", "", now_s=1.0)
    indices.hear(3, b"a", now_s=2.0)
    indices.release(3, b"a")
    assert "Worker index 3 is taken" in indices.pop_objection(b"b")


def test_a_first_round_waits_for_different_workers():
    options = LeaderOptions(mode=modes.sync(), num_workers=2, start_timeout_s=60.0)
    gathering = Gathering(options)
    leader = Leader(options, b"leader")
    leader.set_checkpoints((0,), 0)
    (restore,) = leader.decide(now_s=0.0)
    leader.restored({})
    for session, now_s in ((b"a", 0.0), (b"b", 6.0)):
        assert leader.join(session, 0, now_s=now_s)
    push = Push(b"b", 1, restore.version, 1.0, True, False, False)
    leader.push(push)
    assert not any(isinstance(e, Apply) for e in leader.decide(now_s=7.0))
    assert leader.find_awaited() == (1,)
    gathering.begin(now_s=0.0)
    assert not gathering.is_over(1, is_first=True, now_s=59.0)
    assert gathering.is_over(2, is_first=True, now_s=59.0)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_worker_whose_pushes_are_all_rejected_holds_nobody_back(mode):
    leader = Leader(LeaderOptions(mode=mode, lease_s=5.0), b"leader")
    leader.set_checkpoints((0,), 0)
    leader.decide(now_s=0.0)
    leader.restored({})
    for worker, session in enumerate((b"good", b"nan")):
        assert leader.join(session, worker, now_s=0.0)
    for sequence in range(1, 9):
        for session in (b"good", b"nan"):
            is_finite = session == b"good"
            leader.push(
                Push(session, sequence, leader.version, 1.0, is_finite, False, False)
            )
        leader.decide(now_s=0.0)
        assert leader.num_waiting == 0, f"a push waits: for {leader.find_awaited()}"
    # With a backup, one of two may be late instead.
    assert leader.counts["applied"] == 8 or mode == modes.sync(backup=1)


def test_a_silent_worker_is_waited_for_and_the_job_ends_without_it():
    leader = _leader(2, start_timeout_s=60.0)
    leader.join(b"a", 0, now_s=0.0)
    leader.join(b"b", 1, now_s=0.0)
    leader.leave(b"a")
    assert not _is_over(leader, 6.0)  # It is left out.
    assert not leader._members
    assert not _is_over(leader, 65.0)
    assert leader.join(b"b", 1, now_s=65.5), "it takes part again"
    assert not _is_over(leader, 71.0)
    assert _is_over(leader, 131.5)
    assert not leader.join(b"b", 1, now_s=132.0)


@pytest.mark.parametrize("launch", ["", "one", "another"])
def test_an_attendance_outlives_server_0_and_does_not_reach_another_run(launch):
    first = _leader(2, launch="one" if launch else "")
    first.join(b"a", 0, now_s=0.0)
    first.join(b"b", 1, now_s=0.0)
    first.leave(b"a")
    data = first.attendance.encode()
    second = _leader(2, launch=launch)
    second.attendance.load(data)
    # Worker 1 has seen the servers that are gone: this is their job.
    session = b"y" if launch == "another" else b"b"
    second.join(session, 1, now_s=0.0)
    second.leave(session)
    assert _is_over(second, 1.0) == (launch != "another")
    # Nobody that was there: another run, of which one worker has come.
    third = _leader(2, launch="third")
    third.attendance.load(data)
    third.join(b"x", 1, now_s=0.0)
    third.leave(b"x")
    assert not _is_over(third, 1000.0)
    fourth = _leader(2)
    fourth.attendance.load(data[:-2])
    fourth.attendance.load(b"")


def test_all_servers_go_back_to_the_newest_checkpoint_that_all_have():
    job = Job(
        random.Random(0),
        modes.asynchronous(),
        num_servers=2,
        num_workers=1,
        checkpoint_every=3,
        lease_s=5.0,
    )
    first, second = job.servers
    while first.follower.version.count < 8:
        job.run(1, is_kind=True)
    assert max(first.disk) == 6
    common = max(first.disk.keys() & second.disk.keys())
    assert common >= 3
    job.kill_server(1)
    while first.follower.version.epoch == 1 or second.follower.version.epoch != 2:
        job.run(1, is_kind=True)
    assert len(first.params) >= common and len(second.params) >= common
    assert first.disk[common][0] == first.params[:common] == second.params[:common]


def test_an_entry_is_sent_until_the_other_server_has_it():
    job = Job(random.Random(0), modes.asynchronous(), num_servers=2, num_workers=1)
    first, second = job.servers
    first.leader.update_follower(second.status())
    job.decide()
    log = first.leader.find_log(1)
    assert [type(e).__name__ for e in log.entries] == ["Restore"]
    assert first.leader.find_log(1) == log and not first.leader.has_all()
    second.execute(second.follower.receive(log))
    assert second.follower.receive(log) == []
    first.leader.update_follower(second.status())
    assert first.leader.find_log(1) is None and first.leader.has_all()


@pytest.mark.parametrize(
    "change",
    [{"server": 2}, {"server": 7}, {"next_index": 9}, {"epoch": 1 << 50}],
    ids=str,
)
def test_a_server_that_is_where_it_cannot_be_is_refused(change):
    leader = Leader(LeaderOptions(mode=modes.asynchronous(), num_servers=2), b"leader")
    leader.set_checkpoints((0,), 0)
    leader.update_follower(FollowerStatus(1, b"i", b"", 0, 0, (0,), ()))
    (restore,) = leader.decide(now_s=0.0)
    leader.restored({})
    status = FollowerStatus(1, b"i", b"leader", restore.version.epoch, 1, (0,), ())
    with pytest.raises(MessageError, match="the status of a server that cannot be"):
        leader.update_follower(structs.replace(status, **change))
    leader.update_follower(status)
    assert leader.has_all()
