"""Timeline: a trace of one rank, as a file that Perfetto opens.

The file is an array of Chrome's trace events, like Horovod's. The format allows the
closing bracket to be missing, so a file that a killed process leaves can be opened. A
process of the trace stands for a rank, and a thread for a tensor. The spans of a tensor
must not overlap; they may touch.
"""

import logging
import os
import pathlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_START = "start_time_since_epoch_in_micros"  # Horovod's name for it.
_CYCLES = ""  # in place of a tensor's name: the thread of the engine's cycles.
# Writing this many takes about a millisecond, in which the engine does nothing else.
_MOST_PENDING = 512
_FLUSH_AFTER_S = 1.0
_logger = logging.getLogger("jdp")


def rank_path(path: str | os.PathLike[str], rank: int) -> pathlib.Path:
    """Returns the path of one rank's file: trace.json becomes trace.rank0.json."""
    path = pathlib.Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


class RankTimeline:
    """Trace file of one rank; replaces an existing file. Any thread may use it.

    Times are seconds of `time.perf_counter`. Spans that ended before the timeline began
    are left out. Names of tensors are kept while the timeline is open. If the file can
    no longer be written, as on a full disk, the timeline ends with a warning in the
    log, and the engine goes on.

    Args:
      path: path of this rank's file; see `rank_path`.
      rank: rank of this process.
      mark_cycles: whether `mark_cycle` leaves a mark.

    Raises:
      OSError: the file cannot be written; the error has the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        mark_cycles: bool = False,
    ):
        self._path = os.fspath(path)
        self._rank = rank
        self._mark_cycles = mark_cycles
        self._start_s = self._flushed_s = time.perf_counter()
        start_us = time.time_ns() // 1000
        # Pending events: tensor, name, start, end (None for an instant), arguments.
        self._pending: list[
            tuple[str, str, float, float | None, Mapping[str, object]]
        ] = []
        self._tids: dict[str, int] = {}
        self._lock = threading.RLock()  # for the file, not for `_pending`.
        # Unbuffered: written events survive if the process is killed.
        self._file = open(path, "wb", buffering=0)
        self._num_bytes = 0  # of whole events in the file.
        name = {"name": f"rank {rank}", _START: start_us}
        place = {"sort_index": rank}
        header = b"[\n" + msgspec.json.encode(_metadata("process_name", rank, name))
        try:
            self._write(header + _encode(_metadata("process_sort_index", rank, place)))
        except OSError as error:
            self._file.close()
            raise OSError(error.errno, error.strerror, self._path) from None

    def add_span(
        self, tensor: str, phase: str, start_s: float, end_s: float, **args: object
    ) -> None:
        """Adds a phase of a tensor.

        Args:
          tensor: its name.
          phase: name, such as "NEGOTIATE_ALL_REDUCE" or "MEMCPY_IN_FUSION_BUFFER".
          start_s: when it began.
          end_s: when it ended.
          **args: arguments of the event, such as num_bytes=4096.
        """
        self._pending.append((tensor, phase, start_s, end_s, args))
        if len(self._pending) >= _MOST_PENDING:
            self._flush(end_s)
        elif end_s - self._flushed_s >= _FLUSH_AFTER_S:
            self._flush(end_s)

    def add_instant(self, tensor: str, name: str, at_s: float) -> None:
        """Adds an event of a tensor at one moment, such as "rank 3 is ready"."""
        self._pending.append((tensor, name, at_s, None, {}))
        if len(self._pending) >= _MOST_PENDING:
            self._flush(at_s)

    def mark_cycle(self, at_s: float) -> None:
        """Notes that the engine looks for work.

        Call it in every cycle, even if cycles are not marked: it also writes pending
        spans while an idle engine adds no new ones.
        """
        if self._mark_cycles:
            self.add_instant(_CYCLES, "CYCLE_START", at_s)
        if at_s - self._flushed_s >= _FLUSH_AFTER_S:
            self._flush(at_s)

    def close(self) -> None:
        """Completes the file; later events are ignored."""
        with self._lock:
            self._flush(self._flushed_s)
            if not self._file.closed:
                self._write_or_end(b"\n]\n")
                self._file.close()

    def _flush(self, now_s: float) -> None:
        with self._lock:
            self._write_pending(now_s)

    def _write_pending(self, now_s: float) -> None:
        pending, self._pending = self._pending, []
        self._flushed_s = now_s
        if self._file.closed or not pending:
            return
        chunk = bytearray()
        for tensor, name, start_s, end_s, args in pending:
            start_ns = round((start_s - self._start_s) * 1e9)
            end_ns = start_ns
            if end_s is not None:
                end_ns = round((end_s - self._start_s) * 1e9)
            if end_ns < 0:
                continue
            start_ns = max(start_ns, 0)
            tid = self._tids.get(tensor)
            if tid is None:
                # From 1 on: viewers hide thread 0 as the idle thread.
                tid = self._tids[tensor] = len(self._tids) + 1
                thread = {"name": tensor or "engine cycles"}
                chunk += _encode(_metadata("thread_name", self._rank, thread, tid=tid))
            event: dict[str, object] = {
                "name": name,
                "ph": "X",
                "ts": start_ns / 1000,
                "pid": self._rank,
                "tid": tid,
            }
            if end_s is not None:
                # Both ends were rounded, so spans that touch do not overlap.
                event["dur"] = max(end_ns - start_ns, 0) / 1000
            else:
                event |= {"ph": "i", "s": "t" if tensor else "p"}
            if args:
                event["args"] = args
            chunk += _encode(event)
        self._write_or_end(chunk)

    def _write(self, chunk: bytes | bytearray) -> None:
        """Writes whole events."""
        left = memoryview(chunk)
        while left:
            left = left[self._file.write(left) :]
        self._num_bytes += len(chunk)

    def _write_or_end(self, chunk: bytes | bytearray) -> None:
        """Writes whole events, or ends the timeline if that fails."""
        try:
            self._write(chunk)
        except OSError as error:
            _logger.warning(
                "Rank %d ends its timeline, %s, which cannot be written any more: %s.",
                self._rank,
                self._path,
                error.strerror,
            )
            self._give_up()

    def _give_up(self) -> None:
        """Removes a partial event, and closes the file."""
        try:
            self._file.truncate(self._num_bytes)
            self._file.seek(self._num_bytes)
            self._file.write(b"\n]\n")
        except OSError:
            pass  # The warning is logged, and an array without its end can be opened.
        finally:
            self._file.close()


def merge(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]
) -> list[int]:
    """Merges the timelines of several ranks, aligned by the clocks of their hosts.

    Timelines of killed processes are read up to their last whole event.

    Args:
      paths: timelines of different ranks; they may be results of a merge.
      out: the file to write.

    Returns:
      The ranks in the result.

    Raises:
      OSError: a file cannot be read or written; the error has the path.
      ValueError: a file is not a timeline, or two have the same rank.
    """
    timelines = [(os.fspath(path), *read(path)) for path in paths]
    if not timelines:
        raise ValueError("`paths` must name at least one timeline.")
    path_of_rank: dict[int, str] = {}
    for path, _, events in timelines:
        for rank in {event["pid"] for event in events}:
            if rank in path_of_rank:
                raise ValueError(
                    f"{path_of_rank[rank]} and {path} are both of rank {rank}."
                )
            path_of_rank[rank] = path
    first_us = min(start_us for _, start_us, _ in timelines)
    with open(out, "wb") as file:
        comma = b"[\n"
        for _, start_us, events in timelines:
            for event in events:
                if _START in event.get("args", {}):
                    event["args"][_START] = first_us
                if "ts" in event:
                    # As nanoseconds, so that touching spans still touch.
                    ns = round(event["ts"] * 1000) + (start_us - first_us) * 1000
                    event["ts"] = ns / 1000
                file.write(comma + msgspec.json.encode(event))
                comma = b",\n"
        file.write(b"\n]\n")
    return sorted(path_of_rank)


def _encode(event: dict[str, object]) -> bytes:
    """Encodes one event after a comma, so that the file never ends with a comma."""
    return b",\n" + msgspec.json.encode(event, enc_hook=str)


def _metadata(
    name: str, rank: int, args: Mapping[str, object], *, tid: int | None = None
) -> dict[str, object]:
    event: dict[str, object] = {"name": name, "ph": "M", "pid": rank, "args": args}
    return event if tid is None else event | {"tid": tid}


def read(path: str | os.PathLike[str]) -> tuple[int, list[dict[str, Any]]]:
    """Reads the start of a timeline, in microseconds since the epoch, and its events.

    The times of the events are microseconds since that start.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is not a timeline.
    """
    data = pathlib.Path(path).read_bytes().rstrip()
    try:
        events = _decode(data)
        starts = {
            event["args"][_START] for event in events if _START in event.get("args", {})
        }
        if not all(isinstance(event.get("pid"), int) for event in events):
            raise ValueError("an event has no rank as its `pid`")
        times = {type(event.get("ts", 0)) for event in events}
        if not {*times, *map(type, starts)} <= {int, float}:
            raise ValueError("a time is not a number")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a timeline of jdp: {error}.") from None
    if len(starts) != 1:
        raise ValueError(f"{path} is not a timeline of jdp: no event has {_START!r}.")
    return starts.pop(), events


def _decode(data: bytes) -> list[dict[str, Any]]:
    """Decodes events, also if a killed process has not written the end."""
    try:
        return msgspec.json.decode(data, type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        # One event per line; the last line may be partial.
        for part in (data, data.rpartition(b",\n")[0]):
            try:
                return msgspec.json.decode(part + b"]", type=list[dict[str, Any]])
            except msgspec.DecodeError:
                continue
        raise error from None
