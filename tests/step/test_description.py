"""What a step sends, described."""

import functools
import json
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from jax import lax

import jdp
import jdp.flax_linen
from tests import harness

WIDTH = 8


def _params():
    def matrix(*shape):
        return np.ones(shape, np.float32)

    return {
        "first": matrix(WIDTH, WIDTH),
        "second": matrix(WIDTH, WIDTH),
        "a": matrix(WIDTH, 1),
        "b": matrix(WIDTH, 1),
        "spare": matrix(3),
    }


def _loss(params, x):
    h = jnp.tanh(jnp.tanh(x @ params["first"]) @ params["second"])
    heads = [lambda: h @ params["a"], lambda: h @ params["b"]]
    return (lax.cond(x.sum() > 0, *heads) ** 2).mean()


def _step(n=4, **kwargs):
    @jdp.data_parallel(world=harness.local_world(n))
    def train(params, x):
        loss, grads = jdp.value_and_grad(_loss, **kwargs)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    return train


X = np.ones((8, WIDTH), np.float32)
MATRIX = WIDTH * WIDTH * 4


def _small_buckets():
    order = jdp.gradient_order(_loss, _params(), jnp.asarray(X))
    return jdp.plan_buckets(
        _params(), order=order, bucket_bytes=MATRIX, first_bucket_bytes=MATRIX
    )


def test_buckets_come_in_the_order_sent():
    plan = _small_buckets()
    found = jdp.describe(_step(plan=plan), _params(), X)
    assert (found.name, found.num_replicas) == ("train", 4)
    (made,) = found.synchronizations
    paths = [[leaf.path for leaf in bucket.leaves] for bucket in made.buckets]
    assert paths == [["['b']", "['a']", "['second']"], ["['first']"]]
    sizes = [bucket.num_bytes for bucket in made.buckets]
    assert sizes == [MATRIX + 2 * WIDTH * 4, MATRIX]
    leaf = made.buckets[1].leaves[0]
    assert (leaf.dtype, leaf.shape, leaf.num_bytes) == ("float32", (8, 8), MATRIX)
    assert (made.packing, made.algorithm, made.hook) == ("flat", "psum", None)


def test_a_bucket_is_ready_when_its_last_gradient_is():
    first, last = (
        jdp.describe(_step(plan=_small_buckets()), _params(), X)
        .synchronizations[0]
        .buckets
    )
    assert 0 < first.ready_after < last.ready_after <= 1
    # Two multiplications of a matrix, one of a head: the first bucket waits for all
    # but one of the larger ones; what is not a multiplication is 2 of 8 by comparison.
    assert abs(first.ready_after - 0.5) < 0.2


def test_what_is_not_used_is_told_apart():
    (made,) = jdp.describe(_step(), _params(), X).synchronizations
    assert made.never_used == ("['spare']",)
    assert made.used_at_times == ("['a']", "['b']")
    sent = [leaf.path for bucket in made.buckets for leaf in bucket.leaves]
    assert "['spare']" not in sent


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("find_unused", [False, True])
def test_wire_bytes_are_those_of_a_ring(n, find_unused):
    def train(params, x):
        jdp.value_and_grad(_loss, find_unused=find_unused)(params, x)
        return params, {}

    step = jdp.data_parallel(train, world=harness.local_world(n))
    found = jdp.describe(step, _params(), X)
    gradients = 2 * MATRIX + 2 * WIDTH * 4
    riders = 4 + 2 * 4 * find_unused  # the loss, and a float for each of a and b.
    expected = round(2 * (n - 1) / n * (gradients + riders))
    assert found.wire_bytes == expected
    riders = found.synchronizations[0].riders
    assert riders == (("float32[]", "float32[2]") if find_unused else ("float32[]",))


def test_reductions_in_the_backward_pass_are_shown():
    def loss(params, x):
        layer = lambda h, w: (jnp.tanh(h @ jdp.sync_in_backward(w)), None)  # noqa: E731
        h, _ = lax.scan(layer, x, params["layers"])
        return (h @ params["head"]).mean()

    @jdp.data_parallel(world=harness.local_world(2))
    def train(params, x):
        return params, jdp.value_and_grad(loss)(params, x)[0]

    params = {
        "layers": np.ones((3, WIDTH, WIDTH), np.float32),
        "head": np.ones(WIDTH, np.float32),
    }
    found = jdp.describe(train, params, X)
    (made,) = found.synchronizations
    assert [leaf.path for leaf in made.synced_in_backward] == ["['layers']"]
    assert [leaf.path for b in made.buckets for leaf in b.leaves] == ["['head']"]
    assert found.wire_bytes == 3 * MATRIX + WIDTH * 4 + 4


def test_accumulated_gradients_are_ready_at_the_end():
    @jdp.data_parallel(world=harness.local_world(2))
    def train(params, x):
        return params, jdp.accumulate_gradients(_loss, 2)(params, x)[0]

    (made,) = jdp.describe(train, _params(), X).synchronizations
    assert [bucket.ready_after for bucket in made.buckets] == [1.0]


def test_other_ways_to_synchronise_are_described_too():
    @jdp.data_parallel(world=harness.local_world(2))
    def train(params, x):
        _, grads = jdp.local_gradients(_loss)(params, x)
        all_reduce = jdp.AllReduce(lax.psum, name="named")
        grads = jdp.sync_gradients(grads, all_reduce=all_reduce)
        return params, grads

    (made,) = jdp.describe(train, _params(), X).synchronizations
    assert made.algorithm == "named"
    assert [bucket.ready_after for bucket in made.buckets] == [None]


@pytest.mark.parametrize(
    "all_reduce, name",
    [
        (None, "psum"),
        ("auto", "psum"),  # no world of `jdp.init`.
        (lax.psum, "psum"),
        (jdp.collectives.ring_all_reduce, "ring_all_reduce"),
        (
            functools.partial(jdp.collectives.ring_all_reduce, num_chunks=2),
            "ring_all_reduce",
        ),
        (lambda x, axis_name: lax.psum(x, axis_name), "custom"),
    ],
)
def test_the_all_reduce_is_described_by_its_name(all_reduce, name):
    @jdp.data_parallel(world=harness.local_world(2))
    def train(params, x):
        _, grads = jdp.value_and_grad(_loss, all_reduce=all_reduce)(params, x)
        return params, grads

    (made,) = jdp.describe(train, _params(), X).synchronizations
    assert made.algorithm == name


def test_shapes_are_enough_and_nothing_runs():
    @jdp.data_parallel(world=harness.local_world(4))
    def train(params, x):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return params, jdp.value_and_grad(_loss)(params, x)[0]

    def shapes(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    found = jdp.describe(train, shapes(_params()), shapes(X))
    assert found == jdp.describe(train, _params(), X)


def test_a_table_of_one_replica_says_so():
    step = jdp.data_parallel(lambda p, x: (p, {}), world=harness.local_world(1))
    assert str(jdp.describe(step, _params(), X)).startswith("<lambda> on 1 replica:")


def test_a_table_has_every_bucket_path_and_sum():
    found = jdp.describe(_step(plan=_small_buckets()), _params(), X)
    text = str(found)
    for part in (
        "train on 4 replicas",
        f"{MATRIX + 64:,}",
        "float32[8,8]",
        "['second']",
        "['a']  (used at times)",
        "packing flat, algorithm psum, hook none",
        f"{found.wire_bytes:,} bytes per step",
        "Never used, and not sent: ['spare'].",
        "100%",
    ):
        assert part in " ".join(text.split("\n")), part
    console = rich.console.Console(width=120, no_color=True)
    with console.capture() as shown:
        console.print(found)
    assert shown.get() == text


def test_json_has_what_the_table_has():
    found = jdp.describe(_step(plan=_small_buckets()), _params(), X)
    fields = json.loads(found.to_json())
    assert fields["wire_bytes"] == found.wire_bytes
    (made,) = fields["synchronizations"]
    assert made["buckets"][1]["leaves"][0]["path"] == "['first']"
    assert made["never_used"] == ["['spare']"]


def test_a_step_that_synchronises_nothing_says_so():
    step = jdp.data_parallel(lambda s, x: (s, {}), world=harness.local_world(2))
    found = jdp.describe(step, np.ones(2), X)
    assert found.wire_bytes == 0
    assert "synchronises nothing" in str(found)


def test_something_else_than_a_step_is_refused():
    with pytest.raises(TypeError, match="must be what `jdp.data_parallel` returned"):
        jdp.describe(_loss, _params(), X)


def _describe_in_one_process():
    world = jdp.init(timeout_s=20.0)

    @jdp.data_parallel
    def train(params, x):
        return params, jdp.value_and_grad(_loss)(params, x)[0]

    if world.process_index == 1:  # alone, with its own samples.
        return jdp.describe(train, _params(), X[:4]).wire_bytes
    return None


@pytest.mark.multiprocess
def test_one_process_may_ask_alone():
    values = harness.run_checked(_describe_in_one_process, 2)
    assert values == [None, 2 * MATRIX + 2 * WIDTH * 4 + 4]


def _reduced_bytes(step, *args):
    """The bytes that the all-reduces of a compiled step sum, and their number."""
    text = step.lower(*args).compile().as_text()
    sizes = re.findall(r"= (f32|bf16)\[([\d,]*)\]\S* all-reduce\(", text)
    bytes_of = {"f32": 4, "bf16": 2}
    numbers = [
        (bytes_of[d], math.prod(map(int, filter(None, s.split(","))))) for d, s in sizes
    ]
    return sum(size * count for size, count in numbers), len(numbers)


class _Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (5, 7):
            x = nn.Dense(width)(x)
            norm = jdp.flax_linen.SyncBatchNorm(axis_name="data")
            x = nn.relu(norm(x, use_running_average=False))
        return x


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("weight", [None, 2.0])
def test_collectives_of_batch_norm_and_weights_are_counted(n, weight):
    net = _Net()
    state = jax.device_get(net.init(jax.random.key(0), X))

    @jdp.data_parallel(world=harness.local_world(n))
    def step(state, x):
        def loss_fn(params, x):
            out, new = net.apply(
                {"params": params, "batch_stats": state["batch_stats"]},
                x,
                mutable=["batch_stats"],
            )
            return jnp.mean(out**2), new["batch_stats"]

        grad_fn = jdp.value_and_grad(
            loss_fn, has_aux=True, weight=weight, packing="flat", all_reduce=None
        )
        (loss, stats), grads = grad_fn(state["params"], x)
        params = jax.tree.map(lambda p, g: p - g, state["params"], grads)
        return {"params": params, "batch_stats": stats}, loss

    found = jdp.describe(step, state, X)
    (made,) = found.synchronizations
    # The means of all replicas, and the squares.
    norms = tuple(4 * (n + 1) * width for width in (5, 7)) if n > 1 else ()
    assert made.batch_norm_bytes == norms * 2
    # The total travels in a bucket. The weights of all replicas travel before the
    # backward pass, which goes through the collectives of batch norm.
    assert made.weight_bytes == (4 + 4 * n if weight and n > 1 else 0)
    num_bytes, num_collectives = _reduced_bytes(step, state, X)
    assert found.wire_bytes == round(2 * (n - 1) / n * num_bytes)
    if n > 1:
        assert num_collectives == 5 + (weight is not None)
        assert f"Batch norm: 4 collectives of {2 * sum(norms)} bytes" in str(found)


@pytest.mark.parametrize(
    "dtype, size", [("float32", 4), ("float16", 4), ("bfloat16", 24)]
)
def test_a_weight_has_the_bytes_with_which_its_sum_is_exact(dtype, size):
    params = jax.tree.map(lambda x: x.astype(dtype), _params())

    @jdp.data_parallel(world=harness.local_world(4))
    def step(params, x):
        grad_fn = jdp.value_and_grad(_loss, weight=3.0, packing="flat", all_reduce=None)
        loss, grads = grad_fn(params, x.astype(dtype))
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    found = jdp.describe(step, params, X)
    assert found.synchronizations[0].weight_bytes == size
