"""Unused parameters: they and their optimizer state stay as they are."""

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp import compat
from jdp.backward.flow import FlowAnalysis, Sets
from jdp.gradients import used_flags
from jdp.optimizers import leaf_updates, selection, update_arguments
from jdp.optimizers.leaf_updates import LeafPlace, LeafUpdate, StateLayout
from jdp.optimizers.transformation import Transformation
from jdp.trees import tree_paths
from jdp.types import PyTree


class SkipUnusedState(NamedTuple):
    """State of `skip_unused`: one state of the inner optimizer per parameter."""

    # By path, as `jdp.trees.tree_paths.leaf_paths` writes it. A tree like `params` in
    # the inner state becomes the entry of this parameter: for `optax.adam`, each state
    # is (ScaleByAdamState(count, mu, nu), EmptyState()).
    leaf_states: dict[str, Any]


def skip_unused(
    tx: optax.GradientTransformation,
) -> Transformation[SkipUnusedState]:
    """Wraps an optimizer so that unused parameters stay as they are.

    `update` takes `used`, a tree of booleans with the structure of the gradients, as
    `jdp.value_and_grad(find_unused=True)` returns it. Where it is False, the parameter
    and all its state (moments, step count, schedules) stay bit for bit what they were,
    without weight decay and whatever the gradient holds, as in torch for a gradient of
    None. A Python bool is decided while tracing: `tx` is then not run for an unused
    parameter. An array is decided at run time.

        tx = optax.chain(
            optax.clip_by_global_norm(1.0), jdp.skip_unused(optax.adamw(1e-3))
        )
        updates, state = tx.update(grads, state, params, used=used)

    `tx` steps on each parameter separately, and masks and labels by path or shape work
    as before: its update of the whole tree is traced, and cut into one program per
    parameter. Where such a program needs other parameters, as with the `cond` of
    `optax.MultiSteps`, `tx` runs once per parameter, on trees with `()` in place of all
    others; code that uses positions in a list of all leaves then sees a list of one.
    Transformations that mix parameters come in front, as above, or go around, as
    `optax.apply_if_finite`; `update` refuses them inside. Only masks may follow: an
    unused parameter gets an update of -0.0, the only value that leaves -0.0 as it is.

    State keeps the dtypes that `tx.init` gave it. A schedule counts the steps of its
    parameter, and `optax.inject_hyperparams` holds one value per parameter. Keys made
    by `jax.random.key` are folded with the index of the parameter; otherwise all would
    draw the same noise. An extra argument with the structure of the gradients is cut as
    they are; others are passed on whole. `optax.tree.map_params` does not work on the
    state.

    On CPU, XLA treats subnormal numbers as zero in additions, so `optax.apply_updates`
    flushes subnormal parameters there, used or not.

    Args:
      tx: the optimizer.

    Returns:
      An optax transformation. Its `update` raises ValueError if `used` is missing, if
      the gradients do not have the structure of `used`, of `params` or of the state,
      or if `tx` mixes parameters; TypeError if a leaf of `used` is not one boolean.

    Raises:
      TypeError: `tx` is not an optimizer.
    """
    update_arguments.check_optimizer(tx, "skip_unused")
    inner = optax.with_extra_args_support(tx)
    # Caches of facts that depend on structure and shapes alone.
    layouts: dict[Any, StateLayout | None] = {}
    slots: dict[Any, list[PyTree]] = {}

    def init(params: PyTree) -> SkipUnusedState:
        leaf_states = {}
        states = _init_leaves(inner, params)
        for i, (name, state) in enumerate(zip(_names(params), states, strict=True)):
            leaf_states[name] = jax.tree.map(functools.partial(_copy, index=i), state)
        return SkipUnusedState(leaf_states)

    def update(
        updates: PyTree,
        state: Any,  # SkipUnusedState; optax declares a wider type.
        params: PyTree | None = None,
        *,
        used: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, SkipUnusedState]:
        flags = _check_used(used, updates)
        _check_structures(updates, state, params)
        _check_no_functions(extra_args)
        like = updates if params is None else params
        key, leaves, treedef = _key_of(like)
        is_checked = key in layouts
        layout = layouts[key] if is_checked else leaf_updates.find_layout(inner, like)
        trees = {"updates": updates, "params": params, **extra_args}
        names, found = _names(updates), None
        states = [state.leaf_states[name] for name in names]
        if layout is not None:
            found = leaf_updates.trace(inner, layout, trees, states)
        if not is_checked:
            _check_separable(inner, trees, has_update=found is None)
            layouts[key] = layout
        if found is not None:
            results = _update_leaves(found, flags, states)
        else:
            slots[key] = slots.get(key) or _find_slots(inner, leaves, treedef)
            results = _update_alone(inner, slots[key], flags, states, trees)
        new = dict(zip(names, (new for _, new in results), strict=True))
        treedef = jax.tree.structure(updates)
        return treedef.unflatten(x for x, _ in results), SkipUnusedState(new)

    return Transformation(init, update)


def _key_of(params: PyTree) -> tuple[Hashable, list[Any], Any]:
    """Returns the structure, shapes and dtypes as a key; the leaves; the structure."""
    leaves, treedef = jax.tree.flatten(params)
    kinds = tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
    return (treedef, kinds), leaves, treedef


def _init_leaves(
    inner: optax.GradientTransformationExtraArgs, params: PyTree
) -> list[PyTree]:
    """Returns a state of `inner` for each parameter."""
    leaves, treedef = jax.tree.flatten(params)
    layout = leaf_updates.find_layout(inner, params)
    if layout is not None:
        parts = layout.split(inner.init(params))
        return [layout.of_leaf(parts, i) for i in range(len(leaves))]
    states = []
    for i, leaf in enumerate(leaves):
        place = LeafPlace(treedef, i)
        whole = inner.init(place.put(leaf))
        states.append(place.contract(place.slots(whole), whole))
    return states


def _find_slots(
    inner: optax.GradientTransformationExtraArgs, leaves: list[Any], treedef: Any
) -> list[PyTree]:
    places = [LeafPlace(treedef, i) for i in range(len(leaves))]

    def init(leaves: list[Any]) -> list[PyTree]:
        pairs = zip(places, leaves, strict=True)
        return [inner.init(place.put(leaf)) for place, leaf in pairs]

    states = jax.eval_shape(init, leaves)
    return [place.slots(state) for place, state in zip(places, states, strict=True)]


def _update_leaves(
    updates: list[LeafUpdate], flags: list[Any], states: list[PyTree]
) -> list[tuple[jax.Array, PyTree]]:
    """Returns the update and the new state of each parameter."""
    # Without staging, each call would compile anew.
    is_staged = any(
        map(
            compat.is_staged,
            jax.tree.leaves((flags, [leaf.arguments for leaf in updates])),
        )
    )
    calls: dict[Any, Any] = {}
    results = []
    for leaf, flag, old in zip(updates, flags, states, strict=True):
        if used_flags.is_static(flag) and not flag:
            results.append((selection.no_update(leaf.aval), old))
            continue
        decided = [] if used_flags.is_static(flag) else [flag]
        treedef = jax.tree.structure(old)
        key = leaf.signature, treedef, len(decided)
        if key not in calls:

            def leaf_update(
                decided: list[Any],
                old: PyTree,
                arguments: list[Any],
                run: Any = leaf.run,
                treedef: Any = treedef,
            ) -> tuple[jax.Array, PyTree]:
                def step() -> tuple[jax.Array, PyTree]:
                    update, *state = run(arguments)
                    return update, treedef.unflatten(state)

                return selection.choose_leaf_step(
                    decided[0] if decided else True, step, old
                )

            calls[key] = jax.jit(leaf_update) if is_staged else leaf_update
        results.append(calls[key](decided, old, leaf.arguments))
    return results


def _update_alone(
    inner: optax.GradientTransformationExtraArgs,
    slots: list[PyTree],
    flags: list[Any],
    states: list[PyTree],
    trees: dict[str, PyTree],
) -> list[tuple[jax.Array, PyTree]]:
    """`_update_leaves`, where `inner` runs on one parameter at a time."""
    treedef = jax.tree.structure(trees["updates"])
    columns = {
        name: jax.tree.leaves(tree)
        for name, tree in trees.items()
        if jax.tree.structure(tree) == treedef
    }
    results = []
    for i, (flag, old) in enumerate(zip(flags, states, strict=True)):

        def step(i: int = i, old: Any = old) -> tuple[jax.Array, Any]:
            place = LeafPlace(treedef, i)
            cut = trees | {key: place.put(column[i]) for key, column in columns.items()}
            grads, params = cut.pop("updates"), cut.pop("params")
            whole = place.expand(slots[i], old)
            update, new = inner.update(grads, whole, params, **cut)
            return place.pick(update), place.contract(slots[i], new)

        results.append(selection.choose_leaf_step(flag, step, old))
    return results


def _names(tree: PyTree) -> list[str]:
    # `flax.nnx.Optimizer` calls `init` with variables and `update` with their values.
    paths = tree_paths.leaf_paths(tree)
    return [path.removesuffix(".value") or "(root)" for path in paths]


def _copy(x: Any, *, index: int) -> jax.Array:
    """Returns an array of the initial state as the parameter `index` keeps it."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # A copy: an array shared by several states could not be donated. Not of weak
        # type, which the results of `update` do not have.
        return jnp.array(x, dtype=x.dtype)
    fold = jax.random.fold_in
    for _ in x.shape:
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(x, index)


def _check_used(used: PyTree | None, updates: PyTree) -> list[Any]:
    if used is None:
        raise ValueError(
            "`used` is missing: the optimizer of `skip_unused` must be told which "
            "parameters were used. Take it from `jdp.value_and_grad(find_unused=True)` "
            "and call `update(grads, state, params, used=used)`. In `jdp.zero1` and "
            "`jdp.distributed_optimizer`, an `optax.MultiSteps` around `skip_unused` "
            "does not hand it on: accumulate with `jdp.accumulate_gradients`."
        )
    return used_flags.check_used(used, updates)


def _check_no_functions(extra_args: dict[str, Any]) -> None:
    for name, value in extra_args.items():
        if any(callable(x) for x in jax.tree.leaves(value)):
            raise ValueError(
                "`skip_unused` runs its optimizer on one parameter at a time, but the "
                f"extra argument `{name}` is a function of all of them. Put what needs "
                "it, such as a line search, in front of `skip_unused` or behind it in "
                "an `optax.chain`."
            )


def _check_structures(
    updates: PyTree, state: SkipUnusedState, params: PyTree | None
) -> None:
    if params is not None:
        tree_paths.check_same_structure(params, "`params`", updates, "the gradients")
    names = dict.fromkeys(_names(updates))
    added = [name for name in names if name not in state.leaf_states]
    removed = [name for name in state.leaf_states if name not in names]
    if added or removed:
        raise ValueError(
            "The state of `skip_unused` was not made for these parameters: it has "
            + (f"no `{added[0]}`." if added else f"`{removed[0]}` as well.")
            + " Call `init` again when parameters are added or removed."
        )


def _check_separable(
    inner: optax.GradientTransformationExtraArgs,
    trees: dict[str, PyTree],
    *,
    has_update: bool,
) -> None:
    """Raises ValueError if `inner` lets one parameter's update depend on another.

    Args:
      inner: the optimizer.
      trees: the arguments of its `update`, by name, but for the state.
      has_update: whether to look at its `update`, not only at its `init`; tracing it
        takes long, and an update that was cut by leaf mixes nothing.
    """
    extra_args = dict(trees)
    updates, params = extra_args.pop("updates"), extra_args.pop("params")
    num_leaves = jax.tree.structure(updates).num_leaves
    if num_leaves < 2:
        return

    def first_step(updates: PyTree, params: PyTree | None) -> Any:
        state = inner.init(updates if params is None else params)
        if not has_update:
            return state
        return inner.update(updates, state, params, **extra_args)

    jaxpr = jax.make_jaxpr(first_step)(updates, params).jaxpr
    leaf_bits = [1 << i for i in range(num_leaves)]
    inputs = [Sets(bit, bit) for bit in leaf_bits] * (1 if params is None else 2)
    found = FlowAnalysis(by_value=True).propagate(jaxpr, inputs)
    results = [sets.may for sets in found]
    # An update may depend on its own parameter, a part of the state on any one.
    num_updates = num_leaves if has_update else 0
    owners = [*leaf_bits[:num_updates], *[0] * (len(results) - num_updates)]
    for bits, owner in zip(results, owners, strict=True):
        if (bits | owner).bit_count() > 1:
            paths = tree_paths.leaf_paths(updates)
            mixed = bits | owner
            a, b = [path for i, path in enumerate(paths) if mixed >> i & 1][:2]
            raise ValueError(
                "`skip_unused` runs its optimizer on one parameter at a time, but this "
                f"one mixes parameters: `{a}` and `{b}`, for example. Put the part "
                "that mixes them in front, as in "
                "`optax.chain(optax.clip_by_global_norm(1.0), jdp.skip_unused(...))`, "
                "or around `skip_unused`, as `optax.apply_if_finite`."
            )
