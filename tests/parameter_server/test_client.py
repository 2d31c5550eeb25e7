"""What a worker takes for done, and what a server takes for new, one step at a time."""

from jdp.parameter_server.client import Client
from jdp.parameter_server.follower import Follower
from jdp.parameter_server.messages import (
    Apply,
    LeaderLog,
    Params,
    Ping,
    Pong,
    Pull,
    Push,
    Restore,
    SessionUnknown,
    Settled,
    Version,
    Welcome,
    WorkerHello,
)

WELCOME = Welcome(Version(1, 0), "asynchronous()", False, 8.0, False)


def _client(num_servers=2):
    hellos = [
        WorkerHello(b"s", 0, i, num_servers, [], "", Version(), None) for i in (0, 1)
    ]
    client = Client(hellos[:num_servers])
    for server in range(num_servers):
        client.receive(server, WELCOME, now_s=0.0)
    return client


def _push(client):
    how = {"weight": 1.0, "is_finite": True, "is_compressed": False}
    return client.push(Version(1, 0), **how)


def _kinds(sent):
    return [(server, type(message)) for server, message in sent]


def test_a_push_is_done_when_all_servers_settled_it_at_one_version():
    client = _client()
    assert _kinds(_push(client)) == [(0, Push), (1, Push)]
    client.receive(0, Settled(1, "applied", Version(1, 1)), now_s=0.0)
    # The servers went back meanwhile: that of server 0 is gone.
    client.receive(1, Settled(1, "applied", Version(2, 1)), now_s=0.0)
    assert client.is_pushing
    assert _kinds(client.receive(0, Pong(1), now_s=0.0)) == [(0, Push)]
    assert client.receive(0, Pong(2), now_s=0.0) == []
    client.receive(0, Settled(1, "applied", Version(2, 1)), now_s=0.0)
    assert not client.is_pushing and client.outcome == "applied"
    assert client.counts["applied"] == 1 and client.known == Version(2, 1)


def test_parts_of_several_versions_are_asked_for_again():
    client = _client()
    ((server, first),) = client.pull(after=0, now_s=0.0)
    assert server == 0 and isinstance(first, Pull)
    client.receive(0, Params(first.pull, Version(1, 1), False), now_s=0.0)
    sent = client.receive(1, Params(first.pull, Version(2, 0), False), now_s=0.0)
    ((_, second),) = sent
    assert isinstance(second, Pull) and second.pull != first.pull
    late = Params(first.pull, Version(2, 0), False)
    assert not client.is_current(late) and client.is_pulling
    for server in (0, 1):
        client.receive(server, Params(second.pull, Version(2, 0), False), now_s=0.0)
    assert not client.is_pulling


def test_what_has_no_answer_is_said_again():
    client = _client(1)
    _push(client)
    assert client.tick(now_s=0.9) == []
    assert client.tick(now_s=1.0) == [(0, Ping(b"s", 1))]
    client.pull(after=1, now_s=1.0)
    asked = [n for n in range(11, 200) if client.tick(now_s=n / 10)[-1:] != []]
    assert len(asked) < 30 and client.is_pulling
    assert client.receive(0, SessionUnknown(), now_s=20.0) == []
    assert _kinds(client.tick(now_s=20.0))[0] == (0, WorkerHello)
    sent = client.receive(0, WELCOME, now_s=20.1)
    assert _kinds(sent) == [(0, Ping), (0, Pull)]


def test_a_replica_takes_each_push_and_each_entry_once():
    follower = Follower()
    begin = Restore(Version(1, 0))
    log = LeaderLog(b"leader", 1, 0, (begin,))
    for entry in follower.receive(log):
        follower.execute(entry)
    push = Push(b"s", 1, Version(1, 0), 1.0, True, False, False)
    assert follower.hold(push, "part") and not follower.hold(push, "again")
    more = LeaderLog(b"leader", 1, 0, (begin, Apply(((b"s", 1),), (1.0,), 0)))
    (entry,) = follower.receive(more)
    assert [part.payload for part in follower.execute(entry).parts] == ["part"]
    assert not follower.hold(push, "again") and not follower.find_held()
    assert follower.receive(more) == []
    # Nothing of an older log, nor of a newer one but from its beginning.
    newer = LeaderLog(b"other", 2, 0, (Restore(Version(2, 0)),))
    assert follower.receive(LeaderLog(b"other", 2, 1, (entry,))) == []
    for entry in follower.receive(newer):
        follower.execute(entry)
    assert follower.version == Version(2, 0)
    assert follower.receive(log) == []
    assert follower.receive(LeaderLog(b"third", 2, 0, (Restore(Version(2, 5)),))) == []
