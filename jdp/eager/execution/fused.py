"""Fused operations: from the tensors of one member to its results.

Fused tensors are sent as one flat array. A rank that has joined contributes the neutral
element of the reduction.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdp.collectives.base import Op
from jdp.eager import numerics
from jdp.eager.execution import small_tensors
from jdp.eager.execution.base import Array, Implementation, SetMembers
from jdp.eager.messages import Spec

# Tensors that are smaller on average are packed into one buffer. Larger ones are
# reduced one after another in place, which saves a copy.
_PACKED_BYTES = 4096
# Results of a buffer of up to this size are views of one copy: a caller that keeps one
# of them keeps all of them alive.
_SHARED_BYTES = 1 << 16
_MAX_LAYOUTS = 256
_ALIGNMENT = 64  # bytes; XLA's alignment of buffers on CPU.
_Reduce = Callable[[list[Array], Op], list[Array]]  # `Implementation.all_reduce`.


class FusedJob(NamedTuple):
    """Fused batch of operations of one kind, as seen by this member.

    Attributes:
      specs: by tensor, the agreed spec.
      locals: by tensor and member, `Request.local`; () for kinds without it.
      arrays: by tensor, the array of this member; None if it has joined.
    """

    specs: Sequence[Spec]
    locals: Sequence[tuple[tuple[int, ...], ...]]
    arrays: Sequence[Array | None]


class _Layout(NamedTuple):
    """Positions of tensors in a packed buffer."""

    size: int
    # With the shape; None: it is flat.
    places: list[tuple[slice, tuple[int, ...] | None]]


class Scratch:
    """Reusable buffers by dtype, and layouts of tensors in them."""

    def __init__(self) -> None:
        self._buffers: dict[np.dtype, np.ndarray] = {}
        self._layouts: dict[tuple[tuple[int, ...], ...], _Layout] = {}
        self.marks: list[tuple[str, float]] | None = None  # None: not recorded.

    def mark(self, phase: str) -> None:
        """Records, for the timeline, the end of a phase that began at the last mark.

        Args:
          phase: its name; "": no phase ends, but the next one begins.
        """
        if self.marks is not None:
            self.marks.append((phase, time.perf_counter()))

    def take(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Returns an uninitialized array, (size,), valid until the next call."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[dtype] = np.empty(size, dtype)
        return buffer[:size]

    def lay_out(self, shapes: tuple[tuple[int, ...], ...]) -> _Layout:
        """Returns where tensors of these shapes are in a buffer."""
        layout = self._layouts.get(shapes)
        if layout is None:
            if len(self._layouts) == _MAX_LAYOUTS:
                self._layouts.clear()
            sizes = [math.prod(shape) for shape in shapes]
            ends = list(itertools.accumulate(sizes))
            places = [
                (slice(end - size, end), None if len(shape) == 1 else shape)
                for size, end, shape in zip(sizes, ends, shapes, strict=True)
            ]
            layout = self._layouts[shapes] = _Layout(ends[-1], places)
        return layout


def run(
    job: FusedJob, implementation: Implementation, members: SetMembers, scratch: Scratch
) -> list[Any]:
    """Runs a job together with the other members.

    Args:
      job: the same on all members, except its arrays.
      implementation: moves the data; the same on all members.
      members: the processes that take part.
      scratch: buffers of the calling thread.

    Returns:
      By tensor, its result; for `all_to_all` also the number of rows from each member.
    """
    return _KINDS[job.specs[0].kind](job, implementation, members, scratch)


def run_carried(
    job: FusedJob, data: bytes, members: SetMembers, scratch: Scratch
) -> list[Any]:
    """Runs a job whose reduced tensors came with the agreement as `data`."""
    reduce = functools.partial(small_tensors.unpack, data)
    return _all_reduce_with(reduce, job, members, scratch)


def num_rows(size: int, count: int, place: int) -> int:
    """Returns the rows of `size` for a member; the first ones get one row more."""
    return size // count + (place < size % count)


def _all_reduce(
    job: FusedJob, implementation: Implementation, members: SetMembers, scratch: Scratch
) -> list[Any]:
    specs, spec = job.specs, job.specs[0]
    if spec.op == "adasum":
        return [
            _owned(
                _scale(
                    implementation.adaptive_sum(_own_flat(array, each, spec.prescale)),
                    spec.postscale,
                )
            ).reshape(each.shape)
            for array, each in zip(job.arrays, specs, strict=True)
        ]
    return _all_reduce_with(implementation.all_reduce, job, members, scratch)


def _all_reduce_with(
    reduce: _Reduce, job: FusedJob, members: SetMembers, scratch: Scratch
) -> list[Any]:
    specs, spec = job.specs, job.specs[0]
    dtype = np.dtype(spec.dtype)
    op, postscale = small_tensors.split_average(spec, dtype, members.size)
    if spec.device == "cpu":
        shapes = tuple([each.shape for each in specs])
        layout = scratch.lay_out(shapes)
        if len(specs) > 1 and layout.size * dtype.itemsize < _PACKED_BYTES * len(specs):
            return _all_reduce_packed(reduce, job, scratch, layout, op, postscale)
    flats = [
        _own_flat(array, each, spec.prescale)
        for array, each in zip(job.arrays, specs, strict=True)
    ]
    reduced = reduce(flats, op)
    return [
        _owned(_scale(x, postscale)).reshape(each.shape)
        for x, each in zip(reduced, specs, strict=True)
    ]


def _all_reduce_packed(
    reduce: _Reduce,
    job: FusedJob,
    scratch: Scratch,
    layout: _Layout,
    op: Op,
    postscale: float,
) -> list[Any]:
    spec = job.specs[0]
    dtype = np.dtype(spec.dtype)
    scratch.mark("")
    buffer = scratch.take(layout.size, dtype)
    arrays: Sequence[Any] = job.arrays
    if spec.prescale != 1.0 or type(None) in map(type, arrays):
        arrays = [
            _neutral(each) if array is None else _scale(array, spec.prescale)
            for array, each in zip(arrays, job.specs, strict=True)
        ]
    np.concatenate(arrays, axis=None, out=buffer)
    scratch.mark("MEMCPY_IN_FUSION_BUFFER")
    (out,) = reduce([buffer], op)
    scratch.mark("")
    out = _scale(out, postscale)
    if out.nbytes <= _SHARED_BYTES:
        out = out.copy()
        parts = [out[place] for place, _ in layout.places]
    else:
        parts = [out[place].copy() for place, _ in layout.places]
    results = [
        part if shape is None else part.reshape(shape)
        for part, (_, shape) in zip(parts, layout.places, strict=True)
    ]
    scratch.mark("MEMCPY_OUT_FUSION_BUFFER")
    return results


def _all_gather(
    job: FusedJob, implementation: Implementation, members: SetMembers, scratch: Scratch
) -> list[Any]:
    parts = [array.reshape(-1) for array in job.arrays]  # pyright: ignore
    # By member and tensor, number of elements.
    sizes = [
        [
            locals_[place][0] * math.prod(spec.shape)
            for spec, locals_ in zip(job.specs, job.locals, strict=True)
        ]
        for place in range(members.size)
    ]
    width = max(map(sum, sizes))
    xp = _module_of(parts[0])
    whole = implementation.all_gather(_padded(xp.concatenate(parts), width))
    rows = [
        xp.split(whole[place], np.cumsum(sizes[place]))[: len(parts)]
        for place in range(members.size)
    ]
    return [
        xp.concatenate([row[i] for row in rows]).reshape(
            _total_rows(locals_), *spec.shape
        )
        for i, (spec, locals_) in enumerate(zip(job.specs, job.locals, strict=True))
    ]


def _total_rows(locals_: tuple[tuple[int, ...], ...]) -> int:
    """Returns the rows of all members; sizes do not tell if rows have no elements."""
    return sum(n for (n,) in locals_)


def _broadcast(
    job: FusedJob, implementation: Implementation, members: SetMembers, scratch: Scratch
) -> list[Any]:
    xp = _module_of(job.arrays[0])
    flat = xp.concatenate([array.reshape(-1) for array in job.arrays])  # pyright: ignore
    root = members.ranks.index(job.specs[0].root)
    out = implementation.broadcast(flat, root)
    return _split_flat(out, [each.shape for each in job.specs])


def _reduce_scatter(
    job: FusedJob, implementation: Implementation, members: SetMembers, scratch: Scratch
) -> list[Any]:
    spec, count = job.specs[0], members.size
    op, postscale = small_tensors.split_average(spec, np.dtype(spec.dtype), count)
    xp = _module_of(job.arrays[0])
    pieces: list[list[Array]] = [[] for _ in range(count)]  # by member and tensor.
    for array, each in zip(job.arrays, job.specs, strict=True):
        array = _scale(array, spec.prescale)
        rows = [num_rows(each.shape[0], count, place) for place in range(count)]
        for place, piece in enumerate(xp.split(array, np.cumsum(rows)[:-1])):
            pieces[place].append(piece.reshape(-1))
    flats = [xp.concatenate(mine) for mine in pieces]
    width = max(x.size for x in flats)
    parts = xp.stack([_padded(x, width) for x in flats])
    out = _scale(implementation.reduce_scatter(parts, op), postscale)
    shapes = [
        (num_rows(each.shape[0], count, members.place), *each.shape[1:])
        for each in job.specs
    ]
    return _split_flat(out, shapes)


def _all_to_all(
    job: FusedJob, implementation: Implementation, members: SetMembers, scratch: Scratch
) -> list[Any]:
    return [
        _exchange(spec, splits, array, implementation, members)
        for spec, splits, array in zip(job.specs, job.locals, job.arrays, strict=True)
    ]


def _exchange(
    spec: Spec,
    splits: tuple[tuple[int, ...], ...],
    array: Array,
    implementation: Implementation,
    members: SetMembers,
) -> tuple[Array, tuple[int, ...]]:
    xp, row = _module_of(array), math.prod(spec.shape)
    mine = splits[members.place]
    flats = [
        piece.reshape(-1) for piece in xp.split(array, np.cumsum(mine))[: members.size]
    ]
    width = row * max(map(max, splits))
    out = implementation.all_to_all(xp.stack([_padded(x, width) for x in flats]))
    received = tuple(each[members.place] for each in splits)
    parts = [out[i, : n * row] for i, n in enumerate(received)]
    return xp.concatenate(parts).reshape(sum(received), *spec.shape), received


_KINDS: dict[
    str, Callable[[FusedJob, Implementation, SetMembers, Scratch], list[Any]]
] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _scale(x: Array, factor: float) -> Array:
    """Multiplies; integers in float64, then truncated, narrow floats in float32."""
    if factor == 1.0:
        return x
    dtype = np.dtype(x.dtype)
    wide = numerics.scaled_in(dtype)
    with np.errstate(all="ignore"):
        return (x.astype(wide) * wide.type(factor)).astype(dtype)


def _own_flat(array: Array | None, spec: Spec, prescale: float) -> Array:
    """Returns a scaled flat copy, which may be overwritten."""
    if array is None:
        return _neutral(spec)
    flat = array.reshape(-1)
    if prescale != 1.0:
        return _scale(flat, prescale)
    return _aligned_copy(flat) if isinstance(flat, np.ndarray) else flat


def _aligned_copy(flat: np.ndarray) -> np.ndarray:
    """Returns a copy that JAX can use without another copy."""
    if flat.nbytes < _PACKED_BYTES:
        return flat.copy()
    memory = np.empty(flat.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    out = memory[start : start + flat.nbytes].view(flat.dtype)
    np.copyto(out, flat)
    return out


def _neutral(spec: Spec) -> np.ndarray:
    """Returns the neutral elements of a reduction, flat."""
    dtype = jnp.dtype(spec.dtype)
    size = math.prod(spec.shape)
    if spec.op in ("min", "max"):
        lowest, highest = numerics.limits(dtype)
        return np.full(size, highest if spec.op == "min" else lowest, dtype)
    return np.ones(size, dtype) if spec.op == "product" else np.zeros(size, dtype)


def _owned(x: Array) -> Array:
    """Returns `x`, or a copy if `x` is read-only or a view of a larger array."""
    if not isinstance(x, np.ndarray):
        return x
    whole = x.base
    is_part = isinstance(whole, np.ndarray) and whole.nbytes > x.nbytes + _ALIGNMENT
    return x.copy() if is_part or not x.flags.writeable else x


def _padded(x: Array, width: int) -> Array:
    return x if x.size == width else _module_of(x).pad(x, (0, width - x.size))


def _split_flat(x: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    starts = [0, *ends[:-1]]
    return [
        _owned(x[a:b].reshape(shape))
        for a, b, shape in zip(starts, ends, shapes, strict=True)
    ]


def _module_of(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp
