"""Packing: how do trees get into the memory that is sent, and back out of it?"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.hooks import CommHook
from jdp.parameter_server import shards
from jdp.parameter_server.push_hook import Compressor
from jdp.trees import buckets
from jdp.types import PyTree


class GradientPacker:
    """Writes gradients into one memory per server, through a hook if there is one."""

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
        """Returns the bytes of a push, per server."""
        if self.is_compressed:
            return [c.layout.num_bytes for c in self._compressors]
        return [s.layout.num_bytes for s in self._plan.of_server]

    def find_sizes(self) -> list[int]:
        """Returns the bytes of the larger of a push and a pull, per server."""
        plain = [s.layout.num_bytes for s in self._plan.of_server]
        return [max(pair) for pair in zip(plain, self.find_push_sizes(), strict=True)]

    def pack(self, leaves: list[Any], memory: list[memoryview]) -> bool:
        """Writes a gradient; returns whether all of it is finite."""
        if self.is_compressed:
            sent, self._state, is_finite = self._compress(leaves, self._state)
            for arrays, compressor, into in zip(
                sent, self._compressors, memory, strict=True
            ):
                views = compressor.layout.views(into)
                for x, view in zip(arrays, views, strict=True):
                    view[...] = np.asarray(x)
            return bool(is_finite)
        if jax.default_backend() != "cpu":  # Arrays on CPU are read in place.
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
            arrays, new = compressor.compress(packed, state)
            # A narrow dtype may overflow where the gradient does not.
            is_finite &= _are_finite(arrays)
            sent.append(arrays)
            new_states.append(new)
        # Residuals that are not finite would spoil every later push.
        kept = jax.tree.map(
            lambda a, b: jnp.where(is_finite, a, b), new_states, list(states)
        )
        return sent, kept, is_finite


def _are_finite(arrays: list[jax.Array]) -> jax.Array:
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.asarray([jnp.isfinite(x).all() for x in floats], bool))


def unpack_params(plan: shards.Shards, memory: Sequence[Any]) -> list[Any]:
    """Returns the leaves of all parameters, as numpy arrays.

    Args:
      plan: the shards of the servers.
      memory: packed parameters of each server; copied, as the next pull overwrites it.
    """
    leaves: list[Any] = [None] * len(plan.plan.leaves)
    for shard, source in zip(plan.of_server, memory, strict=True):
        # One copy; JAX on CPU then takes slices of it as arrays, without another copy.
        copy = shards.make_memory(shard.layout.num_bytes)
        copy[:] = np.frombuffer(source, np.uint8, copy.size)
        views = shard.layout.views(copy)
        for bucket, view in zip(shard.buckets, views, strict=True):
            end = 0
            for i in bucket:
                spec = plan.plan.leaves[i]
                leaves[i] = view[end : end + spec.size].reshape(spec.shape)
                end += spec.size
    return leaves
