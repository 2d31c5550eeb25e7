"""Submission: from the arrays of a call to requests of the engine, and back."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from typing_extensions import TypeVar

from jdp.eager import argument_types, numerics, results, session
from jdp.eager.diagnosis.flight_recorder import Record
from jdp.eager.engine import Engine
from jdp.eager.entries import Entry
from jdp.eager.execution import small_tensors
from jdp.eager.messages import (
    HAS_LOCAL_FIRST,
    OPS,
    SCALAR,
    Kind,
    Request,
    Spec,
    encode_spec,
)
from jdp.eager.process_set import ProcessSet
from jdp.trees import tree_paths
from jdp.types import PyTree

R = TypeVar("R", default=Any)
_finishing = threading.RLock()  # threads and signal handlers may ask for one result.
_MAX_KNOWN = 1 << 12  # cached options, and cached tensors for each of them.


class Handle(Generic[R]):
    """An operation under way; functions whose names end in `_async` return it."""

    __slots__ = ("_entries", "_finish", "_value", "_is_read")

    def __init__(
        self, entries: Sequence[Entry], finish: Callable[[list[Any]], R]
    ) -> None:
        self._entries = entries
        self._finish = finish
        self._value: Any = None
        self._is_read = False

    def is_done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return all([entry.is_done for entry in self._entries]) or session.is_forked()

    def result(self, timeout_s: float | None = None) -> R:
        """Returns the result; all threads get the same object. See `synchronize`."""
        if timeout_s is not None:
            timeout_s = argument_types.check_timeout(timeout_s)
        entries = self._entries  # Read first: they are dropped after `_is_read` is set.
        if not self._is_read:
            value = self._finish(session.wait_for(entries, timeout_s))
            with _finishing:
                if not self._is_read:
                    self._value, self._is_read = value, True
                    self._entries = ()
        return self._value


class _TensorKind(NamedTuple):
    """Facts that all tensors of one dtype and shape share; cached."""

    spec: bytes  # see `Request`.
    local: tuple[int, ...]
    dtype: str
    num_bytes: int
    is_small: bool  # see `small_tensors`.
    is_cast: bool  # whether they are sent in another dtype.


class CallOptions:
    """Options shared by the tensors of a call; checked once per engine."""

    def __init__(self, engine: Engine, arguments: "CollectiveArguments", set_id: int):
        self.engine = engine
        self.arguments = arguments
        self.set_id = set_id
        self.group = (set_id, arguments.group) if arguments.group else None
        wire = arguments.wire_dtype
        self.wire = None if wire is None else jnp.dtype(wire)
        # By dtype, shape, `local`, and platform where it is not numpy's.
        self.kinds: dict[Any, _TensorKind] = {}


class CollectiveArguments(NamedTuple):
    """Arguments of a call except name and tensors."""

    kind: Kind
    process_set: ProcessSet
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    wire_dtype: Any = None  # dtype in which wider floats are sent.
    root: int = -1
    group: str = ""
    group_size: int = 0


def find_options(engine: Engine, *arguments: Any) -> CallOptions:
    """Returns the options of a call, for the fields of `CollectiveArguments`.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: this process is not in the set, there is no such set, or an argument
        is out of range.
      NotImplementedError: adasum of a process set, or of a number of processes that is
        not a power of two.
    """
    known = engine.known_options
    # With their types, since equal arguments may differ in type, as 1 and True do.
    key = (arguments, *map(type, arguments))
    try:
        options = known.get(key)
    except TypeError:  # An argument such as an array has no hash.
        key, options = None, None
    if options is None:
        checked = _check_types(CollectiveArguments(*arguments))
        options = known.get(checked) or _make_options(engine, checked)
        if len(known) > _MAX_KNOWN:
            known.clear()
        known[checked] = options
        if key is not None:
            known[key] = options
    return options


def _check_types(arguments: CollectiveArguments) -> CollectiveArguments:
    """Returns the same arguments in plain types."""
    check_set(arguments.process_set)
    wire = arguments.wire_dtype
    return arguments._replace(
        op=argument_types.check_op(arguments.op),
        prescale=argument_types.check_factor(arguments.prescale, "prescale"),
        postscale=argument_types.check_factor(arguments.postscale, "postscale"),
        wire_dtype=None
        if wire is None
        else argument_types.check_dtype(wire, "wire_dtype"),
        root=argument_types.check_integer(arguments.root, "root"),
        group=argument_types.check_name(arguments.group),
    )


def check_set(process_set: Any) -> None:
    """Raises TypeError if `process_set` is not a `ProcessSet`."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            "`process_set` must be a set from `jdp.eager.add_process_set`, got "
            f"{process_set!r}."
        )


def _make_options(engine: Engine, arguments: CollectiveArguments) -> CallOptions:
    set_id = find_set(engine, arguments.kind, arguments.process_set)
    allowed = OPS.get(arguments.kind, ("",))
    if arguments.op not in allowed:
        raise ValueError(
            f"`op` of {arguments.kind} must be one of {', '.join(allowed)}, got "
            f"{arguments.op!r}."
        )
    for name, factor in (
        ("prescale", arguments.prescale),
        ("postscale", arguments.postscale),
    ):
        if not math.isfinite(factor):
            raise ValueError(f"`{name}` must be finite, got {factor}.")
    if arguments.op == "adasum" and set_id != 0:
        raise NotImplementedError(
            "Adasum does not support process sets other than the global one."
        )
    if arguments.op == "adasum" and engine.size & (engine.size - 1):
        raise NotImplementedError(
            f"Adasum needs a power of two of processes, got {engine.size}."
        )
    if (
        arguments.kind == "broadcast"
        and arguments.root not in arguments.process_set.ranks
    ):
        raise ValueError(
            f"`root={arguments.root}` is not in the process set, which has the ranks "
            f"{list(arguments.process_set.ranks)}."
        )
    options = CallOptions(engine, arguments, set_id)
    if options.wire is not None and not jnp.issubdtype(options.wire, jnp.floating):
        raise ValueError(f"`wire_dtype` must be a floating dtype, got {options.wire}.")
    return options


def find_set(engine: Engine, kind: Kind, process_set: ProcessSet) -> int:
    """Returns the number of a process set.

    Raises:
      ValueError: this process is not in the set, or there is no such set.
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


def find_place(kind: Kind, process_set: ProcessSet) -> int:
    """Returns the position of this process in a set; raises as `find_options`."""
    check_set(process_set)
    engine = session.current_engine()
    find_set(engine, kind, process_set)
    return process_set.ranks.index(engine.rank)


def gradient_factor(
    op: str, prescale: Any, postscale: Any, process_set: ProcessSet
) -> float:
    """Returns the factor for the gathered gradient of a reduce-scatter."""
    check_set(process_set)
    factor = argument_types.check_factor(prescale, "prescale")
    factor *= argument_types.check_factor(postscale, "postscale")
    return factor * (len(process_set.ranks) if op == "sum" else 1)


def submit_tree(options: CallOptions, name: str | None, tree: PyTree) -> Handle[Any]:
    """Submits all leaves of a tree at once."""
    if name is None:
        with session.numbered(options.arguments.kind, options.set_id) as name:
            return submit_tree(options, name, tree)
    name = argument_types.check_name(name)
    if type(tree) is np.ndarray and options.wire is None:  # The most common input.
        kind = options.kinds.get((tree.dtype, tree.shape, ()))
        if kind is None:
            entry = make_entry(options, name, argument_types.check_array(tree, name))
        else:
            entry = _make_entry(options, name, tree, kind)
        options.engine.submit((entry,))
        return Handle((entry,), _take_one)
    if isinstance(tree, np.ndarray | jax.Array):
        array = argument_types.check_array(tree, name)
        kind = results.kind_of(array)
        entries = (make_entry(options, name, array),)
        options.engine.submit(entries)
        return Handle(entries, lambda values: results.restore(values[0], kind))
    leaves, treedef = jax.tree.flatten(tree)
    names = [
        name if path == "(root)" else argument_types.check_name(name + path)
        for path in tree_paths.leaf_paths(tree)
    ]
    arrays = [
        argument_types.check_array(x, each)
        for x, each in zip(leaves, names, strict=True)
    ]
    entries = [
        make_entry(options, each, array)
        for each, array in zip(names, arrays, strict=True)
    ]
    kinds = [results.kind_of(array) for array in arrays]
    if entries:
        options.engine.submit(entries)

    def finish(values: list[Any]) -> PyTree:
        restored = [
            results.restore(value, kind)
            for value, kind in zip(values, kinds, strict=True)
        ]
        return jax.tree.unflatten(treedef, restored)

    return Handle(entries, finish)


def make_entry(
    options: CallOptions, name: str, array: Any, local: tuple[int, ...] = ()
) -> Entry:
    """Returns the entry of one tensor."""
    dtype, shape, kinds = array.dtype, array.shape, options.kinds
    is_jax = isinstance(array, jax.Array)
    if is_jax:
        key = (dtype, shape, local, _device_of(array))
    else:
        key = (dtype, shape, local)
    kind = kinds.get(key)
    if kind is None:
        if len(kinds) == _MAX_KNOWN:
            kinds.clear()
        kind = kinds[key] = _make_kind(options, name, array, local)
    if kind.is_cast:
        assert options.wire is not None
        array = results.cast(array, options.wire)
    if is_jax:
        array = _own_part(array)
    return _make_entry(options, name, array, kind)


def _make_entry(
    options: CallOptions, name: str, array: Any, kind: _TensorKind
) -> Entry:
    arguments = options.arguments
    record = Record(
        name,
        arguments.kind,
        kind.dtype,
        array.shape,
        options.set_id,
        arguments.op,
        kind.num_bytes,
        -1,
        time.perf_counter(),
    )
    request = Request(name, kind.spec, options.set_id, kind.local)
    return Entry(request, record, array, None, kind.is_small, options.group)


def _make_kind(
    options: CallOptions, name: str, array: Any, local: tuple[int, ...]
) -> _TensorKind:
    """Returns the kind of a tensor.

    Raises:
      TypeError: the operation is not defined for the dtype; the text has the `name`.
    """
    arguments, dtype, shape = options.arguments, array.dtype, tuple(array.shape)
    if arguments.kind in OPS and dtype.kind == "b":
        raise TypeError(
            f"`{name}`: bools cannot be reduced; cast them to uint8, for example."
        )
    if arguments.op in ("min", "max") and dtype.kind == "c":
        raise TypeError(f"`{name}`: `op={arguments.op!r}` is not defined for {dtype}.")
    if arguments.op == "adasum" and not (
        jnp.issubdtype(dtype, jnp.floating) and numerics.has_zero(dtype)
    ):
        raise TypeError(
            f"`{name}` must be floating, with a zero, for `op='adasum'`, got {dtype}."
        )
    is_cast, wire = False, options.wire
    if wire is not None and _is_wider(dtype, wire):
        is_cast, dtype = True, wire
    if arguments.kind in HAS_LOCAL_FIRST:
        local = local or shape[:1]
        shape = shape[1:] if shape else SCALAR  # The coordinator refuses it.
    spec = Spec(
        arguments.kind,
        dtype.name,
        shape,
        _device_of(array),
        arguments.op,
        float(arguments.prescale),
        float(arguments.postscale),
        arguments.root,
        arguments.group,
        arguments.group_size,
    )
    return _TensorKind(
        encode_spec(spec),
        local,
        array.dtype.name,
        array.nbytes,
        small_tensors.is_small(spec, array.size * dtype.itemsize),
        is_cast,
    )


def _is_wider(dtype: np.dtype, wire: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > wire.itemsize


def _device_of(array: Any) -> str:
    if isinstance(array, np.ndarray):
        return "cpu"
    (device, *_) = array.devices()
    return device.platform


def _own_part(array: jax.Array) -> Any:
    """Returns a numpy view on CPU, and this process's part on other devices."""
    if _device_of(array) == "cpu":
        return np.asarray(array)
    return array if array.is_fully_addressable else array.addressable_data(0)


def _take_one(values: list[Any]) -> Any:
    return values[0]


def started(record: Record) -> Record:
    """Sets the submission time of a record; returns the record."""
    record.submitted_s = time.perf_counter()
    return record
