"""Results of a replicated function are those of one device on all samples."""

import itertools
import re

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jdp
from tests import harness, rarely
from tests.gradients.test_metric_objects import Labels, check_alike, of_clu, of_nnx

N = 2
_RNG = np.random.default_rng(0)
PARAMS = {"w": _RNG.normal(size=(4, 3)).astype(np.float32)}
X = _RNG.normal(size=(21, 4)).astype(np.float32)
Y = _RNG.integers(0, 3, 21).astype(np.int32)
DATA = {"x": X, "y": Y}


def _outputs(params, batch):
    logits = batch["x"] @ params["w"]
    losses = -jax.nn.log_softmax(logits)[jnp.arange(len(batch["y"])), batch["y"]]
    return {"logits": logits, "labels": batch["y"], "loss": losses}


def measure(params, batch):
    found = _outputs(params, batch)
    right = found["logits"].argmax(-1) == found["labels"]
    return {
        "loss": found["loss"].mean(),
        "vector": found["logits"].mean(axis=0),
        "accuracy": right.mean(),
        "right": jdp.sum_over_replicas(right.sum()),
        "average": jdp.average(found["loss"].mean()),
        "norm": jnp.sum(params["w"] ** 2),
        "constant": 3,
        "clu": of_clu(found),
        "nnx": of_nnx(found),
    }


def measure_by_weight(params, batch, weight):
    found = _outputs(params, batch)
    right = found["logits"].argmax(-1) == found["labels"]
    mean = weight / jnp.where(weight.sum() == 0, 1, weight.sum())
    return {
        "loss": (found["loss"] * mean).sum(),
        "vector": mean @ found["logits"],
        "accuracy": (right * mean).sum(),
        "right": jdp.sum_over_replicas((right * weight).sum()),
        "average": jdp.average((found["loss"] * mean).sum(), weight=weight.sum()),
        "norm": jnp.sum(params["w"] ** 2),
        "constant": 3,
    }


# One program in place of many small ones.
@harness.jit_fast
def _outputs_and_metrics(batch):
    found = _outputs(PARAMS, batch)
    made = {"clu": of_clu(found), "nnx": of_nnx(found)}
    return found, {name: metrics.compute() for name, metrics in made.items()}


def _expected(samples=slice(None), weight=None):
    found, _ = jax.device_get(_outputs_and_metrics(_cut(samples)))
    weight = np.ones(len(found["loss"])) if weight is None else weight
    right = found["logits"].argmax(-1) == found["labels"]
    loss = np.average(found["loss"], weights=weight)
    return {
        "loss": loss,
        "vector": np.average(found["logits"], axis=0, weights=weight),
        "accuracy": np.average(right, weights=weight),
        "right": int(right[weight > 0].sum()),
        "average": loss,
        "norm": (PARAMS["w"] ** 2).sum(),
        "constant": 3,
    }


def _check(result, samples=slice(None), weight=None):
    expected = _expected(samples, weight)
    numbers = {k: v for k, v in result.items() if k in expected}
    chex.assert_trees_all_close(jax.device_get(numbers), expected, rtol=2e-6, atol=1e-7)
    kept = np.arange(len(Y))[samples]
    kept = kept if weight is None else kept[weight > 0]
    _, exact = jax.device_get(_outputs_and_metrics(_cut(kept)))
    for name, metrics in exact.items():
        if name in result:
            check_alike(result[name], metrics)


def _replicated(fn, num_replicas=N, **options):
    world = options.pop("world", None) or harness.local_world(num_replicas)
    return jdp.replicated(
        fn, world=world, compiler_options=harness.fast_options(), **options
    )


def _cut(samples):
    return jax.tree.map(lambda x: x[samples], DATA)


BOTH = pytest.mark.parametrize("fn", [measure, measure_by_weight])


@BOTH
@pytest.mark.parametrize(
    ("count", "num_replicas"),
    rarely.cases(
        itertools.product([20, 21, 1], [1, N]), often=[(20, 1), (21, N), (1, N)]
    ),
)
def test_results_are_those_of_all_samples(fn, count, num_replicas):
    _check(_replicated(fn, num_replicas)(PARAMS, _cut(slice(count))), slice(count))


@BOTH
def test_samples_count_by_their_weight(fn):
    """In numbers; metric objects and sums count samples whose weight is not 0."""
    weight = np.float32([0, 3, 1, 0.5, 2] * 4)
    result = _replicated(fn)(PARAMS, _cut(slice(20)), weight=weight)
    expected = _expected(slice(20), weight)
    if fn is measure_by_weight:
        result.pop("right")  # The function itself has multiplied.
    else:
        assert int(result["right"]) == expected["right"]
        assert int(result["clu"].loss.count) == 16
    for name in ("loss", "vector", "accuracy", "average"):
        np.testing.assert_allclose(result[name], expected[name], rtol=2e-6, atol=1e-7)


@BOTH
def test_padding_does_not_count_whatever_it_gives(fn):
    batch = jax.tree.map(np.array, _cut(slice(20)))
    weight = np.ones(20, np.float32)
    # All of the second replica, and some of the first.
    weight[[2, *range(10, 20)]] = 0
    if fn is measure:
        batch["x"][weight == 0] = np.nan
    _check(_replicated(fn)(PARAMS, batch, weight=weight), slice(20), weight)


@BOTH
def test_results_over_batches_of_any_sizes_are_those_of_all_samples(fn):
    evaluate = _replicated(fn)
    cuts = [slice(0, 8), slice(8, 9), slice(9, 16), slice(16, 21)]
    result = evaluate.over(PARAMS, map(_cut, cuts))
    if fn is measure:  # A metric of clu that keeps the last batch.
        assert float(result["clu"].last.compute()) == pytest.approx(
            _expected(slice(16, 21))["loss"], rel=1e-6
        )
        result["clu"] = result["clu"].replace(last=of_clu(_outputs(PARAMS, DATA)).last)
    _check(result)


def test_one_program_serves_all_batches_of_a_loop():
    num_traces = 0

    def count(params, batch):
        nonlocal num_traces
        num_traces += 1
        return batch["x"].mean()

    evaluate = _replicated(count)
    evaluate.over(PARAMS, map(_cut, [slice(0, 8), slice(8, 9), slice(9, 16)]))
    assert num_traces == 1
    evaluate(PARAMS, _cut(slice(20)))
    evaluate(PARAMS, _cut(slice(20)))
    assert num_traces == 2


def test_a_function_is_run_with_the_samples_that_it_was_given():
    """Not sample by sample where they divide: it may mix them."""
    evaluate = _replicated(lambda p, x: jnp.float32(x.shape[0]))
    assert float(evaluate(PARAMS, X[:20])) == 10
    assert float(evaluate(PARAMS, X)) == 1


def test_arguments_are_passed_in_every_way():
    @_replicated
    def evaluate(params, x, /, y, *rest, scale=1.0, **more):
        total = (x * y).mean() + sum(r.mean() for r in rest)
        return {"all": total * scale + sum(m.mean() for m in more.values())}

    x = np.arange(5, dtype=np.float32)
    for batches, named, expected in (
        ((x, x), {}, 6.0),
        ((x,), {"y": x}, 6.0),
        ((x, x, x, x), {}, 10.0),
        ((x, x), {"z": x}, 8.0),
    ):
        assert float(evaluate(PARAMS, *batches, **named)["all"]) == expected


def test_arguments_that_are_not_samples_go_whole_to_all():
    def evaluate(params, x, *, table, kind, weight):
        return {"n": x.mean() * table.sum() + len(kind), "w": weight.sum()}

    evaluate = _replicated(
        evaluate,
        replicated_argnames=("table", "weight"),
        static_argnames="kind",
    )
    table = np.ones((7, 3))
    # Here `weight` is an argument like others, since an option names it.
    with pytest.raises(TypeError, match="missing a required argument: 'weight'"):
        evaluate(PARAMS, np.ones(5), table=table, kind="ab")
    evaluate = _replicated(
        lambda p, x, *, table, kind: {"n": x.mean() * table.sum() + len(kind)},
        replicated_argnames="table",
        static_argnames="kind",
    )
    for count in (4, 5):
        result = evaluate(PARAMS, np.ones(count), table=table, kind="ab")
        assert float(result["n"]) == 23
    over = evaluate.over(PARAMS, [np.ones(3), np.ones(2)], table=table, kind="abc")
    assert float(over["n"]) == 24


def test_several_batches_are_tuples_in_a_loop():
    evaluate = _replicated(lambda p, x, y: (x * y).mean())
    x = np.arange(5, dtype=np.float32)
    assert float(evaluate.over(PARAMS, [(x, x), [x, x]])) == 6
    with pytest.raises(TypeError, match="takes 2 batches.*got tuple of 1"):
        evaluate.over(PARAMS, [(x,)])
    with pytest.raises(TypeError, match="takes 2 batches.*got dict"):
        evaluate.over(PARAMS, [{"x": x}])


def test_a_method_is_replicated_for_each_object():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @jdp.replicated(world=harness.local_world(N))
        def measure(self, params, batch):
            return batch["x"].mean() * self.scale

    one, two = Model(1.0), Model(2.0)
    found = [float(m.measure(PARAMS, DATA)) for m in (one, two, one)]
    np.testing.assert_allclose(found, X.mean() * np.float32([1, 2, 1]), rtol=1e-5)
    assert float(two.measure.over(PARAMS, [DATA])) == pytest.approx(found[1], rel=1e-6)


def test_modules_are_parameters():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    evaluate = _replicated(lambda model, batch: model(batch["x"]).mean())
    expected = float(model(X).mean())
    assert float(evaluate(model, DATA)) == pytest.approx(expected, rel=1e-5)


class _Noisy(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.dropout(self.dense(x))


DRAWS = {
    "noise": lambda key, x: jax.random.normal(key, x.shape[:1]).mean(),
    "of split keys": lambda key, x: jax.vmap(jax.random.uniform)(
        jax.random.split(key, len(x))
    ).mean(),
    "gamma": lambda key, x: jax.random.gamma(key, jnp.abs(x[:, 0])).mean(),
    "in a loop": lambda key, x: lax.fori_loop(
        0, 3, lambda i, y: y + jax.random.normal(jax.random.fold_in(key, i)), 0.0
    ),
    "of a replica": lambda key, x: jax.random.normal(
        jax.random.fold_in(key, lax.axis_index("data")), x.shape
    ).mean(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_that_all_samples_would_share_are_refused(name):
    def noisy(params, x):
        return DRAWS[name](params, x)

    evaluate, key = _replicated(noisy), jax.random.key(0)
    message = r"`noisy` .* draws random numbers \(\S+:\d+\) from a key"
    for call in (
        lambda: evaluate(key, X),
        lambda: evaluate(key, X[:20], weight=np.ones(20)),
        lambda: evaluate.over(key, [X[:20]]),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_random_numbers_are_those_of_all_samples_where_there_is_a_parameter_weight():
    def noisy(params, x, weight):
        noise = jax.random.uniform(params, x.shape[:1])
        return (noise * weight).sum() / weight.sum()

    key = jax.random.key(0)
    expected = float(jax.random.uniform(key, (20,)).mean())
    found = _replicated(noisy).over(key, [X[:20]])
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_keys_of_the_samples_themselves_may_be_mixed_with_others():
    def noisy(params, batch):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(params, batch["n"])
        return jax.vmap(jax.random.uniform)(keys).mean()

    key, n = jax.random.key(0), np.arange(5)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, n)
    expected = float(jax.vmap(jax.random.uniform)(keys).mean())
    found = _replicated(noisy).over(key, [{"n": n}])
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_samples", [20, 21])
def test_a_module_that_would_change_is_refused(num_samples):
    batch, model = _cut(slice(num_samples)), _Noisy()
    evaluate = _replicated(lambda model, batch: model(batch["x"]).mean())
    with pytest.raises(ValueError, match="changes .* of an nnx object .*model.eval"):
        evaluate(model, batch)
    model.eval()
    expected = float(model.dense(batch["x"]).mean())
    assert float(evaluate(model, batch)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("num_samples", [20, 21])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("['net'].num_calls", lambda model: setattr(model, "num_calls", 1)),
        ("['net'].dropout.deterministic", lambda model: model.train()),
        ("['net'].dense.note", lambda model: setattr(model.dense, "note", "new")),
    ],
)
def test_a_changed_attribute_without_arrays_is_refused(name, change, num_samples):
    model = _Noisy()
    model.num_calls = 0
    model.eval()

    def measure(params, batch):
        change(params["net"])
        return params["net"].dense(batch["x"]).mean()

    # Where each sample is a batch, Flax refuses the change.
    found = f"the attribute `{name}`" if num_samples == 20 else "a variable or an "
    with pytest.raises(ValueError, match=re.escape(f"changes {found}")):
        _replicated(measure)({"net": model}, _cut(slice(num_samples)))
    assert model.num_calls == 0 and model.dropout.deterministic


def test_parameters_are_not_donated():
    placed = jdp.replicate(harness.local_world(N), PARAMS)
    evaluate = _replicated(measure)
    evaluate(placed, _cut(slice(20)))
    _check(evaluate(placed, _cut(slice(20))), slice(20))


def test_results_are_arrays_of_this_process():
    result = _replicated(measure)(PARAMS, DATA)
    for x in jax.tree.leaves(result):
        assert len(x.sharding.device_set) == 1


def test_rows_of_every_replica_are_returned_on_request():
    evaluate = _replicated(lambda p, x: {"x": jdp.PerReplica(x)})
    np.testing.assert_array_equal(
        evaluate(PARAMS, X[:20])["x"].value, X[:20].reshape(2, 10, 4)
    )


def test_a_batch_that_is_on_the_replicas_is_taken_as_it_is():
    world = harness.local_world(N)
    batch = jdp.global_batch(world, _cut(slice(20)))
    for fn in (measure, measure_by_weight):
        _check(_replicated(fn, world=world)(PARAMS, batch), slice(20))


@flax.struct.dataclass
class Node:
    x: jax.Array


def test_samples_may_be_in_any_tree_and_be_keys():
    keys = jax.random.split(jax.random.key(0), 5)

    def draw(params, node):
        values = jax.vmap(jax.random.uniform)(node.x["keys"])
        return values.mean()

    expected = float(jax.vmap(jax.random.uniform)(keys).mean())
    found = _replicated(draw)(PARAMS, Node({"keys": keys, "y": np.ones(5)}))
    assert float(found) == pytest.approx(expected, rel=1e-6)


REDUCTIONS = {
    "pmean": lambda x: lax.pmean(x.mean(), "data"),
    "psum": lambda x: lax.psum(x.sum(), "data"),
    "in a cond": lambda x: lax.cond(
        True, lambda y: lax.psum(y, "data"), lambda y: y, x.sum()
    ),
    "of jdp": lambda x: jdp.average(x.mean(), axis_name="data"),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_that_would_mix_padding_in_is_refused(name):
    def total(params, x):
        return REDUCTIONS[name](x)

    evaluate = _replicated(total)
    evaluate(PARAMS, X[:20])
    message = r"`total` has no parameter `weight`.*it reduces over \('data',\) itself"
    with pytest.raises(ValueError, match=message):
        evaluate(PARAMS, X)


def test_a_number_of_one_batch_that_does_not_add_up_is_refused():
    def total(params, x, weight):
        return {
            "n": lax.psum((x[:, 0] * weight).sum(), "data"),
            "c": lax.pmax(3, "data"),
        }

    for num_replicas in (1, N):
        evaluate = _replicated(total, num_replicas)
        with pytest.raises(ValueError, match=r"`\['n'\]` of `total`.*not in all batch"):
            evaluate.over(PARAMS, [X[:8], X[8:16]])
    same = _replicated(lambda params, x, weight: lax.pmax(3, "data"))
    assert int(same.over(PARAMS, [X[:8], X[8:16]])) == 3


def test_no_batch_at_all_is_refused():
    with pytest.raises(ValueError, match="`measure.over` got no batch"):
        _replicated(measure).over(PARAMS, [])


@pytest.mark.parametrize("count", [8, 7, 2])
def test_metrics_of_any_shape_are_averaged_over_samples(count):
    """Also of size 1, and of as many elements as a replica has samples."""

    def measure(params, x):
        return {
            "four": x.mean(axis=0),
            "one": x[:, :1].mean(axis=0),
            "ones": x[:, :1].mean(axis=0)[None],
        }

    evaluate, mean = _replicated(measure), X[:count].mean(axis=0)
    expected = {"four": mean, "one": mean[:1], "ones": mean[None, :1]}
    found = [evaluate.over(PARAMS, [X[:count]])]
    if count == 7:  # Others divide: a replica sees its samples together.
        found.append(evaluate(PARAMS, X[:count]))
    for result in found:
        chex.assert_trees_all_close(jax.device_get(result), expected, rtol=1e-5)


def _rows(params, x):
    return x[:, 0]


BAD = {
    "rows": (_rows, X, {}, ValueError, "`_rows` seems to have a row per sample"),
    "rows alone": (_rows, X[:20], {}, ValueError, "seems to have a row per sample"),
    "per replica": (
        lambda p, x: jdp.PerReplica(x),
        X,
        {},
        ValueError,
        "is a `jdp.PerReplica`, with rows of padding",
    ),
    "collected": (
        lambda p, batch: Labels.single_from_model_output(labels=batch["y"]),
        DATA,
        {},
        TypeError,
        "which collects the outputs of samples, padding too",
    ),
    "weight": (
        measure,
        DATA,
        {"weight": np.ones(20)},
        ValueError,
        r"one number per sample of this process, shape \(21,\), got shape \(20,\)",
    ),
    "lengths": (
        lambda p, batch: 0.0,
        {"x": X, "y": Y[:20]},
        {},
        ValueError,
        r"of `<lambda>`.* `batch\['x'\]` 21, `batch\['y'\]` 20",
    ),
    "arguments": (
        measure,
        DATA,
        {"other": 1},
        TypeError,
        r"`measure\(params, batch\)` cannot be called .*unexpected keyword",
    ),
    "text": (lambda p, batch: "a", DATA, {}, TypeError, "not a valid JAX type|is 'a'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_call_is_named(name):
    fn, batch, named, error, message = BAD[name]
    with pytest.raises(error, match=message):
        _replicated(fn)(PARAMS, batch, **named)


def test_a_wrong_function_or_option_is_named():
    with pytest.raises(TypeError, match="`fn` must be a function .*got dict"):
        jdp.replicated({})
    with pytest.raises(TypeError, match="must take the parameters of a model"):
        jdp.replicated(lambda: 0)
    with pytest.raises(ValueError, match="'y', which is not a parameter"):
        jdp.replicated(measure, static_argnames="y")
    with pytest.raises(TypeError, match="`world` must be what `jdp.init` returned"):
        jdp.replicated(measure, world=3)


def test_arguments_of_one_call_are_refused_in_a_loop():
    for fn in (measure, measure_by_weight):
        with pytest.raises(TypeError, match="over` takes no `weight`: each sample"):
            _replicated(fn).over(PARAMS, [DATA], weight=np.ones(21))
    with pytest.raises(TypeError, match=r"shape \(21, 4\). Pass `\[batch\]`"):
        _replicated(measure).over(PARAMS, X)


def test_a_misspelt_name_in_an_option_shows_the_function_as_it_was_written():
    with pytest.raises(ValueError, match=r"parameter of `measure\(params, batch\)"):
        jdp.replicated(measure, static_argnames="bacth")


def _evaluate_in_processes():
    world = jdp.init()
    shard = world.shard(DATA, shuffle=False)
    evaluate = jdp.replicated(measure)
    over = evaluate.over(PARAMS, shard.batches(4 * world.process_count))
    whole = jdp.replicated(measure, split_batches=True)(PARAMS, DATA)
    by_weight = jdp.replicated(measure_by_weight, split_batches=True)(PARAMS, DATA)
    own = jax.tree.map(lambda x: x[world.process_index :: 2][:9], DATA)
    uneven = evaluate(PARAMS, own)  # 9 samples of each process, on 2 replicas.
    none = DATA if world.is_main_process else None
    lonely = evaluate.over(PARAMS, [] if none is None else [none])
    computed = [
        {
            name: x.compute() if hasattr(x, "compute") else np.asarray(x)
            for name, x in result.items()
        }
        for result in (over, whole, by_weight, uneven, lonely)
    ]
    return jax.device_get(computed)


@pytest.mark.multiprocess
def test_processes_evaluate_what_one_device_does():
    (first, second) = harness.run_checked(
        _evaluate_in_processes, 2, devices_per_process=2
    )
    chex.assert_trees_all_equal(first, second)
    over, whole, by_weight, uneven, lonely = first
    for result, samples in (
        (over, slice(None)),
        (whole, slice(None)),
        (by_weight, slice(None)),
        (uneven, slice(18)),
        (lonely, slice(None)),
    ):
        expected = _expected(samples)
        for name in expected:
            np.testing.assert_allclose(
                result[name], expected[name], rtol=2e-6, atol=1e-7, err_msg=name
            )
    found = _outputs(PARAMS, jax.tree.map(jnp.asarray, DATA))
    for name, make in {"clu": of_clu, "nnx": of_nnx}.items():
        exact = jax.device_get(make(found).compute())
        for result in (whole, lonely):
            chex.assert_trees_all_close(result[name], exact, rtol=2e-6)


def _call_without_waiting():
    """Calls that do not depend on each other, of two programs."""
    world = jdp.init()
    params = jdp.replicate(world, PARAMS)
    evaluate = jdp.replicated(lambda p, x: jnp.mean(x @ p["w"]))

    @jdp.data_parallel(donate_state=False)
    def step(params, x):
        return params, jnp.sum(x @ params["w"])

    x = np.ones((2 * world.num_local_replicas, 4), np.float32)
    results = [(evaluate(params, x), step(params, x)[1]) for _ in range(100)]
    return {(float(mean), float(total)) for mean, total in results}


@pytest.mark.multiprocess
def test_calls_that_are_not_waited_for_do_not_hang():
    first, second = harness.run_checked(_call_without_waiting, 2, devices_per_process=2)
    assert first == second and len(first) == 1
