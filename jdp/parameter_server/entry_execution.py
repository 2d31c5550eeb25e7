"""Entry execution: what does each entry of the log change on one server?"""

import dataclasses
import time

import numpy as np

from jdp.parameter_server import messages, metrics, push_hook
from jdp.parameter_server.follower import Follower, PushPart
from jdp.parameter_server.leader import Leader
from jdp.parameter_server.messages import (
    Apply,
    DropSession,
    HandOut,
    Params,
    Restore,
    Version,
)
from jdp.parameter_server.push_hook import Compressor
from jdp.parameter_server.saving import Saver
from jdp.parameter_server.sessions import WorkerSessions
from jdp.parameter_server.shards import Shard
from jdp.parameter_server.updates import Updater


@dataclasses.dataclass
class EntryExecutor:
    """Executes entries: updates, parameters to workers, checkpoints.

    Attributes:
      leader: the state machine of server 0; None on other servers.
      is_over: whether the log has ended the job.
    """

    shard: Shard
    updater: Updater
    compressor: Compressor | None
    saver: Saver
    sessions: WorkerSessions
    follower: Follower
    leader: Leader | None
    metrics: metrics.Metrics
    is_over: bool = False
    _packed: tuple[Version, np.ndarray] | None = None

    def execute(self, entries: list[messages.LogEntry]) -> bool:
        """Executes entries in their order.

        Returns:
          False where the checkpoint of a `Restore` is missing or refused; the entries
          after it are not executed.
        """
        for entry in entries:
            before = self.follower.version
            done = self.follower.execute(entry)
            match entry:
                case Apply():
                    self._apply(entry, done.parts)
                case Restore():
                    self.is_over = False
                    if not self._restore(entry.version, before):
                        return False
                case messages.SaveCheckpoint():
                    self._save()
                case messages.KeepCheckpoint():
                    self.saver.keep(entry.count)
                case DropSession():
                    self.sessions.remove(entry.session)
                case HandOut():
                    self._hand_out(entry)
                case messages.Stop():
                    self.is_over = True
            for name, settled in done.settled.items():
                if (session := self.sessions.get(name)) is not None:
                    self.sessions.send(session, settled)
        return True

    def report_checkpoints(self) -> None:
        """Tells the leader which checkpoints this server has, if it is server 0."""
        if self.leader is not None:
            saver = self.saver
            self.leader.set_checkpoints(
                saver.find_counts(), saver.find_epoch(), runs=saver.find_runs()
            )

    def _apply(self, entry: Apply, parts: list[PushPart]) -> None:
        layout, compressor = self.shard.layout, self.compressor
        opened = [
            push_hook.open_payload(p.payload, p.push.is_compressed, layout, compressor)
            for p in parts
        ]
        self.updater.apply(opened, entry.weights, entry.staleness)
        self.metrics.note_update(entry.staleness, now_s=time.monotonic())
        self.saver.note(self.follower.version)

    def _hand_out(self, entry: HandOut) -> None:
        """Sends this server's parameters to a worker."""
        session = self.sessions.get(entry.session)
        if session is None:
            return
        layout, version = self.shard.layout, self.follower.version
        self.metrics.num_pulls += 1
        self.metrics.num_pulled_bytes += layout.num_bytes
        if session.shared_memory is not None:
            self.updater.copy_into(layout.views(session.shared_memory.pulled))
            self.sessions.send(session, Params(entry.pull, version, True))
            return
        if self._packed is None or self._packed[0] != version:
            packed = np.zeros(layout.num_bytes, np.uint8)
            self.updater.copy_into(layout.views(packed))
            self._packed = version, packed
        self.sessions.send(session, Params(entry.pull, version, False), self._packed[1])

    def _save(self) -> None:
        follower = self.follower
        self.saver.save(follower.version, follower.settled, follower.leader)
        self.report_checkpoints()

    def _restore(self, version: Version, before: Version) -> bool:
        """Returns to a checkpoint that all servers have; False if it cannot be used."""
        self.sessions.clear()
        self._packed = None
        settled = self.saver.restore(version, before)
        self.report_checkpoints()
        if settled is None:
            return False
        self.follower.restore(settled)
        if self.leader is not None:
            self.leader.restored(settled)
        return True
