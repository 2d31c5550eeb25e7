"""`argnums` and `allow_int` mean what they mean in `jax.value_and_grad`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdp
from tests import harness

W = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
B = np.float32([0.5, -0.5])
X = np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)

pytestmark = pytest.mark.filterwarnings("ignore:.*may be left out of a step")


def loss_fn(w, x, b, *, power=2):
    return jnp.mean(jnp.tanh(x @ w["w"] + b[None]) ** power)


def _functions(loss_fn, argnums, **options):
    return {
        "value_and_grad": jdp.value_and_grad(loss_fn, argnums, **options),
        "local_gradients": jdp.local_gradients(loss_fn, argnums, **options),
        "accumulate_gradients": jdp.accumulate_gradients(
            loss_fn, 2, argnums=argnums, **options
        ),
    }


def _on_replicas(fn, *args):
    """On two replicas with the same samples, whose means are those of each."""
    both = harness.jit_fast(
        lambda args: jax.vmap(lambda _: fn(*args), axis_name="data")(jnp.zeros(2))
    )(args)
    return jax.tree.map(lambda x: x[0], both)


NAMES = ["value_and_grad", "local_gradients", "accumulate_gradients"]


CASES = [(name, a) for name in NAMES for a in ((0, 2), [2, 0], (-1, 0))]
# What is no parameter is a batch to `accumulate_gradients`, and cut.
CASES += [(name, a) for name in NAMES[:2] for a in (0, 2, -1, (0,), (-3,))]


@pytest.mark.parametrize("name,argnums", CASES)
def test_argnums_are_those_of_jax(name, argnums):
    args = {"w": W}, X, B
    found = _on_replicas(_functions(loss_fn, argnums)[name], *args)
    argnums = tuple(argnums) if isinstance(argnums, list) else argnums
    expected = jax.value_and_grad(loss_fn, argnums)(*args)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def test_keywords_and_what_was_used_go_with_them():
    fn = jdp.value_and_grad(loss_fn, (2, 0), find_unused=True)
    (loss, grads), used = _on_replicas(functools.partial(fn, power=4), {"w": W}, X, B)
    expected = jax.value_and_grad(functools.partial(loss_fn, power=4), (2, 0))
    chex.assert_trees_all_close((loss, grads), expected({"w": W}, X, B), rtol=1e-5)
    assert jax.tree.map(bool, used) == (True, {"w": True})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "argnums,error,message",
    [
        (3, ValueError, "names the positional argument 3, but the call has 3"),
        ((0, -4), ValueError, "names the positional argument -4"),
        ((0, 0), ValueError, "must name at least one argument, and each once"),
        ((), ValueError, "must name at least one argument"),
        ("w", TypeError, "must be an integer or a tuple of integers, got 'w'"),
        (0.0, TypeError, "must be an integer"),
    ],
)
def test_a_wrong_place_is_named(name, argnums, error, message):
    with pytest.raises(error, match=message):
        _on_replicas(_functions(loss_fn, argnums)[name], {"w": W}, X, B)


def _with_integers(params, x):
    h = x @ params["w"] * params["step"]
    h = lax.cond(params["is_on"], lambda h: h + params["b"][None], lambda h: h, h)
    noise = jax.random.normal(jax.random.wrap_key_data(params["key"]), h.shape[1:])
    return jnp.mean((h + noise[0]) ** 2)


INTEGERS = {
    "w": W,
    "b": B,
    "step": np.int32(3),
    "is_on": np.bool_(True),
    "key": np.uint32([1, 2]),
}


@pytest.mark.parametrize("options", [{}, {"find_unused": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_integers_have_gradients_of_float0(name, options):
    fn = _functions(_with_integers, 0, allow_int=True, **options)[name]
    step = jax.shard_map(
        lambda p, x: jax.tree.map(_shown, fn(p, x)),
        mesh=harness.local_world(2).mesh,
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P(),
        check_vma=False,
    )
    out = harness.jit_fast(step)(INTEGERS, np.concatenate([X, X]))
    (loss, grads), used = out if options else (out, None)
    expected = jax.value_and_grad(_with_integers, allow_int=True)(INTEGERS, X)
    chex.assert_trees_all_close(
        (loss, grads), jax.tree.map(_shown, expected), rtol=1e-5
    )
    if used is not None:
        is_float = {"w": True, "b": True, "step": False, "is_on": False, "key": False}
        assert jax.tree.map(bool, used) == is_float


def _shown(x):
    """A number in place of float0, which leaves no compiled function."""
    is_float0 = getattr(x, "dtype", None) == jax.dtypes.float0
    return jnp.full(x.shape, 77) if is_float0 else x


def test_integers_do_not_count_as_never_used():
    fn = jdp.value_and_grad(_with_integers, allow_int=True)
    _on_replicas(lambda p: fn(p, X)[0], INTEGERS)  # would warn, and fail.


def test_without_allow_int_they_are_named():
    with pytest.raises(TypeError, match=r"`\['is_on'\]` is bool.*`allow_int=True`"):
        _on_replicas(jdp.value_and_grad(_with_integers), INTEGERS, X)


def test_state_of_a_hook_is_made_without_them():
    hook = jdp.hooks.top_k(1.0)

    @jdp.data_parallel(world=harness.local_world(2), donate_state=False)
    def step(params, x):
        state = jdp.hooks.init_state(hook, params)
        fn = jdp.value_and_grad(
            _with_integers, allow_int=True, hook=hook, hook_state=state
        )
        (loss, grads), _ = fn(params, x)
        return params, {"loss": loss, "w": grads["w"]}

    whole = np.concatenate([X, X])  # Random numbers are those of one device.
    metrics = step(INTEGERS, whole)[1]
    expected = jax.grad(_with_integers, allow_int=True)(INTEGERS, whole)
    np.testing.assert_allclose(metrics["w"], expected["w"], rtol=1e-5)


@pytest.mark.parametrize("flag", ["has_aux", "find_unused", "allow_int", "find_norms"])
def test_a_flag_is_true_or_false(flag):
    makers = [
        functools.partial(jdp.value_and_grad, loss_fn),
        functools.partial(jdp.accumulate_gradients, loss_fn, 2),
    ]
    if flag == "find_norms":
        makers.append(functools.partial(jdp.sync_gradients, {"w": W}))
    else:
        makers.append(functools.partial(jdp.local_gradients, loss_fn))
    for make in makers:
        with pytest.raises(TypeError, match=f"`{flag}` must be True or False, got 'a'"):
            make(**{flag: "a"})


@pytest.mark.parametrize("value", [None, np.float32(1)])
def test_a_loss_is_a_function(value):
    accumulate = functools.partial(jdp.accumulate_gradients, num_micro_batches=2)
    for make in (jdp.value_and_grad, jdp.local_gradients, jdp.mean_loss, accumulate):
        with pytest.raises(TypeError, match=r"^`loss_fn` must be a function"):
            make(value)


def test_a_truth_value_is_no_count():
    with pytest.raises(TypeError, match="`num_micro_batches` must be an integer"):
        jdp.accumulate_gradients(loss_fn, True)


@pytest.mark.parametrize("name", NAMES)
def test_outside_of_a_step_the_axis_is_not_bound(name):
    fn = _functions(loss_fn, 0)[name]
    with pytest.raises(ValueError, match="`axis_name='data'` is not bound here"):
        fn({"w": W}, X, B[None])
