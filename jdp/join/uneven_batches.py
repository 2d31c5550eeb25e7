"""Uneven batches: how does a loop go on while any process has data?"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic

import jax
import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from jdp.join import batch_spec
from jdp.join.early_exit import ExitWatch
from jdp.join.read_ahead import ReadAhead
from jdp.join.rounds import Rounds
from jdp.replicas import mesh, world_end
from jdp.replicas.mesh import World
from jdp.runtime import forks
from jdp.types import PyTree

B = TypeVar("B", default=Any)


def join_batches(
    batches: Iterable[B],
    *,
    world: World,
    prefetch: int = 8,
    like: PyTree | None = None,
) -> "UnevenBatches[B]":
    """Iterates over `batches` for as long as any process has one left.

    Every process must call it, in the same order relative to other calls that all
    processes make. All get the same number of iterations, the largest number of batches
    of any process. At each iteration all get the same shapes, so they can run one
    compiled step together. A batch smaller than the largest one is padded with zeros at
    its end; a process without data gets only zeros. The number of samples never shrinks
    within the loop, so a smaller last batch compiles no new program.

        for batch, weight in jdp.join_batches(loader, world=world):
            state, loss = train_step(state, batch, weight)

    and in the step `jdp.value_and_grad(loss_fn, weight=weight.sum())(params, batch,
    weight)`. A step without the weight counts padding as samples. Nothing runs on
    devices here. The thread that reads ahead copies host arrays, so a loader can write
    all its batches to the same memory.

    Leave the loop on all processes at the same iteration, or on none. If one process
    leaves alone, by `break` or an exception, the others raise RuntimeError. A process
    that waits for it in a collective for `world.timeout_s` is ended with a message.

    Args:
      batches: the batches of this process, possibly none: pytrees of numeric arrays or
        arrays of PRNG keys, shape (n, ...), with the same n in all leaves of a batch.
        The structure, dtypes and trailing shapes must be the same on all processes at
        each iteration. Padding keys have zero data.
      world: the world that `jdp.init` returned.
      prefetch: number of batches to read ahead, at least 1. Processes agree about once
        per `3 * prefetch / 4` iterations: a larger number sends fewer messages.
      like: an example batch of arrays or `jax.ShapeDtypeStruct`s. Only needed if a
        process may have no batch at all and batches contain containers other than
        dict, list, tuple, namedtuple and None.

    Returns:
      An iterator of (batch, weight); `weight` is float32, shape (samples,), 1 per true
      sample and 0 for padding. `close()` ends it early.

    Raises:
      ValueError: `prefetch` is below 1.
      TypeError: `batches` is not iterable, or is a dict, which is one batch.
      RuntimeError: while iterating, on all processes at the same iteration. Reading
        failed on another process (the failing process raises its own exception), specs
        differ, or a process has not come or not read a batch within `world.timeout_s`.
    """
    mesh.check_world(world)
    if prefetch < 1:
        raise ValueError(f"`prefetch` must be at least 1, got {prefetch}.")
    if isinstance(batches, Mapping):
        raise TypeError(
            "`batches` is a dict, and iterating over a dict yields its keys. Pass a "
            "list of batches; for one batch, `[batch]`."
        )
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"`batches` must be iterable, got {type(batches).__name__}. Pass a list, a "
            "generator, or a data loader."
        )
    return UnevenBatches(batches, world, prefetch, like)


class UnevenBatches(Generic[B]):
    """The iterator that `join_batches` returns."""

    def __init__(
        self,
        batches: Iterable[B],
        world: World,
        prefetch: int,
        like: PyTree | None,
    ):
        """Use `join_batches`."""
        index = 0 if world.store is None else world.store.next_round()
        directory = f"jdp/join/{index}"
        self._rounds = Rounds(world, index, directory)
        self._watch = ExitWatch(
            world, directory, loop="the loop over `jdp.join_batches`"
        )
        self._read_ahead = ReadAhead(batches, world, prefetch, like, self._rounds)
        self._weights: dict[tuple[int, int], np.ndarray] = {}
        self._zeros: dict[tuple[int, int], list[np.ndarray]] = {}
        # Threads hold `ReadAhead`, never this object, so it is closed when a `for` loop
        # drops it. At exit it is closed before the hooks of `jax.distributed` and
        # `jdp.init` run, which were registered earlier.
        self._closer = closer = _Closer()
        self._close = weakref.finalize(
            self,
            forks.only_here(_shut_down),
            *(self._read_ahead, self._watch, self._rounds, closer),
        )
        self._close.atexit = False
        closer.register(self._close)

    def __iter__(self) -> "UnevenBatches[B]":
        return self

    def __next__(self) -> tuple[B, NDArray[np.float32]]:
        try:
            if not self._close.alive:
                raise StopIteration
            step = self._read_ahead.take(self._watch)
        except BaseException as error:
            self._closer.reason = _as_reason(error)
            self.close()
            raise
        samples, spec, batch = step
        if batch is None:
            leaves = self._make_zeros(samples, spec)
            treedef = self._read_ahead.treedefs[spec]
            return jax.tree.unflatten(treedef, leaves), self._make_weight(samples, 0)
        weight = self._make_weight(samples, batch.num_samples)
        return batch_spec.pad_batch(batch, samples), weight

    def close(self) -> None:
        """Ends the loop on this process and stops its threads.

        Notifies the other processes, unless the loop has ended on all.
        """
        self._close()

    def _make_weight(self, samples: int, num_true: int) -> np.ndarray:
        """Returns the weights; read-only, since weights of full batches are reused."""
        weight = self._weights.get((samples, num_true))
        if weight is None:
            weight = (np.arange(samples) < num_true).astype(np.float32)
            weight.setflags(write=False)
            if num_true in (0, samples):
                self._weights[samples, num_true] = weight
        return weight

    def _make_zeros(self, samples: int, spec: int) -> list[np.ndarray]:
        leaves = self._zeros.get((samples, spec))
        if leaves is None:
            leaves = batch_spec.make_zeros(self._read_ahead.specs[spec], samples)
            self._zeros = {(samples, spec): leaves}  # Sizes only grow: keep the last.
        return leaves


class _Closer:
    """Closes a loop that is open at exit, with the reason if it is known."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._close: Callable[[], Any] | None = None

    def register(self, close: Callable[[], Any]) -> None:
        self._close = close
        world_end.register(self._run)

    def unregister(self) -> None:
        world_end.unregister(self._run)

    def _run(self) -> None:
        assert self._close is not None
        error = getattr(sys, "last_value", None)  # The uncaught exception.
        if error is not None:
            self.reason = _as_reason(error)
        self._close()


def _shut_down(
    read_ahead: ReadAhead, watch: ExitWatch, rounds: Rounds, closer: _Closer
) -> None:
    closer.unregister()
    if read_ahead.has_ended:
        watch.close()
    else:
        watch.leave(closer.reason)
    read_ahead.stop()
    rounds.finish()


def _as_reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
