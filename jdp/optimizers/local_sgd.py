"""Local SGD: parameters averaged every so many steps, not gradients in each."""

import functools
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from typing_extensions import TypeVar

from jdp import compat, types
from jdp.gradients import option_checks, used_flags, weighted_mean
from jdp.optimizers import local_training, update_arguments
from jdp.optimizers.local_training import LocalTraining
from jdp.replicas import axes, initial_state
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import PerReplica
from jdp.types import AllReduce, AllReduceOption, AxisName, PyTree

T = TypeVar("T", default=Any)


class LocalSGDState(NamedTuple, Generic[T]):
    """State of `local_sgd`."""

    params: PerReplica[T]  # parameters of this replica.
    inner: PerReplica  # state of its optimizer.
    # Samples, or steps, of this replica since the last average of each kind: float32
    # (k,) for k periods.
    seen: PerReplica
    step: jax.Array  # int32 (): updates so far.


def local_sgd(
    tx: optax.GradientTransformation,
    *,
    period: int | tuple[int, int],
    warmup_steps: int = 0,
    axis_name: AxisName | None = None,
    all_reduce: AllReduceOption = "auto",
    world: World | None = None,
) -> LocalTraining[LocalSGDState[Any]]:
    """Averages parameters every `period` steps, instead of gradients in every step.

    In the first `warmup_steps` gradients are averaged: plain data-parallel training.
    After step k of those that follow, parameters are averaged if k is a multiple of
    `period` (Stich, 2019; Lin et al., 2020: post-local SGD). The state of the optimizer
    stays each replica's own.

    Integers and booleans among the parameters stay bit for bit as they are if all
    replicas have the same. Otherwise all go on with the mean over the replicas with
    data, computed in JAX's default float and rounded, between the least and the
    greatest.

        local = jdp.local_sgd(optax.sgd(0.1, momentum=0.9), period=8, warmup_steps=500)
        state = local.init(params)

        @jdp.data_parallel
        def step(state, batch):
            loss, grads = jdp.local_gradients(loss_fn)(state.params.value, batch)
            return local.update(grads, state), {"loss": loss}

    Args:
      tx: the optimizer of each replica.
      period: steps between averages. For a pair of axes also a pair: between averages
        within a node, and between averages over all, a multiple of the first.
      warmup_steps: number of plain data-parallel steps at the start.
      axis_name: the axis, or a pair of axes (across nodes, within a node); None: the
        axes of the world.
      all_reduce: sums the parameters, or gradients; see `jdp.sync_gradients`.
      world: the replicas, for `init` outside of a step; None: the world of `jdp.init`.

    Returns:
      The pair; its state is a `LocalSGDState`.

    Raises:
      ValueError: a period is below 1, a pair goes without a pair of axes, or its second
        is not a multiple of its first; `warmup_steps` is negative; `all_reduce` does
        not sum. Without `axis_name`, `init` and `update` raise for a pair.
      TypeError: `tx` is not an optimizer, or a number of steps is not an integer.
    """
    update_arguments.check_optimizer(tx, "local_sgd")
    given = period if isinstance(period, Sequence) else (period,)
    periods = tuple(local_training.as_integer("period", each) for each in given)
    warmup_steps = local_training.as_integer("warmup_steps", warmup_steps)
    _check_periods(periods, warmup_steps)
    if axis_name is not None:
        _check_axes(periods, axis_name)
    by = option_checks.find_all_reduce(all_reduce)

    def update(
        grads: PyTree,
        state: LocalSGDState,
        /,
        *,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> LocalSGDState:
        names = _check_axes(periods, axes.find(axis_name))
        reach = _Reach(names, by)
        # Replicas to average over, per period: the widest last.
        reaches = [reach._replace(names=names[-1:])] * (len(periods) == 2) + [reach]
        amount = local_training.find_amount(weight, names)
        step = state.step + 1
        later = step - warmup_steps
        counts = amount
        if warmup_steps:
            grads, counts = _average_in_warmup(grads, amount, later, reach)
            extra_args = _unite_used(extra_args, later <= 0, names)
        params, inner = local_training.step_apart(
            tx, grads, state.params, state.inner, counts, extra_args
        )
        seen = state.seen.value + amount
        params, seen = _average_if_due(params, seen, later, periods, reaches)
        return LocalSGDState(PerReplica(params), inner, PerReplica(seen), step)

    init = functools.partial(_init, tx, periods, axis_name, world)
    return LocalTraining(init, update)


def _init(
    tx: optax.GradientTransformation,
    periods: Sequence[int],
    axis_name: AxisName | None,
    world: World | None,
    params: PyTree,
) -> Any:
    names = _check_axes(periods, axes.find_outside(axis_name, world))

    def init_here(params: PyTree) -> LocalSGDState:
        own, inner = local_training.begin_apart(tx, params, names)
        seen = PerReplica(local_training.no_samples(len(periods), names))
        return LocalSGDState(own, inner, seen, jnp.zeros((), jnp.int32))

    return initial_state.init_on_replicas(
        init_here, params, axis_name=names, world=world
    )


def _keep(tree: PyTree) -> PyTree:
    return tree


def _average_in_warmup(
    grads: PyTree, amount: jax.Array, later: jax.Array, reach: "_Reach"
) -> tuple[PyTree, jax.Array]:
    """Averages gradients until `later`, the steps since the warm-up, is above 0.

    Returns:
      The gradients, and whether they are a step for this replica: float32 (), 0 for
      none.
    """

    def average(grads: PyTree) -> PyTree:
        return _mean_or_keep(grads, reach, amount)

    grads = lax.cond(later > 0, _keep, average, grads)
    # A replica without data takes the step of the mean, too.
    anywhere = lax.psum(amount, reach.names) > 0
    return grads, jnp.where(later > 0, amount, anywhere.astype(jnp.float32))


def _average_if_due(
    params: PyTree,
    seen: jax.Array,
    later: jax.Array,
    periods: Sequence[int],
    reaches: Sequence["_Reach"],
) -> tuple[PyTree, jax.Array]:
    """Averages parameters over the widest axes whose period is over.

    Args:
      params: the parameters of this replica.
      seen: samples since the last average of each kind, float32 (k,).
      later: steps since the warm-up, int32 ().
      periods: steps between averages, by kind.
      reaches: replicas to average over, by kind.

    Returns:
      Parameters, and `seen` after the averages.
    """
    is_done = jnp.bool_(False)  # by an average over more replicas.
    for k in reversed(range(len(periods))):
        is_due = (later > 0) & (later % periods[k] == 0)

        def average(params: PyTree, k: int = k, seen: Any = seen) -> PyTree:
            return _mean_or_keep(params, reaches[k], seen[k])

        params = lax.cond(is_due & ~is_done, average, _keep, params)
        is_done = is_done | is_due
        # An average over all replicas is an average within each node as well.
        seen = jnp.where(is_due & (jnp.arange(len(periods)) <= k), 0.0, seen)
    return params, seen


def _unite_used(
    extra_args: dict[str, Any], is_warmup: jax.Array, names: tuple[str, ...]
) -> dict[str, Any]:
    """Returns extra arguments; in the warm-up `used` tells what any replica used."""
    used = extra_args.get("used")
    if used is None:
        return extra_args
    leaves, treedef = jax.tree.flatten(used)
    decided = [i for i, x in enumerate(leaves) if not used_flags.is_static(x)]
    if not decided:
        return extra_args
    own = jnp.stack([leaves[i] for i in decided]).astype(jnp.int32)
    own = compat.cast_tree_varying(own, names)

    def unite(own: jax.Array) -> jax.Array:
        return compat.cast_tree_varying(lax.pmax(own, names), names)

    for i, flag in zip(
        decided, lax.cond(is_warmup, unite, lambda own: own, own) > 0, strict=True
    ):
        leaves[i] = flag
    return {**extra_args, "used": jax.tree.unflatten(treedef, leaves)}


class _Reach(NamedTuple):
    """Replicas whose mean is taken, and how."""

    names: tuple[str, ...]  # the axes along which they lie.
    all_reduce: AllReduce


def _mean_or_keep(tree: PyTree, reach: _Reach, amount: jax.Array) -> PyTree:
    """Returns the mean, typed as varying; the tree itself where no replica counts."""
    names = reach.names
    mean = local_training.mean_by_amount(tree, names, amount, reach.all_reduce)
    anyone = weighted_mean.has_data(lax.psum(amount, names))

    def choose(mean: jax.Array, own: jax.Array) -> jax.Array:
        flag, mean = compat.cast_tree_varying((anyone, mean), names)
        return lax.select(jnp.broadcast_to(flag, own.shape), mean, own)

    return jax.tree.map(choose, mean, tree)


def _check_axes(periods: Sequence[int], axis_name: AxisName) -> tuple[str, ...]:
    """Returns the names of the axes; a pair of periods needs a pair of them."""
    names = types.as_axis_names(axis_name)
    if len(periods) == 2 and len(names) != 2:
        raise ValueError(
            f"`period={tuple(periods)}` is for a pair of axes, across nodes and within "
            f"a node, got `axis_name={names[0]!r}`. Make the mesh with "
            "`jdp.init(axis_name=('node', 'data'))`."
        )
    return names


def _check_periods(periods: Sequence[int], warmup_steps: int) -> None:
    if not 1 <= len(periods) <= 2 or min(periods) < 1:
        raise ValueError(
            f"`period` must be at least 1, or a pair of such, got {periods}."
        )
    if periods[-1] % periods[0]:
        raise ValueError(
            "The second of `period`, over all, must be a multiple of the first, within "
            f"a node, got {periods}."
        )
    if warmup_steps < 0:
        raise ValueError(f"`warmup_steps` must be at least 0, got {warmup_steps}.")
