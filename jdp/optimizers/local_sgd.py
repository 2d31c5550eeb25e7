"""Local training: replicas that train apart, and come together now and then.

Between averages every replica has parameters of its own, so they are a
`jdp.PerReplica` in the train state, and stepping and averaging are one thing: a pair of
`init(params) -> state` and `update(grads, state) -> state`, where `state.params.value`
is what the next gradient is taken at.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdp.gradients import averaging, reduce, step_trace, used_flags, weighted_mean
from jdp.gradients.weighted_mean import Weighting
from jdp.optimizers import partials, update_arguments
from jdp.optimizers.partials import Op, Partial
from jdp.replicas import initial_state, mesh
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import PerReplica
from jdp.types import AxisName, PyTree


class LocalUpdate(Protocol):
    """Takes the step of one replica, and averages when it is time."""

    def __call__(
        self,
        grads: PyTree,
        state: Any,
        /,
        *,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> Any:
        """Returns the next state.

        Args:
          grads: this replica's own gradients (`jdp.local_gradients`).
          state: what `init` made, or the last call returned.
          weight: how many samples the gradients are of; None: as many as those of the
            other replicas. A replica without any does not step, and what a replica has
            seen since the last average is what it counts by in the next.
          **extra_args: of `update` of the replica's optimizer, such as `value=` for
            `optax.contrib.reduce_on_plateau`, or `used=` for `jdp.skip_unused`: this
            replica's own.
        """
        ...


class LocalTraining(NamedTuple):
    """How replicas train apart; a pair of pure functions."""

    init: Callable[[PyTree], Any]  # (params) -> state; also outside of a step.
    update: LocalUpdate


class LocalSGDState(NamedTuple):
    """State of `local_sgd`."""

    params: PerReplica  # what this replica has.
    inner: PerReplica  # state of its optimizer.
    # Samples, or steps, that it has seen since the last average of each kind, float32
    # (k,), of k periods.
    seen: PerReplica
    step: jax.Array  # int32 (): updates so far.


def local_sgd(
    tx: optax.GradientTransformation,
    *,
    period: int | tuple[int, int],
    warmup_steps: int = 0,
    axis_name: AxisName = "data",
    world: World | None = None,
) -> LocalTraining:
    """Averages parameters every so many steps, in place of gradients in each.

    In the first `warmup_steps` gradients are averaged: plain data-parallel training.
    After step k of those that follow, parameters are averaged if k is a multiple of
    `period` (Stich, 2019; Lin et al., 2020: post-local SGD). The state of the optimizer
    stays each replica's own.

    Integers and booleans among the parameters stay bit for bit what they are where all
    replicas have the same. Elsewhere all go on with the mean, computed in JAX's default
    float and rounded, between the least and the greatest of replicas that have data.

        local = jdp.local_sgd(optax.sgd(0.1, momentum=0.9), period=8, warmup_steps=500)
        state = local.init(params)

        @jdp.data_parallel
        def step(state, batch):
            loss, grads = jdp.local_gradients(loss_fn)(state.params.value, batch)
            return local.update(grads, state), {"loss": loss}

    Args:
      tx: the optimizer of each replica.
      period: steps between averages. Of a pair of axes also a pair: between averages
        within a node, and over all, a multiple of the first.
      warmup_steps: how many steps are plain ones.
      axis_name: the axis, or a pair of axes (across nodes, within a node).
      world: the replicas, for `init` outside of a step; None: what `jdp.init` made.

    Returns:
      The pair; its state is a `LocalSGDState`.

    Raises:
      ValueError: a period is below 1, a pair goes without a pair of axes, or its second
        is no multiple of its first; `warmup_steps` is negative.
      TypeError: `tx` is no optimizer, or a number of steps is no integer.
    """
    update_arguments.check_optimizer(tx, "local_sgd")
    names = mesh.as_axis_names(axis_name)
    given = period if isinstance(period, Sequence) else (period,)
    periods = tuple(as_integer("period", each) for each in given)
    warmup_steps = as_integer("warmup_steps", warmup_steps)
    _check_periods(periods, names, warmup_steps)
    # Over what is averaged, how often: the widest last.
    reaches = [names[-1:], names] if len(periods) == 2 else [names]

    def init(params: PyTree) -> Any:
        def init_here(params: PyTree) -> LocalSGDState:
            own, inner = begin_apart(tx, params, axis_name)
            seen = PerReplica(no_samples(len(periods), axis_name))
            return LocalSGDState(own, inner, seen, jnp.zeros((), jnp.int32))

        return initial_state.init_on_replicas(
            init_here, params, axis_name=axis_name, world=world
        )

    def update(
        grads: PyTree,
        state: LocalSGDState,
        /,
        *,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> LocalSGDState:
        amount = find_amount(weight, axis_name)
        step = state.step + 1
        later = step - warmup_steps

        def mean_gradients(grads: PyTree) -> PyTree:
            return _mean_or_keep(grads, names, amount)

        def keep(grads: PyTree) -> PyTree:
            return grads

        counts = amount
        if warmup_steps:
            grads = lax.cond(later > 0, keep, mean_gradients, grads)
            # The mean is a step for those without data, too.
            anywhere = lax.psum(amount, names) > 0
            counts = jnp.where(later > 0, amount, anywhere.astype(jnp.float32))
        extra_args = _united(extra_args, later <= 0, names, bool(warmup_steps))
        params, inner = step_apart(
            tx, grads, state.params, state.inner, counts, extra_args
        )
        seen = state.seen.value + amount
        is_done = jnp.bool_(False)  # by an average over more replicas.
        for k in reversed(range(len(periods))):
            is_due = (later > 0) & (later % periods[k] == 0)

            def average(params: PyTree, k: int = k, seen: Any = seen) -> PyTree:
                return _mean_or_keep(params, reaches[k], seen[k])

            params = lax.cond(is_due & ~is_done, average, keep, params)
            is_done = is_done | is_due
            # An average over all is one within each node as well.
            seen = jnp.where(is_due & (jnp.arange(len(periods)) <= k), 0.0, seen)
        return LocalSGDState(PerReplica(params), inner, PerReplica(seen), step)

    return LocalTraining(init, update)


def begin_apart(
    tx: optax.GradientTransformation, params: PyTree, axis_name: AxisName
) -> tuple[PerReplica, PerReplica]:
    """Initial state of a replica's own."""
    own = reduce.cast_varying(jax.tree.map(jnp.asarray, params), axis_name)
    inner = reduce.cast_varying(jax.tree.map(jnp.asarray, tx.init(own)), axis_name)
    return PerReplica(own), PerReplica(inner)


def no_samples(count: int, axis_name: AxisName) -> jax.Array:
    """Counters of what a replica has seen: float32 (count,)."""
    return reduce.cast_varying(jnp.zeros(count, jnp.float32), axis_name)


def find_amount(weight: jax.typing.ArrayLike | None, axis_name: AxisName) -> jax.Array:
    """Amount that this replica has seen in this step: float32 (), 1 by default."""
    trace = step_trace.current()
    weighting = trace.resolve(weight, "weight")
    trace.note(weighting)
    amount = jnp.ones((), jnp.float32) if weighting is None else weighting.amount
    return reduce.cast_varying(amount.astype(jnp.float32), axis_name)


def step_apart(
    tx: optax.GradientTransformation,
    grads: PyTree,
    params: PerReplica,
    inner: PerReplica,
    amount: jax.Array,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PerReplica]:
    """Takes the step of this replica; none without data, whatever the gradients."""
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


def _united(
    extra_args: dict[str, Any],
    is_plain: jax.Array,
    names: tuple[str, ...],
    has_warmup: bool,
) -> dict[str, Any]:
    """Extra arguments in which, in a plain step, `used` says what any replica used."""
    used = extra_args.get("used")
    if used is None or not has_warmup:
        return extra_args
    leaves, treedef = jax.tree.flatten(used)
    decided = [i for i, x in enumerate(leaves) if not used_flags.is_static(x)]
    if not decided:
        return extra_args
    own = jnp.stack([leaves[i] for i in decided]).astype(jnp.int32)
    own = reduce.cast_varying(own, names)

    def unite(own: jax.Array) -> jax.Array:
        return reduce.cast_varying(lax.pmax(own, names), names)

    for i, flag in zip(
        decided, lax.cond(is_plain, unite, lambda own: own, own) > 0, strict=True
    ):
        leaves[i] = flag
    return {**extra_args, "used": jax.tree.unflatten(treedef, leaves)}


def is_exact(x: Any) -> bool:
    """Whether an array is of integers or booleans, of which a mean is none."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def _apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """`optax.apply_updates`, but of integers those without an update stay as they are.

    It adds floats to them, which have not all of their digits.
    """

    def keep(new: Any, old: Any, update: Any) -> Any:
        return jnp.where(update == 0, old, new) if is_exact(old) else new

    return jax.tree.map(keep, optax.apply_updates(params, updates), params, updates)


def mean_by_amount(tree: PyTree, names: tuple[str, ...], amount: jax.Array) -> PyTree:
    """Averages over replicas, one collective per dtype; zeros where no replica counts.

    Integers and booleans get the mean, rounded, between the least and the greatest: so
    they stay what they are where they are equal. Nothing is known of them where no
    replica counts.

    Args:
      tree: of this replica.
      names: the axes to average over.
      amount: how much this replica counts, float32 ().
    """
    weighting = Weighting(amount, "weight")
    real = jax.dtypes.canonicalize_dtype(float)
    wide = jax.tree.map(lambda x: x.astype(real) if is_exact(x) else x, tree)
    means = averaging.average_weighted(wide, names, lambda: weighting)
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
    """By array the least and the greatest of the replicas that count."""
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


def _mean_or_keep(tree: PyTree, names: tuple[str, ...], amount: jax.Array) -> PyTree:
    """The mean, typed as what may differ; the tree itself where no replica counts."""
    mean = mean_by_amount(tree, names, amount)
    anyone = weighted_mean.has_data(lax.psum(amount, names))

    def choose(mean: jax.Array, own: jax.Array) -> jax.Array:
        flag, mean = reduce.cast_varying((anyone, mean), names)
        return lax.select(jnp.broadcast_to(flag, own.shape), mean, own)

    return jax.tree.map(choose, mean, tree)


def as_integer(name: str, value: Any) -> int:
    """Returns an integer of Python or numpy.

    Raises:
      TypeError: it is another number, or none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be an integer, a number of steps, got {value!r}."
        ) from None


def _check_periods(
    periods: Sequence[int], names: tuple[str, ...], warmup_steps: int
) -> None:
    if not 1 <= len(periods) <= 2 or min(periods) < 1:
        raise ValueError(
            f"`period` must be at least 1, or a pair of such, got {periods}."
        )
    if len(periods) == 2 and len(names) != 2:
        raise ValueError(
            f"`period={periods}` is for a pair of axes, across nodes and within a "
            f"node, got `axis_name={names[0]!r}`. Make the mesh with "
            "`jdp.init(axis_name=('node', 'data'))`."
        )
    if periods[-1] % periods[0]:
        raise ValueError(
            "The second of `period`, over all, must be a multiple of the first, within "
            f"a node, got {periods}."
        )
    if warmup_steps < 0:
        raise ValueError(f"`warmup_steps` must be at least 0, got {warmup_steps}.")
