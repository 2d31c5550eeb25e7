"""Server: holds parameters, and updates them with what workers push."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, Literal

import jax
import optax

from jdp.hooks import CommHook
from jdp.parameter_server import (
    by_leaf,
    keys,
    modes,
    option_checks,
    saving,
    shards,
    updates,
)
from jdp.parameter_server.checkpoints import Checkpoints
from jdp.parameter_server.keys import Place
from jdp.parameter_server.leader_options import LeadOptions
from jdp.parameter_server.metrics import Report
from jdp.parameter_server.modes import Mode
from jdp.parameter_server.push_hook import Compressor
from jdp.runtime import descriptors, environment
from jdp.types import Device, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of servers; the same on all of them.

    Attributes:
      lease_s: after how many seconds of silence a worker is left out; it may come back.
      start_timeout_s: how long the first synchronous round waits for
        `Place.num_workers`, in seconds; and how long, when all others have left,
        servers wait for a worker that is silent.
      checkpoint_dir: folder for checkpoints, on a disk that outlives the process; None:
        none are made, and a server that is killed takes the parameters with it.
      checkpoint_every: updates from one checkpoint to the next; 0: only at SIGTERM.
      nonfinite: what becomes of gradients with NaN or infinity: "reject" drops and
        counts them, "apply" does not look.
      hook: the communication hook that workers push through; None: none of them uses
        one.
      report: what server 0 shows each second: a live "table", lines of "json" on
        stdout, or ""; None: what `jdp launch` was told, `--table` or `--json`.
      device: where updates are made; None: the first one of this process.
    """

    lease_s: float = 10.0
    start_timeout_s: float = 60.0
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int = 0
    nonfinite: Literal["reject", "apply"] = "reject"
    hook: CommHook | None = None
    report: Report | None = None
    device: Device | None = None

    def __post_init__(self) -> None:
        """Checks every option."""
        for name in ("lease_s", "start_timeout_s"):
            option_checks.check_seconds(name, getattr(self, name))
        every = option_checks.check_count("checkpoint_every", self.checkpoint_every, 0)
        object.__setattr__(self, "checkpoint_every", every)
        if self.checkpoint_dir is not None:
            option_checks.check_folder("checkpoint_dir", self.checkpoint_dir)
        option_checks.check_hook("hook", self.hook)
        option_checks.check_device("device", self.device)
        if self.checkpoint_every and self.checkpoint_dir is None:
            raise ValueError("`checkpoint_every` needs a `checkpoint_dir`.")
        if self.nonfinite not in ("reject", "apply"):
            raise ValueError(
                f'`nonfinite` must be "reject" or "apply", got {self.nonfinite!r}.'
            )
        if self.report not in (None, "", "table", "json"):
            raise ValueError(
                f'`report` must be "table", "json", "" or None, got {self.report!r}.'
            )


class Server:
    """One of the servers of a job.

    Each server process makes one, with the same arguments, and calls `serve`.
    """

    def __init__(
        self,
        params: PyTree,
        tx: optax.GradientTransformation,
        *,
        mode: Mode | None = None,
        place: Place | None = None,
        options: ServerOptions | None = None,
    ):
        """Takes the parameters that are this server's, and listens.

        Args:
          params: all parameters, with the values to begin with; those of the workers
            are not read.
          tx: updates the parameters. With several servers, of each leaf by itself.
          mode: `sync()` by default, `asynchronous()` or `bounded(staleness=)`.
          place: which server this is; None: what `jdp launch` says.
          options: the same on all servers.

        Raises:
          RuntimeError: there is no place, no key file, no memory, or somebody else
            listens at the address.
          TypeError: a parameter is not of a floating dtype, an argument is of
            another type, or the optimizer needs more than `staleness=`.
          ValueError: `mode` waits for no worker, the hook cannot compress a push, or
            the optimizer does not work on leaves one by one, and there are several
            servers.
        """
        # Here: users of the types alone must not wait for zmq.
        from jdp.parameter_server import service, sockets

        place = Place.from_environ() if place is None else place
        options = ServerOptions() if options is None else options
        option_checks.check_is("place", place, Place, "a `Place` or None")
        option_checks.check_is(
            "options", options, ServerOptions, "`ServerOptions(...)`"
        )
        option_checks.check_optimizer(tx)
        if place.role != "server":
            raise ValueError(
                f"`place` is that of a {place.role}. Make a `Server` where its role is "
                '"server", and a `Worker` elsewhere.'
            )
        mode = modes.sync() if mode is None else mode
        num_servers = len(place.addresses)
        modes.check_num_workers(mode, place.num_workers)
        plan = shards.plan_shards(params, num_servers)
        by_leaf.check_is_by_leaf(tx, params, plan)
        checkpoints = None
        if options.checkpoint_dir is not None:
            checkpoints = Checkpoints(options.checkpoint_dir, place.index, num_servers)
        hook = options.hook
        shard = plan.of_server[place.index]
        compressor = None if hook is None else Compressor(hook, shard.avals)
        packed = 0 if compressor is None else compressor.layout.num_bytes
        most_bytes = max(shard.layout.num_bytes, packed)
        found = keys.read_keys(place.key_file)
        address = place.addresses[place.index]
        descriptors.raise_limit()
        socket = sockets.ServerSocket(address, found, most_bytes=most_bytes)
        with _closed_unless_well(socket):
            device = options.device or jax.local_devices()[0]
            with explaining_memory(place.index, device):
                updater = updates.Updater(params, tx, plan, place.index, device)
                # The number of pushes an update is mostly made of.
                is_sync = isinstance(mode, modes.Sync)
                num_pushes = (place.num_workers or 1) if is_sync else 1
                updater.warm_up(max(1, num_pushes - (mode.backup if is_sync else 0)))
            saver = saving.Saver(place.index, updater, checkpoints)
        report = options.report
        if report is None:
            report = os.environ.get(keys.REPORT, "")
        self._device = device
        self._index = place.index
        self._service = service.Service(
            place,
            plan,
            service.Parts(
                socket,
                updater,
                compressor,
                saver,
            ),
            LeadOptions(
                mode=mode,
                num_servers=num_servers,
                num_workers=place.num_workers,
                lease_s=options.lease_s,
                start_timeout_s=options.start_timeout_s,
                checkpoint_every=options.checkpoint_every,
                nonfinite=options.nonfinite,
                launch=os.environ.get(environment.LAUNCH_ID, ""),
            ),
            service.ServiceOptions(
                hook_name="" if hook is None else hook.name,
                report=report if report in ("table", "json") else "",
                keys=found,
            ),
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """Events so far, as a line of the report; on server 0."""
        return dict(self._service.summarize())

    def serve(self) -> None:
        """Serves until all workers have left, SIGTERM, or `stop`.

        With `Place.num_workers` it also returns when so many workers came and all have
        left. At SIGTERM, in the main thread, a checkpoint is written first.

        Raises:
          RuntimeError: this server has no memory left; the workers get it too.
        """
        with _stopping_at_sigterm(self), explaining_memory(self._index, self._device):
            self._service.run()

    def stop(self) -> None:
        """Makes `serve` write a checkpoint and return; any thread may call it."""
        self._service.stop()


@contextlib.contextmanager
def explaining_memory(index: int, device: Device) -> Iterator[None]:
    """Says which server has no memory left, in place of how XLA does."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not updates.is_out_of_memory(error):
            raise
        raise RuntimeError(
            f"Server {index} is out of memory on {device}: {error}\nParameters, "
            "optimizer state and one gradient a worker must fit. Start more servers, "
            "or take an optimizer with a smaller state."
        ) from error


@contextlib.contextmanager
def _closed_unless_well(socket: Any) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        socket.refuse_all(f"The server has failed: {error}")
        raise


@contextlib.contextmanager
def _stopping_at_sigterm(server: Server) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGTERM, signal.SIGINT)  # `jdp launch` hands an interrupt on.
    old = [signal.signal(signum, lambda *_: server.stop()) for signum in signals]
    try:
        yield
    finally:
        for signum, handler in zip(signals, old, strict=True):
            signal.signal(signum, handler)
