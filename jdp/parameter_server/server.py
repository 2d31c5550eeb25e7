"""Server: how does a process hold parameters, and update them with pushes?"""

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
from jdp.parameter_server.leader_options import LeaderOptions
from jdp.parameter_server.metrics import Report
from jdp.parameter_server.modes import Mode
from jdp.parameter_server.push_hook import Compressor
from jdp.runtime import descriptors, environment
from jdp.types import Device, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of servers; the same on all of them.

    Attributes:
      lease_s: seconds of silence after which a worker is left out; it may come back.
      start_timeout_s: longest wait of the first synchronous round for
        `Place.num_workers` workers, in seconds. Also the longest wait for a silent
        worker after all others have left.
      checkpoint_dir: folder for checkpoints, on a disk that outlives the process. None:
        no checkpoints; the parameters of a killed server are lost.
      checkpoint_every: updates from one checkpoint to the next; 0: only at SIGTERM and
        at the end.
      nonfinite: "reject" drops and counts gradients with NaN or infinity; "apply"
        applies them.
      hook: the communication hook that workers push through; None: none of them uses
        one.
      report: report of server 0, every second: a live "table", lines of "json" on
        stdout, or "" for none; None: as `--table` or `--json` of `jdp launch` say.
      device: the device for updates; None: the first device of this process.
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
        """Puts this server's share of the parameters on its device, and listens.

        Args:
          params: all parameters, with their initial values.
          tx: the optimizer. With several servers, it must update each leaf without
            looking at the others.
          mode: `sync()` by default, `asynchronous()` or `bounded(staleness=)`.
          place: index and addresses of the servers; None: as `jdp launch` has set them.
          options: options, the same on all servers.

        Raises:
          RuntimeError: there is no place, key file or memory, or another process
            listens at the address.
          TypeError: a parameter does not have a floating dtype, an argument has the
            wrong type, or the optimizer needs more arguments than `staleness=`.
          ValueError: `mode` waits for no worker, the hook cannot compress a push, or
            there are several servers and the optimizer mixes leaves.
        """
        # Imported here: users of the types alone must not wait for zmq.
        from jdp.parameter_server import service, sockets

        place, options = _check_arguments(place, options, tx)
        mode = modes.sync() if mode is None else mode
        modes.check_num_workers(mode, place.num_workers)
        plan = shards.plan_shards(params, len(place.addresses))
        by_leaf.check_is_by_leaf(tx, params, plan)
        checkpoints = None
        if options.checkpoint_dir is not None:
            folder = options.checkpoint_dir
            checkpoints = Checkpoints(folder, place.index, len(place.addresses))
        shard, hook = plan.of_server[place.index], options.hook
        compressor = None if hook is None else Compressor(hook, shard.avals)
        packed = 0 if compressor is None else compressor.layout.num_bytes
        most_bytes = max(shard.layout.num_bytes, packed)
        found = keys.read_keys(place.key_file)
        address = place.addresses[place.index]
        descriptors.raise_limit()
        socket = sockets.ServerSocket(address, found, most_bytes=most_bytes)
        self._index = place.index
        with _refusing_on_failure(socket):
            self._device = device = options.device or jax.local_devices()[0]
            with explaining_memory(place.index, device):
                updater = updates.Updater(params, tx, plan, place.index, device)
                updater.warm_up(_find_usual_num_pushes(mode, place.num_workers))
            saver = saving.Saver(place.index, updater, checkpoints)
        self._service = service.Service(
            place,
            plan,
            service.ServiceParts(socket, updater, compressor, saver),
            _make_leader_options(mode, place, options),
            service.ServiceOptions(
                hook_name="" if hook is None else hook.name,
                report=_find_report(options),
                keys=found,
            ),
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """Counts of events so far, as one line of the report; complete on server 0."""
        return dict(self._service.summarize())

    def serve(self) -> None:
        """Serves until all `Place.num_workers` workers have left, SIGTERM, or `stop`.

        At SIGTERM, in the main thread, a checkpoint is written first.

        Raises:
          RuntimeError: this server has no memory left. Workers raise the same error.
        """
        with _stopping_at_sigterm(self), explaining_memory(self._index, self._device):
            self._service.run()

    def stop(self) -> None:
        """Makes `serve` write a checkpoint and return; any thread may call it."""
        self._service.stop()


def _check_arguments(
    place: Place | None,
    options: ServerOptions | None,
    tx: optax.GradientTransformation,
) -> tuple[Place, ServerOptions]:
    """Returns place and options of a server, with defaults filled in."""
    place = Place.from_environ() if place is None else place
    options = ServerOptions() if options is None else options
    option_checks.check_is("place", place, Place, "a `Place` or None")
    option_checks.check_is("options", options, ServerOptions, "`ServerOptions(...)`")
    option_checks.check_optimizer(tx)
    if place.role != "server":
        raise ValueError(
            f'`place` has the role "{place.role}". Make a `Server` where the role is '
            '"server", and a `Worker` elsewhere.'
        )
    return place, options


def _find_usual_num_pushes(mode: Mode, num_workers: int | None) -> int:
    """Returns the number of pushes that most updates are made of."""
    if not isinstance(mode, modes.Sync):
        return 1
    return max(1, (num_workers or 1) - mode.backup)


def _find_report(options: ServerOptions) -> Report:
    report = options.report
    if report is None:
        report = os.environ.get(keys.REPORT, "")
    return report if report in ("table", "json") else ""


def _make_leader_options(
    mode: Mode, place: Place, options: ServerOptions
) -> LeaderOptions:
    return LeaderOptions(
        mode=mode,
        num_servers=len(place.addresses),
        num_workers=place.num_workers,
        lease_s=options.lease_s,
        start_timeout_s=options.start_timeout_s,
        checkpoint_every=options.checkpoint_every,
        nonfinite=options.nonfinite,
        launch=os.environ.get(environment.LAUNCH_ID, ""),
    )


@contextlib.contextmanager
def explaining_memory(index: int, device: Device) -> Iterator[None]:
    """Replaces an out-of-memory error of XLA by an error that names the server."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not updates.is_out_of_memory(error):
            raise
        raise RuntimeError(
            f"Server {index} is out of memory on {device}: {error}\nParameters, "
            "optimizer state and one gradient per worker must fit. Start more servers, "
            "or use an optimizer with a smaller state."
        ) from error


@contextlib.contextmanager
def _refusing_on_failure(socket: Any) -> Iterator[None]:
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
    signals = (signal.SIGTERM, signal.SIGINT)  # `jdp launch` forwards an interrupt.
    old = [signal.signal(signum, lambda *_: server.stop()) for signum in signals]
    try:
        yield
    finally:
        for signum, handler in zip(signals, old, strict=True):
            signal.signal(signum, handler)
