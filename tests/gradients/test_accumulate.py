"""Accumulated micro-batches: the gradient of the whole batch, in less memory."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jdp
from tests import harness, rarely

BATCH = 40


def _step(grad_fn):
    def step(params, batch):
        return params, grad_fn(params, batch)

    return step


def _run(grad_fn, params, batch, n=4, **kwargs):
    step = jdp.data_parallel(_step(grad_fn), world=harness.local_world(n), **kwargs)
    return step(params, batch)[1]


@pytest.mark.parametrize(
    ("num_micro_batches", "n"),
    rarely.cases(
        itertools.product([1, 2, 3, 5], [1, 2, 4, 8]),
        often=[(1, 2), (2, 1), (2, 4), (3, 8), (5, 2)],
    ),
)
def test_it_is_the_gradient_of_the_whole_batch(n, num_micro_batches):
    params, (batch,) = harness.oracle_params(), harness.oracle_batches(1, BATCH)
    grad_fn = jdp.accumulate_gradients(harness.oracle_loss, num_micro_batches)
    found = _run(grad_fn, params, batch, n)
    expected = jax.value_and_grad(harness.oracle_loss)(params, batch)
    # Sums of 40 terms of order 1 in another order.
    chex.assert_trees_all_close(found, expected, atol=BATCH * 1.2e-7, rtol=0)


def test_micro_batches_count_by_their_samples():
    # 5 samples in 3 micro-batches: 2, 2 and 1. Equal weights would give 3.33.
    x = np.array([0, 0, 0, 0, 10], np.float32)
    grad_fn = jdp.accumulate_gradients(lambda p, x: (p * x).mean(), 3)
    loss, grad = _run(grad_fn, np.float32(1), x, n=1)
    assert (float(loss), float(grad)) == (2.0, 2.0)


def test_metrics_are_averaged_as_the_loss_is():
    def loss_fn(p, x):
        metrics = {
            "size": x.shape[0],
            "mean": x.mean(),
            "is_large": x.mean() > 5,
            "count": jnp.int32(x.shape[0]),
        }
        return (p * x).mean(), metrics

    x = np.array([0, 0, 0, 0, 10], np.float32)
    grad_fn = jdp.accumulate_gradients(loss_fn, 3, has_aux=True)
    (loss, metrics), _ = _run(grad_fn, np.float32(1), x, n=1)
    sizes = np.array([2, 2, 1])
    expected = {
        "size": (sizes * sizes).sum() / 5,
        "mean": 2.0,
        "is_large": 1 / 5,
        "count": (sizes * sizes).sum() / 5,
    }
    chex.assert_trees_all_close(
        jax.tree.map(float, metrics), expected, atol=1e-6, rtol=0
    )
    assert float(loss) == 2.0


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 6])  # of 6 samples.
def test_rows_of_samples_keep_their_order_and_are_never_averaged(num_micro_batches):
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    size = 6 // num_micro_batches

    def run(metrics):
        def loss_fn(p, x):
            return (p * x).mean(), metrics(x)

        grad_fn = jdp.accumulate_gradients(loss_fn, num_micro_batches, has_aux=True)
        return _run(grad_fn, np.float32(1), x, n=1)[0][1]

    rows = {"x": x, "is_large": x[:, 0] > 5}
    found = run(lambda x: jdp.PerReplica({"x": x, "is_large": x[:, 0] > 5}))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[0], found.value), rows)
    # As long as a micro-batch by chance, such as a statistic of each feature.
    chance = run(lambda x: {"k": x.mean() * jnp.ones(size)})
    chex.assert_trees_all_close(chance, {"k": np.full(size, 5.5)}, atol=1e-6, rtol=0)
    if num_micro_batches > 1:
        message = (
            r"`\['x'\]`, float32\[\d, 2\], seems to have a row per sample of a micro"
        )
        with pytest.raises(ValueError, match=message):
            run(lambda x: {"x": x})


def test_metrics_of_unlike_shapes_are_not_added():
    x = np.arange(5, dtype=np.float32)  # micro-batches of 2, 1, 1 and 1.

    def run(metrics):
        grad_fn = jdp.accumulate_gradients(
            lambda p, x: ((p * x).mean(), metrics(x)), 4, has_aux=True
        )
        return _run(grad_fn, np.float32(1), x, n=1)[0][1]

    found = run(lambda x: jdp.PerReplica(x))
    np.testing.assert_array_equal(found.value[0], x)
    with pytest.raises(
        ValueError, match=r"`\['a'\]`, float32\[2\], seems to have a row"
    ):
        run(lambda x: {"a": x})
    with pytest.raises(ValueError, match=r"\(3, 2\), changes with the number"):
        run(lambda x: jnp.ones((3, 1)) * x)
    with pytest.raises(
        TypeError, match=r"`\['key'\]` is key<fry>\[\], which has no mean"
    ):
        run(lambda x: {"key": jax.random.key(0)})


@pytest.mark.parametrize("num_micro_batches", [2, 3, 6])
def test_several_rows_per_sample_are_rows_as_well(num_micro_batches):
    x = np.arange(12, dtype=np.float32).reshape(6, 2)

    def run(metrics):
        def loss_fn(p, x):
            assert x.shape[0] != 2 * size + 1  # A loss may take whole pairs alone.
            return (p * x).mean(), metrics(x)

        size = 6 // num_micro_batches
        grad_fn = jdp.accumulate_gradients(loss_fn, num_micro_batches, has_aux=True)
        return _run(grad_fn, np.float32(1), x, n=1)[0][1]

    found = run(lambda x: jdp.PerReplica({"of tokens": x.reshape(-1) > 5}))
    np.testing.assert_array_equal(found.value["of tokens"][0], x.reshape(-1) > 5)
    with pytest.raises(ValueError, match=r"`\['x'\]`, float32\[\d+\], seems to have a"):
        run(lambda x: {"x": x.reshape(-1)})
    for wrap in (dict, lambda **kwargs: jdp.PerReplica(kwargs)):
        with pytest.raises(ValueError, match="changes with the number of samples"):
            run(lambda x, wrap=wrap: wrap(x=x.T))


def _compiled(grad_fn, params, batch, **kwargs):
    step = jdp.data_parallel(
        _step(grad_fn), world=harness.local_world(4), donate_state=False, **kwargs
    )
    return step.lower(params, batch).compile()


def _lines(compiled, word):
    return [s for s in compiled.as_text().splitlines() if f" {word}(" in s]


@pytest.mark.parametrize("num_micro_batches", [2, 3, 5])
def test_each_bucket_is_reduced_once_after_the_loop(num_micro_batches):
    params, (batch,) = harness.oracle_params(), harness.oracle_batches(1, BATCH)
    plan = jdp.plan_buckets(params, bucket_bytes=64, first_bucket_bytes=64)
    assert len(plan.buckets) == 3
    grad_fn = jdp.accumulate_gradients(
        harness.oracle_loss, num_micro_batches, plan=plan
    )
    compiled = _compiled(grad_fn, params, batch)
    assert len(_lines(compiled, "all-reduce")) == 3
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count(" all-reduce(") == 3  # none in the body of the loop
    assert " while(" in entry


def test_it_needs_one_copy_of_the_gradients_more_than_a_micro_batch():
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(256, 256)).astype(np.float32) for _ in range(6)]
    gradient_bytes = sum(p.nbytes for p in params)

    def loss_fn(params, x):
        for p in params:
            x = jnp.tanh(x @ p)
        return (x**2).mean()

    def temporary(grad_fn, batch_size):
        batch = np.ones((batch_size, 256), np.float32)
        memory = _compiled(grad_fn, params, batch).memory_analysis()
        return memory.temp_size_in_bytes

    one = temporary(jdp.value_and_grad(loss_fn), 4 * 8)
    accumulated = temporary(jdp.accumulate_gradients(loss_fn, 4), 4 * 32)
    # The micro-batch itself, and a loop's counters.
    assert accumulated <= one + gradient_bytes + 3 * 8 * 256 * 4 * 4


def test_sums_are_kept_in_the_dtype_that_was_asked_for():
    def loss_fn(p, x):
        return (p["w"] * x.astype(jnp.bfloat16)).sum()

    params = {"w": jnp.ones((), jnp.bfloat16)}
    x = np.ones(1000, np.float32)

    def mean(dtype):
        grad_fn = jdp.accumulate_gradients(loss_fn, 1000, dtype=dtype)
        return _run(grad_fn, params, x, n=1)[1]["w"]

    assert mean(None).dtype == jnp.bfloat16
    assert mean(jnp.float32).dtype == jnp.float32
    # With 8 bits a sum stops to grow where a thousandth is less than half a unit.
    assert float(mean(None)) < 0.6
    np.testing.assert_allclose(mean(jnp.float32), 1, rtol=1000 * 1.2e-7)


def test_the_reduction_is_in_the_dtype_of_the_sums():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), harness.oracle_params())
    (batch,) = harness.oracle_batches(1, BATCH, jnp.bfloat16)
    grad_fn = jdp.accumulate_gradients(harness.oracle_loss, 2, dtype=jnp.float32)
    lines = _lines(_compiled(grad_fn, params, batch), "all-reduce")
    num_elements = sum(p.size for p in jax.tree.leaves(params))
    # The loss is of bfloat16, and goes by itself.
    assert [f"f32[{num_elements}]" in line for line in lines].count(True) == 1
    assert not any(f"bf16[{num_elements}" in line for line in lines)


def test_what_any_micro_batch_uses_is_used():
    def loss_fn(p, x):
        return lax.cond(
            x[0] > 0, lambda: (p["a"] * x).mean(), lambda: (p["b"] * x).mean()
        )

    params = {k: np.float32(1) for k in "abc"}

    def used(signs):
        def fn(params, x):
            grad_fn = jdp.accumulate_gradients(loss_fn, 2, find_unused=True)
            _, used = grad_fn(params, x)
            assert used["c"] is False
            return params, used

        step = jdp.data_parallel(fn, world=harness.local_world(2))
        _, found = step(params, np.array(signs, np.float32))
        return {name for name in found if found[name]}

    with pytest.warns(UserWarning, match="`\\['c'\\]`"):
        assert used([1, 1, 1, 1]) == {"a"}
    with pytest.warns(UserWarning):
        assert used([1, 1, 1, -1]) == {"a", "b"}
    with pytest.warns(UserWarning):
        assert used([-1, -1, -1, -1]) == {"b"}


class _Converting:
    """Makes an array of what it is given, whenever it is made."""

    def __init__(self, w):
        self.w = jnp.asarray(w)


jax.tree_util.register_pytree_node(
    _Converting, lambda x: ((x.w,), None), lambda _, parts: _Converting(*parts)
)


def test_what_micro_batches_use_goes_into_a_class_that_converts():
    def loss_fn(p, x):
        return lax.cond(x[0] > 0, lambda: (p["a"].w * x).mean(), lambda: p["b"].w)

    params = {k: _Converting(np.float32(1)) for k in "ab"}
    grad_fn = jdp.accumulate_gradients(loss_fn, 2, find_unused=True)
    _, used = _run(grad_fn, params, np.ones(4, np.float32), n=2)
    assert {k: bool(v.w) for k, v in used.items()} == {"a": True, "b": False}


def test_one_micro_batch_of_plain_metrics_traces_the_loss_as_often_as_no_metrics():
    def count(has_aux):
        calls = []

        def loss_fn(p, x):
            calls.append(x.shape)
            loss = (p * x).mean()
            return (loss, {"mean": x * loss}) if has_aux else loss

        grad_fn = jdp.accumulate_gradients(loss_fn, 1, has_aux=has_aux)
        _run(grad_fn, np.float32(1), np.ones((4, 2), np.float32), n=1)
        return calls

    assert count(True) == count(False)


def test_a_metric_as_long_as_a_micro_batch_of_a_fixed_size_can_be_told_apart():
    def run(wrap):
        def loss_fn(p, x):
            assert x.shape == (2, 3)
            return (p * x).mean(), wrap(x.sum() * jnp.arange(2.0))

        grad_fn = jdp.accumulate_gradients(loss_fn, 2, has_aux=True)
        return _run(grad_fn, np.float32(1), np.ones((4, 3), np.float32), n=1)[0][1]

    with pytest.raises(ValueError, match=r"return it behind .*, such as `x\[None\]`"):
        run(lambda x: x)
    np.testing.assert_array_equal(run(lambda x: x[None]), [[0, 6]])


def test_keyword_arguments_go_whole_to_every_micro_batch():
    def loss_fn(p, x, *, scale, name):
        assert name == "given"
        return (p * x).mean() * scale[0] + 0 * scale[2]

    def grad_fn(params, x):
        run = jdp.accumulate_gradients(loss_fn, 2)
        return run(params, x, scale=jnp.array([3.0, 4.0, 5.0]), name="given")

    loss, grad = _run(grad_fn, np.float32(2), np.ones(4, np.float32), n=2)
    assert (float(loss), float(grad)) == (6.0, 3.0)


@pytest.mark.parametrize(
    "args,kwargs,error,message",
    [
        ((0,), {}, ValueError, "`num_micro_batches` must be at least 1, got 0"),
        ((2,), {"dtype": jnp.int32}, TypeError, "floating dtype, got int32"),
    ],
)
def test_bad_options_are_named(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        jdp.accumulate_gradients(harness.oracle_loss, *args, **kwargs)


@pytest.mark.parametrize(
    "batches,message",
    [
        (({"x": np.ones((2, 3))},), r"2 samples, fewer than the 3 micro-batches"),
        (
            ({"x": np.ones((6, 3)), "y": np.ones(4)},),
            r"`batches\[0\]\['y'\]` has 4 samples, but `batches\[0\]\['x'\]` has 6",
        ),
        ((np.ones(6), np.float32(1)), r"`batches\[1\]` is a scalar"),
        ((), "no batch"),
    ],
)
def test_batches_that_cannot_be_cut_are_named(batches, message):
    def fn(_):
        grad_fn = jdp.accumulate_gradients(lambda p, *b: p.sum(), 3)
        return grad_fn(jnp.ones(2), *batches)

    with pytest.raises(ValueError, match=message):
        jax.vmap(fn, axis_name="data")(jnp.arange(2))


def test_a_loss_that_reduces_in_its_backward_pass_is_refused():
    def loss_fn(params, batch):
        return harness.oracle_loss(jdp.sync_in_backward(params), batch)

    params, (batch,) = harness.oracle_params(), harness.oracle_batches(1)
    for grad_fn in (
        jdp.accumulate_gradients(loss_fn, 2),
        jdp.local_gradients(loss_fn),
    ):
        with pytest.raises(
            ValueError, match=r"reduces the gradient of `\['b0'\]` in the back"
        ):
            _run(grad_fn, params, batch)


# --- The numbers of torch --------------------------------------------------------


def _flat(params):
    leaves = [leaf for layer in params for leaf in layer]
    return np.concatenate([np.ravel(x.addressable_data(0)) for x in leaves])


def _train_with_no_sync(world, way):
    """Three steps of four micro-batches; torch adds up gradients of loss / 4."""
    case = np.load(harness.REFERENCE / "torch_2_13_no_sync.npz")
    rank = world.process_index
    params = [(case[f"init.W{i}"], case[f"init.b{i}"]) for i in range(3)]

    @jdp.data_parallel
    def accumulate(params, x, y):
        grad_fn = jdp.accumulate_gradients(harness.torch_loss, 4)
        _, grads = grad_fn(params, (x, y))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

    # The pair for users who hold the loop: the sums differ from replica to replica, so
    # that they have a first dimension that is split.
    @jdp.data_parallel(donate_state=False)
    def local(params, sums, x, y):
        _, grads = jdp.local_gradients(harness.torch_loss)(params, (x, y))
        sums = jax.tree.map(lambda s, g: s[0] + g / 4, sums, grads)
        ranks = lax.axis_index("data")
        mine = jax.tree.map(lambda s: jnp.stack([s * (1 - ranks), s * ranks]) * 2, sums)
        return params, mine

    @jdp.data_parallel
    def synced(params, sums):
        grads = jdp.sync_gradients(jax.tree.map(lambda s: s[0], sums))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

    params = jdp.replicate(world, params)
    trajectory, grads_after, local_sums = [_flat(params)], [], []
    for k in range(3):
        xs, ys = case["X"][rank, 4 * k : 4 * k + 4], case["Y"][rank, 4 * k : 4 * k + 4]
        if way == "scan":
            x, y = xs.reshape(16, 10), ys.reshape(16, 1)
            params, grads = accumulate(params, x, y)
        else:
            sums = jax.tree.map(lambda p: np.zeros((1, *p.shape), np.float32), params)
            for i in range(4):
                _, both = local(params, sums, xs[i], ys[i])
                sums = jax.tree.map(lambda s: np.asarray(s)[rank][None], both)
                if i == 2:
                    local_sums.append(_flat_host(sums))
            params, grads = synced(params, sums)
        trajectory.append(_flat(params))
        grads_after.append(_flat(grads))
    jdp.check_replicas(params, world=world)
    return {"traj": trajectory, "grads": grads_after, "local": local_sums}


def _flat_host(tree):
    return np.concatenate([np.ravel(x) for layer in tree for x in layer])


WAYS = ("scan", "no_sync")


def _train_in_each_way():
    world = jdp.init()
    return {way: _train_with_no_sync(world, way) for way in WAYS}


@pytest.fixture(scope="module")
def trained():
    return harness.run_checked(_train_in_each_way, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_accumulate_as_torch_does(trained, way):
    case = np.load(harness.REFERENCE / "torch_2_13_no_sync.npz")
    for rank, found in enumerate(each[way] for each in trained):
        np.testing.assert_allclose(found["traj"], case["sgd.traj"], atol=1e-5, rtol=0)
        np.testing.assert_allclose(
            found["grads"], case["sgd.grads_after_sync"], atol=1e-5, rtol=0
        )
        if way == "no_sync":
            np.testing.assert_allclose(
                found["local"],
                case["sgd.local_grads_after_3_micro"][rank],
                atol=1e-5,
                rtol=0,
            )


@pytest.mark.filterwarnings("ignore:.*can never receive:UserWarning")
def test_no_sync_unites_what_its_steps_used():
    """torch's test_grads_same_across_ranks_with_no_sync: four branches, two steps."""

    def loss_fn(params, branch):
        branches = [lambda name=name: params[name].sum() for name in "abcd"]
        return lax.switch(branch, branches)

    def fn(params, branches):
        grads = jax.tree.map(jnp.zeros_like, params)
        used = jax.tree.map(lambda _: False, params)
        for branch in branches:
            grad_fn = jdp.local_gradients(loss_fn, find_unused=True)
            (_, new), now = grad_fn(params, branch)
            grads = jax.tree.map(jnp.add, grads, new)
            used = jax.tree.map(jnp.logical_or, used, now)
        return jdp.sync_gradients(grads, used=used)

    params = {k: np.float32(1) for k in "abcde"}
    run = jax.pmap(fn, "data", in_axes=(None, 0), devices=jax.devices()[:2])
    grads, used = run(params, np.array([[0, 1], [2, 3]]))
    assert jax.tree.map(lambda x: x.tolist(), used) == (
        {k: [True, True] for k in "abcd"} | {"e": [False, False]}
    )
    expected = {k: [0.5, 0.5] for k in "abcd"} | {"e": [0.0, 0.0]}
    assert jax.tree.map(lambda x: x.tolist(), grads) == expected


def test_training_with_it_is_training_with_whole_batches():
    tx = optax.adam(0.01)
    params, batches = harness.oracle_params(), harness.oracle_batches(4, BATCH)

    @jdp.data_parallel(world=harness.local_world(2))
    def step(carry, batch):
        params, state = carry
        grad_fn = jdp.accumulate_gradients(harness.oracle_loss, 3)
        loss, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    carry, losses = (params, tx.init(params)), []
    for batch in batches:
        carry, loss = step(carry, batch)
        losses.append(float(loss))
    expected, expected_losses = harness.train_alone(params, batches, tx)
    chex.assert_trees_all_close(carry[0], expected, atol=4 * 4 * 1.2e-7, rtol=0)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
