"""Updates: how does one server hold its parameters and update them?"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jdp.parameter_server import shards
from jdp.parameter_server.shards import Shards
from jdp.parameter_server.staleness import run_update
from jdp.trees import buckets, tree_paths
from jdp.types import Device, PyTree

# Updates until a state keeps its dtypes and structure; no optimizer needs more.
_MOST_FORMS = 4


class _UpdaterState(NamedTuple):
    """Arrays that an update changes."""

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
          tx: the optimizer; gets `staleness=` if it takes extra arguments.
          plan: division of the parameters among the servers.
          server: index of this server.
          device: device of the parameters and updates.
        """
        self._tx = optax.with_extra_args_support(tx)
        self._shard = plan.of_server[server]
        self._device = device
        self._plan = plan
        self._server = server
        self._update = jax.jit(self._make_update, donate_argnums=0)
        self._compiled: dict[tuple[int, int], Any] = {}  # by form and number of pushes.
        self._initial = params
        self._state = self._begin(params)
        self._form = 0  # index of the state's form in `_forms`.
        self._forms = self._find_forms()

    def apply(
        self,
        pushes: Sequence[Sequence[np.ndarray | jax.Array]],
        weights: Sequence[float],
        staleness: int,
    ) -> None:
        """Updates with the weighted mean of pushes; returns once that is done.

        Args:
          pushes: per push, the packed buckets of this server, shape (n,) each.
          weights: weight of each push; positive.
          staleness: passed to the optimizer.
        """
        # Fractions, in float64: a sum of samples times gradients may overflow.
        parts = np.asarray(weights, np.float64)
        parts /= parts.sum()
        with jax.default_device(self._device):
            self._state = self._compile(len(pushes))(
                self._state,
                tuple(tuple(push) for push in pushes),
                parts.astype(_weight_dtype()),
                np.int32(staleness),
            )
            self._form = min(self._form + 1, len(self._forms) - 1)
        # The worker reuses the shared memory as soon as this returns.
        jax.block_until_ready(self._state)

    def copy_into(self, buffers: Sequence[np.ndarray]) -> None:
        """Copies the parameters into the buffers of the buckets, shape (n,) each."""
        shards.copy_leaves(self._shard, self._find_leaves(), buffers)

    def save(self) -> list[np.ndarray]:
        """Returns copies of all arrays of the state; for PRNG keys, of their data."""
        return [np.array(_without_key(x)) for x in jax.tree.leaves(self._state)]

    def describe(self) -> tuple[str, ...]:
        """Describes each array, and the structure of the optimizer state."""
        state = self._forms[-1]
        leaves = zip(tree_paths.leaf_paths(state), jax.tree.leaves(state), strict=True)
        arrays = [f"`{path}` {x.dtype}{list(x.shape)}" for path, x in leaves]
        return (*arrays, f"a state {_describe_nodes(state.opt_state)}")

    def load(self, arrays: Sequence[np.ndarray]) -> None:
        """Restores the result of `save`.

        Raises:
          RuntimeError: it belongs to other parameters or another optimizer.
        """
        found = [(tuple(x.shape), np.dtype(x.dtype)) for x in arrays]
        kinds = [list(map(_saved_as, jax.tree.leaves(form))) for form in self._forms]
        if found not in kinds:
            raise RuntimeError(
                "The checkpoint belongs to other parameters, another optimizer or "
                f"another number of servers.\n  here:       {kinds[-1][:4]} ...\n"
                f"  checkpoint: {found[:4]} ...\nGive another `checkpoint_dir`."
            )
        # The last matching form: a checkpoint is made after updates.
        self._form = max(i for i, kind in enumerate(kinds) if kind == found)
        leaves, treedef = jax.tree.flatten(self._forms[self._form])
        put = [jax.device_put(x, self._device) for x in arrays]
        self._state = jax.tree.unflatten(treedef, map(_with_key, put, leaves))

    def reset(self) -> None:
        """Returns to the initial parameters."""
        self._state, self._form = self._begin(self._initial), 0

    def warm_up(self, num_pushes: int) -> None:
        """Compiles the update for this number of pushes ahead of time."""
        self._compile(num_pushes)

    def _compile(self, num_pushes: int) -> Any:
        place = self._form, num_pushes
        if place not in self._compiled:
            # A state that changes its form cannot reuse the donated memory.
            is_settled = self._form == len(self._forms) - 1
            update = self._update if is_settled else jax.jit(self._make_update)
            lowered = update.lower(
                self._forms[self._form], *self._find_avals(num_pushes)
            )
            self._compiled[place] = lowered.compile()
        return self._compiled[place]

    def _find_avals(self, num_pushes: int) -> tuple[Any, ...]:
        """Returns the shapes and dtypes of the other arguments of an update."""
        avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._shard.avals)
        return (
            (avals,) * num_pushes,
            jax.ShapeDtypeStruct((num_pushes,), _weight_dtype()),
            jax.ShapeDtypeStruct((), jnp.int32),
        )

    def _find_forms(self) -> list[_UpdaterState]:
        """Returns shapes and dtypes of the initial state, and after each update.

        The first updates may change them, for example with parameters of two dtypes;
        the last form is stable.

        Raises:
          ValueError: they do not become stable.
        """
        forms = [jax.eval_shape(lambda state: state, self._state)]
        while len(forms) <= _MOST_FORMS:
            form = self._update.eval_shape(forms[-1], *self._find_avals(1))
            if _is_alike(form, forms[-1]):
                return forms
            forms.append(form)
        raise ValueError(
            "The optimizer's state has another structure, or other shapes or dtypes, "
            f"after each of the first {_MOST_FORMS} updates, so that no program and no "
            "checkpoint fits it. Take an optimizer whose state keeps them."
        )

    def _begin(self, params: PyTree) -> _UpdaterState:
        own = self._plan.find_parts(params, self._server)
        # A copy: the first update donates it.
        own = jax.tree.map(lambda x: jax.device_put(np.array(x), self._device), own)
        with jax.default_device(self._device):
            opt_state = jax.tree.map(jnp.array, self._tx.init(own))
        return _UpdaterState(own, opt_state)

    def _find_leaves(self) -> list[Any]:
        """Returns the leaves of the whole tree; None for leaves of other servers."""
        is_gap = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        leaves = jax.tree.leaves(self._state.params, is_leaf=is_gap)
        return [None if is_gap(x) else x for x in leaves]

    def _make_update(
        self,
        state: _UpdaterState,
        pushes: tuple[tuple[jax.Array, ...], ...],
        weights: jax.Array,
        staleness: jax.Array,
    ) -> _UpdaterState:
        means = [_mean(column, weights) for column in zip(*pushes, strict=True)]
        leaves: list[Any] = [optax.MaskedNode()] * len(self._plan.plan.leaves)
        for bucket, mean in zip(self._shard.buckets, means, strict=True):
            shapes = [self._plan.plan.leaves[i].shape for i in bucket]
            for i, part in zip(bucket, buckets.unpack(mean, shapes), strict=True):
                leaves[i] = part
        treedef: Any = self._plan.plan.treedef
        grads = jax.tree.unflatten(treedef, leaves)
        updates, opt_state = run_update(
            self._tx, grads, state.opt_state, state.params, staleness
        )
        params: Any = optax.apply_updates(state.params, updates)
        return _UpdaterState(params, opt_state)


def _is_alike(one: PyTree, other: PyTree) -> bool:
    """Whether one compiled program takes both."""
    has_one_structure = jax.tree.structure(one) == jax.tree.structure(other)
    return has_one_structure and jax.tree.leaves(one) == jax.tree.leaves(other)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_key(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if _is_key(x) else x


def _with_key(x: jax.Array, like: Any) -> jax.Array:
    """Wraps the data of a PRNG key if `like` is a key."""
    if not _is_key(like):
        return x
    impl = jax.random.key_impl(jnp.zeros((), like.dtype))
    return jax.random.wrap_key_data(x, impl=impl)


def _saved_as(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype in which `Updater.save` returns it."""
    data = jax.eval_shape(_without_key, aval)
    return data.shape, np.dtype(data.dtype)


def _describe_nodes(tree: PyTree) -> str:
    """Describes the structure of a tree, with the class names of its states."""
    if jax.tree_util.tree_structure(tree) == jax.tree_util.tree_structure(0):
        return "*"
    children = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
    is_plain = type(tree) in (list, tuple) or isinstance(tree, Mapping)
    name = "" if is_plain else type(tree).__name__
    return f"{name}({', '.join(map(_describe_nodes, children))})"


def _weight_dtype() -> np.dtype:
    """Returns the dtype of weights: float64 if `jax_enable_x64` is set."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def _mean(column: Sequence[jax.Array], parts: jax.Array) -> jax.Array:
    """Mean of buffers of one shape, weighted with `parts`, which sum to 1.

    It is summed in float32 at least. In spite of rounding, it lies between the least
    and the largest value: finite buffers have a finite mean, and the mean of equal
    buffers equals them.
    """
    if len(column) == 1:
        return column[0]
    dtype = column[0].dtype
    wide = jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype
    parts = parts.astype(jnp.finfo(wide).dtype)
    values = [x.astype(wide) for x in column]
    mean = functools.reduce(jnp.add, map(jnp.multiply, parts, values))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(
            _clamp(mean.real, [x.real for x in values]),
            _clamp(mean.imag, [x.imag for x in values]),
        )
    return _clamp(mean, values).astype(dtype)


def _clamp(mean: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
    least = functools.reduce(jnp.minimum, values)
    return jnp.clip(mean, least, functools.reduce(jnp.maximum, values))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
