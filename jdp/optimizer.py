"""Optimizer: which gradients reach an optax transformation, and for what."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend import core

from jdp import buckets, compat, grad_sync
from jdp.buckets import BucketPlan
from jdp.grad_sync import Packing
from jdp.types import AllReduce, AxisName, PyTree


def distributed_optimizer(
    tx: optax.GradientTransformation,
    *,
    axis_name: AxisName = "data",
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduce | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it steps on the average of all replicas' gradients.

    The state is the inner optimizer's own. `update` is called inside a traced function
    by every replica, with its local gradients (`jdp.local_gradients`).

    Args:
      tx: the optimizer.
      axis_name: see `sync_gradients`, as for the other options.
      plan: see `sync_gradients`.
      packing: see `sync_gradients`.
      all_reduce: see `sync_gradients`.

    Returns:
      An optax transformation; its `update` raises what `sync_gradients` raises.
    """
    inner = optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        grads = grad_sync.sync_gradients(
            updates,
            axis_name=axis_name,
            plan=plan,
            packing=packing,
            all_reduce=all_reduce,
        )
        return inner.update(grads, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


class SkipUnusedState(NamedTuple):
    """State of `skip_unused`: one state of the inner optimizer for each parameter."""

    # By path, as `jdp.buckets.leaf_paths` writes it. Where the inner optimizer holds a
    # tree like `params`, there is the entry of the one parameter alone: for
    # `optax.adam`, each is (ScaleByAdamState(count, mu, nu), EmptyState()).
    leaf_states: dict[str, Any]


def skip_unused(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that a parameter that was not used is left as it is.

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

    `tx` runs once for each parameter, on trees with `()` in place of all others, so
    masks and labels by path or shape work as before. What mixes parameters comes in
    front, as above, or goes around, as `optax.apply_if_finite`; `update` refuses it
    inside. Only masks may come behind: an unused parameter gets an update of -0.0,
    which alone leaves a parameter of -0.0 as it is.

    State keeps the dtypes that `tx.init` gave it. A schedule counts the steps of its
    parameter, and `optax.inject_hyperparams` holds a value for each. Keys made by
    `jax.random.key` are folded with the index of the parameter, or all would draw the
    same noise. An extra argument with the structure of the gradients is cut as they
    are; others are handed on whole. `optax.tree.map_params` cannot see into the state.

    XLA takes subnormal numbers for zero when it adds on a CPU, so there
    `optax.apply_updates` flushes subnormal parameters, used or not.

    Args:
      tx: the optimizer.

    Returns:
      An optax transformation. Its `update` raises ValueError if `used` is missing, if
      the gradients do not have the structure of `used`, of `params` or of the state,
      or if `tx` mixes parameters; TypeError if a leaf of `used` is not one boolean.
    """
    inner = optax.with_extra_args_support(tx)
    # A cache of what follows from the structure and the shapes alone.
    slots: dict[Any, list[PyTree]] = {}

    def init(params: PyTree) -> SkipUnusedState:
        leaves, treedef = jax.tree.flatten(params)
        leaf_states = {}
        for i, (name, leaf) in enumerate(zip(_names(params), leaves, strict=True)):
            place = _Place(treedef, i)
            whole = inner.init(place.put(leaf))
            state = place.contract(place.slots(whole), whole)
            leaf_states[name] = jax.tree.map(functools.partial(_own, index=i), state)
        return SkipUnusedState(leaf_states)

    def update(
        updates: PyTree,
        state: Any,  # SkipUnusedState, of which the type that optax declares knows not.
        params: PyTree | None = None,
        *,
        used: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, SkipUnusedState]:
        flags = _check_used(used, updates)
        _check_structures(updates, state, params)
        leaves, treedef = jax.tree.flatten(updates if params is None else params)
        key = treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        if key not in slots:
            _check_separable(inner, updates, params, extra_args)
            slots[key] = _find_slots(inner, leaves, treedef)
        trees = {"updates": updates, "params": params, **extra_args}
        return _update_leaves(inner, slots[key], flags, state, trees)

    return optax.GradientTransformationExtraArgs(init, update)


def _find_slots(
    inner: optax.GradientTransformationExtraArgs, leaves: list[Any], treedef: Any
) -> list[PyTree]:
    places = [_Place(treedef, i) for i in range(len(leaves))]

    def init(leaves: list[Any]) -> list[PyTree]:
        pairs = zip(places, leaves, strict=True)
        return [inner.init(place.put(leaf)) for place, leaf in pairs]

    states = jax.eval_shape(init, leaves)
    return [place.slots(state) for place, state in zip(places, states, strict=True)]


def _update_leaves(
    inner: optax.GradientTransformationExtraArgs,
    slots: list[PyTree],
    flags: list[Any],
    state: SkipUnusedState,
    trees: dict[str, PyTree],
) -> tuple[PyTree, SkipUnusedState]:
    """Runs `inner` on each parameter; `trees` are the arguments of its `update`."""
    treedef = jax.tree.structure(trees["updates"])
    columns = {
        name: jax.tree.leaves(tree)
        for name, tree in trees.items()
        if jax.tree.structure(tree) == treedef
    }
    updates, leaf_states = [], {}
    for i, name in enumerate(_names(trees["updates"])):
        old = state.leaf_states[name]

        def step(i: int = i, old: Any = old) -> tuple[jax.Array, Any]:
            place = _Place(treedef, i)
            cut = trees | {key: place.put(column[i]) for key, column in columns.items()}
            grads, params = cut.pop("updates"), cut.pop("params")
            whole = place.expand(slots[i], old)
            update, new = inner.update(grads, whole, params, **cut)
            return place.pick(update), place.contract(slots[i], new)

        update, leaf_states[name] = _choose(flags[i], step, old)
        updates.append(update)
    return treedef.unflatten(updates), SkipUnusedState(leaf_states)


def _names(tree: PyTree) -> list[str]:
    # `flax.nnx.Optimizer` calls `init` with variables and `update` with their values.
    paths = buckets.leaf_paths(tree)
    return [path.removesuffix(".value") or "(root)" for path in paths]


class _Place(NamedTuple):
    """One leaf of the trees of a structure, and what is there in such a tree."""

    treedef: Any
    position: int

    def put(self, x: Any) -> PyTree:
        # `optax.MaskedNode()` would do, but Python makes each, and there are as many
        # as the square of the number of parameters: it doubles the time to trace.
        others = [()] * self.treedef.num_leaves
        others[self.position] = x
        return self.treedef.unflatten(others)

    def pick(self, tree: PyTree) -> Any:
        return self.treedef.flatten_up_to(tree)[self.position]

    def slots(self, state: PyTree) -> PyTree:
        """Tells the trees that `put` made in `state` from its other leaves."""
        made = [jax.tree.structure(self.put(x)) for x in (0, optax.MaskedNode())]

        def is_made(tree: PyTree) -> bool:
            return jax.tree.structure(tree) in made

        return jax.tree.map(is_made, state, is_leaf=is_made)

    def expand(self, slots: PyTree, state: PyTree) -> PyTree:
        return jax.tree.map(lambda s, x: self.put(x) if s else x, slots, state)

    def contract(self, slots: PyTree, state: PyTree) -> PyTree:
        return jax.tree.map(lambda s, x: self.pick(x) if s else x, slots, state)


def _choose(flag: Any, step: Any, old: Any) -> tuple[jax.Array, Any]:
    """Returns the update and the state of one parameter, `old` if it was not used."""
    if isinstance(flag, bool | np.bool_):
        if flag:
            update, new = step()
            return update, jax.tree.map(_in_type_of, old, new)
        aval = jax.eval_shape(lambda: step()[0])
        return lax.full(aval.shape, _negative_zero(aval.dtype), aval.dtype), old
    update, new = step()
    zero = lax.full_like(update, _negative_zero(update.dtype))
    state = jax.tree.map(
        lambda a, b: lax.select(flag, _in_type_of(a, b), jnp.asarray(a)), old, new
    )
    return lax.select(flag, update, zero), state


def _negative_zero(dtype: Any) -> complex:
    """What changes no number, not even -0.0, when it is added."""
    return complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0


def _own(x: Any, *, index: int) -> jax.Array:
    """Returns an array of the initial state as the parameter `index` keeps it."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # A copy, or a value that all states begin with could not be donated; and not of
        # weak type, which the results of `update` do not have.
        return jnp.array(x, dtype=x.dtype)
    fold = jax.random.fold_in
    for _ in x.shape:
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(x, index)


def _in_type_of(old: Any, new: Any) -> jax.Array:
    """Returns `new` in the dtype of `old`, so that a state can be carried by a scan."""
    return lax.convert_element_type(new, jnp.result_type(old))


def _check_used(used: PyTree | None, updates: PyTree) -> list[Any]:
    if used is None:
        raise ValueError(
            "`used` is missing: the optimizer of `skip_unused` must be told which "
            "parameters were used. Take it from `jdp.value_and_grad(find_unused=True)` "
            "and call `update(grads, state, params, used=used)`."
        )
    _check_same_structure("used", used, updates)
    flags = jax.tree.leaves(used)
    for i, flag in enumerate(flags):
        if isinstance(flag, jax.Array | np.ndarray | np.generic):
            is_boolean = flag.dtype == np.bool_ and flag.shape == ()
            found = f"{flag.dtype} of shape {flag.shape}"
        else:
            is_boolean, found = isinstance(flag, bool), repr(flag)
        if not is_boolean:
            raise TypeError(
                f"`used` must hold one boolean for each parameter, but has {found} for "
                f"`{buckets.leaf_paths(used)[i]}`."
            )
    return flags


def _check_structures(
    updates: PyTree, state: SkipUnusedState, params: PyTree | None
) -> None:
    if params is not None:
        _check_same_structure("params", params, updates)
    names = dict.fromkeys(_names(updates))
    added = [name for name in names if name not in state.leaf_states]
    removed = [name for name in state.leaf_states if name not in names]
    if added or removed:
        raise ValueError(
            "The state of `skip_unused` was not made for these parameters: it has "
            + (f"no `{added[0]}`." if added else f"`{removed[0]}` as well.")
            + " Call `init` again when parameters are added or removed."
        )


def _check_same_structure(name: str, tree: PyTree, updates: PyTree) -> None:
    found, expected = jax.tree.structure(tree), jax.tree.structure(updates)
    if found == expected:
        return
    difference = ""
    pairs = itertools.zip_longest(buckets.leaf_paths(tree), buckets.leaf_paths(updates))
    for a, b in pairs:
        if a != b:
            difference = (
                f"The first path that differs: {f'`{a}`' if a else 'nothing'} in "
                f"`{name}`, {f'`{b}`' if b else 'nothing'} in the gradients.\n"
            )
            break
    raise ValueError(
        f"`{name}` does not have the structure of the gradients.\n{difference}"
        f"  {name}: {found}\n  gradients: {expected}"
    )


def _check_separable(
    inner: optax.GradientTransformationExtraArgs,
    updates: PyTree,
    params: PyTree | None,
    extra_args: dict[str, Any],
) -> None:
    """Raises ValueError if `inner` lets one parameter's update depend on another."""
    treedef = jax.tree.structure(updates)
    num_leaves = treedef.num_leaves
    if num_leaves < 2:
        return

    def first_step(updates: PyTree, params: PyTree | None) -> tuple[PyTree, Any]:
        state = inner.init(updates if params is None else params)
        return inner.update(updates, state, params, **extra_args)

    jaxpr = jax.make_jaxpr(first_step)(updates, params).jaxpr
    leaf_bits = [1 << i for i in range(num_leaves)]
    results = _reach(jaxpr, leaf_bits * (1 if params is None else 2))
    # An update may depend on its own parameter, a part of the state on any one.
    owners = [*leaf_bits, *[0] * (len(results) - num_leaves)]
    for bits, owner in zip(results, owners, strict=True):
        if (bits | owner).bit_count() > 1:
            paths = buckets.leaf_paths(updates)
            mixed = bits | owner
            a, b = [path for i, path in enumerate(paths) if mixed >> i & 1][:2]
            raise ValueError(
                "`skip_unused` runs its optimizer on one parameter at a time, but this "
                f"one mixes parameters: `{a}` and `{b}`, for example. Put the part "
                "that mixes them in front, as in "
                "`optax.chain(optax.clip_by_global_norm(1.0), jdp.skip_unused(...))`, "
                "or around `skip_unused`, as `optax.apply_if_finite`."
            )


def _reach(jaxpr: Any, bits: Sequence[int]) -> list[int]:
    """Returns for each result of `jaxpr` the union of the bits it depends on."""
    bits_of = dict(zip(jaxpr.invars, bits, strict=True))

    def read(x: Any) -> int:
        return 0 if isinstance(x, core.Literal) else bits_of.get(x, 0)

    for eqn in jaxpr.eqns:
        results = _reach_equation(eqn, [read(x) for x in eqn.invars])
        bits_of.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _reach_equation(eqn: Any, bits: list[int]) -> list[int]:
    everything = functools.reduce(int.__or__, bits, 0)
    if everything.bit_count() < 2:
        return [everything] * len(eqn.outvars)
    params = eqn.params
    if "branches" in params:
        branches = [_reach(branch.jaxpr, bits[1:]) for branch in params["branches"]]
        return [
            functools.reduce(int.__or__, xs, bits[0])
            for xs in zip(*branches, strict=True)
        ]
    match eqn.primitive.name:
        case "while":
            return _reach_while(params, bits)
        case "scan":
            num_consts, num_carries = compat.scan_operands(params)
            return _reach_scan(params["jaxpr"].jaxpr, bits, num_consts, num_carries)
    inside = params.get("jaxpr", params.get("call_jaxpr"))
    inside = getattr(inside, "jaxpr", inside)
    if inside is None or len(inside.invars) != len(bits):
        return [everything] * len(eqn.outvars)
    return _reach(inside, bits)


def _reach_scan(
    jaxpr: Any, bits: list[int], num_consts: int, num_carries: int
) -> list[int]:
    end = num_consts + num_carries
    consts, carries, xs = bits[:num_consts], bits[num_consts:end], bits[end:]
    while True:
        results = _reach(jaxpr, [*consts, *carries, *xs])
        grown = [a | b for a, b in zip(carries, results, strict=False)]
        if grown == carries:
            return results
        carries = grown


def _reach_while(params: dict[str, Any], bits: list[int]) -> list[int]:
    start, end = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carries = bits[end:]
    while True:
        (goes_on,) = _reach(params["cond_jaxpr"].jaxpr, [*bits[:start], *carries])
        results = _reach(params["body_jaxpr"].jaxpr, [*bits[start:end], *carries])
        grown = [a | b | goes_on for a, b in zip(carries, results, strict=True)]
        if grown == carries:
            return grown
        carries = grown
