"""Zero: optimizer state that is shared out among the replicas (ZeRO, stage 1)."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp import compat
from jdp.collectives import base, xla
from jdp.collectives.base import ReduceScatterAllGather
from jdp.gradients import (
    hook_reduction,
    reduce,
    step_trace,
    used_flags,
    weighted_mean,
)
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.hooks.base import CommHook
from jdp.hooks.state import init_state
from jdp.optimizers import outer_transforms, sharded_program, update_arguments
from jdp.optimizers import shard_layout as layouts
from jdp.optimizers.shard_layout import Layout, Piece
from jdp.replicas import initial_state, per_replica
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import PerReplica
from jdp.trees import buckets, tree_paths
from jdp.trees.buckets import BucketPlan
from jdp.types import AxisName, PyTree


class ZeroState(NamedTuple):
    """State of `zero1`: this replica's pieces of the state of the inner optimizer."""

    shared: list[jax.Array]  # arrays of the inner state that every replica has whole.
    # A list of arrays in the shape of a parameter, of which a replica has a piece:
    # shape (ceil(size / n),), of n replicas.
    own: PerReplica
    hook: Any  # state of the hook; None without one.
    # Path in the inner state and shape of the whole, as in `[0].mu['w'] [5, 16]`.
    shared_names: tuple[str, ...]
    own_names: tuple[str, ...]


# Names are no arrays. A named tuple all the same: `flax.serialization` knows it.
jax.tree_util.register_dataclass(
    ZeroState,
    data_fields=["shared", "own", "hook"],
    meta_fields=["shared_names", "own_names"],
)


def zero1(
    tx: optax.GradientTransformation,
    *,
    divide_by: DivideBy = "weight",
    axis_name: AxisName = "data",
    plan: BucketPlan | None = None,
    halves: ReduceScatterAllGather = xla.PSUM,
    hook: CommHook | None = None,
    world: World | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that each replica holds a part of its state, and no more.

    With n replicas the moments of Adam take 1/n of the memory on each (Rajbhandari et
    al., 2020: ZeRO, stage 1). `update` is called inside a traced function by every
    replica, with its local gradients (`jdp.local_gradients`), as that of
    `jdp.distributed_optimizer`. The gradients are reduced and scattered, bucket by
    bucket; each replica steps on its piece of every parameter; the updates are gathered
    from all. That is as much communication as an all-reduce.

        tx = jdp.zero1(optax.adamw(1e-3))
        state = {"params": params, "opt": tx.init(params)}

        @jdp.data_parallel
        def step(state, batch):
            loss, grads = jdp.local_gradients(loss_fn)(state["params"], batch)
            updates, opt = tx.update(grads, state["opt"], state["params"])
            ...

    The numbers are those of `tx` on whole arrays, up to the order of summation, and the
    same on all replicas: `jdp.optimizers.sharded_program` runs `tx`, and knows which of
    its sums go over whole parameters, as in `optax.clip_by_global_norm`, `optax.lars`
    and `optax.lamb`. Masks and labels see paths and shapes as without it. What neither
    works element by element nor sums up whole arrays, such as the products of matrices
    of `optax.contrib.muon`, is done on gathered arrays by every replica: right, but
    that saves no memory while it runs.

    Args:
      tx: the optimizer.
      divide_by: see `sync_gradients`.
      axis_name: see `sync_gradients`.
      plan: see `sync_gradients`.
      halves: what reduces and scatters gradients, and gathers updates, such as
        `jdp.collectives.RING` or `SHARED_MEMORY`.
      hook: see `sync_gradients`; what it sums is then cut. `halves` gathers alone.
      world: the replicas, for `init` outside of a step; None: what `jdp.init` made.

    Returns:
      An optax transformation; its state is a `ZeroState`. Its `update` needs `params`,
      takes `weight` as `sync_gradients` does, and leaves the state as it is, with
      updates of -0.0, where no replica has data. It raises what `sync_gradients`
      raises, and ValueError for a state of other parameters.

    Raises:
      TypeError: `tx` is no optimizer, `hook` no hook, or `halves` are none.
      ValueError: `divide_by` is unknown.
    """
    update_arguments.check_optimizer(tx, "zero1")
    step_trace.check_divide_by(divide_by)
    if not isinstance(halves, ReduceScatterAllGather):
        raise TypeError(
            "`halves` must be the halves of an all-reduce, such as "
            f"`jdp.collectives.RING`, got {halves!r}."
        )
    inner = optax.with_extra_args_support(tx)
    options = reduce.make_options(axis_name, plan, None, None, hook)

    def init(params: PyTree) -> Any:
        def init_here(params: PyTree) -> ZeroState:
            layout = layouts.find_layout(axis_name)
            state = inner.init(params)
            hook_state = None
            if hook is not None:
                hook_state = init_state(hook, params, plan=plan, axis_name=axis_name)
            return _cut_state(state, params, hook_state, layout)

        return initial_state.init_on_replicas(
            init_here, params, axis_name=axis_name, world=world
        )

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
        updates = outer_transforms.mark(updates, "zero1")
        layout = layouts.find_layout(axis_name)
        extra_args = update_arguments.check_extra(extra_args, tx, zero1, axis_name)
        trace = step_trace.current()
        weighting = trace.resolve(weight, divide_by)
        trace.note(weighting)
        scattered = _scatter(
            updates, used, state.hook, options, weighting, halves, layout
        )
        if used is not None:
            extra_args["used"] = scattered.used
        extra, merge = update_arguments.split_arrays(extra_args)
        # Of leaves: a class of the user's may refuse what is no array, as a piece is.
        grads, of_grads = jax.tree.flatten(updates)
        leaves, of_params = jax.tree.flatten(params)
        names, of_state = _names_of_init(inner, params)
        before = _leaves_of(state, names, layout)
        args = (scattered.grads, before, [layout.cut(x) for x in leaves], extra)
        # Of the state as it is: dtypes may settle in the first update.
        wholes = (grads, before, leaves, extra)
        avals = jax.tree.map(_aval, wholes, is_leaf=_is_piece)
        made: list[Any] = []

        def step(grads: list, state: list, params: list, extra: list) -> Any:
            whole_state = jax.tree.unflatten(of_state, state)
            out, new = inner.update(
                jax.tree.unflatten(of_grads, grads),
                whole_state,
                jax.tree.unflatten(of_params, params),
                **merge(extra),
            )
            found = jax.tree.leaves(new)
            if len(found) != len(state):
                tree_paths.check_same_structure(
                    new, "The state that the optimizer returns", whole_state, _OF_INIT
                )
            made.append(jax.tree.structure(out))
            return jax.tree.leaves(out), found

        steps, new = sharded_program.run(step, args, avals, layout)
        places = [i for i, x in enumerate(steps) if not _is_float0(x)]
        own = _as_pieces([steps[i] for i in places], layout)
        leaves = _in_kinds(new, names, layout)
        if weighting is not None:  # Without any data nothing happens.
            has_data = weighted_mean.has_data(scattered.total)
            own, leaves = _unless_empty(has_data, own, leaves, before)
        for i, x in zip(places, _gather_all(own, layout, halves), strict=True):
            steps[i] = x
        updates = jax.tree.unflatten(made[-1], steps)
        return updates, _make_state(names, leaves, scattered.hook_state)

    return optax.GradientTransformationExtraArgs(init, update)


_OF_INIT = "that of its `init`, which `zero1` cuts into pieces"


class _Name(NamedTuple):
    """One array of the inner state."""

    path: str
    shape: tuple[int, ...]  # of the whole.
    is_cut: bool

    @property
    def key(self) -> str:
        return f"{self.path} {list(self.shape)}"


def array_names(state: PyTree) -> list[str]:
    """Names the arrays of an inner state, as a `ZeroState` does."""
    return [name.key for name in _names(state, ())]


def _names(state: PyTree, params: PyTree) -> list[_Name]:
    """Names the arrays of an inner state, and says which of them are cut."""
    of_params = {jnp.shape(x) for x in jax.tree.leaves(params)} - {()}
    # `flax.nnx.Optimizer` calls `init` with variables and `update` with their values.
    paths = [path.removesuffix(".value") for path in tree_paths.leaf_paths(state)]
    return [
        _Name(path, jnp.shape(x), jnp.shape(x) in of_params and not _is_key(x))
        for path, x in zip(paths, jax.tree.leaves(state), strict=True)
    ]


def _names_of_init(
    inner: optax.GradientTransformation, params: PyTree
) -> tuple[list[_Name], Any]:
    """Returns the names of the arrays of a new inner state, and its treedef."""
    made: list[Any] = []

    def init(params: PyTree) -> list[Any]:
        state = inner.init(params)
        made[:] = _names(state, params), jax.tree.structure(state)
        return jax.tree.leaves(state)

    jax.eval_shape(init, params)
    names, treedef = made
    return names, treedef


def _cut_state(
    state: PyTree, params: PyTree, hook_state: PyTree, layout: Layout
) -> ZeroState:
    names = _names(state, params)
    leaves = []
    for name, x in zip(names, jax.tree.leaves(state), strict=True):
        x = jnp.asarray(x)
        if name.is_cut:
            data = layout.cut(x).data[0]
            leaves.append(base.cast_varying(data, layout.axis_name))
        else:
            leaves.append(jnp.array(x))
    return _make_state(names, leaves, hook_state)


def _make_state(
    names: list[_Name], leaves: list[jax.Array], hook_state: PyTree
) -> ZeroState:
    pairs = list(zip(names, leaves, strict=True))
    return ZeroState(
        [x for name, x in pairs if not name.is_cut],
        PerReplica([x for name, x in pairs if name.is_cut]),
        hook_state,
        tuple(name.key for name in names if not name.is_cut),
        tuple(name.key for name in names if name.is_cut),
    )


def own_shapes(state: ZeroState) -> list[tuple[int, ...]]:
    """Returns the shapes of the whole arrays of which a state has pieces."""
    return [tuple(json.loads(name[name.rindex("[") :])) for name in state.own_names]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _is_piece(x: Any) -> bool:
    return isinstance(x, Piece)


def _is_float0(x: Any) -> bool:
    """Whether it is a gradient of integers, which holds nothing to cut or to send."""
    return not _is_piece(x) and x.dtype == jax.dtypes.float0


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of the whole, and its dtype, which may be weak."""
    data, shape = x if _is_piece(x) else (x, jnp.shape(x))
    aval = jax.typeof(data)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def _leaves_of(state: ZeroState, names: list[_Name], layout: Layout) -> list[Any]:
    """The arrays of the inner state: pieces, or shared.

    Raises:
      ValueError: the state is of other parameters; the array is named.
    """
    own = dict(zip(state.own_names, state.own.value, strict=True))
    shared = dict(zip(state.shared_names, state.shared, strict=True))
    expected = [name.key for name in names]
    if {*own, *shared} != {*expected}:
        missing = [key for key in expected if key not in own and key not in shared]
        extra = [key for key in (*shared, *own) if key not in expected]
        lines = [f"\n  missing: `{key}`" for key in missing[:3]]
        lines += [f"\n  too much: `{key}`" for key in extra[:3]]
        raise ValueError(
            "The state of `zero1` was not made for these parameters, by path and "
            f"shape of the whole arrays:{''.join(lines)}\n"
            "Call `init` again when parameters are added, removed or reshaped."
        )
    leaves = []
    for name in names:
        if not name.is_cut:
            leaves.append(jnp.asarray(shared[name.key]))
            continue
        data = own[name.key]
        width = layout.width(name.shape)
        if data.shape != (width,):
            advice = per_replica.explain_rows(data.shape, (width,))
            raise ValueError(
                f"The state of `zero1` does not fit: `{name.key}` is in pieces of "
                f"{list(data.shape)}, but of {[width]} on {layout.num_replicas} "
                "replicas."
                + (advice or " Bring a state to other replicas with `jdp.reshard`.")
            )
        leaves.append(Piece(data[None], name.shape))
    return leaves


def _in_kinds(leaves: list[Any], names: list[_Name], layout: Layout) -> list[jax.Array]:
    """The leaves of a new inner state, as pieces or shared as they were."""
    leaves = list(leaves)
    stray = [
        i
        for i, (x, name) in enumerate(zip(leaves, names, strict=True))
        if not name.is_cut and _is_piece(x)
    ]
    wholes = _gather_all([leaves[i] for i in stray], layout, xla.PSUM)
    for i, x in zip(stray, wholes, strict=True):
        leaves[i] = x
    return [
        _finite_padding(_as_pieces([x], layout)[0], layout)[0] if name.is_cut else x
        for x, name in zip(leaves, names, strict=True)
    ]


def _finite_padding(piece: Piece, layout: Layout) -> jax.Array:
    # Padding may have come to 0 / 0, which a search for NaN would find. Nothing else
    # reads it, and to mask it makes XLA copy the moments.
    return layout.mask(piece, 0) if compat.searches_for_nan() else piece.data


def _as_pieces(leaves: list[Any], layout: Layout) -> list[Piece]:
    return [x if _is_piece(x) else layout.cut(x) for x in leaves]


class _Scattered(NamedTuple):
    """Values of one replica after the reduction."""

    grads: list[Any]  # leaves; `Piece`s, but for those that carry no data.
    used: PyTree | None  # by any replica.
    total: jax.Array | int  # how much all replicas count together.
    hook_state: PyTree


def _scatter(
    grads: PyTree,
    used: PyTree | None,
    hook_state: PyTree,
    options: reduce.ReduceOptions,
    weighting: Weighting | None,
    halves: ReduceScatterAllGather,
    layout: Layout,
) -> _Scattered:
    """Averages gradients, of which a replica gets its pieces; unites what was used."""
    plan = buckets.fit_plan(options.plan, grads)
    options = options._replace(plan=plan)
    decided = used_flags.find_decided(used, grads)
    riders = [used_flags.as_rider(decided, jnp.float32)] if decided else []
    if options.hook is not None or reduce.is_alone(options.axis_name):
        means = reduce.mean_over_replicas(
            grads,
            options,
            hook_state=hook_state,
            weighting=weighting,
            riders=riders,
        )
        if decided:
            used = used_flags.from_rider(used, means.riders[0])
        found = [
            x if _is_float0(x) else layout.cut(x) for x in jax.tree.leaves(means.grads)
        ]
        return _Scattered(found, used, means.total, means.hook_state)
    leaves = reduce.check_are_local(grads, plan, (), options.axis_name)
    pieces_: list[Any] = list(leaves)
    total: jax.Array | int = layout.num_replicas
    if weighting is not None or decided:
        flags, total = reduce.mean_of_riders(riders, options, weighting)
        if decided:
            used = used_flags.from_rider(used, flags[0])
    share = hook_reduction.find_share(weighting, False, total, options.axis_name)
    for bucket in plan.buckets:
        rows = [layout.rows(hook_reduction.scale(leaves[i], share)) for i in bucket]
        parts = layouts.scatter(rows, layout, halves)
        for i, part in zip(bucket, parts, strict=True):
            # float16 is weighed in float32.
            pieces_[i] = Piece(part.astype(leaves[i].dtype), jnp.shape(leaves[i]))
    return _Scattered(pieces_, used, total, hook_state)


def _gather_all(
    own: list[Piece], layout: Layout, halves: ReduceScatterAllGather
) -> list[jax.Array]:
    """Puts pieces together, in one collective a dtype and set of mesh axes."""
    groups: dict[Any, list[int]] = {}
    for i, piece in enumerate(own):
        kind = piece.data.dtype, compat.varying_axes(piece.data)
        groups.setdefault(kind, []).append(i)
    wholes: list[Any] = [None] * len(own)
    for members in groups.values():
        found = layouts.gather([own[i] for i in members], layout, halves)
        for i, x in zip(members, found, strict=True):
            wholes[i] = x
    return wholes


def _unless_empty(
    has_data: jax.Array, own: list[Piece], leaves: list[jax.Array], before: list[Any]
) -> tuple[list[Piece], list[jax.Array]]:
    """Updates of -0.0 and the old state where no replica has data."""
    own = [
        Piece(jnp.where(has_data, x.data, jnp.asarray(-0.0, x.data.dtype)), x.shape)
        for x in own
    ]
    olds = [x.data[0] if _is_piece(x) else x for x in before]
    return own, [
        jnp.where(has_data, new, old) for new, old in zip(leaves, olds, strict=True)
    ]


def _check_arguments(grads: PyTree, state: Any, params: PyTree | None) -> None:
    if params is None:
        raise ValueError(
            "`params` is missing: the optimizer of `zero1` steps on its own piece "
            "of them. Call `update(grads, state, params)`."
        )
    if not isinstance(state, ZeroState):
        raise TypeError(
            "The state of `zero1` must be what its `init` made, got "
            f"{type(state).__name__}."
        )
    update_arguments.check_shapes(grads, params)
