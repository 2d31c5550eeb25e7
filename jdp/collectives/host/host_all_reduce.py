"""Host all-reduce: a reduction on the host, as part of a traced program."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdp import compat, types
from jdp.collectives import base, xla
from jdp.collectives.base import Op, ReduceScatterAllGather
from jdp.collectives.host import members, ordered
from jdp.collectives.host.local_replicas import LocalReplicas
from jdp.replicas import mesh
from jdp.replicas.mesh import World
from jdp.trees import buckets
from jdp.types import AllReduce, AxisName


class HostMedium(Protocol):
    """Memory or links through which the processes of a world reduce numpy arrays.

    Attributes:
      world: the world.
      axis_name: axes to reduce over.
      local: where the replicas of this process are reduced first.
    """

    world: World
    axis_name: AxisName
    local: LocalReplicas

    def reduce_in_place(self, arrays: Sequence[np.ndarray], op: Op, call: int) -> None:
        """Replaces arrays of one dtype by their reductions over the processes.

        Args:
          arrays: contiguous and writeable, shape (n,) each.
          op: see `HostAllReduce`.
          call: identifier of the operation, equal on all processes.

        Raises:
          RuntimeError: a process has ended, did not arrive in time, or reduces
            something else.
        """
        ...

    def reduce_scatter(
        self,
        rows: Sequence[np.ndarray],
        op: Op,
        call: int,
        outs: Sequence[np.ndarray],
    ) -> None:
        """Reduces the row of this process in each array.

        Args:
          rows: arrays of one dtype, shape (num_processes, n) each.
          op: see `HostAllReduce`.
          call: see `reduce_in_place`.
          outs: shape (n,) each, dtype of `rows` or of their sum.
        """
        ...

    def all_gather(
        self, parts: Sequence[np.ndarray], call: int, outs: Sequence[np.ndarray]
    ) -> None:
        """Gathers the parts of each array from all processes.

        Args:
          parts: arrays of one dtype, shape (n,) each.
          call: see `reduce_in_place`.
          outs: arrays of that dtype, shape (num_processes, n) each.
        """
        ...


class HostAllReduce(abc.ABC):
    """Reduces over CPU processes on the host.

    Several replicas of a process are reduced before the processes are.

    Sums and products of 16-bit floats are computed in float32, as the contract of
    `jdp.collectives.base` requires. A reduction has side effects, so a program keeps
    its reductions in order. Call programs that contain it from one thread: JAX then
    runs them in the order of the calls, the same on all processes.

    Attributes:
      name: its name in `jdp.collectives`.
      title: its name in messages.
      bucket_bytes: size of the buckets that suit it.
    """

    name: str
    title: str
    bucket_bytes: int

    def __init__(self, medium: HostMedium | None = None):
        self._medium = medium

    @abc.abstractmethod
    def _open_default(self, world: World, axis_name: AxisName) -> HostMedium:
        """Returns the medium that is used where none was given."""

    @property
    def value(self) -> AllReduce:
        """This reduction as an `AllReduce`."""
        return AllReduce(
            self,
            reduce_group=self.reduce_group,
            bucket_bytes=self.bucket_bytes,
            name=self.name,
        )

    def __call__(
        self, x: jax.Array, axis_name: AxisName, *, op: Op = "sum"
    ) -> jax.Array:
        """Reduces one buffer.

        Args:
          x: shape (n,).
          axis_name: all axes of the world, or the inner axis of a pair.
          op: "sum", "mean", "min", "max" or "product".

        Returns:
          The reduction, shape (n,), dtype of `x`; see `jdp.collectives.base`.

        Raises:
          ValueError: `axis_name` is not bound or not as above, or `op` is unknown.
          RuntimeError: at run time: a process has ended, or did not arrive in time.
        """
        base.enter(x, axis_name, op)
        return self.reduce_group([x], axis_name, op=op)[0]

    def reduce_group(
        self,
        arrays: Sequence[jax.Array],
        axis_name: AxisName,
        *,
        op: Op = "sum",
        has_data: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Reduces arrays of one dtype and any shapes in place, without packing them.

        Where `has_data`, bool (), is False, this replica contributes zeros, whatever
        the arrays hold.
        """
        group = self._find(axis_name)
        sizes, dtype = [x.size for x in arrays], arrays[0].dtype
        if group.num_replicas == 1 or sum(sizes) == 0:
            return [base.replicated(x, axis_name) for x in arrays]
        num_local = group.world.num_local_replicas
        further = [] if num_local == 1 else [base.find_group(axis_name).rank]
        further += [] if has_data is None else [has_data]

        # The program keeps the functions, which therefore must not hold its arrays.
        num_arrays, may_lack_data = len(arrays), has_data is not None

        def run(call: int, results: Sequence[Any], operands: Sequence[Any]) -> None:
            flat = [np.asarray(x).reshape(-1) for x in results]
            if may_lack_data and not np.asarray(operands[-1]):
                for x in flat:
                    x.fill(0)
            replica = 0
            if num_local > 1:
                replica = int(np.asarray(operands[num_arrays])) % num_local
            medium = self._open(group.world, axis_name)
            medium.local.reduce(replica, flat, op, call, medium.reduce_in_place)

        def substitute(*operands: jax.Array) -> list[jax.Array]:
            given = operands[:num_arrays]
            if may_lack_data:
                given = [jnp.where(operands[-1], x, jnp.zeros_like(x)) for x in given]
            total = xla.psum_all_reduce(buckets.pack(given), axis_name, op=op)
            return buckets.unpack(total, [x.shape for x in given])

        reduced = ordered.bind(
            run,
            substitute,
            ordered.Label(self.name, f"all-reduce {op} {dtype}{sizes}"),
            [*arrays, *further],
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
            _other_axes(arrays[0], axis_name),
            num_in_place=len(arrays),
        )
        return [base.replicated(x, axis_name) for x in reduced]

    def reduce_scatter(
        self,
        x: jax.Array,
        axis_name: AxisName,
        *,
        op: Op = "sum",
        dtype: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Reduces and scatters: replica i gets the reduction of part i of n.

        Args:
          x: shape (n,); padded with zeros to a multiple of the number of replicas.
          axis_name: see `__call__`.
          op: "sum", "mean", "min", "max" or "product".
          dtype: dtype of the result: the dtype of `x` or of its sum; None: of `x`.

        Returns:
          Shape (ceil(n / num_replicas),).
        """
        x, group = base.enter(x, axis_name, op)
        result_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
        if base.is_trivial(x, group):
            self._find(axis_name)
            return base.finish(x, op, 1, result_dtype)
        rows = base.pad(x, group.size).reshape(group.size, -1)
        return self._scatter_rows([rows], axis_name, op, result_dtype)[0]

    def scatter_rows(
        self, rows: Sequence[jax.Array], axis_name: AxisName, *, op: Op = "sum"
    ) -> list[jax.Array]:
        """Gives replica i the reduction of row i of each array, without packing.

        Args:
          rows: arrays of one dtype, shape (num_replicas, k) each.
          axis_name: see `__call__`.
          op: see `reduce_scatter`.

        Returns:
          Shape (k,) each.
        """
        base.check_dtype(rows[0].dtype, op)
        return self._scatter_rows(rows, axis_name, op, rows[0].dtype)

    def _scatter_rows(
        self, rows: Sequence[jax.Array], axis_name: AxisName, op: Op, dtype: Any
    ) -> list[jax.Array]:
        group = self._find(axis_name, halves=True)

        def run(call: int, results: Sequence[Any], operands: Sequence[Any]) -> None:
            given, outs = ([np.asarray(x) for x in xs] for xs in (operands, results))
            medium = self._open(group.world, axis_name)
            medium.reduce_scatter(given, op, call, outs)

        def substitute(*rows: jax.Array) -> list[jax.Array]:
            flat = [x.reshape(-1) for x in rows]
            return [
                xla.psum_reduce_scatter(x, axis_name, op=op, dtype=dtype) for x in flat
            ]

        return ordered.bind(
            run,
            substitute,
            ordered.Label(
                self.name,
                f"reduce-scatter {op} {rows[0].dtype}{[x.shape for x in rows]}",
            ),
            rows,
            [jax.ShapeDtypeStruct(x.shape[1:], dtype) for x in rows],
            sorted(set().union(*map(compat.varying_axes, rows))),
        )

    def all_gather(self, part: jax.Array, axis_name: AxisName) -> jax.Array:
        """Gathers: every replica gets all parts, in the order of their ranks.

        Args:
          part: shape (m,).
          axis_name: see `__call__`.

        Returns:
          Shape (num_replicas * m,), the same on all replicas.
        """
        part, group = base.enter(part, axis_name, "sum")
        if base.is_trivial(part, group):
            self._find(axis_name)
            return base.replicated(part, axis_name)
        return self.gather_rows([part], axis_name)[0].reshape(-1)

    def gather_rows(
        self, parts: Sequence[jax.Array], axis_name: AxisName
    ) -> list[jax.Array]:
        """Inverts `scatter_rows`: row i of each result comes from replica i.

        Args:
          parts: arrays of one dtype, shape (k,) each.
          axis_name: see `__call__`.

        Returns:
          Shape (num_replicas, k) each, the same on all replicas.
        """
        group = self._find(axis_name, halves=True)

        def run(call: int, results: Sequence[Any], operands: Sequence[Any]) -> None:
            given, outs = ([np.asarray(x) for x in xs] for xs in (operands, results))
            self._open(group.world, axis_name).all_gather(given, call, outs)

        def substitute(*parts: jax.Array) -> list[jax.Array]:
            flat = [xla.psum_all_gather(x, axis_name) for x in parts]
            return [x.reshape(group.num_replicas, -1) for x in flat]

        gathered = ordered.bind(
            run,
            substitute,
            ordered.Label(
                self.name, f"all-gather {parts[0].dtype}{[x.size for x in parts]}"
            ),
            parts,
            [
                jax.ShapeDtypeStruct((group.num_replicas, x.size), x.dtype)
                for x in parts
            ],
            _other_axes(parts[0], axis_name),
        )
        return [base.replicated(x, axis_name) for x in gathered]

    @property
    def halves(self) -> ReduceScatterAllGather:
        """The two halves, for example for `hierarchical_all_reduce(within=...)`."""
        return ReduceScatterAllGather(
            self.reduce_scatter, self.all_gather, self.scatter_rows, self.gather_rows
        )

    def _find(self, axis_name: AxisName, *, halves: bool = False) -> "_Group":
        """Returns the replicas that reduce.

        Raises:
          ValueError: it does not reduce over these axes, or, for the
            `halves` of a reduction, a process has several replicas.
        """
        size = compat.axis_size(axis_name)
        medium = self._medium
        world = mesh.current_world() if medium is None else medium.world
        ranks = members.find_processes(world, axis_name, self.title)
        if medium is not None:
            names = types.as_axis_names(medium.axis_name)
            if types.as_axis_names(axis_name) != names:
                raise ValueError(
                    f"`axis_name={axis_name!r}`: this {self.title} was made to reduce "
                    f"over {medium.axis_name!r}."
                )
        num_replicas = len(ranks) * world.num_local_replicas
        if size != num_replicas:
            raise ValueError(
                f"`axis_name={axis_name!r}` has {size} replicas here, but "
                f"{num_replicas} in the world: the {self.title} reduces over all of it."
            )
        if halves and world.num_local_replicas > 1:
            raise ValueError(
                f"{world.num_local_replicas} replicas per process: the halves of the "
                f"{self.title} are for one CPU replica per process."
            )
        return _Group(world, num_replicas)

    def _open(self, world: World, axis_name: AxisName) -> HostMedium:
        return self._medium or self._open_default(world, axis_name)


def _other_axes(x: jax.Array, axis_name: AxisName) -> list[str]:
    return sorted(compat.varying_axes(x) - set(types.as_axis_names(axis_name)))


class _Group(NamedTuple):
    """Replicas that reduce together."""

    world: World
    num_replicas: int
