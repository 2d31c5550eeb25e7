"""Requests: from the arrays of a call to what the engine takes, and back."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdp import buckets
from jdp.eager import session
from jdp.eager.engine import Engine
from jdp.eager.entry import Entry
from jdp.eager.flight_recorder import Record
from jdp.eager.messages import Kind, Request, Spec, encode_spec
from jdp.eager.mismatch import SCALAR
from jdp.eager.process_set import ProcessSet
from jdp.types import PyTree

_MAX_KNOWN = 1 << 16  # encoded requests that are kept.
# Of these kinds the first dimension may differ between ranks.
_HAS_LOCAL_FIRST = ("all_gather", "all_to_all")


class Handle:
    """An operation that is under way; see `synchronize` and `poll`."""

    __slots__ = ("_entries", "_finish", "_value", "_is_read")

    def __init__(
        self, entries: Sequence[Entry], finish: Callable[[list[Any]], Any]
    ) -> None:
        """Use the functions whose names end in `_async`."""
        self._entries = entries
        self._finish = finish
        self._value: Any = None
        self._is_read = False

    def is_done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return all([entry.is_done for entry in self._entries])

    def result(self, timeout_s: float | None = None) -> Any:
        """Returns the result; see `synchronize`."""
        if not self._is_read:
            self._value = self._finish(session.wait_for(self._entries, timeout_s))
            self._entries, self._is_read = (), True
        return self._value


class Options(NamedTuple):
    """What a call says of all its tensors."""

    kind: Kind
    engine: Engine
    set_id: int
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    group: str = ""
    group_size: int = 0
    wire: np.dtype | None = None  # what wider floats travel as.


def find_set(engine: Engine, kind: Kind, process_set: ProcessSet) -> int:
    """Returns the number of a set that this process is in.

    Raises:
      ValueError: it is not in it, or there is no such set.
    """
    set_id = process_set.process_set_id
    if set_id == 0:
        return 0
    if set_id is None or engine.executor.known_sets.get(set_id) != process_set.ranks:
        raise ValueError(
            f"{kind}: the process set {list(process_set.ranks)} does not exist, or has "
            "been removed. Add it with `jdp.eager.add_process_set`, on all processes."
        )
    if engine.rank not in process_set.ranks:
        raise ValueError(
            f"{kind}: rank {engine.rank} is not a member of the process set "
            f"{list(process_set.ranks)}."
        )
    return set_id


def check_op(options: Options, allowed: Sequence[str]) -> None:
    """Raises where a reduction is not one of those allowed, or cannot be scaled so."""
    op = options.op
    if op not in allowed:
        raise ValueError(
            f"`op` of {options.kind} must be one of {', '.join(allowed)}, got {op!r}."
        )
    for field in ("prescale", "postscale"):
        value = getattr(options, field)
        if not math.isfinite(value):
            raise ValueError(f"`{field}` must be finite, got {value}.")
    if op == "adasum" and options.set_id != 0:
        raise NotImplementedError(
            "Adasum does not support process sets other than that of all."
        )
    size = options.engine.size
    if op == "adasum" and size & (size - 1):
        raise NotImplementedError(
            f"Adasum needs a power of two of processes, got {size}."
        )


def wire_dtype(compression: Any) -> np.dtype:
    """Returns the dtype that floats are sent as; ValueError if it is none of floats."""
    dtype = jnp.dtype(compression)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`compression` must be a floating dtype, got {dtype}.")
    return dtype


def check_splits(array: Any, splits: Any, count: int) -> tuple[int, ...]:
    """Returns how many rows of an array go to each of `count` processes."""
    if array.ndim == 0:
        return ()  # All ranks hear of it from the coordinator.
    num_rows = array.shape[0]
    if splits is None:
        if num_rows % count:
            raise ValueError(
                f"`splits` is not given, but the {num_rows} rows do not divide among "
                f"the {count} processes."
            )
        return (num_rows // count,) * count
    splits = np.asarray(splits)
    if splits.ndim != 1 or splits.dtype.kind not in "iu":
        raise ValueError(
            "`splits` must be integers, shape (k,), got "
            f"{splits.dtype}{list(splits.shape)}."
        )
    if splits.size != count:
        raise ValueError(
            f"`splits` must have an entry for each of the {count} processes, got "
            f"{splits.size}."
        )
    if (splits < 0).any() or splits.sum() > num_rows:
        raise ValueError(
            f"`splits` must be at least 0, and no more than the {num_rows} rows of the "
            f"array together, got {splits.tolist()}."
        )
    return tuple(splits.tolist())


def submit_tree(options: Options, name: str | None, tree: PyTree) -> Handle:
    """Submits all leaves of a tree at once."""
    if name is None:
        name = session.next_name(options.kind, options.set_id)
    if isinstance(tree, np.ndarray | jax.Array):  # What most calls give.
        array = as_array(tree)
        entry = make_entry(options, name, array)
        options.engine.submit((entry,))
        return Handle((entry,), functools.partial(_restore_one, array, options.wire))
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [as_array(leaf) for leaf in leaves]
    entries = [
        make_entry(options, name + ("" if path == "(root)" else path), array)
        for path, array in zip(buckets.leaf_paths(tree), arrays, strict=True)
    ]
    if entries:
        options.engine.submit(entries)

    def finish(values: list[Any]) -> PyTree:
        restored = [
            restore(value, array, options.wire)
            for value, array in zip(values, arrays, strict=True)
        ]
        return jax.tree.unflatten(treedef, restored)

    return Handle(entries, finish)


def as_array(leaf: Any) -> Any:
    """Returns a leaf as an array of numpy or JAX.

    Raises:
      TypeError: it is no array of numbers.
      ValueError: it is a global array that is split over the processes.
    """
    if isinstance(leaf, np.ndarray):
        array = leaf
    elif isinstance(leaf, jax.core.Tracer):
        raise TypeError(
            "An eager collective was called while JAX traces. It runs on the host; "
            "inside of `jit` use `jdp.data_parallel`, `jdp.sync_gradients` or "
            "`jdp.collectives`."
        )
    elif isinstance(leaf, jax.Array):
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError(
                f"A leaf, {leaf.dtype}{list(leaf.shape)}, is split over the processes; "
                "give what this process has of it."
            )
        return leaf
    else:
        array = np.asarray(leaf)
    if array.dtype.kind not in "iufcb" and not jnp.issubdtype(array.dtype, jnp.number):
        raise TypeError(f"A leaf must be an array of numbers, got {array.dtype}.")
    return array


def make_entry(
    options: Options, name: str, array: Any, local: tuple[int, ...] = ()
) -> Entry:
    """Makes the request of one tensor."""
    known = _Known.of(options.engine)
    dtype, shape = array.dtype, array.shape
    key = (name, options[2:], options.kind, dtype, shape, local, type(array))
    request = known.get(key)
    if request is None:
        if len(known) == _MAX_KNOWN:
            known.clear()
        request = known[key] = _make_request(options, name, array, local)
    wire = options.wire
    if wire is not None and _is_wider(dtype, wire):
        array = array.astype(wire)
    if isinstance(array, jax.Array):
        array = _own_part(array)
    record = Record(
        name,
        options.kind,
        dtype.name,
        shape,
        options.set_id,
        options.op,
        array.nbytes,
        submitted_s=time.perf_counter(),
    )
    return Entry(request, record, array=array)


class _Known:
    """Encoded requests, which come over and over, of the engine that runs."""

    engine: Engine | None = None
    requests: dict[Any, Request] = {}

    @classmethod
    def of(cls, engine: Engine) -> dict[Any, Request]:
        """Returns those of an engine."""
        if cls.engine is not engine:
            cls.engine, cls.requests = engine, {}
        return cls.requests


def _make_request(
    options: Options, name: str, array: Any, local: tuple[int, ...]
) -> Request:
    dtype, shape = array.dtype, tuple(array.shape)
    is_reduced = options.kind in ("all_reduce", "reduce_scatter")
    if is_reduced and dtype.kind == "b":
        raise TypeError(
            f"`{name}`: bools cannot be reduced; cast them to uint8, for example."
        )
    if options.op in ("min", "max") and dtype.kind == "c":
        raise TypeError(f"`{name}`: `op={options.op!r}` is not defined for {dtype}.")
    if options.op == "adasum" and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`{name}` must be floating for `op='adasum'`, got {dtype}.")
    if options.wire is not None and _is_wider(dtype, options.wire):
        dtype = options.wire
    if options.kind in _HAS_LOCAL_FIRST:
        local = local or shape[:1]
        shape = shape[1:] if shape else SCALAR  # It is refused on all ranks.
    spec = Spec(
        options.kind,
        dtype.name,
        shape,
        _device_of(array),
        options.op,
        options.prescale,
        options.postscale,
        options.root,
        options.group,
        options.group_size,
    )
    return Request(name, encode_spec(spec), options.set_id, local)


def _is_wider(dtype: np.dtype, wire: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > wire.itemsize


def _device_of(array: Any) -> str:
    if isinstance(array, np.ndarray):
        return "cpu"
    (device, *_) = array.devices()
    return device.platform


def restore(value: Any, given: Any, wire: np.dtype | None) -> Any:
    """Returns a result as the kind of array that was given, with its dtype."""
    if wire is not None and value.dtype != given.dtype:
        value = value.astype(given.dtype)
    if isinstance(given, np.ndarray):
        return value
    if given.is_fully_addressable:
        return jax.device_put(value, given.sharding)
    # A copy on each device; `device_put` would ask the other processes.
    return jax.make_array_from_callback(
        given.shape, given.sharding, lambda index: value[index]
    )


def _own_part(array: jax.Array) -> Any:
    """What numpy can read on CPU; on other devices the array of this process."""
    if _device_of(array) == "cpu":
        return np.asarray(array)
    return array if array.is_fully_addressable else array.addressable_data(0)


def _restore_one(given: Any, wire: np.dtype | None, values: list[Any]) -> Any:
    return restore(values[0], given, wire)


def started(record: Record) -> Record:
    """Notes when a request was made."""
    record.submitted_s = time.perf_counter()
    return record
