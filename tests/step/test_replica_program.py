"""Steps as users write them: the right gradient, or a refusal by name."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from jax.experimental import io_callback
from optax import contrib

import jdp
from tests import harness, rarely

N = 4
BOTH = ("node", "data")
either = pytest.mark.parametrize("check_vma", [True, False])
rarely_unchecked = pytest.mark.parametrize(
    "check_vma", rarely.cases([True, False], often=(True,))
)


def _data_parallel(step, n=N, axis_name="data", **options):
    world = harness.local_world(n, axis_name, 2 if axis_name == BOTH else 1)
    return jdp.data_parallel(
        step,
        world=world,
        donate_state=False,
        compiler_options=harness.fast_options(),
        **options,
    )


# --- Ways to write a step ------------------------------------------------------------

PARAMS = {"b": np.float32(0.5), "w": np.array([1.0, -2.0, 0.5], np.float32)}
X = np.random.default_rng(0).normal(size=(2 * N, 3)).astype(np.float32)


def _loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - 1) ** 2)


EXPECTED = jax.tree.map(
    lambda p, g: p - 0.1 * g, PARAMS, jax.grad(_loss)(PARAMS, jnp.asarray(X))
)


def _sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def _by_gradients(find_grads):
    """A step whose parameters are the whole state."""
    return lambda params, x: (_sgd(params, find_grads(params, x)), {})


def _beside(find_own, find_shared=lambda grads, x: _mean(grads)):
    """A step that averages its gradients, and has something else in its state."""

    def step(state, x):
        grads = jax.grad(_loss)(state["params"], x)
        params = _sgd(state["params"], find_shared(grads, x))
        return {"own": find_own(state["own"], grads, x), "params": params}, {}

    return step


def _mean(x):
    return lax.pmean(x, "data")


def _dynamic_scale(params, x):
    return DynamicScale(scale=2.0).value_and_grad(_loss, axis_name="data")(params, x)[3]


def _of_nnx(params, x, transform=nnx.grad):
    state = nnx.State(jax.tree.map(nnx.Param, params))
    found = transform(lambda s, x: _loss(nnx.to_pure_dict(s), x))(state, x)
    return nnx.to_pure_dict(found[1] if transform is nnx.value_and_grad else found)


def _optimizer(params, x):
    tx = jdp.distributed_optimizer(optax.identity())
    return tx.update(jax.grad(_loss)(params, x), tx.init(params), params)[0]


def _mean_of_loss_within(params, x):
    return jdp.value_and_grad(lambda p, x: _mean(_loss(p, x)))(params, x)[1]


RIGHT = {
    "lax.pmean(jax.grad)": lambda p, x: _mean(jax.grad(_loss)(p, x)),
    "psum / n": lambda p, x: jax.tree.map(
        lambda g: lax.psum(g, "data") / N, jax.grad(_loss)(p, x)
    ),
    "DynamicScale": _dynamic_scale,
    "pmean(nnx.grad)": lambda p, x: _mean(_of_nnx(p, x)),
    "pmean(nnx.value_and_grad)": lambda p, x: _mean(_of_nnx(p, x, nnx.value_and_grad)),
    "sync_gradients(jax.grad)": lambda p, x: jdp.sync_gradients(jax.grad(_loss)(p, x)),
    "sync_gradients(local_gradients)": lambda p, x: jdp.sync_gradients(
        jdp.local_gradients(_loss)(p, x)[1]
    ),
    "distributed_optimizer(jax.grad)": _optimizer,
    "jdp.value_and_grad": lambda p, x: jdp.value_and_grad(_loss)(p, x)[1],
    "jdp.value_and_grad of a pmean": _mean_of_loss_within,
    "a mean of a mean": lambda p, x: jdp.sync_gradients(
        jdp.value_and_grad(_loss)(p, x)[1]
    ),
    "all_gather": lambda p, x: jax.tree.map(
        lambda g: lax.all_gather(g, "data").mean(0), jax.grad(_loss)(p, x)
    ),
    "jax.grad of all samples": lambda p, x: jax.grad(_loss)(
        p, lax.all_gather(x, "data", tiled=True)
    ),
}
REFUSED = {
    "jax.grad": (_by_gradients(jax.grad(_loss)), r"`\['b'\]`.* and so may 1 more"),
    "jax.value_and_grad": (
        _by_gradients(lambda p, x: jax.value_and_grad(_loss)(p, x)[1]),
        r"`\['b'\]`",
    ),
    "nnx.grad": (_by_gradients(_of_nnx), r"`\['b'\]`"),
    "nnx.value_and_grad": (
        _by_gradients(lambda p, x: _of_nnx(p, x, nnx.value_and_grad)),
        r"`\['b'\]`",
    ),
    "jax.grad of a pmean": (
        _by_gradients(jax.grad(lambda p, x: _mean(_loss(p, x)))),
        r"`\['b'\]`",
    ),
    "local_gradients": (
        _by_gradients(lambda p, x: jdp.local_gradients(_loss)(p, x)[1]),
        r"`\['b'\]`",
    ),
    "one leaf": (
        _by_gradients(lambda p, x: (g := jax.grad(_loss)(p, x)) | {"b": _mean(g["b"])}),
        r"`\['w'\]` may differ between the replicas: ",
    ),
    "momentum": (
        _beside(lambda own, grads, x: own * 0.9 + grads["w"]),
        r"`\['own'\]`",
    ),
    "optimizer's state": (
        _beside(
            lambda own, grads, x: optax.adam(0.1).update(grads, own)[1],
        ),
        r"`\['own'\]\[0\].mu\['b'\]`.* and so may 3 more",
    ),
    "statistics": (
        _beside(lambda own, grads, x: 0.9 * own + 0.1 * x.mean(0)),
        r"`\['own'\]`",
    ),
    "a carry of a scan": (
        _beside(lambda own, grads, x: lax.scan(lambda c, r: (c + r, None), own, x)[0]),
        r"`\['own'\]`",
    ),
    "a choice": (
        _beside(lambda own, grads, x: lax.cond(x[0, 0] > 0, lambda: own, lambda: -own)),
        r"`\['own'\]`",
    ),
    "a key": (
        _beside(lambda own, grads, x: own + lax.axis_index("data")),
        r"`\['own'\]`",
    ),
}


@rarely_unchecked
@pytest.mark.parametrize("way", RIGHT)
def test_a_step_gives_the_gradient_of_one_device(way, check_vma):
    step = _data_parallel(_by_gradients(RIGHT[way]), check_vma=check_vma)
    state, _ = step(PARAMS, X)
    jdp.check_replicas(state, world=step.world)
    for got, want in zip(
        jax.tree.leaves(state), jax.tree.leaves(EXPECTED), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-6)


@either
@pytest.mark.parametrize("way", REFUSED)
def test_a_step_that_forgets_to_average_is_refused_by_path(way, check_vma):
    run, path = REFUSED[way]
    state = PARAMS
    if way not in ("one leaf",) and "grad" not in way:
        own = np.ones(3, np.float32)
        own = optax.adam(0.1).init(PARAMS) if way == "optimizer's state" else own
        state = {"params": PARAMS, "own": own}
    step = _data_parallel(run, check_vma=check_vma)
    with pytest.raises(ValueError, match=path) as raised:
        step(state, X)
    text = str(raised.value)
    assert "may differ between the replicas" in text
    remedy = "`jdp.value_and_grad` in place of `jax.value_and_grad`"
    if way == "a key":  # of its number alone.
        remedy = "depends on the number of a replica"
    assert remedy in text
    assert "(test_replica_program.py:" in text
    assert "check_vma" not in text


EXTERNAL = {
    "io_callback": lambda: io_callback(lambda: np.float32(1), jnp.float32(0)),
    "pure_callback": lambda: jax.pure_callback(lambda: np.float32(1), jnp.float32(0)),
    "rng_uniform": lambda: lax.rng_uniform(0.0, 1.0, ()),
}


@rarely_unchecked
@pytest.mark.parametrize("name", EXTERNAL)
def test_what_hosts_return_is_refused_by_path_and_line(name, check_vma):
    def run(rate, x):
        return (rate + EXTERNAL[name](), {})

    step = _data_parallel(run, 2, check_vma=check_vma)
    if not check_vma:  # It may be an all-reduce of the user's own.
        step(np.float32(0), X)
        return
    with pytest.raises(ValueError, match=r"leaf `\(root\)` may differ") as raised:
        step(np.float32(0), X)
    text = str(raised.value)
    assert f"it depends on what `{name}` (test_replica_program.py:" in text
    assert "`replicated_argnames`" in text and "jdp.broadcast_from(x, 0" in text
    assert "pass `check_vma=False`" in text


def test_what_one_replica_heard_from_its_host_may_go_to_all():
    def run(state, x):
        heard = io_callback(lambda: np.float32(7), jnp.float32(0))
        return jdp.broadcast_from(heard, 0), {}

    assert _data_parallel(run, 2)(np.float32(0), X)[0] == 7


def test_an_axis_of_the_world_that_was_left_out_is_named():
    step = _data_parallel(_by_gradients(_second_of_pair), axis_name=BOTH)
    with pytest.raises(ValueError, match="over some axes of the world only") as raised:
        step(PARAMS, X)
    text = str(raised.value)
    assert "not over `node`. Pass `axis_name=('node', 'data')`" in text
    assert "lax.pmean(grads" not in text


def _second_of_pair(params, x):
    return jdp.value_and_grad(_loss, axis_name="data")(params, x)[1]


@either
def test_what_was_sent_some_other_way_passes_unchecked_alone(check_vma):
    def exchange(params, x):
        grads = jax.grad(_loss)(params, x)
        other = lax.ppermute(grads, "data", [(0, 1), (1, 0)])
        return jax.tree.map(lambda a, b: (a + b) / 2, grads, other)

    step = _data_parallel(_by_gradients(exchange), 2, check_vma=check_vma)
    if check_vma:
        with pytest.raises(ValueError, match="equal for a reason .* `check_vma=False`"):
            step(PARAMS, X)
        return
    state, _ = step(PARAMS, X)
    np.testing.assert_allclose(state["w"], EXPECTED["w"], atol=1e-6)


def test_pcast_and_pvary_may_stay_in_a_step():
    def step(params, x):
        own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        return _sgd(params, _mean(jax.grad(_loss)(own, x))), {}

    state, _ = _data_parallel(step)(PARAMS, X)
    np.testing.assert_allclose(state["w"], EXPECTED["w"], atol=1e-6)


# --- Models, with no option ----------------------------------------------------------

SEQUENCES = np.random.default_rng(1).normal(size=(2 * N, 5, 8)).astype(np.float32)
W = {"w": np.eye(8, dtype=np.float32) + 0.1}


def _linen(cell):
    rnn = nn.RNN(cell)
    params = rnn.init(jax.random.key(0), SEQUENCES)
    return lambda p, x: jnp.mean(rnn.apply(p, x) ** 2), params


def _nnx_rnn():
    model = nnx.RNN(nnx.GRUCell(8, 8, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return (
        lambda p, x: jnp.mean(nnx.merge(graph, p, rest, copy=True)(x) ** 2),
        params,
    )


def _flash_attention(p, x):
    q = x @ p["w"]

    def body(carry, kv):
        largest, total, out = carry
        score = jnp.einsum("bqd,bd->bq", q, kv)
        new = jnp.maximum(largest, score)
        kept, weight = jnp.exp(largest - new), jnp.exp(score - new)
        out = out * kept[..., None] + weight[..., None] * kv[:, None]
        return (new, total * kept + weight, out), None

    start = jnp.full(q.shape[:2], -jnp.inf), jnp.zeros(q.shape[:2]), jnp.zeros(q.shape)
    (_, total, out), _ = lax.scan(body, start, x.swapaxes(0, 1))
    return jnp.mean((out / total[..., None]) ** 2)


def _ctc(p, x):
    frames, labels = jnp.zeros(x.shape[:2]), jnp.ones((len(x), 2), int)
    losses = optax.ctc_loss(x @ p["w"], frames, labels, jnp.zeros((len(x), 2)))
    return losses.mean()


def _layers(p, x):
    layers = jnp.stack([p["w"], p["w"].T])
    run = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jnp.mean(lax.scan(run, x, layers)[0] ** 2)


@jax.custom_vjp
def _clipped(x):
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def _noise():
    return jax.random.normal(jax.random.key(1), 8)


MODELS = {
    "linen RNN": lambda: _linen(nn.SimpleCell(8)),
    "linen LSTM": lambda: _linen(nn.OptimizedLSTMCell(8)),
    "nnx RNN": _nnx_rnn,
    "flash attention": lambda: (_flash_attention, W),
    "ctc": lambda: (_ctc, W),
    "loop from zeros": lambda: (
        lambda p, x: lax.fori_loop(
            0, 3, lambda i, a: a + jnp.tanh(x @ p["w"]), jnp.zeros(x.shape)
        ).mean(),
        W,
    ),
    "cond or 0.0": lambda: (
        lambda p, x: lax.cond(
            x.sum() > -1e9, lambda: (x @ p["w"]).mean(), lambda: 0.0
        ),
        W,
    ),
    "remat, scan over layers": lambda: (_layers, W),
    "linalg": lambda: (
        lambda p, x: jnp.mean(jnp.linalg.solve(p["w"] + 2 * jnp.eye(8), x[:, 0].T)),
        W,
    ),
    "random": lambda: (
        lambda p, x: jnp.mean((x @ p["w"] + _noise()) ** 2),
        W,
    ),
    "custom_vjp": lambda: (lambda p, x: jnp.mean(_clipped(x @ p["w"]) * 1e-3), W),
}  # fmt: skip


# Linen's layers over time are the same scan, and take seconds each.
OFTEN = [(name, "data") for name in MODELS if name not in ("linen LSTM", "nnx RNN")]


@pytest.mark.filterwarnings("ignore:.* may be left out of a step by control flow")
@pytest.mark.parametrize(
    ("name", "axis_name"),
    [
        *rarely.cases([(name, "data") for name in MODELS], often=OFTEN),
        ("flash attention", BOTH),
        ("cond or 0.0", BOTH),
    ],
)
def test_an_ordinary_model_needs_no_option(name, axis_name):
    loss_fn, params = MODELS[name]()

    def run(params, x):
        loss, grads = jdp.value_and_grad(loss_fn, axis_name=axis_name)(params, x)
        return grads, {"loss": loss}

    grads, metrics = _data_parallel(run, axis_name=axis_name)(params, SEQUENCES)
    loss, want = harness.jit_fast(jax.value_and_grad(loss_fn))(params, SEQUENCES)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)


def test_a_loss_over_the_samples_of_all_replicas_gives_the_gradient_of_one_device():
    def loss_of(rows, everyone, first):
        scores = jax.nn.log_softmax(rows @ everyone.T)
        return -scores[jnp.arange(len(rows)), first + jnp.arange(len(rows))].mean()

    def loss_fn(p, x):
        rows = jnp.tanh(x @ p["w"])
        everyone = lax.all_gather(rows, "data", tiled=True)
        return loss_of(rows, everyone, lax.axis_index("data") * len(rows))

    def alone(p, x):
        rows = jnp.tanh(x @ p["w"])
        return loss_of(rows, rows, 0)

    x = SEQUENCES[:, 0]
    loss, want = jax.value_and_grad(alone)(W, x)
    grads, metrics = _data_parallel(
        lambda p, x: jdp.value_and_grad(loss_fn)(p, x)[::-1]
    )(W, x)
    np.testing.assert_allclose(metrics, loss, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], want["w"], atol=1e-6)


# --- Reductions that only some replicas reach ----------------------------------------


@either
@pytest.mark.parametrize("kind", ["SyncBatchNorm", "sync_in_backward", "update"])
def test_a_reduction_in_a_branch_of_its_own_is_refused(kind, check_vma):
    from jdp.flax_linen import SyncBatchNorm

    norm = SyncBatchNorm(use_running_average=False)
    variables = norm.init(jax.random.key(0), X)
    tx = jdp.distributed_optimizer(optax.sgd(0.1))

    def branch(p, x):
        if kind == "sync_in_backward":
            return jdp.sync_in_backward(p)["scale"] * x
        stats = variables["batch_stats"]
        return norm.apply(
            {"params": p, "batch_stats": stats}, x, mutable=["batch_stats"]
        )[0]

    def loss_fn(p, x):
        return lax.cond(x.sum() > 0, branch, lambda p, x: x * p["scale"], p, x).mean()

    def step(p, x):
        if kind != "update":
            return _sgd(p, jdp.value_and_grad(loss_fn)(p, x)[1]), {}
        loss, grads = jdp.local_gradients(lambda p, x: (x * p["scale"]).mean())(p, x)
        return lax.cond(
            jnp.isfinite(loss), lambda: tx.update(grads, tx.init(p))[0], lambda: p
        ), {}

    name = "distributed_optimizer" if kind == "update" else kind
    with pytest.raises(ValueError, match=f"`jdp.{name}`.*in a branch of a `cond`"):
        _data_parallel(step, check_vma=check_vma)(variables["params"], X)


# --- Metrics -------------------------------------------------------------------------


def _metrics(metrics_fn, state=(), n=N, x=X):
    return _data_parallel(lambda s, x: (s, metrics_fn(s, x)), n)(state, x)[1]


@pytest.mark.parametrize("n", [1, N])
def test_metrics_that_are_the_same_come_back_as_they_are(n):
    state = {
        "step": np.int32(2**24 + 1),
        "small": np.int8(-3),
        "key": jax.random.key(7),
        "half": np.float16(0.1),
    }
    got = _metrics(
        lambda s, x: s | {"done": s["step"] > 0, "n": lax.psum(1, "data"), "py": 3},
        state,
        n,
    )
    assert (int(got["step"]), got["step"].dtype) == (2**24 + 1, np.int32)
    assert (int(got["small"]), got["small"].dtype) == (-3, np.int8)
    assert (bool(got["done"]), got["done"].dtype) == (True, np.bool_)
    assert (int(got["n"]), int(got["py"])) == (n, 3)
    assert got["half"] == np.float16(0.1) and got["half"].dtype == np.float16
    assert jax.random.key_data(got["key"]).tolist() == [0, 7]


def test_integers_that_differ_have_a_mean():
    rank = lambda: lax.axis_index("data")  # noqa: E731
    got = _metrics(
        lambda s, x: {
            "int32": rank(),
            "int8": rank().astype(jnp.int8),
            "uint32": rank().astype(jnp.uint32) * 3,
            "bool": rank() > 0,
            "total": lax.psum(rank(), "data"),
        }
    )
    means = {"int32": 1.5, "int8": 1.5, "uint32": 4.5, "bool": 0.75}
    assert {k: float(got[k]) for k in means} == means
    assert {got[k].dtype for k in means} == {np.dtype(np.float32)}
    assert (int(got["total"]), got["total"].dtype) == (6, np.int32)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_numbers_that_differ_are_averaged_in_float32(dtype):
    def run(state, x):
        return state, {"m": lax.axis_index("data").astype(dtype)}

    found = _data_parallel(run)(np.float32(0), X)[1]["m"]
    assert found.dtype == jnp.float32 and found == (N - 1) / 2


def test_wide_integers_are_exact_with_wide_types():
    with jax.enable_x64(True):
        got = _metrics(
            lambda s, x: {
                "same": s,
                "mean": s + 2 * lax.axis_index("data"),
            },
            np.int64(2**40 + 1),
        )
        assert (got["same"].item(), got["same"].dtype) == (2**40 + 1, np.int64)
        assert (got["mean"].item(), got["mean"].dtype) == (2**40 + 4, np.float64)


def test_a_replicas_own_metrics_come_back_in_rows():
    got = _metrics(
        lambda s, x: {
            "own": jdp.PerReplica({"y": x[:, 0], "rank": lax.axis_index("data")}),
            "mean": jdp.average(x[:, 0]),
            "first": x[0, 0],
        }
    )
    rows = X[:, 0].reshape(N, 2)
    np.testing.assert_array_equal(got["own"].value["y"], rows)
    assert got["own"].value["rank"].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(got["mean"], rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(got["first"], rows.mean(0)[0], rtol=1e-6)


def test_a_metric_with_a_row_per_sample_is_refused_by_path():
    for metric in (lambda x: x, lambda x: x[:, 0] > 0):
        with pytest.raises(ValueError, match=r"`\['a'\]\['y'\]`.*PerReplica") as raised:
            _metrics(lambda s, x, metric=metric: {"a": {"y": metric(x)}})
        assert "`jdp.average(x, axis_name='data')`" in str(raised.value)
    # One that all replicas share is not in question, nor one of another length.
    got = _metrics(lambda s, x: {"a": jnp.ones(2), "b": x.sum(0)})
    assert (got["a"].shape, got["b"].shape) == ((2,), (3,))


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("value", ["hello", np.array(["a"]), object(), b"x"])
def test_a_metric_that_is_no_number_is_refused_by_path(value, n):
    with pytest.raises(TypeError, match=r"The metric `\['a'\]\['b'\]` is .*of type"):
        _metrics(lambda s, x: {"a": {"b": value}}, n=n)


def test_a_key_that_differs_is_refused_by_path():
    def own_key(s, x):
        return {"key": jax.random.fold_in(s, lax.axis_index("data"))}

    with pytest.raises(TypeError, match=r"`\['key'\]` differs.*has no mean"):
        _metrics(own_key, jax.random.key(0))
    got = _metrics(lambda s, x: jdp.PerReplica(own_key(s, x)["key"]), jax.random.key(0))
    assert len({tuple(row) for row in jax.random.key_data(got.value).tolist()}) == N


def test_in_a_join_metrics_are_those_of_the_replicas_with_data():
    step = _data_parallel(
        lambda s, x: (
            s,
            {
                "rank": lax.axis_index("data"),
                "same": s,
                "own": jdp.PerReplica(lax.axis_index("data")),
            },
        )
    )
    amounts = np.array([0, 1, 0, 1], np.float32)
    _, got = step._program.compiled("weight")(*step._place(np.int32(7), (amounts, X)))
    assert (float(got["rank"]), int(got["same"])) == (2.0, 7)
    assert got["own"].value.tolist() == [0, 1, 2, 3]


# --- Looking for NaN -----------------------------------------------------------------


def _loss_in_a_branch(params, x):
    return lax.cond(~(x.sum() > 1e9), lambda: _loss(params, x), lambda: 0.0)


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_step_leaves_the_search_for_nan_on(find_unused):
    loss_fn = _loss_in_a_branch if find_unused else _loss
    grad_fn = jdp.value_and_grad(loss_fn, find_unused=find_unused)

    def find_grads(p, x):
        out = grad_fn(p, x)
        return out[0][1] if find_unused else out[1]

    bad = X.copy()
    bad[0, 0] = np.nan
    with jax.debug_nans(True):
        step = _data_parallel(lambda p, b: (_sgd(p, find_grads(p, b["x"])), {}))
        state, _ = step(PARAMS, {"x": X})
        step(state, {"x": X})
        with pytest.raises(FloatingPointError, match=r"`batch\[0\]\['x'\]` held one"):
            step(state, {"x": bad})
        with pytest.raises(FloatingPointError):
            jax.jit(jnp.log)(-jnp.ones(3))


def _refusal_of(step, state, batch):
    with pytest.raises(ValueError, match="may differ between the replicas") as caught:
        jdp.data_parallel(step, world=harness.local_world(2))(state, batch)
    return str(caught.value)


def test_a_refusal_names_what_helps_for_the_state_that_it_names():
    batch = np.arange(8, dtype=np.float32).reshape(4, 2)
    norm = nn.BatchNorm(False)
    stats = norm.init(jax.random.key(0), batch)
    plateau = contrib.reduce_on_plateau()

    def normalise(stats, x):
        return norm.apply(stats, x, mutable=["batch_stats"])[1] | {
            "params": stats["params"]
        }, {}

    def reduce_rate(state, x):
        return plateau.update(jnp.zeros(()), state, value=x.mean())[1], {}

    def rotate(state, x):
        return lax.ppermute(lax.pmean(x.sum(), "data"), "data", [(0, 1)]), {}

    def number(state, x):
        return state + lax.axis_index("data"), {}

    def add_up(state, x):
        return (state[0] - jdp.sync_gradients(x.mean()), state[1] + x.sum()), {}

    text = _refusal_of(add_up, (0.0, 0.0), batch)
    assert "If the leaf adds up a metric, add `lax.psum(x, 'data')`" in text
    text = _refusal_of(lambda s, x: (s + x.sum(), {}), 0.0, batch)
    assert "adds up a metric" not in text and "Average the gradients" in text
    assert "`jdp.sync_buffers(stats)`" in _refusal_of(normalise, stats, batch)
    text = _refusal_of(reduce_rate, plateau.init(jnp.zeros(())), batch)
    assert "value=jdp.average(loss)" in text
    for step in (rotate, number):
        text = _refusal_of(step, jnp.zeros(()), batch)
        assert "depends on the number of a replica" in text
        assert "own samples" not in text
