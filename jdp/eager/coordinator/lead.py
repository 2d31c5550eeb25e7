"""Lead: the shell of the coordinator on process 0; it receives and sends messages."""

import time
from collections.abc import Callable, Sequence

from jdp.eager import messages
from jdp.eager.coordinator import autotune, stall
from jdp.eager.coordinator.autotune import Autotuner
from jdp.eager.coordinator.coordinator import Coordinator
from jdp.eager.coordinator.stall import Inspector
from jdp.eager.diagnosis.timeline import RankTimeline
from jdp.eager.messages import Batch, FromRank, ProtocolError
from jdp.eager.options import CoordinatorOptions, EagerOptions
from jdp.replicas.mesh import World
from jdp.runtime.transport.transport import Link


class Lead:
    """Runs a coordinator; used by the engine's thread alone.

    Args:
      world: the processes; this is process 0.
      options: the same on all.
      link: link to the other processes.
      apply: applies a batch on this process.
    """

    def __init__(
        self,
        world: World,
        options: EagerOptions,
        link: Link,
        apply: Callable[[Batch], None],
    ):
        self._size = world.process_count
        self._link = link
        self._apply = apply
        self._coordinator = Coordinator(
            self._size,
            CoordinatorOptions(
                fusion_bytes=options.fusion_bytes,
                cache_capacity=options.cache_capacity,
                fuse_groups=options.fuse_groups,
            ),
        )
        self._autotuner: Autotuner | None = None
        if options.autotune:
            self._autotuner = autotune.make_autotuner(
                options, can_be_hierarchical=len(world.axis_names) == 2
            )
        self._moved: list[tuple[tuple[str, ...], int]] = []
        self._inspector = Inspector(options, now_s=time.monotonic())

    @property
    def is_tuned(self) -> bool:
        """Whether autotuning has ended."""
        return self._autotuner is not None and self._autotuner.is_done

    @property
    def is_tuning(self) -> bool:
        """Whether the engine has to call `note_moved`."""
        return self._autotuner is not None

    @property
    def has_waiting(self) -> bool:
        """Whether some ranks wait for others."""
        return self._coordinator.has_waiting

    def note_moved(self, names: Sequence[str], num_bytes: int) -> None:
        """Notes operations that have run, for the autotuner."""
        self._moved.append((tuple(names), num_bytes))

    def stop(self, why: str) -> None:
        """Ends the engine on all ranks with the next batch; the first reason counts."""
        self._coordinator.stop(why)

    def tell(self, why: str) -> None:
        """Sends the reason for the end of the engine to the other ranks at once."""
        for peer in range(1, self._size):
            self._link.send(peer, messages.encode(Batch(stop=why)))

    def receive(
        self, rank: int, message: FromRank, *, timeline: RankTimeline | None
    ) -> None:
        """Takes a message of a rank."""
        now_s = time.monotonic()
        if timeline is not None:
            for name in self._coordinator.names_of(message):
                timeline.add_instant(name, f"rank {rank} is ready", time.perf_counter())
        try:
            self._coordinator.receive(rank, message, now_s=now_s)
        except ProtocolError as error:
            self._coordinator.stop(str(error))
            return
        if message.asks:
            stalls = self._coordinator.find_stalls(now_s=now_s, after_s=0.0)
            self._send_to_all(Batch(who_waits=stall.describe(stalls)))
        if message.doubts:
            unknown = self._coordinator.find_unknown(rank, message.doubts)
            if unknown:
                self._send_to(rank, Batch(unknown=unknown))

    def decide(self, *, is_over: Callable[[], bool]) -> None:
        """Sends decisions until there are none left, or the engine has ended."""
        now_s = time.monotonic()
        if now_s >= self._inspector.due_s:
            self._inspector.look(self._coordinator, now_s=now_s)
        while not is_over():
            batch = self._coordinator.decide(now_s=now_s)
            if batch is None:
                break
            self._send_to_all(batch)
            if self._autotuner is not None and not self._autotuner.is_done:
                self._tune(self._autotuner)

    def _send_to_all(self, batch: Batch) -> None:
        payload = messages.encode(batch)
        for peer in range(1, self._size):
            self._link.send(peer, payload)
        self._apply(batch)

    def _send_to(self, rank: int, batch: Batch) -> None:
        if rank == 0:
            self._apply(batch)
        else:
            self._link.send(rank, messages.encode(batch))

    def _tune(self, autotuner: Autotuner) -> None:
        """Shows the autotuner what has run, and sends its next choice to all ranks."""
        moved, self._moved = self._moved, []
        tuned = autotuner.observe(
            sum(num_bytes for _, num_bytes in moved),
            now_s=time.perf_counter(),
            names=[name for names, _ in moved for name in names],
        )
        if tuned is not None:
            self._coordinator.tune(
                fusion_bytes=tuned.fusion_bytes, cache_enabled=tuned.cache_enabled
            )
            self._send_to_all(Batch(tuned=tuned))
