"""Local training: replicas that step apart, each on parameters of its own.

The parameters are a `jdp.PerReplica` in the train state, and stepping and averaging
are one function. So local training is a pair of `init(params) -> state` and
`update(grads, state) -> state`; the next gradient is taken at `state.params.value`.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from typing_extensions import TypeVar

from jdp import compat
from jdp.gradients import averaging, step_trace, weighted_mean
from jdp.gradients.weighted_mean import Weighting
from jdp.optimizers import partials
from jdp.optimizers.partials import Op, Partial
from jdp.replicas.per_replica import PerReplica
from jdp.types import AllReduce, AxisName, PyTree

State = TypeVar("State", default=Any)


class LocalUpdate(Protocol[State]):
    """Takes the step of one replica, and averages when an average is due."""

    def __call__(
        self,
        grads: PyTree,
        state: State,
        /,
        *,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> State:
        """Returns the next state.

        Args:
          grads: this replica's own gradients (`jdp.local_gradients`).
          state: the result of `init` or of the last call.
          weight: number of samples behind the gradients; None: the same on all
            replicas. A replica without samples does not step. In an average, a replica
            counts by its samples since the last average.
          **extra_args: further arguments for `update` of the replica's optimizer, such
            as `value=` for `optax.contrib.reduce_on_plateau`, or `used=` for
            `jdp.skip_unused`: this replica's own.
        """
        ...


class LocalTraining(NamedTuple, Generic[State]):
    """A pair of pure functions with which replicas train apart."""

    init: Callable[[PyTree], State]  # (params) -> state; also outside of a step.
    update: LocalUpdate[State]


def begin_apart(
    tx: optax.GradientTransformation, params: PyTree, axis_name: AxisName
) -> tuple[PerReplica, PerReplica]:
    """Returns the initial parameters and optimizer state of a replica."""
    own = compat.cast_tree_varying(jax.tree.map(jnp.asarray, params), axis_name)
    inner = compat.cast_tree_varying(jax.tree.map(jnp.asarray, tx.init(own)), axis_name)
    return PerReplica(own), PerReplica(inner)


def no_samples(count: int, axis_name: AxisName) -> jax.Array:
    """Returns zero counters of samples: float32 (count,)."""
    return compat.cast_tree_varying(jnp.zeros(count, jnp.float32), axis_name)


def find_amount(weight: jax.typing.ArrayLike | None, axis_name: AxisName) -> jax.Array:
    """Returns the samples of this replica in this step: float32 (), 1 by default."""
    trace = step_trace.current()
    weighting = trace.resolve(weight, "weight")
    trace.note(weighting)
    amount = jnp.ones((), jnp.float32) if weighting is None else weighting.amount
    return compat.cast_tree_varying(amount.astype(jnp.float32), axis_name)


def step_apart(
    tx: optax.GradientTransformation,
    grads: PyTree,
    params: PerReplica,
    inner: PerReplica,
    amount: jax.Array,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PerReplica]:
    """Takes the step of this replica; without data, whatever the gradients, no step."""
    tx = optax.with_extra_args_support(tx)
    updates, new_inner = tx.update(grads, inner.value, params.value, **extra_args)
    new_params = _apply_updates(params.value, updates)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        new = lax.convert_element_type(new, old.dtype)  # Adam makes floats of integers.
        has_data = jnp.broadcast_to(weighted_mean.has_data(amount), jnp.shape(old))
        return lax.select(has_data, new, old)

    return (
        jax.tree.map(choose, new_params, params.value),
        PerReplica(jax.tree.map(choose, new_inner, inner.value)),
    )


def is_exact(x: Any) -> bool:
    """Whether an array holds integers or booleans."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def _apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """`optax.apply_updates`, which leaves integers with an update of 0 as they are.

    `optax.apply_updates` adds in floats, which cannot hold all digits of integers.
    """

    def keep(new: Any, old: Any, update: Any) -> Any:
        return jnp.where(update == 0, old, new) if is_exact(old) else new

    return jax.tree.map(keep, optax.apply_updates(params, updates), params, updates)


def mean_by_amount(
    tree: PyTree, names: tuple[str, ...], amount: jax.Array, all_reduce: AllReduce
) -> PyTree:
    """Averages over replicas, one collective per dtype; zeros where no replica counts.

    Integers and booleans get the rounded mean, between the least and the greatest, so
    equal values stay as they are. Where no replica counts they are undefined.

    Args:
      tree: arrays of this replica.
      names: the axes to average over.
      amount: weight of this replica, float32 ().
      all_reduce: the sum.
    """
    weighting = Weighting(amount, "weight")
    real = jax.dtypes.canonicalize_dtype(float)
    wide = jax.tree.map(lambda x: x.astype(real) if is_exact(x) else x, tree)
    means = averaging.average_weighted(wide, names, lambda: weighting, all_reduce)
    exact = [x for x in jax.tree.leaves(tree) if is_exact(x)]
    limits = iter(_find_limits(exact, names, amount))

    def in_dtype(mean: jax.Array, like: jax.Array) -> jax.Array:
        if is_exact(like):
            return _round_between(mean, *next(limits))
        return mean.astype(like.dtype)

    return jax.tree.map(in_dtype, means, tree)


def _find_limits(
    arrays: Sequence[jax.Array], names: tuple[str, ...], amount: jax.Array
) -> list[tuple[jax.Array, jax.Array]]:
    """Returns for each array the least and the greatest of the replicas that count."""
    if not arrays:
        return []

    def part(x: jax.Array, op: Op) -> Partial:
        neutral = jnp.asarray(partials.neutral(x.dtype, op), x.dtype)
        return Partial(jnp.where(weighted_mean.has_data(amount), x, neutral), op)

    ops: tuple[Op, ...] = ("min", "max")
    found = partials.combine([part(x, op) for op in ops for x in arrays], names)
    return list(zip(found[: len(arrays)], found[len(arrays) :], strict=True))


def _round_between(mean: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    mean = jnp.round(mean)
    rounded = jnp.where(mean <= low.astype(mean.dtype), low, mean.astype(low.dtype))
    return jnp.where(mean >= high.astype(mean.dtype), high, rounded)


def as_integer(name: str, value: Any) -> int:
    """Returns an integer of Python or numpy.

    Raises:
      TypeError: it is not an integer.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"`{name}` must be an integer, a number of steps, got {value!r}.")
