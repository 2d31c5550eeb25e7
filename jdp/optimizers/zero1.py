"""ZeRO, stage 1: an optimizer whose state is sharded over the replicas."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp import compat
from jdp.collectives import auto, xla
from jdp.collectives.base import ReduceScatterAllGather
from jdp.gradients import (
    hook_reduction,
    reduce,
    reduce_options,
    step_trace,
    used_flags,
    weighted_mean,
)
from jdp.gradients.reduce import ReduceOptions
from jdp.gradients.weighted_mean import DivideBy, GradientWeighting, Weighting
from jdp.hooks.base import CommHook
from jdp.hooks.state import init_state
from jdp.optimizers import (
    outer_transforms,
    shard_layout,
    sharded_program,
    update_arguments,
    zero_state,
)
from jdp.optimizers.shard_layout import ArrayShard, ShardLayout
from jdp.optimizers.transformation import SyncedTransformation
from jdp.optimizers.zero_state import ArrayName, InnerState, ZeroState
from jdp.replicas import axes, initial_state, mesh
from jdp.replicas.mesh import World
from jdp.trees import bucket_names, buckets, tree_paths
from jdp.trees.buckets import BucketPlan
from jdp.types import AxisName, PyTree


def zero1(
    tx: optax.GradientTransformation,
    *,
    divide_by: DivideBy = "weight",
    axis_name: AxisName | None = None,
    plan: BucketPlan | None = None,
    halves: ReduceScatterAllGather | Literal["auto"] = "auto",
    hook: CommHook | None = None,
    world: World | None = None,
) -> SyncedTransformation[ZeroState]:
    """Wraps an optimizer so that each replica holds only a shard of its state.

    With n replicas the moments of Adam take 1/n of the memory on each (Rajbhandari et
    al., 2020: ZeRO, stage 1). `update` is called inside a traced function by every
    replica, with its local gradients (`jdp.local_gradients`), as in
    `jdp.distributed_optimizer`. The gradients are reduce-scattered, bucket by bucket;
    each replica steps on its shard of every parameter; the updates are all-gathered.
    That is as much communication as an all-reduce.

        tx = jdp.zero1(optax.adamw(1e-3))
        state = {"params": params, "opt": tx.init(params)}

        @jdp.data_parallel
        def step(state, batch):
            loss, grads = jdp.local_gradients(loss_fn)(state["params"], batch)
            updates, opt = tx.update(grads, state["opt"], state["params"])
            ...

    The results equal the results of `tx` on whole arrays, up to the order of summation,
    and are the same on all replicas: `jdp.optimizers.sharded_program` runs `tx`, and
    finds its sums over whole parameters, as in `optax.clip_by_global_norm`,
    `optax.lars` and `optax.lamb`. Masks and labels see paths and shapes as without it.
    Where other operations need a whole array, such as the matrix products of
    `optax.contrib.muon`, one replica runs them, its owner, with 1/n of the matrices;
    see `jdp.optimizers.region_owners`. Operations that mix all arrays run on gathered
    arrays on every replica. That is correct, but saves no memory while it runs.

    Args:
      tx: the optimizer.
      divide_by: see `sync_gradients`.
      axis_name: see `sync_gradients`.
      plan: see `sync_gradients`.
      halves: the reduce-scatter for gradients and the all-gather for updates, such as
        `jdp.collectives.PSUM` or `RING`; "auto": `SHARED_MEMORY` between CPU processes
        of one host with one replica each, and elsewhere `PSUM`.
      hook: see `sync_gradients`; its sums are then cut, and `halves` only gathers.
      world: the replicas, for `init` outside of a step; None: the world of `jdp.init`.

    Returns:
      An optax transformation; its state is a `ZeroState`. Its `update` needs `params`,
      takes `weight` as `sync_gradients` does, and leaves the state as it is, with
      updates of -0.0, where no replica has data. It raises what `sync_gradients`
      raises, and ValueError for a state of other parameters.

    Raises:
      TypeError: `tx` is not an optimizer, `hook` is not a hook, or `halves` is neither
        a `ReduceScatterAllGather` nor "auto".
      ValueError: `divide_by` is unknown.
    """
    update_arguments.check_optimizer(tx, "zero1")
    step_trace.check_divide_by(divide_by)
    _check_halves(halves)
    inner = optax.with_extra_args_support(tx)
    options = reduce_options.make_options(axis_name, plan, None, "auto", hook)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        used: PyTree | None = None,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        _check_arguments(updates, state, params)
        grads = outer_transforms.mark(updates, "zero1")
        here = options.here()
        layout = shard_layout.find_layout(here.axis_name)
        extra_args = update_arguments.check_extra(extra_args, tx, zero1, here.axis_name)
        trace = step_trace.current()
        weighting = trace.resolve(weight, divide_by)
        trace.note(weighting)
        by = auto.choose_halves(here.axis_name) if isinstance(halves, str) else halves
        scattered = _scatter(grads, used, state.hook, here, weighting, by, layout)
        if used is not None:
            extra_args["used"] = scattered.used
        old = zero_state.unpack(state, inner, params, layout)
        leaves = scattered.leaves
        step = _step(inner, grads, leaves, old, params, extra_args, layout)
        if weighting is not None:
            has_data = weighted_mean.has_data(scattered.total)
            step = _choose_step(has_data, step, old)
        return (
            _gather_updates(step, layout, by),
            zero_state.pack(old.names, step.state, scattered.hook_state),
        )

    init = functools.partial(_init, inner, options, world)
    return SyncedTransformation(init, update)


def _init(
    inner: optax.GradientTransformation,
    options: ReduceOptions,
    world: World | None,
    params: PyTree,
) -> Any:
    axis_name = axes.find_outside(options.axis_name or None, world)
    names, repeats = [], {}
    here = mesh.find_current_world() if world is None else world
    if not compat.is_bound(axis_name) and here is not None and not here.manual_axes:
        names, repeats = zero_state.find_repeats(inner, params)

    def init_here(params: PyTree) -> ZeroState:
        layout = shard_layout.find_layout(axis_name)
        state = inner.init(params)
        hook_state = None
        if options.hook is not None:
            hook_state = init_state(
                options.hook, params, plan=options.plan, axis_name=axis_name
            )
        return zero_state.cut_state(state, params, hook_state, layout, repeats)

    state = initial_state.init_on_replicas(
        init_here, params, axis_name=axis_name, world=world, cuts_rows=True
    )
    return zero_state.repeat(state, names, repeats) if repeats else state


class _ShardedStep(NamedTuple):
    """Results of one step of the inner optimizer."""

    # Leaves of the updates; None for gradients of integers, which are in `rest`.
    updates: list[ArrayShard | None]
    rest: list[Any]
    treedef: Any  # of the updates.
    state: list[jax.Array]  # leaves: whole arrays, and the data of shards.


def _step(
    inner: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    shards: list[Any],
    state: InnerState,
    params: PyTree,
    extra_args: dict[str, Any],
    layout: ShardLayout,
) -> _ShardedStep:
    """Runs the inner optimizer on shards.

    Args:
      inner: the inner optimizer.
      grads: the gradients of this replica; values are not read.
      shards: leaves of the mean gradients.
      state: the inner state.
      params: the parameters, whole.
      extra_args: further arguments of `update`.
      layout: the replicas that have the shards.
    """
    extra, merge = update_arguments.split_arrays(extra_args)
    # Leaves, not trees: a class of the user's may refuse shards as its fields.
    leaves, of_grads = jax.tree.flatten(grads)
    param_leaves, of_params = jax.tree.flatten(params)
    args = (shards, state.leaves, [layout.cut(x) for x in param_leaves], extra)
    # Types of this state, not of a new one: dtypes may settle in the first update.
    wholes = (leaves, state.leaves, param_leaves, extra)
    avals = jax.tree.map(_aval, wholes, is_leaf=_is_shard)
    made: list[Any] = []

    def update(grads: list, leaves: list, params: list, extra: list) -> Any:
        old = jax.tree.unflatten(state.treedef, leaves)
        out, new = inner.update(
            jax.tree.unflatten(of_grads, grads),
            old,
            jax.tree.unflatten(of_params, params),
            **merge(extra),
        )
        found = jax.tree.leaves(new)
        if len(found) != len(leaves):
            tree_paths.check_same_structure(
                new, "The state that the optimizer returns", old, _OF_INIT
            )
        made.append(jax.tree.structure(out))
        return jax.tree.leaves(out), found

    updates, new = sharded_program.run(update, args, avals, layout)
    own = [None if _is_float0(x) else layout.as_shard(x) for x in updates]
    kept = _in_kinds(new, state.names, layout)
    return _ShardedStep(own, updates, made[-1], kept)


_OF_INIT = "the state of its `init`, which `zero1` cuts into shards"


def _choose_step(
    has_data: jax.Array, step: _ShardedStep, old: InnerState
) -> _ShardedStep:
    """Returns updates of -0.0 and the old state where no replica has data."""

    def choose(x: ArrayShard | None) -> ArrayShard | None:
        if x is None:
            return None
        zero = jnp.asarray(-0.0, x.data.dtype)
        return ArrayShard(jnp.where(has_data, x.data, zero), x.shape)

    updates = list(map(choose, step.updates))
    before = [x.row if _is_shard(x) else x for x in old.leaves]
    pairs = zip(step.state, before, strict=True)
    state = [jnp.where(has_data, new, old) for new, old in pairs]
    return step._replace(updates=updates, state=state)


def _gather_updates(
    step: _ShardedStep, layout: ShardLayout, halves: ReduceScatterAllGather
) -> PyTree:
    """Returns the whole updates."""
    places = [i for i, x in enumerate(step.updates) if x is not None]
    leaves = list(step.rest)
    own = [x for x in step.updates if x is not None]
    for i, x in zip(places, _gather(own, layout, halves), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(step.treedef, leaves)


def _in_kinds(
    leaves: list[Any], names: list[ArrayName], layout: ShardLayout
) -> list[jax.Array]:
    """Returns the leaves of a new inner state, cut or whole as their names say."""
    leaves = list(leaves)
    stray = [
        i
        for i, (x, name) in enumerate(zip(leaves, names, strict=True))
        if not name.is_cut and _is_shard(x)
    ]
    wholes = _gather([leaves[i] for i in stray], layout, xla.PSUM)
    for i, x in zip(stray, wholes, strict=True):
        leaves[i] = x
    return [
        _finite_padding(layout.as_shard(x), layout).row if name.is_cut else x
        for x, name in zip(leaves, names, strict=True)
    ]


def _finite_padding(shard: ArrayShard, layout: ShardLayout) -> ArrayShard:
    # Padding may have become 0 / 0, which `jax_debug_nans` would find. Nothing else
    # reads it, and to mask it makes XLA copy the moments.
    if not compat.searches_for_nan():
        return shard
    return shard._replace(data=layout.mask(shard, 0))


def _is_shard(x: Any) -> bool:
    return isinstance(x, ArrayShard)


def _is_float0(x: Any) -> bool:
    """Whether a leaf is a gradient of integers, which is neither cut nor sent."""
    return not _is_shard(x) and x.dtype == jax.dtypes.float0


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a whole array, which may be weak."""
    data, shape = x if _is_shard(x) else (x, jnp.shape(x))
    aval = jax.typeof(data)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


class _ScatteredGradients(NamedTuple):
    """Results of a reduction on one replica."""

    leaves: list[Any]  # `ArrayShard`s, but for gradients of integers.
    used: PyTree | None  # whether any replica used each parameter.
    total: jax.Array | int  # weight of all replicas; their number without weighting.
    hook_state: PyTree


def _scatter(
    grads: PyTree,
    used: PyTree | None,
    hook_state: PyTree,
    options: ReduceOptions,
    weighting: Weighting | None,
    halves: ReduceScatterAllGather,
    layout: ShardLayout,
) -> _ScatteredGradients:
    """Averages gradients, of which each replica gets its shards; unites usage flags."""
    plan = buckets.fit_plan(options.plan, grads)
    options = options._replace(plan=plan)
    decided = used_flags.find_decided(used, grads)
    riders = [used_flags.as_rider(decided, jnp.float32)] if decided else []
    if options.hook is not None or compat.is_alone(options.axis_name):
        means = reduce.mean_over_replicas(
            grads, options, hook_state=hook_state, weighting=weighting, riders=riders
        )
        if decided:
            used = used_flags.from_rider(used, means.riders[0])
        found = [
            x if _is_float0(x) else layout.cut(x) for x in jax.tree.leaves(means.grads)
        ]
        return _ScatteredGradients(found, used, means.total, means.hook_state)
    leaves = reduce.check_are_local(grads, plan, (), options.axis_name)
    shards: list[Any] = list(leaves)
    total: jax.Array | int = layout.num_replicas
    if weighting is not None or decided:
        flags, total = reduce.mean_of_riders(riders, options, weighting)
        if decided:
            used = used_flags.from_rider(used, flags[0])
    weighing = GradientWeighting(weighting)
    share = hook_reduction.find_share(weighing, total, options.axis_name)
    names = bucket_names.scope_names(plan, plan.buckets)
    for bucket, name in zip(plan.buckets, names, strict=True):
        with jax.named_scope(name):
            rows = [layout.rows(hook_reduction.scale(leaves[i], share)) for i in bucket]
            parts = shard_layout.scatter(rows, layout, halves)
        for i, part in zip(bucket, parts, strict=True):
            # float16 is weighted in float32.
            shards[i] = ArrayShard(part.astype(leaves[i].dtype), jnp.shape(leaves[i]))
    return _ScatteredGradients(shards, used, total, hook_state)


def _gather(
    own: list[ArrayShard], layout: ShardLayout, halves: ReduceScatterAllGather
) -> list[jax.Array]:
    """Gathers whole arrays, in one collective per dtype and set of mesh axes."""
    groups: dict[Any, list[int]] = {}
    for i, shard in enumerate(own):
        kind = shard.data.dtype, compat.varying_axes(shard.data)
        groups.setdefault(kind, []).append(i)
    wholes: list[Any] = [None] * len(own)
    for members in groups.values():
        found = shard_layout.gather([own[i] for i in members], layout, halves)
        for i, x in zip(members, found, strict=True):
            wholes[i] = x
    return wholes


def _check_halves(halves: Any) -> None:
    is_auto = isinstance(halves, str) and halves == "auto"
    if not is_auto and not isinstance(halves, ReduceScatterAllGather):
        raise TypeError(
            "`halves` must be the halves of an all-reduce, such as "
            f"`jdp.collectives.RING`, or 'auto', got {halves!r}."
        )


def _check_arguments(grads: PyTree, state: Any, params: PyTree | None) -> None:
    if params is None:
        raise ValueError(
            "`params` is missing: the optimizer of `zero1` steps on its own shard "
            "of them. Call `update(grads, state, params)`."
        )
    if not isinstance(state, ZeroState):
        raise TypeError(
            "The state of `zero1` must be a result of its `init`, got "
            f"{type(state).__name__}."
        )
    update_arguments.check_shapes(grads, params)
