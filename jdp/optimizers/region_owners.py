"""Region owners: each region of whole arrays runs on one replica, its owner.

The shards of a region's arrays go to the owner, and the shards of its results come
back, both in one all-to-all per dtype for all regions. Of m regions that differ in
nothing but values, each of n replicas owns m // n, which it runs as one batch. The
regions that are left are dealt out by cost, and each replica runs its own in a branch.
"""

import collections
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import compat
from jdp.collectives import base
from jdp.compat import annotations
from jdp.optimizers import shard_layout
from jdp.optimizers.shard_layout import ArrayShard, ShardLayout
from jdp.optimizers.whole_regions import Region


class Ownership(NamedTuple):
    """Which replica runs which region."""

    # Regions of one signature each, as many on each replica: replica i of n has the
    # i-th of n equal runs.
    batches: list[list[Region]]
    singles: list[list[Region]]  # per replica.

    @property
    def regions(self) -> list[Region]:
        """All regions that have an owner."""
        return [*itertools.chain(*self.batches, *self.singles)]


def assign(regions: Sequence[Region], num_replicas: int) -> Ownership:
    """Gives each region an owner, so that all replicas take about as long.

    Regions without an owner are cheap. To gather their arrays on all replicas takes no
    longer, since they do not divide among them, or read more than shards.
    """
    groups: dict[Any, list[Region]] = {}
    for region in regions:
        groups.setdefault(region.signature, []).append(region)
    batches, left = [], []
    for group in groups.values():
        num_even = len(group) - len(group) % num_replicas
        if group[0].is_heavy or group[0].is_light_to_send:
            if num_even:
                batches.append(group[:num_even])
            left += group[num_even:]
    singles: list[list[Region]] = [[] for _ in range(num_replicas)]
    loads = [0.0] * num_replicas
    # The longest first, each to the replica with the least to do (Graham, 1969: at most
    # a third above the optimum).
    for region in sorted(left, key=lambda x: -x.cost):
        if region.is_heavy:
            i = loads.index(min(loads))
            singles[i].append(region)
            loads[i] += region.cost
    return Ownership(batches, singles)


def run(
    ownership: Ownership, values: Mapping[Any, Any], layout: ShardLayout
) -> dict[Any, ArrayShard]:
    """Runs all regions that have an owner, each on its owner.

    Args:
      ownership: the same on all replicas, which all make this call.
      values: shards, or arrays that are the same on all replicas, by key.
      layout: the replicas.

    Returns:
      Each replica's shards of all results, by key.
    """
    there, back = _Mail(layout), _Mail(layout)
    batches = [_Batch(batch, values, layout) for batch in ownership.batches]
    singles = _Singles(ownership.singles, values, layout)
    for part in (*batches, singles):
        part.put_arguments(there)
    there.send()
    for part in (*batches, singles):
        part.run(there, back)
    back.send()
    found: dict[Any, ArrayShard] = {}
    for part in (*batches, singles):
        found |= part.take_results(back)
    return found


class _Mail:
    """Rows for each replica, sent in one all-to-all per dtype."""

    def __init__(self, layout: ShardLayout):
        self._layout = layout
        self._rows: list[jax.Array] = []  # shape (num_replicas, k) each.

    def put(self, rows: jax.Array) -> int:
        """Adds an array of shape (num_replicas, k), of which row i goes to replica i.

        Returns:
          A number for `take`.
        """
        self._rows.append(rows)
        return len(self._rows) - 1

    def send(self) -> None:
        """Sends all rows; every replica makes this call once."""
        groups: dict[Any, list[int]] = {}
        for i, x in enumerate(self._rows):
            groups.setdefault(x.dtype, []).append(i)
        axis_name = self._layout.axis_name
        for dtype, members in groups.items():
            rows = jnp.concatenate([self._rows[i] for i in members], axis=1)
            rows = rows.astype(jnp.uint8) if dtype == jnp.bool_ else rows
            rows = base.cast_varying(rows, axis_name)
            if rows.size:  # Some backends send no empty arrays.
                rows = base.all_to_all(rows, axis_name)
            rows, start = rows.astype(dtype), 0
            for i in members:
                end = start + self._rows[i].shape[1]
                self._rows[i] = lax.slice_in_dim(rows, start, end, axis=1)
                start = end

    def take(self, ticket: int) -> jax.Array:
        """Returns rows, shape (num_replicas, k), of which replica i sent row i."""
        return _as_untyped(self._rows[ticket], self._layout)


class _Batch:
    """Regions of one signature, as many on each replica."""

    def __init__(
        self, regions: list[Region], values: Mapping[Any, Any], layout: ShardLayout
    ):
        self._regions, self._values, self._layout = regions, values, layout
        self._num_own = len(regions) // layout.num_replicas
        self._sent: dict[int, int] = {}  # tickets, by index of an input.
        self._made: list[int] = []  # tickets, per result.

    def put_arguments(self, mail: _Mail) -> None:
        for i, is_shard in enumerate(self._regions[0].are_shards):
            if is_shard:
                parts = [self._values[x.program.inputs[i]].data for x in self._regions]
                rows = jnp.concatenate(parts).reshape(self._layout.num_replicas, -1)
                self._sent[i] = mail.put(rows)

    def run(self, there: _Mail, back: _Mail) -> None:
        first = self._regions[0]
        arguments, axes = [], []
        for i in range(len(first.are_shards)):
            x, is_batched = self._argument(i, there)
            arguments.append(x)
            axes.append(0 if is_batched else None)
        if self._num_own > 1:
            results = jax.vmap(lambda *xs: first.program.run(xs), axes)(*arguments)
        else:
            pairs = zip(arguments, axes, strict=True)
            own = [x if axis is None else x[0] for x, axis in pairs]
            results = [x[None] for x in first.program.run(own)]
        n = self._layout.num_replicas
        for x in results:
            shards = jax.vmap(self._layout.rows)(x)  # (number of own regions, n, k).
            self._made.append(back.put(shards.swapaxes(0, 1).reshape(n, -1)))

    def take_results(self, mail: _Mail) -> dict[Any, ArrayShard]:
        found = {}
        for i, ticket in enumerate(self._made):
            rows = mail.take(ticket).reshape(len(self._regions), -1)
            shape = self._regions[0].results[i].shape
            for k, region in enumerate(self._regions):
                data = lax.slice_in_dim(rows, k, k + 1)
                found[region.program.outputs[i]] = _shard(data, shape, self._layout)
        return found

    def _argument(self, i: int, mail: _Mail) -> tuple[jax.Array, bool]:
        """Returns input `i` of this replica's regions, and whether it is stacked."""
        keys = [x.program.inputs[i] for x in self._regions]
        n, q = self._layout.num_replicas, self._num_own
        if i in self._sent:
            rows = mail.take(self._sent[i]).reshape(n, q, -1).swapaxes(0, 1)
            shape = self._values[keys[0]].shape
            return jax.vmap(lambda x: shard_layout.restore(x, shape))(rows), True
        if len(set(keys)) == 1:
            return self._values[keys[0]], False
        start = _as_untyped(self._layout.rank, self._layout) * q
        whole = jnp.stack([self._values[key] for key in keys])
        return lax.dynamic_slice_in_dim(whole, start, q), True


class _Singles:
    """Regions of any kind, some on each replica, which runs them in its own branch."""

    def __init__(
        self,
        regions: list[list[Region]],
        values: Mapping[Any, Any],
        layout: ShardLayout,
    ):
        self._regions, self._values, self._layout = regions, values, layout
        shards = [
            [values[key] for region in own for key in _sharded_inputs(region)]
            for own in regions
        ]
        self._arguments = _Columns(
            [[(x.data.dtype, layout.width(x.shape)) for x in row] for row in shards]
        )
        self._results = _Columns(
            [
                [(x.dtype, layout.width(x.shape)) for one in own for x in one.results]
                for own in regions
            ]
        )
        self._sent: dict[Any, int] = {}  # tickets, by dtype.
        self._made: dict[Any, int] = {}

    def put_arguments(self, mail: _Mail) -> None:
        rows = []
        for own in self._regions:
            keys = [key for region in own for key in _sharded_inputs(region)]
            rows.append(self._arguments.pack([self._values[k].data for k in keys], 1))
        for dtype in self._arguments.widths:
            self._sent[dtype] = mail.put(jnp.concatenate([x[dtype] for x in rows]))

    def run(self, there: _Mail, back: _Mail) -> None:
        received = {dtype: there.take(ticket) for dtype, ticket in self._sent.items()}
        if not received:
            return
        busy = [i for i, own in enumerate(self._regions) if own]
        branches = [functools.partial(self._run_own, i) for i in busy]
        branches += [self._run_nothing] * (len(busy) < len(self._regions))
        # The branch of a replica without regions is the last.
        index = np.full(len(self._regions), len(branches) - 1, np.int32)
        index[busy] = np.arange(len(busy))
        rank = _as_untyped(self._layout.rank, self._layout)
        made = lax.switch(jnp.asarray(index)[rank], branches, received)
        self._made = {dtype: back.put(x) for dtype, x in made.items()}

    def take_results(self, mail: _Mail) -> dict[Any, ArrayShard]:
        rows = {dtype: mail.take(ticket) for dtype, ticket in self._made.items()}
        found = {}
        for i, own in enumerate(self._regions):
            here = {dtype: x[i : i + 1] for dtype, x in rows.items()}
            data = iter(self._results.unpack(i, here))
            for region in own:
                pairs = zip(region.program.outputs, region.results, strict=True)
                for key, aval in pairs:
                    found[key] = _shard(next(data), aval.shape, self._layout)
        return found

    def _run_own(self, i: int, received: dict[Any, jax.Array]) -> dict[Any, jax.Array]:
        """Runs the regions of replica `i`; returns rows for all replicas, by dtype."""
        rows = iter(self._arguments.unpack(i, received))
        made = []
        for region in self._regions[i]:
            arguments = [
                shard_layout.restore(next(rows), self._values[key].shape)
                if is_shard
                else self._values[key]
                for key, is_shard in zip(
                    region.program.inputs, region.are_shards, strict=True
                )
            ]
            made += map(self._layout.rows, region.program.run(arguments))
        return self._results.pack(made, self._layout.num_replicas)

    def _run_nothing(self, received: dict[Any, jax.Array]) -> dict[Any, jax.Array]:
        return self._results.pack([], self._layout.num_replicas)


class _Columns:
    """Places of arrays in rows of one width per dtype.

    Args:
      kinds: per row, the dtype and the number of columns of each array.
    """

    def __init__(self, kinds: list[list[tuple[Any, int]]]):
        self._kinds = kinds
        used = [collections.Counter[Any]() for _ in kinds]
        for row, counter in zip(kinds, used, strict=True):
            for dtype, width in row:
                counter[dtype] += width
        dtypes = dict.fromkeys(dtype for row in kinds for dtype, _ in row)
        self.widths = {dtype: max(x[dtype] for x in used) for dtype in dtypes}

    def pack(self, arrays: Sequence[jax.Array], num_rows: int) -> dict[Any, jax.Array]:
        """Concatenates arrays, shape (num_rows, k), and pads them to the widths."""
        packed = {}
        for dtype, width in self.widths.items():
            parts = [x for x in arrays if x.dtype == dtype]
            missing = width - sum(x.shape[1] for x in parts)
            if missing or not parts:
                parts.append(jnp.zeros((num_rows, missing), dtype))
            packed[dtype] = jnp.concatenate(parts, axis=1)
        return packed

    def unpack(self, i: int, rows: Mapping[Any, jax.Array]) -> list[jax.Array]:
        """Returns the arrays of row `i`, shape (num_rows, k) each."""
        start = collections.Counter[Any]()
        found = []
        for dtype, width in self._kinds[i]:
            end = start[dtype] + width
            found.append(lax.slice_in_dim(rows[dtype], start[dtype], end, axis=1))
            start[dtype] = end
        return found


def _sharded_inputs(region: Region) -> list[Any]:
    pairs = zip(region.program.inputs, region.are_shards, strict=True)
    return [key for key, is_shard in pairs if is_shard]


def _as_untyped(x: jax.Array, layout: ShardLayout) -> jax.Array:
    """Returns `x`, which differs between the replicas, as if it did not.

    Equations were traced for whole arrays, which do not vary by type, and the bodies of
    their loops do not take other types. Nothing is sent before `_Mail` undoes this.
    """
    names = sorted(layout.tracked_axes)
    return annotations.declare_replicated(x, names) if names else x


def _shard(data: jax.Array, shape: tuple[int, ...], layout: ShardLayout) -> ArrayShard:
    return ArrayShard(compat.cast_varying(data, sorted(layout.tracked_axes)), shape)
