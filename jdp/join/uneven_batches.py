"""Uneven batches: a loop that goes on while any process has data."""

import atexit
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jdp.join import batch_spec
from jdp.join.early_exit import ExitWatch
from jdp.join.read_ahead import ReadAhead
from jdp.join.rounds import Rounds
from jdp.replicas import mesh
from jdp.replicas.mesh import World
from jdp.runtime import forks
from jdp.types import PyTree


def join_batches(
    batches: Iterable[PyTree],
    *,
    world: World,
    prefetch: int = 8,
    like: PyTree | None = None,
) -> "UnevenBatches":
    """Iterates over `batches` for as long as any process has one left.

    Every process calls it, in the same order as other things that all processes do, and
    gets the same number of iterations: the largest number of batches of a process. At
    each iteration all get the same shapes, so that they can run one compiled step
    together. A batch that is smaller than the largest one is padded with zeros at its
    end; a process that has run out gets nothing but zeros. The number of samples never
    shrinks within the loop, so that a smaller last batch compiles no new program.

        for batch, weight in jdp.join_batches(loader, world=world):
            state, loss = train_step(state, batch, weight)

    and in the step `jdp.value_and_grad(loss_fn, weight=weight.sum())(params, batch,
    weight)`. A step that leaves the weight out takes padding for samples. Nothing
    runs on the devices here. Host arrays are copied as they are read, in the thread
    that reads ahead: a loader may write all its batches to the same memory.

    Leave the loop on all processes at the same iteration, or on none. If one process
    leaves alone, by `break` or an exception, the others raise RuntimeError, or end with
    a message if they wait for that process in a collective for `world.timeout_s`.

    Args:
      batches: this process' batches, which may be none: pytrees of numeric arrays or
        arrays of PRNG keys, shape (n, ...), with the same n in all leaves of a batch.
        The structure, dtypes and trailing shapes must be the same on all processes at
        each iteration. Keys are padded with keys whose data is 0.
      world: the replicas.
      prefetch: how many batches are read ahead, at least 1. Processes agree about once
        in `3 * prefetch / 4` iterations: more makes fewer messages.
      like: an example batch, of arrays or `jax.ShapeDtypeStruct`s. Only needed where a
        process may have no batch at all and batches have nodes of types other than
        dict, list, tuple, namedtuple and None.

    Returns:
      An iterator of (batch, weight); `weight` is float32, shape (samples,), 1 for a
      true sample and 0 for padding. `close()` ends it early.

    Raises:
      ValueError: `prefetch` is below 1.
      TypeError: `batches` is not iterable, or is a dict, which is one batch.
      RuntimeError: while iterating, on all processes at the same iteration: reading
        failed on another process (the one where it failed raises what it caught), specs
        differ, a process has not read a batch or not come within `world.timeout_s`.
    """
    mesh.check_world(world)
    if prefetch < 1:
        raise ValueError(f"`prefetch` must be at least 1, got {prefetch}.")
    if isinstance(batches, Mapping):
        raise TypeError(
            "`batches` is a dict, of which an iteration gives the keys. Pass a list of "
            "batches; of one, `[batch]`."
        )
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"`batches` must be iterable, got {type(batches).__name__}. Pass a list, a "
            "generator, or a data loader."
        )
    return UnevenBatches(batches, world, prefetch, like)


class UnevenBatches:
    """The iterator that `join_batches` returns."""

    def __init__(
        self,
        batches: Iterable[PyTree],
        world: World,
        prefetch: int,
        like: PyTree | None,
    ):
        """Use `join_batches`."""
        number = 0 if world.store is None else world.store.next_round()
        directory = f"jdp/join/{number}"
        self._rounds = Rounds(world, directory)
        self._watch = ExitWatch(
            world, directory, loop="the loop over `jdp.join_batches`"
        )
        self._read_ahead = ReadAhead(batches, world, prefetch, like, self._rounds)
        self._weights: dict[tuple[int, int], np.ndarray] = {}
        self._zeros: dict[tuple[int, int], list[np.ndarray]] = {}
        # Threads hold `ReadAhead`, never this object: when a `for` loop drops it, it
        # is closed. At exit it is closed before `jax.distributed`, and before
        # `jdp.init`'s own hook, which were both registered earlier.
        self._closer = closer = _Closer()
        self._close = weakref.finalize(
            self,
            forks.only_here(_shut_down),
            *(self._read_ahead, self._watch, self._rounds, closer),
        )
        self._close.atexit = False
        closer.register(self._close)

    def __iter__(self) -> "UnevenBatches":
        """Returns itself."""
        return self

    def __next__(self) -> tuple[PyTree, np.ndarray]:
        """Returns the batch and the weights of the next iteration."""
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

        The other processes are told, unless the loop has ended for all.
        """
        self._close()

    def _make_weight(self, samples: int, num_true: int) -> np.ndarray:
        """Returns the weights; read-only, since those of full batches are reused."""
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
            self._zeros = {(samples, spec): leaves}  # Marks grow; the last is enough.
        return leaves


class _Closer:
    """Closes a loop that the end of the program finds open; knows why, at times."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._close: Callable[[], Any] | None = None

    def register(self, close: Callable[[], Any]) -> None:
        self._close = close
        atexit.register(self._run)

    def unregister(self) -> None:
        atexit.unregister(self._run)

    def _run(self) -> None:
        assert self._close is not None
        error = getattr(sys, "last_value", None)  # It was not caught.
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
