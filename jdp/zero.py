"""Zero: optimizer state that is shared out among the replicas (ZeRO, stage 1)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdp import buckets, compat, compression, per_replica, pieces, reduction, weights
from jdp.buckets import BucketPlan
from jdp.collectives import base, xla
from jdp.collectives.base import Halves
from jdp.hooks.base import CommHook
from jdp.hooks.state import init_state
from jdp.mesh import World
from jdp.per_replica import PerReplica
from jdp.pieces import Layout, Piece
from jdp.types import AxisName, PyTree
from jdp.weights import DivideBy, Weighting


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZeroState:
    """State of `zero1`: this replica's pieces of the state of the inner optimizer.

    Attributes:
      shared: by leaf of the inner state, those that every replica has whole.
      own: by leaf, those of which a replica has a piece, shape (ceil(size /
        num_replicas),): arrays in the shape of a parameter.
      hook: state of the hook; None without one.
      treedef: structure of the inner state.
      shapes: by leaf of the inner state the shape of the whole array, or None where
        it is shared.
    """

    shared: list[Any]
    own: PerReplica
    hook: Any
    treedef: Any = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[int, ...] | None, ...] = dataclasses.field(
        metadata={"static": True}
    )


def zero1(
    tx: optax.GradientTransformation,
    *,
    divide_by: DivideBy = "weight",
    axis_name: AxisName = "data",
    plan: BucketPlan | None = None,
    halves: Halves = xla.PSUM,
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
    same on all replicas: `tx` is run by `jdp.pieces`, which knows which of its sums go
    over whole parameters, as in `optax.clip_by_global_norm`, `optax.lars` and
    `optax.lamb`. Masks and labels see paths and shapes as without it. What neither
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
    """
    inner = optax.with_extra_args_support(tx)
    options = reduction.make_options(axis_name, plan, None, None, hook)

    def init(params: PyTree) -> Any:
        def init_here(params: PyTree) -> ZeroState:
            layout = pieces.find_layout(axis_name)
            state = inner.init(params)
            hook_state = None
            if hook is not None:
                hook_state = init_state(hook, params, plan=plan, axis_name=axis_name)
            return _cut_state(state, params, hook_state, layout)

        return per_replica.init_on_replicas(
            init_here, params, axis_name=axis_name, world=world
        )

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError(
                "`params` is missing: the optimizer of `zero1` steps on its own piece "
                "of them. Call `update(grads, state, params)`."
            )
        layout = pieces.find_layout(axis_name)
        avals = jax.tree.map(_aval, (updates, params, extra_args))
        whole_state = jax.eval_shape(inner.init, avals[1])
        _check_state(state, whole_state, layout)
        weighting = weights.resolve(weight, divide_by)
        weights.note(weighting)
        grads, total, hook_state = _scatter(
            updates, state.hook, options, weighting, halves, layout
        )
        cut = jax.tree.map(layout.cut, params)
        args = (grads, _pieces_of(state), cut, extra_args)

        def step(grads: PyTree, state: PyTree, params: PyTree, extra: Any) -> Any:
            return inner.update(grads, state, params, **extra)

        out, new = pieces.run(
            step, args, (avals[0], whole_state, avals[1], avals[2]), layout
        )
        own = _as_pieces(jax.tree.leaves(out, is_leaf=_is_piece), layout)
        leaves = _in_kinds(new, state, layout)
        if weighting is not None:  # Without any data nothing happens.
            own, leaves = _unless_empty(jnp.greater(total, 0), own, leaves, state)
        treedef = jax.tree.structure(updates)
        updates = jax.tree.unflatten(treedef, _gather_all(own, layout, halves))
        return updates, dataclasses.replace(
            state,
            shared=[x for x, s in zip(leaves, state.shapes, strict=True) if s is None],
            own=PerReplica(
                [x for x, s in zip(leaves, state.shapes, strict=True) if s is not None]
            ),
            hook=hook_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _cut_state(
    state: PyTree, params: PyTree, hook_state: PyTree, layout: Layout
) -> ZeroState:
    leaves, treedef = jax.tree.flatten(state)
    of_params = {jnp.shape(x) for x in jax.tree.leaves(params)} - {()}
    shapes = tuple(
        jnp.shape(x) if jnp.shape(x) in of_params and not _is_key(x) else None
        for x in leaves
    )
    shared, own = [], []
    for x, shape in zip(leaves, shapes, strict=True):
        x = jnp.asarray(x)
        if shape is None:
            shared.append(jnp.array(x, dtype=x.dtype))
        else:
            own.append(base.cast_varying(layout.cut(x).data[0], layout.axis_name))
    return ZeroState(shared, PerReplica(own), hook_state, treedef, shapes)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _is_piece(x: Any) -> bool:
    return isinstance(x, Piece)


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _pieces_of(state: ZeroState) -> PyTree:
    """The inner state, in which the leaves are pieces or shared."""
    shared, own = iter(state.shared), iter(state.own.value)
    leaves = [
        next(shared) if shape is None else Piece(next(own)[None], shape)
        for shape in state.shapes
    ]
    return jax.tree.unflatten(state.treedef, leaves)


def _in_kinds(new: PyTree, state: ZeroState, layout: Layout) -> list[jax.Array]:
    """The leaves of a new inner state, as pieces or shared as they were."""
    leaves = jax.tree.leaves(new, is_leaf=_is_piece)
    stray = [
        i
        for i, (x, shape) in enumerate(zip(leaves, state.shapes, strict=True))
        if shape is None and _is_piece(x)
    ]
    wholes = _gather_all([leaves[i] for i in stray], layout, xla.PSUM)
    for i, x in zip(stray, wholes, strict=True):
        leaves[i] = x
    return [
        x if shape is None else _as_pieces([x], layout)[0].data[0]
        for x, shape in zip(leaves, state.shapes, strict=True)
    ]


def _as_pieces(leaves: list[Any], layout: Layout) -> list[Piece]:
    return [x if _is_piece(x) else layout.cut(x) for x in leaves]


def _scatter(
    grads: PyTree,
    hook_state: PyTree,
    options: reduction.Options,
    weighting: Weighting | None,
    halves: Halves,
    layout: Layout,
) -> tuple[PyTree, jax.Array | int, PyTree]:
    """Averages gradients; returns this replica's pieces, and how much all count."""
    plan = buckets.fit_plan(options.plan, grads)
    options = options._replace(plan=plan)
    if options.hook is not None or reduction.is_alone(options.axis_name):
        means = compression.mean_over_replicas(
            grads, options, hook_state=hook_state, weighting=weighting
        )
        pieces_ = jax.tree.map(layout.cut, means.grads)
        return pieces_, means.total, means.hook_state
    leaves = reduction.check_are_local(grads, plan, (), options.axis_name)
    found: list[Any] = list(leaves)
    total: jax.Array | int = layout.num_replicas
    if weighting is not None:
        _, total = reduction.mean_of_riders([], options, weighting)
    share = compression.find_share(weighting, False, total, options)
    for bucket in plan.buckets:
        rows = [layout.rows(compression.scale(leaves[i], share)) for i in bucket]
        parts = pieces.scatter(rows, layout, halves)
        for i, part in zip(bucket, parts, strict=True):
            found[i] = Piece(part, jnp.shape(leaves[i]))
    return jax.tree.unflatten(plan.treedef, found), total, hook_state


def _gather_all(own: list[Piece], layout: Layout, halves: Halves) -> list[jax.Array]:
    """Puts pieces together, in one collective a dtype and set of mesh axes."""
    groups: dict[Any, list[int]] = {}
    for i, piece in enumerate(own):
        kind = piece.data.dtype, compat.varying_axes(piece.data)
        groups.setdefault(kind, []).append(i)
    wholes: list[Any] = [None] * len(own)
    for members in groups.values():
        found = pieces.gather([own[i] for i in members], layout, halves)
        for i, x in zip(members, found, strict=True):
            wholes[i] = x
    return wholes


def _unless_empty(
    has_data: jax.Array, own: list[Piece], leaves: list[jax.Array], state: ZeroState
) -> tuple[list[Piece], list[jax.Array]]:
    """Updates of -0.0 and the old state where no replica has data."""
    own = [
        Piece(jnp.where(has_data, x.data, jnp.asarray(-0.0, x.data.dtype)), x.shape)
        for x in own
    ]
    shared, mine = iter(state.shared), iter(state.own.value)
    before = [next(shared if shape is None else mine) for shape in state.shapes]
    return own, [
        jnp.where(has_data, new, old) for new, old in zip(leaves, before, strict=True)
    ]


def _check_state(state: Any, expected: PyTree, layout: Layout) -> None:
    if not isinstance(state, ZeroState):
        raise TypeError(
            "The state of `zero1` must be what its `init` made, got "
            f"{type(state).__name__}."
        )
    if jax.tree.structure(expected) != state.treedef:
        found = jax.tree.unflatten(state.treedef, state.shapes)
        buckets.check_same_structure(found, "The state", expected, "that of `zero1`")
    own = iter(state.own.value)
    paths = buckets.leaf_paths(expected)
    leaves = jax.tree.leaves(expected)
    for path, aval, shape in zip(paths, leaves, state.shapes, strict=True):
        if shape is None:
            continue
        width = next(own).shape
        if shape != aval.shape or width != (layout.width(shape),):
            raise ValueError(
                f"The state of `zero1` does not fit: `{path}` was made for "
                f"{list(shape)} in pieces of {list(width)}, but is "
                f"{list(aval.shape)} in pieces of {[layout.width(aval.shape)]} on "
                f"{layout.num_replicas} replicas. Bring a state to other replicas with "
                "`jdp.reshard`."
            )
