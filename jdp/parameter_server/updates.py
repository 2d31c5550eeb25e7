"""Updates: the parameters of one server, and the compiled update of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp import buckets
from jdp.parameter_server import shards
from jdp.parameter_server.shards import Shards
from jdp.types import Device, PyTree

_PROBE_WIDTH = 2  # most elements of a dimension, where a probe is enough.
_PROBE_STEPS = 2


class _State(NamedTuple):
    """What an update changes."""

    params: PyTree  # the leaves of this server; `optax.MaskedNode` for the others.
    opt_state: PyTree


class Updater:
    """Parameters and optimizer state of one server, on one device."""

    def __init__(
        self,
        params: PyTree,
        tx: optax.GradientTransformation,
        plan: Shards,
        server: int,
        device: Device,
    ):
        """Puts this server's leaves of `params` on `device`.

        Args:
          params: all parameters.
          tx: updates them; it gets `staleness=` where it takes further arguments.
          plan: which of them are those of this server.
          server: its number.
          device: where updates are made.
        """
        self._tx = optax.with_extra_args_support(tx)
        self._shard = plan.of_server[server]
        self._device = device
        self._plan = plan
        self._server = server
        self._update = jax.jit(self._make_update, donate_argnums=0)
        self._compiled: dict[int, Any] = {}  # by number of pushes.
        self._initial = params
        self._state = self._begin(params)

    def apply(
        self,
        pushes: Sequence[Sequence[np.ndarray | jax.Array]],
        weights: Sequence[float],
        staleness: int,
    ) -> None:
        """Updates with the weighted mean of pushes, and waits until it is made.

        Args:
          pushes: of each, the packed buckets of this server, shape (n,) each.
          weights: of each; positive.
          staleness: what the optimizer is told of it.
        """
        with jax.default_device(self._device):
            self._state = self._compile(len(pushes))(
                self._state,
                tuple(tuple(push) for push in pushes),
                np.asarray(weights, np.float32),
                np.int32(staleness),
            )
        # Who waits for memory that is shared must not go on before it was read.
        jax.block_until_ready(self._state)

    def copy_into(self, buffers: Sequence[np.ndarray]) -> None:
        """Copies the parameters into the buffers of the buckets, shape (n,) each."""
        shards.copy_leaves(self._shard, self._find_leaves(), buffers)

    def save(self) -> list[np.ndarray]:
        """Returns copies of all arrays that make the state."""
        return [np.array(x) for x in jax.tree.leaves(self._state)]

    def load(self, arrays: Sequence[np.ndarray]) -> None:
        """Takes what `save` has returned.

        Raises:
          RuntimeError: it is that of other parameters, or of another optimizer.
        """
        leaves, treedef = jax.tree.flatten(self._state)
        found = [(tuple(x.shape), np.dtype(x.dtype)) for x in arrays]
        wanted = [(x.shape, np.dtype(x.dtype)) for x in leaves]
        if found != wanted:
            raise RuntimeError(
                "The checkpoint is that of other parameters, of another optimizer or "
                f"of another number of servers.\n  here:       {wanted[:4]} ...\n"
                f"  checkpoint: {found[:4]} ...\nGive another `checkpoint_dir`."
            )
        self._state = jax.tree.unflatten(
            treedef, [jax.device_put(x, self._device) for x in arrays]
        )

    def reset(self) -> None:
        """Goes back to the parameters it was given."""
        self._state = self._begin(self._initial)

    def warm_up(self, num_pushes: int) -> None:
        """Compiles the update for so many pushes at once, before there are any."""
        self._compile(num_pushes)

    def _compile(self, num_pushes: int) -> Any:
        if num_pushes not in self._compiled:
            avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._shard.avals]
            lowered = self._update.lower(
                self._state,
                (tuple(avals),) * num_pushes,
                jax.ShapeDtypeStruct((num_pushes,), jnp.float32),
                jax.ShapeDtypeStruct((), jnp.int32),
            )
            self._compiled[num_pushes] = lowered.compile()
        return self._compiled[num_pushes]

    def _begin(self, params: PyTree) -> _State:
        own = self._plan.find_parts(params, self._server)
        # A copy: the first update donates it.
        own = jax.tree.map(lambda x: jax.device_put(np.array(x), self._device), own)
        with jax.default_device(self._device):
            opt_state = jax.tree.map(jnp.array, self._tx.init(own))
        return _State(own, opt_state)

    def _find_leaves(self) -> list[Any]:
        """The leaves of the whole tree; None for those of other servers."""
        is_gap = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        leaves = jax.tree.leaves(self._state.params, is_leaf=is_gap)
        return [None if is_gap(x) else x for x in leaves]

    def _make_update(
        self,
        state: _State,
        pushes: tuple[tuple[jax.Array, ...], ...],
        weights: jax.Array,
        staleness: jax.Array,
    ) -> _State:
        means = [_mean(column, weights) for column in zip(*pushes, strict=True)]
        leaves: list[Any] = [optax.MaskedNode()] * len(self._plan.plan.leaves)
        for bucket, mean in zip(self._shard.buckets, means, strict=True):
            shapes = [self._plan.plan.leaves[i].shape for i in bucket]
            for i, part in zip(bucket, buckets.unpack(mean, shapes), strict=True):
                leaves[i] = part
        treedef: Any = self._plan.plan.treedef
        grads = jax.tree.unflatten(treedef, leaves)
        updates, opt_state = self._tx.update(
            grads, state.opt_state, state.params, staleness=staleness
        )
        params: Any = optax.apply_updates(state.params, updates)
        return _State(params, opt_state)


def check_is_by_leaf(
    tx: optax.GradientTransformation, params: PyTree, plan: Shards
) -> None:
    """Raises ValueError if `tx` needs all gradients where servers have some each.

    It is tried on small arrays: what it makes of a leaf must not depend on leaves of
    other servers, as it does with `optax.clip_by_global_norm`.
    """
    if len(plan.of_server) == 1:
        return
    rng = np.random.default_rng(0)
    tx = optax.with_extra_args_support(tx)

    def small(x: Any) -> jax.Array:
        shape = tuple(min(n, _PROBE_WIDTH) for n in np.shape(x))
        return jnp.asarray(rng.normal(size=shape), jnp.result_type(x))

    tree = jax.tree.map(small, params)
    # Gradients of very different size: as large as what is clipped, and as small.
    leaves = jax.tree.leaves(tree)
    scales = [10.0 ** (3 * (i % 3) - 3) for i in range(len(leaves))]
    grads = jax.tree.unflatten(
        jax.tree.structure(tree), [s * x for s, x in zip(scales, leaves, strict=True)]
    )

    def run(tree: PyTree, grads: PyTree) -> PyTree:
        updates, state = grads, tx.init(tree)
        for _ in range(_PROBE_STEPS):
            updates, state = tx.update(grads, state, tree, staleness=jnp.int32(1))
        return updates

    whole = jax.tree.leaves(run(tree, grads))
    for server, shard in enumerate(plan.of_server):
        parts = run(plan.find_parts(tree, server), plan.find_parts(grads, server))
        for i, x in zip(sorted(shard.leaves), jax.tree.leaves(parts), strict=True):
            if not np.allclose(x, whole[i], rtol=1e-3, equal_nan=True):
                raise ValueError(
                    f"The optimizer looks at more than one leaf at a time: its update "
                    f"of `{plan.plan.leaf_paths()[i]}` depends on parameters that "
                    f"other servers have. With {len(plan.of_server)} servers, clip by "
                    "norm before `Worker.push`, or start one server."
                )


def _mean(column: Sequence[jax.Array], weights: jax.Array) -> jax.Array:
    """Weighted mean of buffers of one shape, in float32 at least."""
    if len(column) == 1:
        return column[0]
    dtype = jnp.promote_types(column[0].dtype, jnp.float32)
    total = sum(w * x.astype(dtype) for w, x in zip(weights, column, strict=True))
    return (total / weights.sum()).astype(column[0].dtype)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that there is no memory left."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
