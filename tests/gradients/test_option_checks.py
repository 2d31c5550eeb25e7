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
    collectives.fixed_tree_all_reduce,
    collectives.halving_doubling_all_reduce,
    collectives.hierarchical_all_reduce,
    collectives.pallas_all_reduce,
    collectives.psum_all_reduce,
    collectives.reduce_broadcast_all_reduce,
    collectives.ring_all_reduce,
    collectives.tcp_all_reduce,
    collectives.TcpAllReduce(),
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


def _each(change):
    """A `reduce_group` that changes each sum."""
    return lambda xs, axis_name, has_data: [change(lax.psum(x, axis_name)) for x in xs]


def _chooses(result):
    return jdp.AllReduce(lax.psum, choose=lambda buffer, axis_name: result)


def _groups(result):
    return jdp.AllReduce(lax.psum, reduce_group=lambda xs, axis_name, has_data: result)


WRONG_SUMS = {
    "integers": (lambda x, a: lax.psum(x, a).astype(int), r"float32\[8\], got int32"),
    "narrow": (lambda x, a: lax.psum(x, a).astype("bfloat16"), "got bfloat16"),
    "short": (lambda x, a: lax.psum(x, a)[:-1], r"float32\[8\], got float32\[7\]"),
    "long": (lambda x, a: jnp.tile(lax.psum(x, a), 2), r"got float32\[16\]"),
    "rank": (lambda x, a: lax.psum(x, a)[None], r"got float32\[1,8\]"),
    "none": (lambda x, a: None, "`reduce` .* one array, the sum, got None"),
    "tuple": (lambda x, a: (lax.psum(x, a),), "the sum, got a tuple of 1"),
    "one argument": (lambda x: x, r"`reduce\(x, axis_name\)`.*too many positional"),
    "no scale": (jdp.AllReduce(lax.psum, takes_scale=True), r"scale=...\)`, which"),
    "group: scalars": (
        jdp.AllReduce(lax.psum, reduce_group=_each(jnp.sum)),
        r"shapes and dtypes.*\n.*float32\[2\].*\n  returned: .*float32\[\]",
    ),
    "group: flat": (
        jdp.AllReduce(lax.psum, reduce_group=_each(jnp.ravel)),
        r"`reduce_group` .*\n.*\n  returned: .*float32\[6\]",
    ),
    "group: integers": (
        jdp.AllReduce(lax.psum, reduce_group=_each(lambda x: x.astype(int))),
        r"`reduce_group` .*\n.*\n  returned: .*int32\[2\]",
    ),
    "group: few": (_groups([]), r"`reduce_group` .*\n.*\n  returned: \[\]"),
    "group: many": (_groups([np.ones(2, "f")] * 9), "`reduce_group` .* the sums in"),
    "group: none": (_groups(None), "`reduce_group` .* list of 2 arrays, .* got None"),
    "group: array": (_groups(np.ones(2)), "list of 2 arrays, the sums, got a ndarray"),
    "group: texts": (_groups(["a", "b"]), "list of arrays, got a str among them"),
    "group: argument": (
        jdp.AllReduce(lax.psum, reduce_group=lambda xs, axis_name: xs),
        r"`reduce_group\(arrays, axis_name, has_data=...\)`.*'has_data'",
    ),
    "choose: none": (_chooses(None), "`choose` of `all_reduce` .*, got None"),
    "choose: number": (_chooses(3), "`choose` of `all_reduce` must be a function.*3"),
    "choose: mean": (_chooses(lax.pmean), "`choose` .*must sum .*`jax.lax.pmean` does"),
    "choose: field": (
        _chooses(jdp.AllReduce(lax.pmean)),
        "`choose` .*must sum .*pmean",
    ),
    "choose: op": (
        _chooses(functools.partial(collectives.ring_all_reduce, op="mean")),
        r"`choose` .*must sum .*ring_all_reduce\(op='mean'\)` does not",
    ),
    "choose: sum": (_chooses(lambda x, a: None), "`reduce` .* the sum, got None"),
}


def _synced(all_reduce, **options):
    def fn(grads):
        return jdp.sync_gradients(
            grads, axis_name="i", all_reduce=all_reduce, **options
        )

    grads = {"a": np.float32([[1, 2], [3, 4]]), "b": np.ones((2, 3, 2), "f")}
    return jax.vmap(fn, axis_name="i")(grads)


@pytest.mark.parametrize("name", WRONG_SUMS)
def test_what_a_users_all_reduce_returns_is_checked(name):
    all_reduce, message = WRONG_SUMS[name]
    with pytest.raises((TypeError, ValueError), match=message) as e:
        _synced(all_reduce)
    assert "`all_reduce`" in str(e.value)


@pytest.mark.parametrize("hook", [None, jdp.hooks.none()])
def test_with_a_hook_reduce_and_choose_are_checked_too(hook):
    for name in ("integers", "short", "none", "choose: none", "choose: mean"):
        all_reduce, message = WRONG_SUMS[name]
        with pytest.raises((TypeError, ValueError), match=message):
            _synced(all_reduce, hook=hook)


@pytest.mark.parametrize("hook", [None, jdp.hooks.none()])
@pytest.mark.parametrize(
    "result",
    [
        lax.psum,
        "auto",
        collectives.auto_all_reduce,
        collectives.ring_all_reduce,
        jdp.AllReduce(lax.psum),
    ],
)
def test_a_choice_takes_any_form_of_an_all_reduce_and_any_sum(result, hook):
    choose = _chooses(result).choose
    means = _synced(jdp.AllReduce(pytest.fail, choose=choose), hook=hook)
    np.testing.assert_array_equal(means["a"], [[2, 3], [2, 3]])


@pytest.mark.parametrize("weight", [None, 2.0])
def test_a_group_may_be_a_tuple(weight):
    def reduce_group(arrays, axis_name, has_data):
        return lax.psum(tuple(arrays), axis_name)

    all_reduce = jdp.AllReduce(pytest.fail, reduce_group=reduce_group)
    means = _synced(all_reduce, weight=weight)
    np.testing.assert_array_equal(means["a"], [[2, 3], [2, 3]])


@pytest.mark.parametrize(
    "field,value",
    [("reduce_group", 1), ("choose", "auto"), ("takes_scale", "no"), ("name", 3)],
)
def test_a_field_of_an_all_reduce_has_its_type(field, value):
    with pytest.raises(TypeError, match=f"`{field}` of `all_reduce` must be .*{value}"):
        _synced(jdp.AllReduce(lax.psum, **{field: value}))


def test_a_scale_does_not_round_gradients_of_64_bits():
    scales = []

    def scaled(x, axis_name, *, scale=None):
        scales.append(scale)
        return lax.psum(x, axis_name) * (1 if scale is None else scale)

    with jax.enable_x64(True):
        grads = {"a": np.full((3, 4), 1 / 3), "b": np.full((3, 4), 1 / 7)}
        plan = jdp.plan_buckets(
            {k: g[0] for k, g in grads.items()}, bucket_bytes=8, first_bucket_bytes=8
        )

        def fn(grads):
            all_reduce = jdp.AllReduce(scaled, takes_scale=True)
            return jdp.sync_gradients(
                grads, axis_name="i", plan=plan, weight=7.0, all_reduce=all_reduce
            )

        means = jax.vmap(fn, axis_name="i")(grads)
        for k in grads:
            np.testing.assert_allclose(means[k], grads[k], rtol=1e-14)
    assert len(scales) == 2
