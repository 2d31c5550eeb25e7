"""An unused parameter keeps its value and all its state; the others see plain optax."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import jdp
from jdp.optimizers import skip_unused
from tests import harness

PARAMS = {
    "a": {"w": jnp.array([[1.0, -0.0], [0.5, -2.0]]), "b": jnp.array([3.0, -0.0])},
    "c": jnp.array([-1.0, 0.25, -0.0]),
}
GRADS = jax.tree.map(lambda x: x * 0.5 + 1.0, PARAMS)
NAN_GRADS = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), PARAMS)
ALL = jax.tree.map(lambda _: True, PARAMS)
WITHOUT_C = {**ALL, "c": False}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 10)),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9),
    "lamb": optax.lamb(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
}
# Momentum, a schedule, norms of each parameter, and moments in factors.
OFTEN = ("sgd", "adamw", "lamb", "adafactor")
txs = pytest.mark.parametrize(
    "tx",
    [
        pytest.param(tx, marks=[pytest.mark.slow] * (name not in OFTEN))
        for name, tx in OPTIMIZERS.items()
    ],
    ids=OPTIMIZERS,
)
# Decided by the program, and at run time.
kinds = pytest.mark.parametrize("kind", [bool, jnp.asarray], ids=["python", "array"])


def _flags(used, kind):
    return jax.tree.map(kind, used)


def _run(tx, params, steps, state=None, *, step_fn=None):
    """Steps of (grads, used); returns the last params and state."""
    state = tx.init(params) if state is None else state
    for grads, used in steps:
        updates, state = (step_fn or tx.update)(grads, state, params, used=used)
        params = optax.apply_updates(params, updates)
    return params, state


def _assert_close(tree, expected, num_steps):
    # Optax compiles parts of Adam as one, for the whole tree, and XLA rounds what it
    # fuses in another way: by an ulp a step, of numbers of order 1.
    tolerance = num_steps * np.finfo(np.float32).eps
    chex.assert_trees_all_close(tree, expected, rtol=tolerance, atol=tolerance)


def _run_plain(tx, params, num_steps):
    return _run(optax.with_extra_args_support(tx), params, [(GRADS, ALL)] * num_steps)


def _bits(tree):
    return jax.tree.map(lambda x: np.asarray(x).tobytes(), tree)


@txs
@kinds
def test_with_all_used_it_is_the_plain_optimizer(tx, kind):
    steps = [(GRADS, _flags(ALL, kind))] * 3
    params, _ = _run(skip_unused.skip_unused(tx), PARAMS, steps)
    expected, _ = _run_plain(tx, PARAMS, 3)
    _assert_close(params, expected, num_steps=3)


@txs
@kinds
@pytest.mark.parametrize("jit", [False, True])
def test_an_unused_parameter_and_its_state_keep_their_bits(tx, kind, jit):
    skipping = skip_unused.skip_unused(tx)
    params, state = _run(skipping, PARAMS, [(GRADS, ALL)] * 2)
    grads, used = {**GRADS, "c": NAN_GRADS["c"]}, _flags(WITHOUT_C, kind)
    step = functools.partial(skipping.update, used=used)
    updates, new_state = (jax.jit(step) if jit else step)(grads, state, params)
    new_params = optax.apply_updates(params, updates)
    assert _bits(new_params["c"]) == _bits(params["c"])
    assert _bits(new_state.leaf_states["['c']"]) == _bits(state.leaf_states["['c']"])
    assert _bits(new_params["a"]) != _bits(params["a"])


@kinds
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_the_update_of_an_unused_zero_keeps_its_sign(kind, zero, dtype):
    x = jnp.full(2, complex(zero, zero) if dtype == jnp.complex64 else zero, dtype)
    tx = skip_unused.skip_unused(optax.sgd(0.1))
    updates, _ = jax.jit(functools.partial(tx.update, used=[kind(False)]))(
        [jnp.ones_like(x)], tx.init([x]), [x]
    )
    assert updates[0].dtype == dtype
    assert _bits(optax.apply_updates([x], updates)) == _bits([x])


@txs
@kinds
def test_a_parameter_that_skipped_steps_is_as_if_they_had_not_been(tx, kind):
    """So the bias correction of Adam, and schedules, count the steps of the leaf."""
    mask = [True, False, True, False, False, True]
    steps = [(GRADS if c else NAN_GRADS, c) for c in mask]
    steps = [({**GRADS, "c": g["c"]}, _flags({**ALL, "c": c}, kind)) for g, c in steps]
    params, _ = _run(skip_unused.skip_unused(tx), PARAMS, steps)
    _assert_close(params["c"], _run_plain(tx, PARAMS, sum(mask))[0]["c"], 3)
    _assert_close(params["a"], _run_plain(tx, PARAMS, len(mask))[0]["a"], 6)


@txs
def test_a_mask_of_the_program_and_one_of_the_run_give_the_same(tx):
    skipping, masks = skip_unused.skip_unused(tx), [ALL, WITHOUT_C, ALL]
    results = [
        _run(skipping, PARAMS, [(GRADS, _flags(used, kind)) for used in masks])
        for kind in (bool, jnp.asarray, np.bool_, lambda x: np.array(x))
    ]
    for result in results[1:]:
        chex.assert_trees_all_equal(result, results[0])
        chex.assert_trees_all_equal_dtypes(result, results[0])


def test_the_optimizer_does_not_run_for_what_the_program_leaves_out():
    tx = skip_unused.skip_unused(optax.stateless_with_tree_map(lambda g, _: jnp.sin(g)))
    state, used = tx.init(PARAMS), {"a": {"w": True, "b": False}, "c": False}
    jaxpr = jax.make_jaxpr(functools.partial(tx.update, used=used))(GRADS, state)
    assert str(jaxpr).count("= sin ") == 1


def _decays(path, x):
    return path[-1].key != "b"


NO_BIAS = {"a": {"w": True, "b": False}, "c": True}
LABELS = {"a": {"w": "x", "b": "y"}, "c": "x"}
PARTS = {"x": optax.adam(0.1), "y": optax.sgd(0.1, momentum=0.9)}
MASKED = {
    "mask": optax.masked(optax.adam(0.1), NO_BIAS),
    "mask of a prefix": optax.masked(optax.adam(0.1), {"a": True, "c": False}),
    "mask by path": optax.masked(
        optax.adam(0.1), functools.partial(jax.tree_util.tree_map_with_path, _decays)
    ),
    "weight decay": optax.adamw(0.1, weight_decay=0.5, mask=NO_BIAS),
    "weight decay by rank": optax.adamw(
        0.1,
        weight_decay=0.5,
        mask=functools.partial(jax.tree.map, lambda x: jnp.ndim(x) > 1),
    ),
    "labels": optax.multi_transform(PARTS, LABELS),
    "labels by path": optax.multi_transform(
        PARTS,
        functools.partial(
            jax.tree_util.tree_map_with_path, lambda p, x: "xy"[p[-1].key == "b"]
        ),
    ),
    "frozen": optax.multi_transform({**PARTS, "y": optax.set_to_zero()}, LABELS),
}


@pytest.mark.parametrize("tx", MASKED.values(), ids=MASKED)
def test_masks_and_labels_of_the_whole_tree_work(tx):
    masks = [ALL, WITHOUT_C, ALL]
    params, _ = _run(skip_unused.skip_unused(tx), PARAMS, [(GRADS, m) for m in masks])
    _assert_close(params["a"], _run_plain(tx, PARAMS, 3)[0]["a"], 3)
    _assert_close(params["c"], _run_plain(tx, PARAMS, 2)[0]["c"], 2)


def test_a_chain_hands_used_on_and_clips_by_the_norm_of_all():
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), skip_unused.skip_unused(optax.sgd(1.0))
    )
    grads = {"x": jnp.array([3.0]), "y": jnp.array([4.0])}
    used = {"x": True, "y": False}
    updates, _ = tx.update(grads, tx.init(grads), grads, used=used)
    # The norm is sqrt(9 + 16).
    assert _bits(updates) == _bits({"x": np.float32([-3 / 5]), "y": np.float32([-0.0])})


def _stateless(fn):
    return optax.stateless(lambda updates, params: fn(updates, params))


def _swap(tree):
    return {"x": tree["y"], "y": tree["x"]}


def _in_cond(fn):
    return _stateless(
        lambda g, p: lax.cond(
            p["x"][0] > 0, lambda: fn(g), lambda: jax.tree.map(abs, g)
        )
    )


def _in_scan(fn, num_steps):
    return _stateless(
        lambda g, p: lax.scan(lambda c, _: (fn(c), None), g, length=num_steps)[0]
    )


def _in_while(fn):
    return _stateless(
        lambda g, p: lax.while_loop(lambda c: jnp.sum(c["x"]) < 9.0, fn, g)
    )


def _rotate(tree):
    return {"x": tree["y"], "y": tree["z"], "z": tree["z"]}


def _late(carry):
    """What `z` was a step ago reaches `x`."""
    tree, z = carry
    return {**tree, "x": tree["x"] + z}, tree["z"]


def _late_in_scan(g, p):
    first = (g, jnp.zeros(1))
    return lax.scan(lambda c, _: (_late(c), None), first, length=2)[0][0]


def _repeat(fn, x):
    """Calls `fn` twice, by a while loop."""
    body = (lambda c: c[0] < 2, lambda c: (c[0] + 1, fn(c[1])))
    return lax.while_loop(*body, (0, x))[1]


def _late_in_while(g, p):
    return _repeat(_late, (g, jnp.zeros(1)))[0]


def _add_one(tree):
    return jax.tree.map(lambda x: x + 1, tree)


MIXING = {
    "global norm": optax.clip_by_global_norm(1.0),
    "after another": optax.chain(
        optax.scale_by_adam(), optax.normalize_by_update_norm()
    ),
    "in a group": optax.multi_transform(
        {"x": optax.clip_by_global_norm(1.0), "y": optax.sgd(1.0)},
        {"x": "x", "y": "y", "z": "x"},
    ),
    "parameters": _stateless(lambda g, p: jax.tree.map(lambda x: x * p["x"], g)),
    "state": optax.apply_if_finite(optax.sgd(1.0), 3),
    "jit": _stateless(jax.jit(lambda g, p: _rotate(g))),
    "cond": _in_cond(_rotate),
    "predicate": _in_cond(_add_one),
    "scan": _in_scan(_rotate, 2),
    "scan, in two steps": _stateless(_late_in_scan),
    "while": _in_while(_rotate),
    "while, in two steps": _stateless(_late_in_while),
    "condition": _in_while(_add_one),
    "lbfgs": optax.scale_by_lbfgs(),
}
VECTORS = {k: jnp.array([2.0]) for k in "xyz"}


@pytest.mark.parametrize("tx", MIXING.values(), ids=MIXING)
def test_an_optimizer_that_mixes_parameters_is_refused(tx):
    skipping = skip_unused.skip_unused(tx)
    used = jax.tree.map(lambda _: True, VECTORS)
    with pytest.raises(ValueError, match=r"mixes parameters: `\['.'\]` and `\['.'\]`"):
        skipping.update(VECTORS, skipping.init(VECTORS), VECTORS, used=used)


SEPARABLE = {
    "jit": _stateless(jax.jit(lambda g, p: _add_one(g))),
    "cond on a count": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "scan": _in_scan(_add_one, 2),
    "while": _stateless(lambda g, p: _repeat(_add_one, g)),
    "muon": optax.contrib.muon(0.1),
    "novograd": optax.novograd(0.1),
    "schedule free": optax.contrib.schedule_free_adamw(0.1),
}


@pytest.mark.parametrize("tx", SEPARABLE.values(), ids=SEPARABLE)
def test_one_that_only_walks_the_whole_tree_is_not(tx):
    params = {k: jnp.ones((4, 4)) for k in "xyz"}
    used = jax.tree.map(lambda _: True, params)
    skipping = skip_unused.skip_unused(tx)
    updates, _ = skipping.update(params, skipping.init(params), params, used=used)
    plain = optax.with_extra_args_support(tx)
    expected, _ = plain.update(params, plain.init(params), params)
    _assert_close(updates, expected, num_steps=1)


def _update(grads=GRADS, params=PARAMS, used=ALL, made_for=PARAMS):
    tx = skip_unused.skip_unused(optax.adam(0.1))
    return tx.update(grads, tx.init(made_for), params, used=used)


def test_a_missing_mask_is_refused():
    with pytest.raises(ValueError, match=r"jdp.value_and_grad\(find_unused=True\)"):
        _update(used=None)


@pytest.mark.parametrize(
    ("used", "message"),
    [
        ({"a": ALL["a"]}, r"`\['c'\]` is only in the gradients"),
        (
            {**ALL, "b": True},
            r"differs: `\['b'\]` in `used`, `\['c'\]` in the gradients",
        ),
    ],
)
def test_a_mask_of_another_structure_is_refused(used, message):
    with pytest.raises(ValueError, match=message):
        _update(used=used)


@pytest.mark.parametrize(
    ("flag", "found"),
    [
        (1, "1"),
        ("yes", "'yes'"),
        (jnp.array([True]), r"bool of shape \(1,\)"),
        (np.float32(1), r"float32 of shape \(\)"),
    ],
)
def test_a_mask_of_something_else_than_booleans_is_refused(flag, found):
    with pytest.raises(TypeError, match=rf"{found} for `\['a'\]\['b'\]`"):
        _update(used={**ALL, "a": {"w": True, "b": flag}})


def test_parameters_of_another_structure_than_the_gradients_are_refused():
    with pytest.raises(ValueError, match=r"`\['c'\]` is only in the gradients"):
        _update(params={"a": PARAMS["a"]})


def test_a_parameter_that_the_state_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"it has no `\['c'\]`.*`init`"):
        _update(made_for={"a": PARAMS["a"]})


def test_a_parameter_that_only_the_state_has_is_refused():
    with pytest.raises(ValueError, match=r"it has `\['d'\]` as well.*`init`"):
        _update(made_for={**PARAMS, "d": jnp.ones(1)})


def test_the_state_holds_that_of_each_parameter_by_path():
    state = skip_unused.skip_unused(optax.scale_by_adam()).init(PARAMS)
    moments = {
        "['a']['b']": PARAMS["a"]["b"],
        "['a']['w']": PARAMS["a"]["w"],
        "['c']": PARAMS["c"],
    }
    expected = {
        path: optax.ScaleByAdamState(
            jnp.zeros((), jnp.int32), jnp.zeros_like(x), jnp.zeros_like(x)
        )
        for path, x in moments.items()
    }
    chex.assert_trees_all_equal(state, skip_unused.SkipUnusedState(expected))


def test_the_state_of_a_masked_parameter_is_as_small():
    """As each parameter has a state, none may have the size of the whole tree."""
    tx = skip_unused.skip_unused(optax.masked(optax.trace(0.9), NO_BIAS))
    expected = optax.MaskedState(optax.TraceState(optax.MaskedNode()))
    assert tx.init(PARAMS).leaf_states["['a']['b']"] == expected


@txs
def test_the_state_is_the_carry_of_a_scan(tx):
    skipping = skip_unused.skip_unused(tx)
    flags = [True, False, True]

    def step(carry, c):
        params, state = carry
        used = {**ALL, "c": c}
        updates, state = skipping.update(GRADS, state, params, used=used)
        return (optax.apply_updates(params, updates), state), None

    first = (PARAMS, skipping.init(PARAMS))
    params, state = lax.scan(step, first, jnp.array(flags))[0]
    steps = [(GRADS, {**ALL, "c": jnp.asarray(c)}) for c in flags]
    _assert_close((params, state), _run(skipping, PARAMS, steps), num_steps=3)


@pytest.mark.parametrize("tx", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1)])
@kinds
def test_a_state_of_bfloat16_stays_so_under_wider_gradients(tx, kind):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    skipping = skip_unused.skip_unused(tx)
    state = skipping.init(params)
    new_params, new = _run(skipping, params, [(GRADS, _flags(WITHOUT_C, kind))])
    chex.assert_trees_all_equal_shapes_and_dtypes((new_params, new), (params, state))
    assert _bits(new_params["c"]) == _bits(params["c"])


@kinds
def test_the_update_has_the_dtype_that_the_optimizer_gives_it(kind):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32)
    skipping = skip_unused.skip_unused(tx)
    updates, _ = skipping.update(
        params, skipping.init(params), params, used=_flags(WITHOUT_C, kind)
    )
    expected, _ = tx.update(params, tx.init(params), params)
    chex.assert_trees_all_equal_dtypes(updates, expected)


def _weak_counter():
    """Its first state is of weak type, and that of its updates is not."""
    return optax.GradientTransformation(
        lambda params: {"count": 0, "scale": jnp.asarray(1.0)},
        lambda updates, state, params=None: (
            updates,
            {"count": state["count"] + 1, "scale": state["scale"] * jnp.float32(2)},
        ),
    )


@pytest.mark.parametrize("tx", [*OPTIMIZERS.values(), _weak_counter()])
def test_later_steps_do_not_trace_again(tx):
    skipping = skip_unused.skip_unused(tx)
    traces = []

    @jax.jit
    def step(*args, used):
        traces.append(used)
        return skipping.update(*args, used=used)

    steps = [(GRADS, _flags(used, jnp.asarray)) for used in [ALL, WITHOUT_C, ALL]]
    _run(skipping, PARAMS, steps, step_fn=step)
    assert len(traces) == 1


def test_a_state_can_be_donated():
    """Also where each parameter's state begins with the same array."""
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=jnp.float32(0.1))
    skipping = skip_unused.skip_unused(tx)
    step = jax.jit(functools.partial(skipping.update, used=ALL), donate_argnums=1)
    updates, _ = step(GRADS, skipping.init(PARAMS), PARAMS)
    expected, _ = skipping.update(GRADS, skipping.init(PARAMS), PARAMS, used=ALL)
    _assert_close(updates, expected, num_steps=1)


def _noise_keys(state):
    return {k: jax.random.key_data(s.rng_key) for k, s in state.leaf_states.items()}


@kinds
def test_an_unused_parameter_draws_no_random_numbers(kind):
    tx = skip_unused.skip_unused(optax.add_noise(1.0, 0.5, jax.random.key(0)))
    state = tx.init(PARAMS)
    _, new = tx.update(GRADS, state, PARAMS, used=_flags(WITHOUT_C, kind))
    old_keys, new_keys = _noise_keys(state), _noise_keys(new)
    kept = {path: (old_keys[path] == new_keys[path]).all() for path in old_keys}
    assert kept == {"['a']['b']": False, "['a']['w']": False, "['c']": True}


@pytest.mark.parametrize("shape", [(), (2,)])
def test_parameters_of_one_shape_draw_different_noise(shape):
    keys = jax.random.split(jax.random.key(0), shape)
    tx = optax.GradientTransformation(
        lambda params: keys,
        lambda updates, state, params=None: (
            jax.tree.map(
                lambda x: jax.random.normal(state.ravel()[0], x.shape), updates
            ),
            state,
        ),
    )
    skipping = skip_unused.skip_unused(tx)
    used = jax.tree.map(lambda _: True, VECTORS)
    updates, _ = skipping.update(VECTORS, skipping.init(VECTORS), used=used)
    assert len({float(x[0]) for x in updates.values()}) == len(VECTORS)


def test_parameters_may_be_missing():
    tx = skip_unused.skip_unused(optax.sgd(1.0))
    updates, _ = tx.update(GRADS, tx.init(PARAMS), used=WITHOUT_C)
    expected = {"a": GRADS["a"], "c": jnp.zeros(3)}
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda x: -x, expected))


def _scale_by_argument():
    def update(grads, state, params=None, *, scale, **extra_args):
        return jax.tree.map(lambda x: x * scale, grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _add_argument():
    def update(grads, state, params=None, *, tree, **extra_args):
        return jax.tree.map(jnp.add, grads, tree), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def test_other_extra_arguments_reach_the_optimizer():
    tx = skip_unused.skip_unused(_scale_by_argument())
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, used=ALL, scale=2.0)
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda x: x * 2, GRADS))


def test_an_extra_argument_like_the_gradients_is_cut_as_they_are():
    tx = skip_unused.skip_unused(_add_argument())
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, used=ALL, tree=PARAMS)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.add, GRADS, PARAMS))


@pytest.mark.parametrize("params", [{}, (), [{}, None]])
def test_a_tree_without_parameters_stays_as_it_is(params):
    tx = skip_unused.skip_unused(optax.adam(0.1))
    updates, state = tx.update(params, tx.init(params), params, used=params)
    assert (updates, state.leaf_states) == (params, {})


@kinds
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("put", [lambda x: x, lambda x: (x,), lambda x: {"x": (x,)}])
def test_a_single_parameter_works_wherever_it_is(kind, flag, put):
    x, tx = jnp.array([1.0, -0.0]), optax.adam(0.1)
    steps = [(put(x), put(kind(flag)))] * 2
    params, _ = _run(skip_unused.skip_unused(tx), put(x), steps)
    expected, _ = _run(optax.with_extra_args_support(tx), put(x), steps)
    if flag:
        _assert_close(params, expected, num_steps=2)
    else:
        assert _bits(params) == _bits(put(x))


@pytest.mark.parametrize("check_vma", [True, False])
@kinds
def test_it_runs_under_shard_map(check_vma, kind):
    tx = jdp.distributed_optimizer(skip_unused.skip_unused(optax.adam(0.1)))

    def step(grads, state, params, c):
        used = {**_flags(ALL, kind), "c": c > 0 if kind is jnp.asarray else False}
        grads = jax.tree.map(lambda x: x[0], grads)
        return tx.update(grads, state, params, used=used)

    mapped = jax.shard_map(
        step,
        mesh=harness.local_world(2).mesh,
        in_specs=(PartitionSpec("data"), *[PartitionSpec()] * 3),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    state = tx.init(PARAMS)
    local_grads = jax.tree.map(lambda x: jnp.stack([0.5 * x, 1.5 * x]), GRADS)
    results = jax.jit(mapped)(local_grads, state, PARAMS, 0.0)
    alone = skip_unused.skip_unused(optax.adam(0.1))
    expected = alone.update(GRADS, state, PARAMS, used=WITHOUT_C)
    _assert_close(results, expected, num_steps=1)


def test_under_vmap_each_replica_has_its_own_mask():
    tx = skip_unused.skip_unused(optax.adam(0.1))
    state = tx.init(PARAMS)

    def step(c):
        return tx.update(GRADS, state, PARAMS, used={**ALL, "c": c})

    batched = jax.vmap(step)(jnp.array([True, False]))
    for i, used in enumerate([ALL, WITHOUT_C]):
        expected = tx.update(GRADS, state, PARAMS, used=used)
        _assert_close(jax.tree.map(lambda x, i=i: x[i], batched), expected, 1)


def test_the_optimizer_of_flax_takes_it():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    plain_model = nnx.clone(model)
    tx = optax.adam(0.1)
    skipping = nnx.Optimizer(model, skip_unused.skip_unused(tx), wrt=nnx.Param)
    plain = nnx.Optimizer(plain_model, tx, wrt=nnx.Param)
    kernel = np.array(model.kernel[...])
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    for _ in range(2):
        skipping.update(model, grads, used=nnx.State({"kernel": False, "bias": True}))
        plain.update(plain_model, grads)
    chex.assert_trees_all_equal(model.kernel[...], kernel)
    _assert_close(model.bias[...], plain_model.bias[...], num_steps=2)
