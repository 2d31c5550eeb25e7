"""Worker: pulls parameters, and pushes gradients."""

import dataclasses
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np

from jdp.hooks import CommHook
from jdp.parameter_server import (
    keys,
    messages,
    option_checks,
    shards,
    shared_memory_lane,
)
from jdp.parameter_server.client import Client
from jdp.parameter_server.keys import Place
from jdp.parameter_server.messages import Hello, Outcome, Version
from jdp.parameter_server.push_hook import Compressor
from jdp.parameter_server.shared_memory_lane import Lane, LaneFile
from jdp.trees import buckets
from jdp.types import Device, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of a worker.

    Attributes:
      hook: the communication hook that compresses pushes: `jdp.hooks.cast`, `int8` or
        `top_k`; residuals stay in this process. None: gradients are sent as they are.
        The servers need the same hook.
      timeout_s: how long a server may be silent, in seconds; long enough for one that
        was killed to start again.
      wait_timeout_s: longest wait for a push or a pull while servers answer, in
        seconds: in synchronous mode, for the slowest worker.
      shared_memory: whether arrays go through shared memory to a server on this host.
      device: where parameters are put; None: the first one of this process.
    """

    hook: CommHook | None = None
    timeout_s: float = 60.0
    wait_timeout_s: float = 600.0
    shared_memory: bool = True
    device: Device | None = None

    def __post_init__(self) -> None:
        """Checks every option."""
        for name in ("timeout_s", "wait_timeout_s"):
            option_checks.check_seconds(name, getattr(self, name))
        option_checks.check_hook("hook", self.hook)
        option_checks.check_device("device", self.device)
        option_checks.check_flag("shared_memory", self.shared_memory)


class Worker:
    """One of the workers of a job; a context manager that says goodbye at its end.

    One thread uses it. A push is under way while the program goes on; the next one
    waits for it.
    """

    def __init__(
        self,
        params: PyTree,
        *,
        place: Place | None = None,
        options: WorkerOptions | None = None,
    ):
        """Connects to all servers.

        Args:
          params: pytree like the parameters of the servers; values are not read.
          place: which worker this is; None: what `jdp launch` says.
          options: of this worker.

        Raises:
          RuntimeError: a server does not answer, or refuses this worker: its model or
            its jdp is another one.
          TypeError: an argument is of another type.
          ValueError: the hook cannot compress a push.
        """
        # Here: users of the types alone must not wait for zmq.
        from jdp.parameter_server.connection import Connection

        place = Place.from_environ() if place is None else place
        options = WorkerOptions() if options is None else options
        option_checks.check_is("place", place, Place, "a `Place` or None")
        option_checks.check_is(
            "options", options, WorkerOptions, "`WorkerOptions(...)`"
        )
        if place.role != "worker":
            raise ValueError(f'`place` is that of a {place.role}, not of a "worker".')
        self._device = options.device or jax.local_devices()[0]
        self._shards = shards.plan_shards(params, len(place.addresses))
        self._template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), params
        )
        self._packer = _Packer(self._shards, options.hook)
        sizes = self._packer.find_sizes()
        made = [
            shared_memory_lane.make_lane(n) if options.shared_memory else None
            for n in sizes
        ]
        self._lane_files = [pair[1] for pair in made if pair is not None]
        lanes = [None if pair is None else pair[0] for pair in made]
        push_sizes = self._packer.find_push_sizes()
        self._memory = [
            _memory_of(x, n) for x, n in zip(lanes, push_sizes, strict=True)
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

    def __enter__(self) -> "Worker":
        """Is ready."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Waits for the last push, unless there was an error, and says goodbye."""
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
        """Epoch, and number of updates, of the parameters that were pulled last.

        An epoch begins where servers go back to a checkpoint; pairs never decrease.
        """
        return self._version.epoch, self._version.count

    @property
    def counts(self) -> dict[Outcome, int]:
        """Counts of settled pushes by outcome: "applied", "late", "rejected"."""
        return self._connection.counts

    def pull(self) -> PyTree:
        """Waits for the parameters; the same version of all servers.

        Those that `prefetch` has asked for, else the newest. What this worker pushed
        before that call is in them.

        Raises:
          RuntimeError: a server does not answer, or has failed.
        """
        self.prefetch()
        memory, self._version = self._connection.await_pull()
        return self._unpack(memory)

    def prefetch(self) -> None:
        """Asks for parameters and does not wait: the next `pull` gets them.

        Called before gradients are computed, it hides the pull behind them, and what is
        pulled does not have that push in it.
        """
        self._connection.pull(after=self._last_push)

    def push(self, grads: PyTree, *, num_samples: float = 1.0) -> None:
        """Begins to push gradients at the parameters that were pulled last.

        It waits for the push before, and for `grads`, and not for the servers.

        Args:
          grads: pytree like the parameters; a mean over `num_samples` samples.
          num_samples: what they count in the mean of a synchronous round.

        Raises:
          RuntimeError: a server does not answer, or has failed.
          RuntimeError: nothing was pulled yet, in synchronous mode.
          ValueError: `grads` are not like the parameters, or `num_samples` is not
            from 1e-30 to 1e30.
          TypeError: `num_samples` is no number.
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
                "gradient at what it returns."
            )
        leaves = shards.check_gradient(self._shards.plan, grads)
        # The memory is free once the push before is settled.
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
          "applied", "late": too late for its round, "rejected": not finite; None if
          there was no push.
        """
        return self._connection.await_push()

    def steps(
        self,
        grad_fn: Callable[[PyTree, Any], tuple[Any, PyTree]],
        batches: Iterable[Any],
    ) -> Iterator[Any]:
        """Trains over batches: pull, gradients, push, with all of it overlapped.

        In asynchronous and bounded mode parameters are pulled while gradients of the
        last ones are computed, so that they are one update of this worker older. In
        synchronous mode the next parameters are asked for with the push.

        Args:
          grad_fn: `(params, batch) -> (value, grads)`, as `jax.value_and_grad` makes.
          batches: pytrees of arrays, with samples along the first dimension.

        Yields:
          The value of each step.

        Raises:
          TypeError: `grad_fn` does not return a pair, or `batches` is no iterable.
          ValueError: the arrays of a batch have different first dimensions, or none.
          RuntimeError: see `pull` and `push`.
        """
        option_checks.check_is("batches", batches, Iterable, "an iterable of batches")
        params = self.pull()
        for batch in batches:
            if not self._welcome.is_sync:
                self.prefetch()
            made = grad_fn(params, batch)
            if not isinstance(made, tuple | list) or len(made) != 2:
                raise TypeError(
                    "`grad_fn` must return (value, grads), as `jax.value_and_grad` "
                    f"makes, got {type(made).__name__}."
                )
            value, grads = made
            self.push(grads, num_samples=_count_samples(batch))
            params = self.pull()
            yield value

    def close(self) -> None:
        """Says goodbye; a push that is under way may be lost."""
        self._connection.close()
        while self._lane_files:
            self._lane_files.pop().close()

    def _unpack(self, memory: list[Any]) -> PyTree:
        leaves: list[Any] = [None] * len(self._shards.plan.leaves)
        for shard, source in zip(self._shards.of_server, memory, strict=True):
            # One copy, as the next pull overwrites it; of a CPU, slices become arrays.
            copy = shards.make_memory(shard.layout.num_bytes)
            copy[:] = np.frombuffer(source, np.uint8, copy.size)
            views = shard.layout.views(copy)
            for bucket, view in zip(shard.buckets, views, strict=True):
                end = 0
                for i in bucket:
                    spec = self._shards.plan.leaves[i]
                    leaves[i] = view[end : end + spec.size].reshape(spec.shape)
                    end += spec.size
        treedef = jax.tree.structure(self._template)
        return jax.tree.unflatten(treedef, jax.device_put(leaves, self._device))


def _count_samples(batch: Any) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    lengths = sorted({shape[0] for shape in shapes if shape})
    if len(lengths) != 1:
        found = ", ".join(map(str, lengths)) or "none"
        raise ValueError(
            "The arrays of a batch must have one first dimension, the number of "
            f"samples, got {found}. Leave out what is not per sample, such as a key, "
            "or use `pull` and `push(grads, num_samples=...)`."
        )
    return lengths[0]


class _Packer:
    """Writes gradients into memory, by server, through a hook if there is one."""

    def __init__(self, plan: shards.Shards, hook: CommHook | None):
        self._plan = plan
        self.is_compressed = hook is not None
        self._compressors: list[Compressor] = []
        self._state: list[PyTree] = []
        if hook is not None:
            self._compressors = [Compressor(hook, s.avals) for s in plan.of_server]
            self._state = [c.init() for c in self._compressors]
            self._compress = jax.jit(self._make_sent)

    def find_push_sizes(self) -> list[int]:
        """Returns the bytes that a push has, by server."""
        if self.is_compressed:
            return [c.layout.num_bytes for c in self._compressors]
        return [s.layout.num_bytes for s in self._plan.of_server]

    def find_sizes(self) -> list[int]:
        """Returns the bytes that a push or a pull has, by server."""
        plain = [s.layout.num_bytes for s in self._plan.of_server]
        return [max(pair) for pair in zip(plain, self.find_push_sizes(), strict=True)]

    def pack(self, leaves: list[Any], memory: list[memoryview]) -> bool:
        """Writes; returns whether all of the gradient is finite."""
        if self.is_compressed:
            sent, self._state, is_finite = self._compress(leaves, self._state)
            for one, compressor, into in zip(
                sent, self._compressors, memory, strict=True
            ):
                views = compressor.layout.views(into)
                for x, view in zip(one, views, strict=True):
                    view[...] = np.asarray(x)
            return bool(is_finite)
        if jax.default_backend() != "cpu":  # There, arrays are read where they lie.
            leaves = jax.device_get(leaves)
        is_finite = True
        for shard, into in zip(self._plan.of_server, memory, strict=True):
            views = shard.layout.views(into)
            shards.copy_leaves(shard, leaves, views)
            is_finite = is_finite and all(map(shards.is_finite, views))
        return is_finite

    def _make_sent(
        self, leaves: list[jax.Array], states: list[PyTree]
    ) -> tuple[list[list[jax.Array]], list[PyTree], jax.Array]:
        is_finite = _are_finite(leaves)
        sent, new_states = [], []
        for shard, compressor, state in zip(
            self._plan.of_server, self._compressors, states, strict=True
        ):
            packed = [
                buckets.pack([leaves[i] for i in bucket]) for bucket in shard.buckets
            ]
            one, new = compressor.compress(packed, state)
            # A narrow dtype may overflow where the gradient does not.
            is_finite &= _are_finite(one)
            sent.append(one)
            new_states.append(new)
        # What is not finite is not kept, to be sent again and again.
        kept = jax.tree.map(
            lambda a, b: jnp.where(is_finite, a, b), new_states, list(states)
        )
        return sent, kept, is_finite


def _are_finite(arrays: list[jax.Array]) -> jax.Array:
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.asarray([jnp.isfinite(x).all() for x in floats], bool))


def _memory_of(shared: Lane | None, num_bytes: int) -> memoryview:
    if shared is not None:
        return shared.pushed[:num_bytes]
    return memoryview(bytearray(num_bytes))


def _make_hellos(
    place: Place,
    plan: shards.Shards,
    files: list[LaneFile | None],
    hook: CommHook | None,
) -> list[Hello]:
    session = os.urandom(16)
    process = f"process {os.getpid()} on {socket.gethostname()}"
    leaves = shards.describe_leaves(plan.plan)
    return [
        Hello(
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
