"""Every optimizer of optax, in pieces and not, steps as it does on one device."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import losses, projections, schedules, second_order, tree_utils

import jdp
from tests import harness
from tests.optimizers import optax_cases
from tests.optimizers.optax_cases import CASES

N, STEPS = 4, 3
_rng = np.random.default_rng(0)
PARAMS = {
    k: np.asarray(0.5 * _rng.normal(size=shape), np.float32)
    for k, shape in optax_cases.SHAPES.items()
}
TARGETS = {
    k: _rng.normal(size=(N, *shape)).astype(np.float32)
    for k, shape in optax_cases.SHAPES.items()
}
# Public functions of optax that are no optimizers, beside losses, schedules and trees.
# `optimistic_adam` is deprecated.
OTHERS = set(
    "apply_updates bias_correction global_norm incremental_update init_empty_state "
    "matrix_inverse_pth_root microbatch multi_normal nnls optimistic_adam "
    "per_example_global_norm_clip "
    "per_example_layer_norm_clip periodic_update power_iteration safe_increment "
    "safe_int32_increment safe_norm safe_root_mean_squares scale_gradient "
    "schedule_free_eval_params tree_map_params unitwise_clip unitwise_norm "
    "update_infinity_moment update_moment update_moment_per_elem_norm "
    "value_and_grad_from_state".split()
)


def _loss(params, target):
    terms = [((p - target[k]) ** 2 + 0.1 * p**4).sum() for k, p in params.items()]
    return 0.5 * sum(terms)


def _gradient(params, target):
    return {k: (p - target[k]) + 0.2 * p**3 for k, p in params.items()}


def _mean_loss(params):
    return jax.vmap(_loss, in_axes=(None, 0))(params, TARGETS).mean()


def _start(case):
    params = {
        k: jnp.asarray(x) for k, x in PARAMS.items() if case.has_scalars or x.ndim
    }
    return optax.LookaheadParams.init_synced(params) if case.is_lookahead else params


def _at(case, params):
    return params.fast if case.is_lookahead else params


def _extra(case, value, grads, mean_loss):
    known = {
        "value": value,
        "grad": grads,
        "value_fn": mean_loss,
        "obj_fn": mean_loss,
        "grad_fn": lambda params, _: jax.grad(mean_loss)(params),
    }
    return {name: known[name] for name in case.extra}


def _steps(case, step, tx, params):
    """Takes all steps in one program: most of the time is that of compiling."""
    start = params, tx.init(params)
    start = step(*start) if case.grows else start
    num_steps = STEPS - 1 if case.grows else STEPS

    def body(state, _):
        new = step(*state)
        return jax.tree.map(lambda x, y: jnp.array(y, dtype=x.dtype), state, new), None

    start = jax.tree.map(lambda x: jnp.array(x, dtype=jnp.result_type(x)), start)
    return jax.lax.scan(body, start, length=num_steps)[0][0]


def _train_alone(case, tx):
    tx = optax.with_extra_args_support(tx)

    def step(params, opt):
        value, grads = jax.value_and_grad(_mean_loss)(_at(case, params))
        extra = _extra(case, value, grads, _mean_loss)
        updates, opt = tx.update(grads, opt, params, **extra)
        return optax.apply_updates(params, updates), opt

    return harness.jit_fast(lambda params: _steps(case, step, tx, params))(_start(case))


def _train_on_replicas(case, txs):
    world = harness.local_world(N)

    @jdp.data_parallel(world=world, compiler_options=harness.fast_options())
    def train(start, target):
        target = jax.tree.map(lambda x: x[0], target)
        found = {}
        for name, tx in txs.items():

            def step(params, opt, tx=tx, name=name):
                at = _at(case, params)
                grads = _gradient(at, target)
                extra = {}
                if case.extra:
                    # No replica sees another one's target.
                    mean_loss = functools.partial(jdp.mean_loss(_loss), target=target)
                    synced = jdp.sync_gradients(grads)
                    extra = _extra(case, mean_loss(at), synced, mean_loss)
                    grads = synced if name == "by itself" else grads
                if "skip" in name:
                    # One replica alone used the vector.
                    is_first = jax.lax.axis_index("data") == 0
                    flags = {"m": True, "s": jnp.bool_(True), "v": is_first}
                    extra["used"] = {k: flags[k] for k in at}
                updates, opt = tx.update(grads, opt, params, **extra)
                return optax.apply_updates(params, updates), opt

            found[name] = _steps(case, step, tx, start)
        return found, {}

    return train(_start(case), TARGETS)[0]


# `zero1(skip_unused(tx))` is slow to compile.
IN_PIECES_TOO = ("sgd", "adafactor", "lamb", "inject_hyperparams", "multi_transform")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_PIECES_TOO else [pytest.mark.slow])
        for name, case in CASES.items()
        if case.refused_by_all is None
    ],
)
def test_it_steps_as_on_one_device(name):
    case = CASES[name]
    tx = case.make()
    world = harness.local_world(N)
    txs = {"plain": jdp.distributed_optimizer(tx)}
    if case.refused_by_zero1 is None:
        txs["zero1"] = jdp.zero1(tx, world=world)
    skipping = jdp.skip_unused(tx)
    if case.refused_by_skip_unused is None and not case.differs_in_skip_unused:
        txs["skip"] = jdp.distributed_optimizer(skipping)
    if case.extra:
        txs["by itself"] = optax.with_extra_args_support(tx)
    if name in IN_PIECES_TOO:
        txs["skip in pieces"] = jdp.zero1(skipping, world=world)
    expected = _train_alone(case, tx)
    for way, found in _train_on_replicas(case, txs).items():
        for path, a, b in zip(
            jdp.trees.buckets.leaf_paths(expected),
            jax.tree.leaves(found),
            jax.tree.leaves(expected),
            strict=True,
        ):
            np.testing.assert_allclose(
                a, b, rtol=case.atol, atol=case.atol, err_msg=f"{way}{path}"
            )


def _public_functions():
    homes = (losses, projections, schedules, second_order, tree_utils)
    known = OTHERS.union(*(vars(home) for home in homes))
    for module in optax_cases.MODULES:
        for name, value in vars(module).items():
            if name.startswith("_") or name in known or inspect.ismodule(value):
                continue
            if inspect.isfunction(value) or name == "MultiSteps":
                yield name


def test_every_one_is_in_the_table():
    missing = sorted(
        set(_public_functions()) - {*optax_cases.CASES, *optax_cases.INSIDE}
    )
    assert not missing, f"optax {optax.__version__} also has {missing}."
    assert set(optax_cases.INSIDE.values()) <= set(CASES)


@pytest.mark.parametrize(
    "name", [n for n, case in CASES.items() if case.refused_by_skip_unused is not None]
)
def test_what_skip_unused_refuses(name):
    case = CASES[name]
    tx, params = jdp.skip_unused(case.make()), _start(case)

    def step(grads):
        extra = _extra(case, jnp.zeros(()), grads, _mean_loss)
        used = jax.tree.map(lambda _: True, grads)
        return tx.update(grads, tx.init(params), params, used=used, **extra)

    with pytest.raises(ValueError, match=case.refused_by_skip_unused):
        jax.eval_shape(step, _at(case, params))


@pytest.mark.filterwarnings("ignore:.seed. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name)
        for name, case in CASES.items()
        for way in ("zero1", "distributed_optimizer")
        if case.refused_by_all or (case.refused_by_zero1 and way == "zero1")
    ],
)
def test_what_is_refused(way, name):
    world, case = harness.local_world(N), CASES[name]
    tx = getattr(jdp, way)(case.make(), world=world)

    def step(state, target):
        grads = jax.tree.map(lambda x: x * target.sum(), PARAMS)
        if case.refused_by_all:  # It takes gradients of single samples.
            grads = jax.tree.map(lambda x: jnp.stack([x, x]), grads)
        return tx.update(grads, state, PARAMS)[1], {}

    with pytest.raises(ValueError, match=case.refused_by_all or case.refused_by_zero1):
        jdp.data_parallel(step, world=world)(tx.init(PARAMS), np.ones(N, np.float32))
