"""A synchronised batch norm is known in a program by a marker, not by tracebacks."""

import functools
import importlib
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

import jdp
from jdp.backward.loss import is_of_synced_batch_norm
from jdp.batch_norm import layer
from tests import harness, rarely
from tests.transforms import AXIS, COMPILED_FAST

N = 2
X = np.arange(N * 4 * 3, dtype=np.float32).reshape(N, 4, 3) % 5
WEIGHT = np.array([3.0, 1.0], np.float32)
PARAMS = np.array([0.5, 1.0, 2.0], np.float32)


def _layer(module, scale, x):
    options = module.make_options(
        x,
        axis=-1,
        axis_name=AXIS,
        axis_index_groups=None,
        use_fast_variance=True,
        epsilon=1e-5,
        momentum=0.9,
    )
    inputs = module.count_samples(x, options)
    moments, _ = module.take_moments(inputs, None, options, jnp.float32)
    return module.normalize(inputs, moments, scale, None, options)


def _make_loss(module):
    def loss_fn(params, x):
        y = _layer(module, params, x * params)
        return (y**3).mean().astype(jnp.bfloat16)

    return loss_fn


def _weighed_late(module, params, local):
    x, weight = local
    loss_fn = _make_loss(module)

    def marked(params, x):
        return loss_fn(jdp.sync_in_backward(params, weight=weight), x)

    return jdp.value_and_grad(marked, weight=weight)(params, x)


def _weighed_early(module, params, local):
    x, weight = local
    return jdp.value_and_grad(_make_loss(module), weight=weight)(params, x)


def _found(transform, module=layer):
    """Losses and gradients, weighted late and early, and the warnings of each."""
    jax.clear_caches()
    found = []
    for fn in (_weighed_late, _weighed_early):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = functools.partial(fn, module)
            results = COMPILED_FAST[transform](run, N, PARAMS, (X, WEIGHT))
        messages = {str(w.message) for w in caught if w.category is UserWarning}
        found.append((*map(np.asarray, results), messages))
    return found


@functools.cache
def _expected(transform):
    return _found(transform)


def _elsewhere(tmp_path, monkeypatch):
    """`jdp.batch_norm.layer` of a copy of the package in another folder."""
    folder = tmp_path / "normalisation"
    folder.mkdir()
    for path in pathlib.Path(layer.__file__).parent.glob("*.py"):
        text = path.read_text().replace("jdp.batch_norm", "normalisation")
        (folder / path.name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        module = importlib.import_module("normalisation.layer")
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "normalisation"]:
            del sys.modules[name]
    assert pathlib.Path(module.global_moments.__file__).parent == folder
    return module


@pytest.mark.parametrize(
    "setting",
    [
        *(
            pytest.param(setting, marks=pytest.mark.slow)
            for setting in (
                ("jax_include_full_tracebacks_in_locations", False),
                ("jax_traceback_in_locations_limit", 0),
                ("jax_traceback_filtering", "off"),
            )
        ),
        "no tracebacks",
        "another path",
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "transform", rarely.cases(["shard_map", "vmap"], often=("shard_map",))
)
def test_the_warning_and_the_weights_are_the_same(
    setting, transform, tmp_path, monkeypatch
):
    expected = _expected(transform)
    (*_, warned), (*_, unwarned) = expected
    assert "synchronised batch norm" in "".join(warned) and not unwarned
    module, before = layer, None
    if setting == "another path":
        module = _elsewhere(tmp_path, monkeypatch)
    elif setting == "no tracebacks":
        harness.drop_tracebacks(monkeypatch)
    else:
        before = getattr(jax.config, setting[0])
        jax.config.update(*setting)
    try:
        found = _found(transform, module)
    finally:
        if before is not None:
            jax.config.update(setting[0], before)
    for (loss, grads, messages), (*values, expected_messages) in zip(
        found, expected, strict=True
    ):
        np.testing.assert_array_equal(loss, values[0])
        np.testing.assert_array_equal(grads, values[1])
        assert messages == expected_messages


def _in_scan(fn):
    return lambda x: lax.scan(lambda c, _: (fn(c), None), x, length=2)[0]


def _custom(fn):
    @jax.custom_vjp
    def made(x):
        return fn(x)

    made.defvjp(lambda x: jax.vjp(fn, x), lambda pull, cotangent: pull(cotangent))
    return made


def _custom_batched(fn):
    made = jax.custom_batching.custom_vmap(fn)
    made.def_vmap(lambda size, batched, x: (jax.vmap(fn)(x), True))
    return lambda x: jax.vmap(made)(x[None])[0]


WRAPPERS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": _in_scan,
    "scanned remat": lambda fn: _in_scan(jax.checkpoint(fn)),
    "cond": lambda fn: lambda x: lax.cond(x.sum() > 0, fn, lambda x: x, x),
    "vmap": lambda fn: lambda x: jax.vmap(fn)(x[None])[0],
    "custom_vjp": _custom,
    "custom_vmap": _custom_batched,
}


def _sums(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from _sums(inner)
        if eqn.primitive.name in ("psum", "psum_invariant"):
            yield eqn


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_marker_stays_in_the_program_and_its_transpose(wrap):
    wrapped = wrap(lambda x: _layer(layer, jnp.ones(3), x))

    def fn(x):
        return jax.grad(lambda x: (wrapped(x) ** 3).sum())(x)

    mesh = jax.make_mesh((1,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(AXIS)
    mapped = jax.shard_map(
        lambda x: fn(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec
    )
    sums = list(_sums(jax.make_jaxpr(mapped)(X[:1])))
    assert sums and all(map(is_of_synced_batch_norm, sums))


def test_another_collective_is_not_taken_for_one():
    jaxpr = jax.make_jaxpr(lambda x: lax.psum(x, AXIS), axis_env=[(AXIS, 2)])(1.0)
    (eqn,) = _sums(jaxpr)
    assert not is_of_synced_batch_norm(eqn)
