"""Worker: how does a training process pull parameters and push gradients?"""

import dataclasses
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import TypeVar

from jdp.hooks import CommHook
from jdp.parameter_server import (
    keys,
    messages,
    option_checks,
    packing,
    shards,
    shared_memory_lane,
)
from jdp.parameter_server.client import Client
from jdp.parameter_server.keys import Place
from jdp.parameter_server.messages import Outcome, Version, WorkerHello
from jdp.parameter_server.shared_memory_lane import SharedMemoryFile, SharedMemoryLane
from jdp.types import Device

T = TypeVar("T", default=Any)
B = TypeVar("B")
V = TypeVar("V")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of a worker.

    Attributes:
      hook: the communication hook that compresses pushes: `jdp.hooks.cast`, `int8` or
        `top_k`; residuals stay in this process. None: gradients are sent as they are.
        The servers need the same hook.
      timeout_s: longest silence of a server, in seconds; enough for a killed server to
        start again.
      wait_timeout_s: longest wait for a push or a pull while servers answer, in
        seconds. In synchronous mode, a worker waits for the slowest worker.
      shared_memory: whether arrays go through shared memory to servers on this host.
      device: the device for parameters; None: the first device of this process.
    """

    hook: CommHook | None = None
    timeout_s: float = 60.0
    wait_timeout_s: float = 600.0
    shared_memory: bool = True
    device: Device | None = None

    def __post_init__(self) -> None:
        for name in ("timeout_s", "wait_timeout_s"):
            option_checks.check_seconds(name, getattr(self, name))
        option_checks.check_hook("hook", self.hook)
        option_checks.check_device("device", self.device)
        option_checks.check_flag("shared_memory", self.shared_memory)


class Worker(Generic[T]):
    """One worker of a job; a context manager that says goodbye on exit.

    Use it from one thread. A push runs in the background; the next push waits for it.
    """

    def __init__(
        self,
        params: T,
        *,
        place: Place | None = None,
        options: WorkerOptions | None = None,
    ):
        """Connects to all servers.

        Args:
          params: pytree like the parameters of the servers; values are not read.
          place: index of this worker, and addresses of the servers; None: as
            `jdp launch` has set them.
          options: options of this worker.

        Raises:
          RuntimeError: a server does not answer, or refuses this worker, for example
            because of another model or another version of jdp.
          TypeError: an argument has the wrong type.
          ValueError: the hook cannot compress a push.
        """
        # Imported here: users of the types alone must not wait for zmq.
        from jdp.parameter_server.connection import Connection

        place, options = _check_arguments(place, options)
        self._device = options.device or jax.local_devices()[0]
        self._shards = shards.plan_shards(params, len(place.addresses))
        self._template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), params
        )
        self._packer = packing.GradientPacker(self._shards, options.hook)
        made = [
            shared_memory_lane.make_lane(n) if options.shared_memory else None
            for n in self._packer.find_sizes()
        ]
        self._shared_memory_files = [pair[1] for pair in made if pair is not None]
        lanes = [None if pair is None else pair[0] for pair in made]
        push_sizes = self._packer.find_push_sizes()
        self._memory = [
            _memory_of(lane, n) for lane, n in zip(lanes, push_sizes, strict=True)
        ]
        files = [None if pair is None else pair[1] for pair in made]
        self._connection = Connection(
            Client(_make_hellos(place, self._shards, files, options.hook)),
            lanes,
            place.addresses,
            keys.read_keys(place.key_file),
            num_pulled_bytes=[s.layout.num_bytes for s in self._shards.of_server],
            timeout_s=options.timeout_s,
            wait_timeout_s=options.wait_timeout_s,
        )
        self._version = Version()
        self._last_push = 0
        try:
            self._welcome = self._connection.await_welcome()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Worker[T]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Waits for the last push unless there was an error, and says goodbye."""
        try:
            if kind is None and self._connection.is_open:
                self.flush()
        finally:
            self.close()

    @property
    def mode(self) -> str:
        """The mode of the servers, such as "sync(backup=0)"."""
        return self._welcome.mode

    @property
    def version(self) -> tuple[int, int]:
        """Epoch and number of updates of the parameters that were pulled last.

        A new epoch begins when servers return to a checkpoint. Pairs never decrease.
        """
        return self._version.epoch, self._version.count

    @property
    def counts(self) -> dict[Outcome, int]:
        """Counts of settled pushes by outcome: "applied", "late", "rejected"."""
        return self._connection.counts

    def pull(self) -> T:
        """Waits for the parameters; all servers send the same version.

        They are the parameters that `prefetch` asked for, or else the newest. They
        contain every push that this worker began before that request.

        Raises:
          RuntimeError: a server does not answer, or has failed.
        """
        self.prefetch()
        memory, self._version = self._connection.await_pull()
        leaves = packing.unpack_params(self._shards, memory)
        treedef = jax.tree.structure(self._template)
        return jax.tree.unflatten(treedef, jax.device_put(leaves, self._device))

    def prefetch(self) -> None:
        """Asks for parameters without waiting: the next `pull` returns them.

        Called before gradients are computed, it overlaps the pull with the computation.
        The parameters then do not contain the push of these gradients.
        """
        self._connection.pull(after=self._last_push)

    def push(self, grads: T, *, num_samples: float = 1.0) -> None:
        """Begins to push gradients at the parameters that were pulled last.

        Waits for the previous push and for `grads`, but not for the servers.

        Args:
          grads: pytree like the parameters; a mean over `num_samples` samples.
          num_samples: weight of `grads` in the mean of a synchronous round.

        Raises:
          RuntimeError: a server does not answer, or has failed.
          RuntimeError: nothing was pulled yet, in synchronous mode.
          ValueError: `grads` are not like the parameters, or `num_samples` is not
            from 1e-30 to 1e30.
          TypeError: `num_samples` is not a number.
        """
        if np.ndim(num_samples) or not isinstance(num_samples, SupportsFloat):
            raise TypeError(
                f"`num_samples` must be a number, got {num_samples!r} of type "
                f"{type(num_samples).__name__}."
            )
        if not messages.LEAST_WEIGHT <= num_samples <= messages.MOST_WEIGHT:
            raise ValueError(
                f"`num_samples` must be a number above 0, from {messages.LEAST_WEIGHT} "
                f"to {messages.MOST_WEIGHT}, got {num_samples}."
            )
        if self._welcome.is_sync and self._version == Version():
            raise RuntimeError(
                "`push` before any `pull`: in synchronous mode a gradient belongs to "
                "the parameters that were pulled last. Call `pull` first, and push the "
                "gradient at the parameters that it returns."
            )
        leaves = shards.check_gradient(self._shards.plan, grads)
        # The memory is free once the previous push is settled.
        self._connection.await_push()
        is_finite = self._packer.pack(leaves, self._memory)
        self._last_push = self._connection.push(
            self._memory,
            self._version,
            weight=float(num_samples),
            is_finite=is_finite,
            is_compressed=self._packer.is_compressed,
        )

    def flush(self) -> Outcome | None:
        """Waits until the last push is settled.

        Returns:
          "applied"; "late": too late for its round; "rejected": not finite; or None if
          there was no push.
        """
        return self._connection.await_push()

    def steps(
        self,
        grad_fn: Callable[[T, B], tuple[V, T]],
        batches: Iterable[B],
    ) -> Iterator[V]:
        """Trains over batches: pulls, computes gradients and pushes, overlapped.

        In asynchronous and bounded mode, the next parameters are pulled while gradients
        are computed, so they lack the newest push of this worker. In synchronous mode,
        the next parameters are requested together with the push.

        Args:
          grad_fn: `(params, batch) -> (value, grads)`, for example from
            `jax.value_and_grad`.
          batches: pytrees of arrays, with samples along the first dimension.

        Yields:
          The value of each step.

        Raises:
          TypeError: `grad_fn` does not return a pair, or `batches` is not iterable.
          ValueError: the arrays of a batch differ in their first dimension, or have
            none.
          RuntimeError: a server does not answer, or has failed.
        """
        option_checks.check_is("batches", batches, Iterable, "an iterable of batches")
        params = self.pull()
        for batch in batches:
            if not self._welcome.is_sync:
                self.prefetch()
            made = grad_fn(params, batch)
            if not isinstance(made, tuple | list) or len(made) != 2:
                raise TypeError(
                    "`grad_fn` must return (value, grads), like the functions of "
                    f"`jax.value_and_grad`, got {type(made).__name__}."
                )
            value, grads = made
            self.push(grads, num_samples=_count_samples(batch))
            params = self.pull()
            yield value

    def close(self) -> None:
        """Says goodbye; a push that is not settled may be lost."""
        self._connection.close()
        while self._shared_memory_files:
            self._shared_memory_files.pop().close()


def _check_arguments(
    place: Place | None, options: WorkerOptions | None
) -> tuple[Place, WorkerOptions]:
    """Returns the arguments of a worker, with defaults filled in."""
    place = Place.from_environ() if place is None else place
    options = WorkerOptions() if options is None else options
    option_checks.check_is("place", place, Place, "a `Place` or None")
    option_checks.check_is("options", options, WorkerOptions, "`WorkerOptions(...)`")
    if place.role != "worker":
        raise ValueError(f'`place` has the role "{place.role}", not "worker".')
    return place, options


def _count_samples(batch: Any) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    lengths = sorted({shape[0] for shape in shapes if shape})
    if len(lengths) != 1:
        found = ", ".join(map(str, lengths)) or "none"
        raise ValueError(
            "The arrays of a batch must have one first dimension, the number of "
            f"samples, got {found}. Leave out arrays that are not per sample, such as "
            "keys, or use `pull` and `push(grads, num_samples=...)`."
        )
    return lengths[0]


def _memory_of(shared: SharedMemoryLane | None, num_bytes: int) -> memoryview:
    if shared is not None:
        return shared.pushed[:num_bytes]
    return memoryview(bytearray(num_bytes))


def _make_hellos(
    place: Place,
    plan: shards.Shards,
    files: list[SharedMemoryFile | None],
    hook: CommHook | None,
) -> list[WorkerHello]:
    session = os.urandom(16)
    process = f"process {os.getpid()} on {socket.gethostname()}"
    leaves = shards.describe_leaves(plan.plan)
    return [
        WorkerHello(
            session,
            place.index,
            server,
            len(files),
            leaves,
            "" if hook is None else hook.name,
            Version(),
            None if file is None else file.offer,
            process,
        )
        for server, file in enumerate(files)
    ]
