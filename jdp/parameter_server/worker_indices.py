"""Worker indices: is a second process a mistake, or a worker that came back?

A worker that was killed and started again has its old index and a new session. So has a
second process that was given the same index by mistake. The second process waits. If
the first one sends a message meanwhile, it is alive, and the second one is refused. If
the first one is silent for half a lease, the second one takes its place.
"""

import dataclasses

_LONGEST_GRACE_S = 0.5  # for messages that a process sent before it was killed.
_GRACES_PER_LEASE = 8
_NUM_PROOFS = 2  # messages that prove that a process is alive.
_MOST_REFUSED = 1024


@dataclasses.dataclass
class _Rival:
    session: bytes
    process: str
    since_s: float
    num_proofs: int = 0


@dataclasses.dataclass
class _Holder:
    session: bytes
    process: str  # host and process, as text.
    heard_s: float
    rival: _Rival | None = None


class WorkerIndices:
    """Sessions by worker index; without clocks and sockets."""

    def __init__(self, lease_s: float):
        """Begins without workers.

        Args:
          lease_s: seconds of silence after which a worker is left out.
        """
        self._grace_s = min(_LONGEST_GRACE_S, lease_s / _GRACES_PER_LEASE)
        self._takeover_s = lease_s / 2
        self._holders: dict[int, _Holder] = {}
        self._objections: dict[bytes, str] = {}  # by session, not told yet.

    def take(
        self, worker: int, session: bytes, process: str, *, now_s: float
    ) -> tuple[bool, bytes | None]:
        """Asks for an index for a session, perhaps again.

        Returns:
          Whether the session has the index now, and the session that lost it.
        """
        holder = self._holders.get(worker)
        lost = None
        if holder is not None and holder.session != session:
            rival = holder.rival
            if rival is None or rival.session != session:
                holder.rival = rival = _Rival(session, process, now_s)
            if rival.num_proofs >= _NUM_PROOFS:
                self._object(worker, holder, rival)
                holder.rival = None
                return False, None
            if now_s < holder.heard_s + self._takeover_s:
                return False, None
            lost = holder.session
        if holder is None or lost is not None:
            self._holders[worker] = _Holder(session, process, now_s)
        return True, lost

    def hear(self, worker: int, session: bytes, *, now_s: float) -> None:
        """Notes a message of a session that has an index."""
        holder = self._holders.get(worker)
        if holder is None or holder.session != session:
            return
        holder.heard_s = now_s
        if holder.rival is not None and self._is_proof(holder.rival, now_s):
            holder.rival.num_proofs += 1

    def release(self, worker: int, session: bytes) -> None:
        """Frees the index of a session, after a goodbye or silence."""
        holder = self._holders.get(worker)
        if holder is None or holder.session != session:
            return
        del self._holders[worker]
        # A process that says goodbye is alive: its rival is another process.
        if holder.rival is not None and holder.rival.num_proofs:
            self._object(worker, holder, holder.rival)

    def clear(self) -> None:
        """Frees all indices."""
        self._holders.clear()

    def pop_objection(self, session: bytes) -> str:
        """Returns why a session is refused, once; "" if it is not."""
        return self._objections.pop(session, "")

    def _is_proof(self, rival: _Rival, now_s: float) -> bool:
        return now_s > rival.since_s + self._grace_s

    def _object(self, worker: int, holder: _Holder, rival: _Rival) -> None:
        while len(self._objections) >= _MOST_REFUSED:
            del self._objections[next(iter(self._objections))]
        self._objections[rival.session] = (
            f"Worker index {worker} is taken: {holder.process or 'another process'} "
            f"has it and is alive, and {rival.process or 'this process'} uses it too. "
            "Give each worker an index of its own: `jdp launch --first` on every host "
            "but the first, or another `index` of `Place`."
        )
