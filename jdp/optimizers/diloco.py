"""DiLoCo: one outer step on the mean displacement of many inner steps."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from typing_extensions import TypeVar

from jdp import compat, types
from jdp.gradients import option_checks
from jdp.optimizers import local_training, update_arguments
from jdp.optimizers.local_training import LocalTraining
from jdp.replicas import axes, initial_state
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import PerReplica
from jdp.trees import buckets
from jdp.types import AllReduce, AllReduceOption, AxisName, PyTree

T = TypeVar("T", default=Any)


class DiLoCoState(NamedTuple, Generic[T]):
    """State of `diloco`."""

    params: PerReplica[T]  # parameters of this replica.
    inner: PerReplica  # state of its optimizer.
    seen: PerReplica  # per fragment, samples since it was sent, float32 (f,).
    outer_params: T  # parameters that all replicas have agreed on.
    outer: list[Any]  # per fragment, state of the outer optimizer.
    # Flat averages of the fragment under way, by dtype; empty if nothing waits.
    under_way: dict[str, jax.Array]
    step: jax.Array  # int32 (): updates so far.


class _DiLoCoOptions(NamedTuple):
    outer_tx: optax.GradientTransformation
    spacing: int  # steps between fragments.
    num_fragments: int
    delay: int
    mixing: float
    names: tuple[str, ...]  # the axes; (): not given.
    all_reduce: AllReduce


def diloco(
    tx: optax.GradientTransformation,
    *,
    period: int,
    outer: optax.GradientTransformation | None = None,
    num_fragments: int = 1,
    delay: int = 0,
    mixing: float | None = None,
    axis_name: AxisName | None = None,
    all_reduce: AllReduceOption = "auto",
    world: World | None = None,
) -> LocalTraining[DiLoCoState[Any]]:
    """Takes `period` inner steps on each replica, then one outer step for all.

    The outer optimizer gets theta - mean(theta_i) as a gradient, where theta are the
    parameters that all began with and theta_i the parameters of replica i (Douillard
    et al., 2023: DiLoCo). With `num_fragments` the leaves are cut into as many parts
    of about the same bytes, one of which is sent every `period / num_fragments` steps
    (Douillard et al., 2025: streaming DiLoCo). With a `delay`, the data sent in a
    step does not depend on the computation of that step, so XLA can overlap the two. It
    is applied at the end of that step or later.

        local = jdp.diloco(optax.adamw(1e-3), period=50)
        state = local.init(params)

        @jdp.data_parallel
        def step(state, batch):
            loss, grads = jdp.local_gradients(loss_fn)(state.params.value, batch)
            return local.update(grads, state), {"loss": loss}

    With `period=1` and `outer=optax.sgd(1.0)`, inner plain SGD is data-parallel SGD.

    Integers and booleans among the parameters take no outer step, and are not mixed:
    all replicas go on with their mean, as in `local_sgd`.

    Args:
      tx: the inner optimizer; its state stays each replica's own.
      period: inner steps per outer step of a parameter.
      outer: the outer optimizer; None: `optax.sgd(0.7, momentum=0.9, nesterov=True)`,
        as in the paper.
      num_fragments: parts that are sent one at a time; a divisor of `period`.
      delay: how many steps later an outer step is taken; at most
        `period / num_fragments`. 0: at once, after waiting for the data.
      mixing: share of a replica's own parameters in its parameters after an outer
        step; None: 0.5 with a delay, since it has stepped on meanwhile, else 0, so that
        all replicas go on with the same.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.
      all_reduce: sums the displacements; see `jdp.sync_gradients`.
      world: the replicas, for `init` outside of a step; None: the world of `jdp.init`.

    Returns:
      The pair; its state is a `DiLoCoState`, whose `outer_params` are what to evaluate.

    Raises:
      ValueError: a number is out of range, `num_fragments` does not divide `period`, or
        `all_reduce` does not sum; from `init`: there are fewer leaves than fragments.
      TypeError: `tx` or `outer` is not an optimizer, or an argument is not a number, or
        not an integer.
    """
    update_arguments.check_optimizer(tx, "diloco")
    options = _make_options(
        period, outer, num_fragments, delay, mixing, axis_name, all_reduce
    )

    def update(
        grads: PyTree,
        state: DiLoCoState,
        /,
        *,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> DiLoCoState:
        here = options._replace(names=types.as_axis_names(axes.find(axis_name)))
        amount = local_training.find_amount(weight, here.names)
        fragments = cut_fragments(
            jax.tree.leaves(state.outer_params), options.num_fragments
        )
        averages: dict[str, jax.Array] = {}
        if options.delay:
            state, averages = _send(state, fragments, here)
        params, inner = local_training.step_apart(
            tx, grads, state.params, state.inner, amount, extra_args
        )
        state = state._replace(
            params=PerReplica(params),
            inner=inner,
            seen=PerReplica(state.seen.value + amount),
            step=state.step + 1,
        )
        if not options.delay:
            state, averages = _send(state, fragments, here)
        return _apply(state, averages, fragments, here)

    init = functools.partial(_init, tx, options, axis_name, world)
    return LocalTraining(init, update)


def _make_options(
    period: int,
    outer: optax.GradientTransformation | None,
    num_fragments: int,
    delay: int,
    mixing: float | None,
    axis_name: AxisName | None,
    all_reduce: AllReduceOption,
) -> _DiLoCoOptions:
    """Validates the public arguments and resolves them into `_DiLoCoOptions`."""
    if outer is None:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    update_arguments.check_optimizer(outer, "diloco", argument="outer")
    period = local_training.as_integer("period", period)
    num_fragments = local_training.as_integer("num_fragments", num_fragments)
    delay = local_training.as_integer("delay", delay)
    if not isinstance(mixing, int | float | np.number | None):
        raise TypeError(f"`mixing` must be a number or None, got {mixing!r}.")
    _check(period, num_fragments, delay, mixing)
    return _DiLoCoOptions(
        outer,
        period // num_fragments,
        num_fragments,
        delay,
        (0.5 if delay else 0.0) if mixing is None else mixing,
        () if axis_name is None else types.as_axis_names(axis_name),
        option_checks.find_all_reduce(all_reduce),
    )


def _init(
    tx: optax.GradientTransformation,
    options: _DiLoCoOptions,
    axis_name: AxisName | None,
    world: World | None,
    params: PyTree,
) -> Any:
    names = types.as_axis_names(axes.find_outside(axis_name, world))

    def init_here(params: PyTree) -> DiLoCoState:
        params = jax.tree.map(jnp.asarray, params)
        leaves = jax.tree.leaves(params)
        fragments = cut_fragments(leaves, options.num_fragments)
        own, inner = local_training.begin_apart(tx, params, names)
        return DiLoCoState(
            own,
            inner,
            PerReplica(local_training.no_samples(options.num_fragments, names)),
            params,
            [options.outer_tx.init(_stepped(f, leaves)) for f in fragments],
            _nothing(leaves, fragments, options.names) if options.delay > 1 else {},
            jnp.zeros((), jnp.int32),
        )

    return initial_state.init_on_replicas(
        init_here, params, axis_name=names, world=world
    )


def cut_fragments(leaves: Sequence[Any], num_fragments: int) -> list[list[int]]:
    """Cuts leaves, in their order, into parts of about the same bytes.

    Raises:
      ValueError: there are fewer leaves than parts.
    """
    if len(leaves) < num_fragments:
        raise ValueError(
            f"`num_fragments={num_fragments}`, but there are {len(leaves)} arrays to "
            "be cut into as many parts."
        )
    sizes = [x.size * x.dtype.itemsize for x in leaves]
    ends = list(itertools.accumulate(sizes))
    fragments: list[list[int]] = [[] for _ in range(num_fragments)]
    k = 0
    for i, end in enumerate(ends):
        middle = end - sizes[i] / 2
        num_left = len(leaves) - i
        is_full = middle >= ends[-1] * (k + 1) / num_fragments
        must_go_on = num_left == num_fragments - k - 1
        if fragments[k] and k + 1 < num_fragments and (is_full or must_go_on):
            k += 1
        fragments[k].append(i)
    return fragments


def _send(
    state: DiLoCoState, fragments: list[list[int]], options: _DiLoCoOptions
) -> tuple[DiLoCoState, dict[str, jax.Array]]:
    """Averages the displacements of the fragment that is due, if one is.

    Returns:
      The state, and the averages that are under way.
    """
    leaves = jax.tree.leaves(state.params.value)
    outer = jax.tree.leaves(state.outer_params)
    seen = state.seen.value
    waiting = state.under_way or _nothing(outer, fragments, options.names)

    def send(k: int) -> Callable[[], dict[str, jax.Array]]:
        def displacement() -> dict[str, jax.Array]:
            exact = [i for i in fragments[k] if local_training.is_exact(outer[i])]
            moved = {i: outer[i] - leaves[i] for i in fragments[k] if i not in exact}
            moved |= {i: leaves[i] for i in exact}
            mean = local_training.mean_by_amount(
                moved, options.names, seen[k], options.all_reduce
            )
            if exact:  # Without any data, zeros are not the mean.
                anyone = lax.psum(seen[k], options.names) > 0
                mean |= {i: jnp.where(anyone, mean[i], outer[i]) for i in exact}
            sent = [mean[i] for i in fragments[k]]
            return _pack(sent, waiting, options.names)

        return displacement

    due = _due(state.step, options)
    ways = [lambda: waiting, *map(send, range(options.num_fragments))]
    averages = lax.switch(due, compat.cast_branches(ways, (), options.names))
    kept = jnp.where(jnp.arange(options.num_fragments) == due - 1, 0.0, seen)
    under_way = averages if state.under_way else {}
    return state._replace(seen=PerReplica(kept), under_way=under_way), averages


def _apply(
    state: DiLoCoState,
    averages: dict[str, jax.Array],
    fragments: list[list[int]],
    options: _DiLoCoOptions,
) -> DiLoCoState:
    """Takes the outer step of the fragment that was sent `delay` steps ago."""
    treedef = jax.tree.structure(state.outer_params)

    def keep(params: Any, outer_params: Any, outer: Any) -> tuple[Any, Any, Any]:
        return params, outer_params, outer

    def step(k: int) -> Callable[..., tuple[Any, Any, Any]]:
        def run(params: Any, outer_params: Any, outer: Any) -> tuple[Any, Any, Any]:
            params, outer_params = list(params), list(outer_params)
            like = [outer_params[i] for i in fragments[k]]
            sent = _unpack(averages, like, options.names)
            before = _stepped(fragments[k], outer_params)
            moved = _stepped(range(len(sent)), sent)
            updates, inner = options.outer_tx.update(moved, outer[k], before)
            after: Any = iter(optax.apply_updates(before, updates))  # pyright: ignore
            for i, x in zip(fragments[k], sent, strict=True):
                own = x
                if not local_training.is_exact(x):
                    own = x = next(after)
                    if options.mixing:  # Equal values stay equal, bit for bit.
                        own = (x + options.mixing * (params[i] - x)).astype(x.dtype)
                outer_params[i] = x
                params[i] = compat.cast_tree_varying(own, options.names)
            outer = [inner if j == k else old for j, old in enumerate(outer)]
            return params, outer_params, outer

        return run

    due = _due(state.step - options.delay, options)
    leaves = jax.tree.leaves(state.params.value)
    operands = leaves, jax.tree.leaves(state.outer_params), state.outer
    ways = [keep, *map(step, range(options.num_fragments))]
    ways = compat.cast_branches(ways, operands, options.names)
    params, outer_params, outer = lax.switch(due, ways, *operands)
    return state._replace(
        params=PerReplica(jax.tree.unflatten(treedef, params)),
        outer_params=jax.tree.unflatten(treedef, outer_params),
        outer=outer,
    )


def _stepped(fragment: Iterable[int], leaves: Sequence[Any]) -> list[Any]:
    """Returns the leaves of a fragment on which the outer optimizer steps."""
    return [leaves[i] for i in fragment if not local_training.is_exact(leaves[i])]


def _due(step: jax.Array, options: _DiLoCoOptions) -> jax.Array:
    """Returns the number, from 1, of the fragment that is due after a step; else 0."""
    turn = step // options.spacing
    is_due = (step > 0) & (step % options.spacing == 0)
    return jnp.where(is_due, (turn - 1) % options.num_fragments + 1, 0)


def _nothing(
    leaves: Sequence[Any], fragments: list[list[int]], names: tuple[str, ...]
) -> dict[str, jax.Array]:
    """Returns zeros in place of averages, as large as the averages of any fragment."""
    sizes: dict[str, int] = {}
    likes: dict[str, Any] = {}
    for part in fragments:
        here: dict[str, int] = {}
        for i in part:
            kind = _kind_of(leaves[i], names)
            here[kind] = here.get(kind, 0) + math.prod(leaves[i].shape)
            likes[kind] = leaves[i]
        sizes = {k: max(sizes.get(k, 0), here.get(k, 0)) for k in {**sizes, **here}}
    return {
        k: compat.cast_varying(
            jnp.zeros(n, likes[k].dtype), sorted(_model_axes(likes[k], names))
        )
        for k, n in sorted(sizes.items())
    }


def _model_axes(x: Any, names: tuple[str, ...]) -> frozenset[str]:
    return compat.varying_axes(x).difference(names)


def _kind_of(x: Any, names: tuple[str, ...]) -> str:
    """Returns the name of the buffer of an array: its dtype, and its model axes."""
    return " ".join([np.dtype(x.dtype).name, *sorted(_model_axes(x, names))])


def _pack(
    arrays: Sequence[jax.Array], like: dict[str, jax.Array], names: tuple[str, ...]
) -> dict[str, jax.Array]:
    packed = {}
    for kind, room in like.items():
        mine = [x for x in arrays if _kind_of(x, names) == kind]
        flat = buckets.pack(mine) if mine else room[:0]
        packed[kind] = jnp.pad(flat, (0, room.size - flat.size))
    return packed


def _unpack(
    packed: dict[str, jax.Array], like: Sequence[jax.Array], names: tuple[str, ...]
) -> list[jax.Array]:
    found: list[Any] = [None] * len(like)
    for kind, flat in packed.items():
        mine = [i for i, x in enumerate(like) if _kind_of(x, names) == kind]
        size = sum(like[i].size for i in mine)
        parts = buckets.unpack(flat[:size], [like[i].shape for i in mine])
        for i, part in zip(mine, parts, strict=True):
            found[i] = part
    return found


def _check(period: int, num_fragments: int, delay: int, mixing: float | None) -> None:
    if period < 1:
        raise ValueError(f"`period` must be at least 1, got {period}.")
    if num_fragments < 1 or period % num_fragments:
        raise ValueError(
            "`num_fragments` must be at least 1 and divide `period`, got "
            f"{num_fragments} with `period={period}`."
        )
    if not 0 <= delay <= period // num_fragments:
        raise ValueError(
            "`delay` must be from 0 to `period / num_fragments`, "
            f"{period // num_fragments}, so that one fragment is under way at a time; "
            f"got {delay}."
        )
    if mixing is not None and not 0 <= mixing < 1:
        raise ValueError(f"`mixing` must be at least 0 and below 1, got {mixing}.")
