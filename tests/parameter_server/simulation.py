"""Servers and workers without sockets: messages get lost or doubled; all may die."""

from collections import deque

from jdp.parameter_server.checkpoints import add_common, find_superfluous
from jdp.parameter_server.client import Client
from jdp.parameter_server.follower import Follower
from jdp.parameter_server.leader import Leader
from jdp.parameter_server.leader_options import LeaderOptions
from jdp.parameter_server.messages import (
    Apply,
    Ended,
    Farewell,
    FollowerStatus,
    HandOut,
    KeepCheckpoint,
    Leave,
    Params,
    Ping,
    Pong,
    Pull,
    Push,
    Restore,
    SaveCheckpoint,
    SessionUnknown,
    Settled,
    Stop,
    Version,
    Welcome,
    WorkerHello,
)


class SimulatedServer:
    """One server; its parameters are the list of pushes that made them."""

    def __init__(self, job, index):
        self.job, self.index = job, index
        self.disk = {0: ((), {})}  # by count: parameters, and the table.
        self.is_full = False  # its disk: no checkpoint can be written.
        self.damaged = set()  # counts of what is not what was written.
        self.common = 0  # the newest count that all are known to have had.
        self.epoch_on_disk = 0
        self.attendance_on_disk = b""
        self.start()

    def start(self):
        self.incarnation = self.job.rng.randbytes(8)
        self.follower = Follower()
        self.params = ()
        self.commons = [self.common] if self.common else []
        self.sessions = set()
        self.is_over = False
        self.leader = None
        if self.index == 0:
            self.leader = Leader(self.job.options, self.incarnation)
            self.leader.attendance.load(self.attendance_on_disk)
            self.note_checkpoints()

    def note_checkpoints(self):
        if self.leader:
            self.leader.set_checkpoints(tuple(self.disk), self.epoch_on_disk)

    def note_attendance(self):
        if self.leader.attendance.has_changed:
            self.attendance_on_disk = self.leader.attendance.encode()

    def drop(self, counts):
        for count in list(counts):
            del self.disk[count]
            self.damaged.discard(count)

    def keep(self, common):
        self.common = common
        if self.common:
            self.disk.pop(0, None)
        self.commons = add_common(self.commons, common)
        self.drop(find_superfluous(set(self.disk) - {0}, self.commons))

    def find_good(self):
        return set(self.disk) - self.damaged

    def refuse(self, count):
        """The checkpoint to go back to is not what was written."""
        self.drop({count} & set(self.disk))
        self.note_checkpoints()
        if self.leader:
            self.leader.start_over()
        else:
            self.incarnation = self.job.rng.randbytes(8)
            self.follower.leader = b""

    def hear(self, message, payload=None):
        """A message of a worker."""
        job, session = self.job, message.session
        if isinstance(message, WorkerHello):
            if self.is_over:
                self.reply(session, Ended(True))
                return
            if self.follower.version.epoch == 0:
                return
            if self.leader and not self.leader.join(
                session,
                message.worker,
                now_s=job.now_s,
                has_seen=message.known.epoch > 0,
            ):
                return
            self.sessions.add(session)
            mode = job.options.mode
            self.reply(
                session, Welcome(self.follower.version, str(mode), True, 5, True)
            )
            return
        if isinstance(message, Leave) and self.leader:
            self.leader.leave(session, now_s=job.now_s)
            self.note_attendance()
            self.reply(session, Farewell())
            return
        if session not in self.sessions:
            self.reply(session, SessionUnknown())
            return
        if self.leader and not self.leader.renew_lease(session, now_s=job.now_s):
            self.sessions.discard(session)
            self.reply(session, SessionUnknown())
            return
        match message:
            case Ping():
                if not message.push:
                    self.reply(session, Pong(0))
                elif self.follower.wants(session, message.push):
                    self.reply(session, Pong(message.push))
                elif (s := self.follower.settled.get(session)) is not None:
                    self.reply(session, s)
            case Push():
                if self.follower.hold(message, payload) and self.leader:
                    self.leader.push(message)
            case Pull():
                self.leader.pull(message)

    def status(self):
        r = self.follower
        return FollowerStatus(
            self.index,
            self.incarnation,
            r.leader,
            max(r.version.epoch, self.epoch_on_disk),
            r.next_index,
            tuple(self.disk),
            r.find_held(),
        )

    def reply(self, session, message):
        self.job.to_worker(self.index, session, message)

    def execute(self, entries):
        job = self.job
        for entry in entries:
            before = self.follower.version
            done = self.follower.execute(entry)
            self.is_over = isinstance(entry, Stop)
            assert self.follower.version >= before
            match entry:
                case Apply():
                    assert [p.payload for p in done.parts] == list(entry.pushes)
                    self.params += entry.pushes
                    job.check_params(self)
                case Restore() if entry.version.count not in self.find_good():
                    self.sessions.clear()
                    self.refuse(entry.version.count)
                    return
                case Restore():
                    self.params, table = self.disk[entry.version.count]
                    self.drop([c for c in self.disk if c > entry.version.count])
                    self.keep(entry.version.count)
                    self.epoch_on_disk = entry.version.epoch
                    self.follower.restore(table)
                    if self.leader:
                        self.leader.restored(table)
                    self.note_checkpoints()
                    self.sessions.clear()
                    job.check_params(self)
                case SaveCheckpoint() if not self.is_full:
                    self.disk[self.follower.version.count] = (
                        self.params,
                        dict(self.follower.settled),
                    )
                    self.damaged.discard(self.follower.version.count)
                    self.keep(self.common)
                    self.note_checkpoints()
                case KeepCheckpoint():
                    assert entry.count in self.disk
                    self.keep(entry.count)
                    self.note_checkpoints()
                case HandOut() if entry.session in self.sessions:
                    params = Params(entry.pull, self.follower.version, False)
                    self.reply(entry.session, (params, self.params))
            for session, settled in done.settled.items():
                self.reply(session, settled)


class SimulatedWorker:
    """One worker: it pulls, and pushes what it made of that."""

    def __init__(self, job, index):
        self.job, self.index = job, index
        self.start()

    def start(self):
        self.session = self.job.rng.randbytes(8)
        n = self.job.num_servers
        hellos = [
            WorkerHello(self.session, self.index, i, n, [], "", Version(), None)
            for i in range(n)
        ]
        self.client = Client(hellos)
        self.seen = Version()
        self.parts = {}
        self.has_left = False
        self.pulled = None
        self.num_done = 0

    def send(self, messages):
        for server, message in messages:
            self.job.to_server(self, server, message)

    def act(self):
        """Takes a step, if it may."""
        client, now_s = self.client, self.job.now_s
        if not client.is_welcome or client.is_pushing or client.is_pulling:
            return
        if self.pulled is None:
            self.parts.clear()
            after = client.sequence if self.job.rng.random() < 0.5 else 0
            self.send(client.pull(after=after, now_s=now_s))
        else:
            is_finite = self.job.rng.random() < 0.9
            version, self.pulled = self.pulled, None
            self.send(
                client.push(
                    version, weight=1.0, is_finite=is_finite, is_compressed=False
                )
            )

    def leave(self):
        """Says goodbye, and is gone once that was heard."""
        self.has_left = True
        self.send(self.client.leave())

    def hear(self, server, message):
        client = self.client
        if isinstance(message, tuple):
            message, params = message
            if client.is_current(message):
                self.parts[server] = (message.version, params)
        was_pulling, was_pushing = client.is_pulling, client.is_pushing
        self.send(client.receive(server, message, now_s=self.job.now_s))
        if was_pushing and not client.is_pushing:
            self.num_done += 1
        if was_pulling and not client.is_pulling:
            # One snapshot: the same version, and the same pushes in it.
            assert len(set(self.parts.values())) == 1, self.parts
            self.pulled, params = self.parts[0]
            assert self.pulled >= self.seen, "a version went back"
            assert self.pulled.count == self.job.count_of(params)
            self.seen = self.pulled


class Job:
    """All of them, and the channels between them."""

    def __init__(self, rng, mode, *, num_servers, num_workers, **options):
        self.rng, self.now_s = rng, 0.0
        self.num_servers = num_servers
        self.options = LeaderOptions(
            mode=mode, num_servers=num_servers, num_workers=num_workers, **options
        )
        self.channels = {}
        self.rounds, self.num_rounds = {}, 0  # in which one a push was applied last.
        self.servers = [SimulatedServer(self, i) for i in range(num_servers)]
        self.workers = [SimulatedWorker(self, i) for i in range(num_workers)]

    def to_server(self, worker, server, message):
        key = ("up", worker.session, server)
        self.channels.setdefault(key, deque()).append(message)

    def to_worker(self, server, session, message):
        key = ("down", session, server)
        self.channels.setdefault(key, deque()).append(message)

    def count_of(self, params):
        """Updates in parameters; those of one round count once."""
        return len({self.rounds[p] for p in params})

    def check_params(self, server):
        assert len(set(server.params)) == len(server.params), "a push applied twice"

    def deliver(self, key):
        kind, who, server = key
        message = self.channels[key].popleft()
        if kind == "up":
            payload = None
            if isinstance(message, Push):
                payload = (message.session, message.sequence)
            self.servers[server].hear(message, payload)
        elif kind == "down":
            for worker in self.workers:
                if worker.session == who:
                    worker.hear(server, message)
        elif kind == "follow":
            self.servers[0].leader.update_follower(message)
        else:
            receiver = self.servers[server]
            receiver.execute(receiver.follower.receive(message))

    def decide(self):
        server = self.servers[0]
        self.before_decision()
        entries = server.leader.decide(now_s=self.now_s)
        for entry in entries:
            if isinstance(entry, Apply):
                self.note_round(entry)
        if entries:
            first = entries[0]
            if isinstance(first, Restore):
                server.follower.leader = server.incarnation
                server.follower.next_index = 0
        server.execute(entries)
        server.note_attendance()
        self.after_decision(entries)

    def note_round(self, entry):
        self.num_rounds += 1
        for push in entry.pushes:
            self.rounds[push] = self.num_rounds

    def before_decision(self):
        pass

    def after_decision(self, entries):
        pass

    def exchange_logs(self):
        for server in self.servers[1:]:
            log = self.servers[0].leader.find_log(server.index)
            for kind, message in (("follow", server.status()), ("log", log)):
                channel = self.channels.setdefault((kind, b"", server.index), deque())
                if message is not None and len(channel) < 2:
                    channel.append(message)

    def cut(self, has):
        for key in list(self.channels):
            if has(key):
                del self.channels[key]

    def damage_checkpoint(self):
        """Flips a bit in the newest checkpoint of a server; one at a time."""
        common = set.intersection(*(set(s.disk) - {0} for s in self.servers))
        if len(common) > 1 and not any(s.damaged for s in self.servers):
            server = self.rng.choice(self.servers)
            server.damaged.add(max(server.disk))

    def kill_server(self, index):
        self.cut(lambda key: key[2] == index or (index == 0 and key[1] == b""))
        self.servers[index].start()

    def kill_worker(self, index):
        session = self.workers[index].session
        self.cut(lambda key: key[1] == session)
        self.workers[index].start()

    def step(self, *, is_kind=False):
        """Something happens; nothing bad if `is_kind`."""
        rng = self.rng
        bad = 0.0 if is_kind else 0.04
        self.now_s += rng.choice((0.0, 0.01, 0.1))
        for _ in range(rng.randrange(5)):
            keys = [k for k, q in self.channels.items() if q]
            if not keys:
                break
            key = rng.choice(keys)
            draw = rng.random()
            if draw < bad:
                self.channels[key].popleft()
            elif draw < 2 * bad:
                self.channels[key].appendleft(self.channels[key][0])
            elif draw < 2.2 * bad:
                self.channels[key].clear()
            else:
                self.deliver(key)
        worker = rng.choice(self.workers)
        if not worker.has_left:
            worker.act()
        if not worker.has_left or worker.client.is_leaving:
            worker.send(worker.client.tick(now_s=self.now_s))
        if rng.random() < 0.3:
            self.exchange_logs()
        self.decide()
        if rng.random() < bad / 4:
            self.kill_server(rng.randrange(self.num_servers))
        if rng.random() < bad:
            self.damage_checkpoint()
        full = rng.choice(self.servers)
        full.is_full = rng.random() < 10 * bad if bad else False
        victim = rng.randrange(len(self.workers))
        if rng.random() < bad / 4 and not self.workers[victim].has_left:
            self.kill_worker(victim)

    def run(self, num_steps, **how):
        for _ in range(num_steps):
            self.step(**how)


__all__ = ["Job", "Settled", "SimulatedServer", "SimulatedWorker"]
