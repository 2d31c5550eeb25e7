"""XLA: programs that communicate over NCCL, ICI or gloo.

For arrays on the host they only move bits, and numpy reduces in rank order. So the
result is bitwise the same as through shared memory: XLA on CPU adds in another order,
and flushes subnormal numbers to zero.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import collectives
from jdp.collectives import xla
from jdp.collectives.base import Op
from jdp.collectives.host import arithmetic
from jdp.eager.execution import host_adasum
from jdp.eager.execution.base import Array, CollectiveTask, SetMembers
from jdp.types import AxisName, Device

_AXIS = "member"
# Total bytes of all members up to which gathering everything costs less than starting
# a second program.
_GATHERED_BYTES = 256 << 10


class Selection(Protocol):
    """Rule for the tasks that a set of XLA programs accepts; see `Implementation`."""

    def is_enabled(self, task: CollectiveTask) -> bool:
        """Whether they accept the task; the same on all members."""
        ...

    def describe(self) -> str:
        """Describes in a few words what they run on, or why they are not available."""
        ...

    def switch(self, *, all_reduce: bool, all_gather: bool) -> None:
        """Sets the kinds that hierarchical programs accept; others ignore it."""
        ...


class EveryTask:
    """Selection of programs that accept every task of several processes."""

    def __init__(self, members: SetMembers):
        self._members = members

    def is_enabled(self, task: CollectiveTask) -> bool:
        """See `Selection`."""
        return self._members.size > 1

    def describe(self) -> str:
        """See `Selection`."""
        return f"one {platform_of(self._members)} device per process"

    def switch(self, *, all_reduce: bool, all_gather: bool) -> None:
        """See `Selection`."""


class Route(NamedTuple):
    """Devices of the members, and the traced all-reduce between them."""

    mesh: Mesh | None = None  # None: the first device of each member.
    axis_name: AxisName = _AXIS
    # Called as `all_reduce(x, axis_name, op=op)`, like those in `jdp.collectives`.
    all_reduce: Callable[..., jax.Array] = xla.psum_all_reduce
    # Whether arrays on the host are reduced there, in rank order.
    is_exact: bool = True


class Xla:
    """Implementation with one small compiled program per kind, dtype and padded size.

    Fused batches, and so their sizes, differ from one time to the next. Sizes are
    rounded up to one of eight steps per octave, at most an eighth more traffic.

    Args:
      members: the process set.
      name: name of the implementation; "": named after the platform.
      selection: rule for the tasks that it accepts; None: all.
      route: devices and all-reduce; None: the first devices of the members.
    """

    is_bounded = False

    def __init__(
        self,
        members: SetMembers,
        *,
        name: str = "",
        selection: Selection | None = None,
        route: Route | None = None,
    ):
        platform = platform_of(members)
        carrier = {"cpu": "gloo", "gpu": "NCCL", "tpu": "ICI"}
        self.name = name or f"XLA ({carrier.get(platform, platform)})"
        self._members = members
        self._selection = EveryTask(members) if selection is None else selection
        self._route = Route() if route is None else route
        self._axis_name = self._route.axis_name
        self._programs: dict[tuple[Any, ...], Callable[[jax.Array], jax.Array]] = {}

    @functools.cached_property
    def _mesh(self) -> Mesh:
        """Mesh of the route, or of one device per member."""
        if self._route.mesh is not None:
            return self._route.mesh
        devices = [
            next(d for d in self._members.world.mesh.devices.flat if _is_of(d, rank))
            for rank in self._members.ranks
        ]
        axes = (jax.sharding.AxisType.Auto,)
        return Mesh(np.array(devices), (_AXIS,), axis_types=axes)

    def is_enabled(self, task: CollectiveTask) -> bool:
        """See `Implementation`."""
        return self._selection.is_enabled(task)

    def describe(self) -> str:
        """See `Implementation`."""
        return self._selection.describe()

    def switch(self, *, all_reduce: bool, all_gather: bool) -> None:
        """See `Implementation`."""
        self._selection.switch(all_reduce=all_reduce, all_gather=all_gather)

    def close(self) -> None:
        """See `Implementation`."""

    def all_reduce(self, arrays: list[Array], op: Op) -> list[Array]:
        """See `Implementation`."""
        sizes = [x.size for x in arrays]
        if self._route.is_exact and isinstance(arrays[0], np.ndarray):
            whole = self._reduce_on_host(np.concatenate(arrays), op)
            return np.split(whole, np.cumsum(sizes)[:-1])
        packed = _pack(arrays, _round_up(sum(sizes)))
        out = self._run(
            ("all_reduce", op),
            packed,
            lambda x: self._route.all_reduce(x, self._axis_name, op=op),
        )
        ends = np.cumsum(sizes).tolist()
        return [out[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def adaptive_sum(self, array: Array) -> Array:
        """See `Implementation`."""
        if isinstance(array, np.ndarray):
            return self._combine_on_host(array)

        def combine(x: jax.Array) -> jax.Array:
            return collectives.adasum(x, self._axis_name)

        out = self._run(("adasum",), _pack([array], _round_up(array.size)), combine)
        return out[: array.size]

    def all_gather(self, part: Array) -> Array:
        """See `Implementation`."""
        dtype = np.dtype(part.dtype)
        if isinstance(part, np.ndarray):
            part = _as_bits(part)
        elif dtype.kind == "b":  # The collectives take only numbers.
            part = _as_integers(part)
        size = _round_up(part.size)
        out = self._run(
            ("all_gather",),
            _pack([part], size),
            lambda x: xla.psum_all_gather(x, self._axis_name),
        )
        out = out.reshape(-1, size)[:, : part.size]
        if isinstance(out, np.ndarray):
            return np.ascontiguousarray(out).view(dtype)
        return _from_integers(out, dtype)

    def reduce_scatter(self, parts: Array, op: Op) -> Array:
        """See `Implementation`."""
        size = parts.shape[1]
        if isinstance(parts, np.ndarray):
            rows = np.ascontiguousarray(self.all_to_all(_as_bits(parts)))
            return _reduce_rows(rows.view(parts.dtype), op)
        padded = _pad_columns(parts, _round_up(size))
        out = self._run(
            ("reduce_scatter", op),
            padded,
            lambda x: xla.psum_reduce_scatter(x, self._axis_name, op=op),
            varies=True,
        )
        return out[:size]

    def all_to_all(self, parts: Array) -> Array:
        """See `Implementation`."""
        dtype = np.dtype(parts.dtype)
        if isinstance(parts, np.ndarray):
            parts = _as_bits(parts)
        count, size = parts.shape

        def exchange(x: jax.Array) -> jax.Array:
            x = x.reshape(count, -1)
            return lax.all_to_all(x, self._axis_name, 0, 0, tiled=True).reshape(-1)

        padded = _pad_columns(parts, _round_up(size))
        out = self._run(("all_to_all",), padded, exchange, varies=True)
        out = out.reshape(count, -1)[:, :size]
        return _from_integers(_contiguous(out), dtype)

    def broadcast(self, array: Array, root: int) -> Array:
        """See `Implementation`."""

        def send(x: jax.Array) -> jax.Array:
            # Sums the bits of one member and zeros: floats would not keep all bits.
            bits = lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
            is_root = lax.axis_index(self._axis_name) == root
            bits = lax.psum(jnp.where(is_root, bits, 0), self._axis_name)
            return lax.bitcast_convert_type(bits, x.dtype)

        kind, dtype = ("broadcast", root), np.dtype(array.dtype)
        if isinstance(array, np.ndarray):
            array = _as_bits(array)
        elif dtype.kind in "bc":  # They have no `bitcast_convert_type`.
            array = _as_integers(array)
        out = self._run(kind, _pack([array], _round_up(array.size)), send)
        return _from_integers(out[: array.size], dtype)

    def _reduce_on_host(self, array: np.ndarray, op: Op) -> np.ndarray:
        """Reduces shape (m,): every member reduces all of it, or a part."""
        count, size = self._members.size, array.size
        if count * array.nbytes <= _GATHERED_BYTES:
            return _reduce_rows(self.all_gather(array), op)
        width = -(-size // count)
        parts = np.pad(array, (0, count * width - size)).reshape(count, width)
        mine = self.reduce_scatter(parts, op)
        return self.all_gather(mine).reshape(-1)[:size]

    def _combine_on_host(self, array: np.ndarray) -> np.ndarray:
        """Combines with the members at distance 1, 2, 4 and so on."""
        place, size = self._members.place, self._members.size
        distance = 1
        while distance < size:
            pairs = [(i, i ^ distance) for i in range(size)]

            def swap(x: jax.Array, pairs: list[tuple[int, int]] = pairs) -> jax.Array:
                return lax.ppermute(x, self._axis_name, pairs)

            packed = _pack([_as_bits(array)], _round_up(array.size))
            other = self._run(("swap", distance), packed, swap, varies=True)
            other = other[: array.size].view(array.dtype)
            both = (other, array) if place & distance else (array, other)
            array = host_adasum.combine(*both)
            distance *= 2
        return array

    def _run(
        self,
        key: tuple[Any, ...],
        x: Array,
        fn: Callable[[jax.Array], jax.Array],
        *,
        varies: bool = False,
    ) -> Array:
        """Runs `fn` on the flat arrays of all members, and waits for the result."""
        spec = PartitionSpec(self._mesh.axis_names)
        with jax.enable_x64(True):
            key = (*key, x.dtype, x.size)
            program = self._programs.get(key)
            if program is None:
                program = jax.jit(
                    jax.shard_map(
                        fn,
                        mesh=self._mesh,
                        in_specs=spec,
                        out_specs=spec if varies else PartitionSpec(),
                    )
                )
                self._programs[key] = program
            place = self._members.place
            whole = jax.make_array_from_single_device_arrays(
                (self._members.size * x.size,),
                NamedSharding(self._mesh, spec),
                [jax.device_put(x, self._mesh.devices.flat[place])],
            )
            out = program(whole).addressable_data(0)
            out.block_until_ready()
            return np.asarray(out) if isinstance(x, np.ndarray) else out


def platform_of(members: SetMembers) -> str:
    """Returns the platform of the devices of the world, such as "cpu"."""
    return members.world.mesh.devices.flat[0].platform


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def _is_of(device: Device, rank: int) -> bool:
    return device.process_index == rank


def _round_up(size: int) -> int:
    """Rounds up to one of eight sizes per octave, at least 64."""
    step = 1 << max(3, size.bit_length() - 4)
    return max(64, -(-size // step) * step)


def _pack(arrays: list[Array], size: int) -> Array:
    """Concatenates flat arrays, and pads them with zeros to `size`."""
    dtype = arrays[0].dtype
    if isinstance(arrays[0], np.ndarray):
        out = np.zeros(size, dtype)
        np.concatenate(arrays, out=out[: sum(x.size for x in arrays)])
        return out
    buffer, offset = jnp.zeros(size, dtype), 0
    for x in arrays:  # Compiled per size, not per list of sizes.
        buffer = _put(buffer, x, offset)
        offset += x.size
    return buffer


@jax.jit
def _put(buffer: jax.Array, x: jax.Array, offset: int) -> jax.Array:
    return lax.dynamic_update_slice(buffer, x, (offset,))


def _pad_columns(parts: Array, width: int) -> Array:
    """Pads shape (n, m) to (n, width), and flattens it."""
    xp = np if isinstance(parts, np.ndarray) else jnp
    return xp.pad(parts, ((0, 0), (0, width - parts.shape[1]))).reshape(-1)


def _as_integers(array: Array) -> Array:
    return array.view(np.uint8 if array.dtype.itemsize == 1 else np.uint32)


def _as_bits(array: np.ndarray) -> np.ndarray:
    """Returns unsigned integers; two per complex number of 16 bytes."""
    bits = np.dtype(_UNSIGNED[min(array.dtype.itemsize, 8)])
    return np.ascontiguousarray(array).view(bits)


def _reduce_rows(rows: np.ndarray, op: Op) -> np.ndarray:
    """Reduces shape (n, m), of which row i came from member i."""
    out = np.empty(rows.shape[1], rows.dtype)
    arithmetic.reduce(list(rows), op, out=out)
    return out


def _contiguous(array: Array) -> Array:
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array


def _from_integers(array: Array, dtype: np.dtype) -> Array:
    return array if array.dtype == dtype else array.view(dtype)
