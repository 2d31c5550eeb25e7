"""Arguments of a synchronisation that are none are refused by name."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jdp
from jdp import collectives
from tests.transforms import TRANSFORMS


def _loss(params, x):
    return (params * x).sum()


MAKERS = {
    "sync_gradients": lambda **o: jdp.sync_gradients(np.ones(2), **o),
    "sync_in_backward": lambda **o: jdp.sync_in_backward(np.ones(2), **o),
    "value_and_grad": lambda **o: jdp.value_and_grad(_loss, **o),
    "mean_loss": lambda **o: jdp.mean_loss(_loss, **o),
    "accumulate_gradients": lambda **o: jdp.accumulate_gradients(_loss, 2, **o),
    "distributed_optimizer": lambda **o: jdp.distributed_optimizer(optax.sgd(0.1), **o),
}
SUMS = [
    lax.psum,
    "auto",
    collectives.auto_all_reduce,
    collectives.AutoAllReduce(),
    collectives.butterfly_all_reduce,
    collectives.halving_doubling_all_reduce,
    collectives.hierarchical_all_reduce,
    collectives.pallas_all_reduce,
    collectives.psum_all_reduce,
    collectives.reduce_broadcast_all_reduce,
    collectives.ring_all_reduce,
    collectives.shared_memory_all_reduce,
    functools.partial(collectives.ring_all_reduce, num_chunks=2),
    functools.partial(collectives.ring_all_reduce, op="sum"),
    lambda x, axis_name: lax.psum(x, axis_name),
    jdp.AllReduce(lax.psum),
]
NO_SUMS = {
    "jdp.collectives.adasum": collectives.adasum,
    "jdp.collectives.ring_all_gather": collectives.ring_all_gather,
    "jdp.collectives.ring_reduce_scatter": collectives.RING.reduce_scatter,
    "jdp.collectives.PSUM.all_gather": collectives.PSUM.all_gather,
    "jdp.collectives.RING": collectives.RING,
    "jdp.collectives.choose": collectives.choose,
    "jdp.collectives.create_shared_buffer": collectives.create_shared_buffer,
    "jax.lax.pmean": lax.pmean,
    "jdp.collectives.ring_all_reduce(op='mean')": functools.partial(
        collectives.ring_all_reduce, op="mean"
    ),
    "jax.lax.pmax": jdp.AllReduce(lax.pmax),
    "jdp.collectives.auto(op='max')": functools.partial(
        collectives.AutoAllReduce(), op="max"
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_adasum_is_no_all_reduce(make):
    with pytest.raises(ValueError, match=r"jdp.collectives.adasum\(grads\)"):
        make(all_reduce=collectives.adasum)


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_does_not_sum_is_no_all_reduce(name):
    message = f"`all_reduce` must sum .*, but `{re.escape(name)}` does not"
    with pytest.raises(ValueError, match=message):
        jdp.value_and_grad(_loss, all_reduce=NO_SUMS[name])


@pytest.mark.parametrize("all_reduce", SUMS)
def test_all_that_sums_is_one(all_reduce):
    jdp.value_and_grad(_loss, all_reduce=all_reduce)


def test_an_all_reduce_is_used_as_its_fields_say():
    """`choose` decides per buffer; `reduce_group` gets leaves that are not packed."""
    chosen = []

    def choose(buffer, axis_name):
        chosen.append((buffer.shape, axis_name))
        return jdp.AllReduce(pytest.fail, reduce_group=reduce_group)

    def reduce_group(arrays, axis_name, *, has_data):
        assert [x.shape for x in arrays] == [(3, 1), (2,)] and has_data is None
        return [lax.psum(x, axis_name) for x in arrays]

    def scaled(x, axis_name, *, scale):
        return lax.psum(x, axis_name) * scale

    for all_reduce in (
        jdp.AllReduce(pytest.fail, choose=choose),
        jdp.AllReduce(scaled, takes_scale=True),
    ):

        def fn(grads, all_reduce=all_reduce):
            return jdp.sync_gradients(grads, axis_name="i", all_reduce=all_reduce)

        grads = {"a": np.float32([[1, 2], [3, 4]]), "b": np.ones((2, 3, 1), "f")}
        means = jax.vmap(fn, axis_name="i")(grads)
        np.testing.assert_array_equal(means["a"], [[2, 3], [2, 3]])
        np.testing.assert_array_equal(means["b"], grads["b"])
    assert chosen == [((5,), "i")]


def test_every_public_collective_is_known_to_sum_or_not():
    known = {id(x) for x in SUMS}
    for name in collectives.__all__:
        x = getattr(collectives, name)
        if id(x) not in known:
            with pytest.raises(ValueError, match="must sum"):
                jdp.value_and_grad(_loss, all_reduce=x)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_all_reduce_that_is_no_function_is_refused(make):
    with pytest.raises(ValueError, match="`all_reduce` must be a function .* got 3"):
        make(all_reduce=3)


@pytest.mark.parametrize("name", [n for n in MAKERS if n != "sync_in_backward"])
def test_a_plan_that_is_none_is_refused(name):
    with pytest.raises(TypeError, match="`plan` must be what `jdp.plan_buckets` .* 3"):
        MAKERS[name](plan=3)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: jdp.accumulate_gradients(_loss, 2.5),
            "`num_micro_batches`",
        ),
        (lambda: jdp.accumulate_gradients(_loss, "2"), "an integer, got '2'"),
        (lambda: jdp.accumulate_gradients(_loss, 2, dtype="f99"), "`dtype` must be a"),
        (lambda: jdp.plan_buckets(np.ones(2), bucket_bytes="25MB"), "`bucket_bytes`"),
        (lambda: jdp.plan_buckets(np.ones(2), first_bucket_bytes=None), "`first_buck"),
        (lambda: jdp.noise_scale(decay="a"), "`decay` must be a number, got 'a'"),
    ],
)
def test_a_number_that_is_none_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_weight_that_is_a_text_is_refused():
    def fn(p, x):
        return jdp.value_and_grad(_loss, weight="a")(p, x)

    with pytest.raises(TypeError, match="`weight` must be a real number, got 'a'"):
        TRANSFORMS["vmap"](fn, 2, jnp.ones(2), jax.numpy.ones((2, 2)))
