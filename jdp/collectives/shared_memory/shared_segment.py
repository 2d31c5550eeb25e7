"""Shared segment: memory that processes of one host share, with a counter for each.

The first process makes the memory, sealed and without a name; the others open it.
"""

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Sequence

import msgspec

from jdp.replicas import cores, meeting, progress, sealed_memory, stamps, wire
from jdp.replicas.cores import UsableCores
from jdp.replicas.meeting import MeetingRecord, StoreMeeting
from jdp.replicas.mesh import World

_TOPIC = "making of a shared segment"
_LABEL = "jdp-shared-segment"
_HEADER_BYTES = sealed_memory.HEADER_BYTES
_WORDS_A_LINE = 8  # counters of two processes never share a cache line of 64 bytes.
_MAX_PROCESSES = 32
_BLAMED = _WORDS_A_LINE * _MAX_PROCESSES  # word of the process that is gone.
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # of Linux on x86-64.
_ALL_WAITERS = 2**31 - 1
# A peer that has finished computing arrives within microseconds. A peer that still
# computes takes longer, and may need the core on which this process spins; it surely
# does if the processes do not have a core each.
_NUM_SPINS = 5000
_NUM_SPINS_SHARED = 100
_SHORT_NS = 50_000  # waits below hold up the main thread, whatever it does.
_CHECK_PERIOD_S = 0.05  # how often a wait checks that its peer is alive.


class Peer(msgspec.Struct, frozen=True):
    """Process, identified by its id and start time, since ids are reused."""

    pid: int
    started: str
    cores: UsableCores

    def is_alive(self) -> bool:
        """Whether the process has not ended; True for a zombie if /proc is unreadable.

        It is unreadable while this process has no descriptor left, which says nothing
        about the other.
        """
        try:
            fields = _read_stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:
            return _has_pid(self.pid)
        return fields[0] not in "ZX" and fields[19] == self.started


class SegmentOffer(msgspec.Struct, frozen=True):
    """Location of the memory that the first process has made."""

    peer: Peer
    path: str = ""
    token: bytes = b""
    num_bytes: int = 0
    error: str | None = None  # why there is no memory.


class SharedSegment:
    """Memory shared by processes of a world, with a counter for each process.

    Each process makes it with the same arguments and then calls `arrive_and_wait` the
    same number of times, from one thread at a time.
    """

    def __init__(
        self, world: World, sizes: Sequence[int], *, key: str, processes: Sequence[int]
    ):
        """Maps the memory, initially zeros.

        Args:
          world: world of the processes.
          sizes: sizes of the memory in bytes, from the largest to the smallest; the
            memory has the first of them that the host has room for.
          key: key in the store, used for this segment only.
          processes: indices of the processes that share it, including this one; all
            on one host.

        Raises:
          RuntimeError: on every process, if memory is missing, a system is not Linux on
            x86-64, or a process is on another host or did not arrive within
            `world.timeout_s`.
        """
        self._world = world
        self._processes = tuple(processes)
        self._own = self._processes.index(world.process_index)
        self._map, self._peers = _map_together(
            world, [_HEADER_BYTES + size for size in sizes], key, self._processes
        )
        whole = memoryview(self._map)
        self.memory = whole[_HEADER_BYTES:]
        self._words = whole[:_HEADER_BYTES].cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._count = 0
        self._holds_up = True  # the main thread, by the wait under way.
        has_cores = cores.are_enough([peer.cores for peer in self._peers])
        self._num_spins = _NUM_SPINS if has_cores else _NUM_SPINS_SHARED

    def arrive_and_wait(self) -> None:
        """Waits until all processes have arrived as often as this one.

        Data that a process wrote before it arrived is visible to all afterwards.

        Raises:
          RuntimeError: a process has ended, or did not arrive within
            `world.timeout_s`, now or at an earlier time.
        """
        self._count += 1
        self._words[_WORDS_A_LINE * self._own] = self._count
        self._futex(self._own, _FUTEX_WAKE, _ALL_WAITERS)
        begun_ns = time.monotonic_ns()
        self._holds_up = True
        for rank in range(len(self._processes)):
            if rank != self._own:
                self._wait_for(rank)
        waited_ns = time.monotonic_ns() - begun_ns
        if waited_ns > _SHORT_NS and stamps.has_record():
            self._holds_up = self._holds_up and progress.is_held_up()
        stamps.add_wait(waited_ns, holds_up=self._holds_up)

    def _wait_for(self, rank: int) -> None:
        words, word, count = self._words, _WORDS_A_LINE * rank, self._count
        for _ in range(self._num_spins):
            if words[word] >= count:
                return
        if self._holds_up and stamps.has_record():
            self._holds_up = progress.is_held_up()
        deadline_s = time.monotonic() + self._world.timeout_s
        while (seen := words[word]) < count:
            if words[_BLAMED]:
                raise RuntimeError(self._describe(words[_BLAMED] - 1))
            if not self._peers[rank].is_alive() or time.monotonic() > deadline_s:
                if words[word] >= count:  # It arrived before it ended.
                    return
                words[_BLAMED] = rank + 1
                raise RuntimeError(self._describe(rank))
            self._futex(rank, _FUTEX_WAIT, seen & 0xFFFFFFFF)

    def _describe(self, rank: int) -> str:
        process = self._processes[rank]
        if not self._peers[rank].is_alive():
            return f"Process {process} has ended; the others cannot go on without it."
        return (
            f"Process {process} did not come to a shared-memory all-reduce within "
            f"{self._world.timeout_s:g} s; it may have stopped, or make other "
            "all-reduces than the rest, as with a last batch of another size."
        )

    def _futex(self, rank: int, operation: int, value: int) -> None:
        # Waits until the lower half of the counter is no longer `value`, or wakes.
        address = ctypes.c_void_p(self._address + 8 * _WORDS_A_LINE * rank)
        _LIBC.syscall(_SYS_FUTEX, address, operation, value, _WAIT, None, 0)


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


_LIBC = ctypes.CDLL(None)
_LIBC.syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)
_PERIOD = _Timespec(0, int(1e9 * _CHECK_PERIOD_S))
_WAIT = ctypes.cast(ctypes.pointer(_PERIOD), ctypes.c_void_p)


def _map_together(
    world: World, sizes: Sequence[int], key: str, processes: Sequence[int]
) -> tuple[mmap.mmap, list[Peer]]:
    obstacle, started = _find_obstacle(processes), ""
    try:
        started = _read_stat(os.getpid())[19]
    except OSError as error:
        obstacle = obstacle or f"cannot read its own state in /proc ({error})."
    own = Peer(os.getpid(), started, cores.find_usable())
    if world.store is None:
        return mmap.mmap(-1, sizes[0]), [own]
    first = processes[0]
    store_meeting = StoreMeeting(world.store, key, world.process_index, world.timeout_s)
    mapped, offer = None, SegmentOffer(own, error=obstacle)
    error = offer.error
    try:
        if world.process_index == first:
            if error is None:
                mapped, offer = _create(sizes, own)
                error = offer.error
            store_meeting.announce(msgspec.msgpack.encode(offer), "offer")
        elif error is None:
            theirs = _hear_offer(store_meeting, first)
            if theirs.error is None:
                mapped, error = _open(sizes, theirs, first)
        record = MeetingRecord(
            _TOPIC,
            msgspec.msgpack.encode(own),
            None if error is None else f"process {world.process_index} {error}",
        )
        outcome = meeting.hold(store_meeting, record, _list_peers, processes=processes)
    finally:
        if world.process_index == first and offer.path:
            os.close(int(offer.path.rpartition("/")[2]))
    if outcome.error is not None:
        raise RuntimeError(outcome.error)
    peers = wire.decode(outcome.body, list[Peer], what=f"The outcome of the {_TOPIC}")
    if mapped is None or len(peers) != len(processes):
        raise wire.Malformed(f"The outcome of the {_TOPIC} leaves processes out.")
    return mapped, peers


def _list_peers(bodies: list[bytes]) -> bytes:
    what = f"A message in the {_TOPIC}"
    peers = [wire.decode(body, Peer, what=what) for body in bodies]
    return msgspec.msgpack.encode(peers)


def _hear_offer(store_meeting: StoreMeeting, first: int) -> SegmentOffer:
    timeout_s = store_meeting.timeout_s
    try:
        offer = store_meeting.hear("offer", timeout_s=timeout_s)
    except TimeoutError:
        raise RuntimeError(
            f"Process {first} did not come to the {_TOPIC} within {timeout_s:g} s."
        ) from None
    assert offer is not None
    return wire.decode(offer, SegmentOffer, what=f"The offer of process {first}")


def _create(sizes: Sequence[int], own: Peer) -> tuple[mmap.mmap | None, SegmentOffer]:
    """Makes the largest memory that there is room for."""
    error = OSError()
    for size in sizes:
        try:
            mapped, _, made = sealed_memory.make_memory(
                size, label=_LABEL, is_populated=True
            )
        except OSError as found:
            error = found
            continue
        return mapped, SegmentOffer(own, made.path, made.token, size)
    return None, SegmentOffer(own, error=_explain(sizes[-1], error))


def _open(
    sizes: Sequence[int], offer: SegmentOffer, first: int
) -> tuple[mmap.mmap | None, str | None]:
    """Maps the offered memory; returns the map, or why that failed."""
    try:
        if offer.num_bytes not in sizes:
            raise OSError(f"it offers {offer.num_bytes:,} bytes")
        # Populated now, since the first access to a page costs a microsecond in a step.
        mapped = sealed_memory.open_memory(
            sealed_memory.MemoryOffer(offer.path, offer.token),
            offer.num_bytes,
            pid=offer.peer.pid,
            is_populated=True,
        )
    except OSError as error:
        return None, f"{_refusal(first)} ({error})."
    return mapped, None


def _refusal(first: int) -> str:
    return (
        f"cannot open the shared memory of process {first}: it is on another host, in "
        "another container, or of another user"
    )


def _find_obstacle(processes: Sequence[int]) -> str | None:
    if len(processes) > _MAX_PROCESSES:
        return f"is one of more than {_MAX_PROCESSES}, too many for a shared segment."
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return None
    # Data is written before its counter, without a fence: x86-64 keeps the order of
    # writes.
    return f"runs on {platform.system()} {platform.machine()}, not Linux on x86-64."


def _explain(size: int, error: OSError) -> str:
    return (
        f"cannot make {size:,} bytes of shared memory: {error.strerror}. Ask for less, "
        "or give the host or container more memory."
    )


def _read_stat(pid: int) -> list[str]:
    """Reads /proc/<pid>/stat after the name: field 0 is the state, 19 the start."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _has_pid(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
