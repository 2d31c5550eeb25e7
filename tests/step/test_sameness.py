"""What `jdp.step.sameness` says, against what replicas do."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax._src import effects
from jax.custom_derivatives import linear_call
from jax.experimental import buffer_callback, io_callback
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import jdp
from jdp import compat
from jdp.step import sameness
from tests import harness

N = 4
BOTH = ("node", "data")


class Found(NamedTuple):
    """What is said of a value, and what the replicas have."""

    spread: sameness.Spread
    rows: np.ndarray  # by replica.

    @property
    def is_same(self):
        return all(np.array_equal(self.rows[0], row) for row in self.rows)


def _found_in(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Found))


def follow(fn, axis_name="data"):
    world = harness.local_world(N, axis_name, 2 if axis_name == BOTH else 1)
    split = P(world.axis_names)
    state = jnp.arange(3.0)
    batch = np.arange(N * 2 * 3, dtype=np.float32).reshape(N * 2, 3) % 7 - 3
    structure = []

    def run(state, batch):
        leaves, treedef = jax.tree.flatten(fn(state, batch))
        structure.append(treedef)
        return [jnp.asarray(x)[None] for x in leaves]

    mapped = jax.shard_map(
        run, mesh=world.mesh, in_specs=(P(), split), out_specs=split, check_vma=False
    )
    traced = jax.make_jaxpr(mapped)(state, batch)
    body, inputs = compat.sharded_program(getattr(traced, "jaxpr", traced))
    spreads = sameness.find_spreads(body, inputs, world.axis_names)
    rows = harness.jit_fast(mapped)(state, batch)
    pairs = zip(spreads, map(np.asarray, rows), strict=True)
    return jax.tree.unflatten(structure[-1], [Found(*pair) for pair in pairs])


def _assert_true(tree):
    """What is called the same must be the same, bit by bit."""
    for found in _found_in(tree):
        assert found.spread.axes or found.is_same


def _with_reference(w, x, *, reduce):
    ref = jax.new_ref(jnp.zeros(3))
    value = x.sum(0)
    ref[...] += lax.pmean(value, "data") if reduce else value
    return jax.freeze(ref)


def _reference_in_loop(w, x, *, value):
    ref = jax.new_ref(jnp.zeros(3))
    seen = jax.new_ref(jnp.zeros(3))

    def body(i, carry):
        seen[...] = ref[...]  # of the iteration before.
        ref[...] = value(x)
        return carry

    lax.fori_loop(0, 3, body, 0)
    return jax.freeze(seen)


def _while(w, x, limit, change):
    return lax.while_loop(
        lambda c: c[0] < limit, lambda c: (c[0] + 1, change(c[1]), c[2]), (0, w, w)
    )


def _mean(x):
    return lax.pmean(x, "data")


def _count():
    """A function of the host that returns another number each time."""
    counter = itertools.count()
    return lambda *_: np.float32(next(counter))


def _fill(context, out, *given):
    np.asarray(out)[...] = next(_FILLED)


_FILLED = itertools.count()
_SCALAR = jax.ShapeDtypeStruct((), "float32")


def _host_sum(w, x):
    return io_callback(lambda v: v.sum(), jax.ShapeDtypeStruct((), "float32"), x)


def _double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def _solved(solver, right, matrix=None):
    """Solves by a solver of JAX; its matrix is applied with a collective in it."""
    solve = getattr(jax.scipy.sparse.linalg, solver)
    scale = 3.0 if matrix is None else matrix

    def apply(v):
        return scale * v + _mean(v)

    return solve(apply, right, maxiter=3)[0]


def _root(value, slope=2.0):
    """The root of `slope * z - value`, by a loop; its derivative is a linear solve."""
    return lax.custom_root(
        lambda z: slope * z - value,
        value,
        lambda f, z: lax.fori_loop(0, 3, lambda _, z: z - f(z) / 4, z),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


_with_rule = jax.custom_batching.custom_vmap(_mean)
_with_rule.def_vmap(lambda size, is_batched, x: (_mean(x), is_batched[0]))


SAME = {
    "cg": lambda w, x: _solved("cg", _mean(x[0])),
    "bicgstab": lambda w, x: _solved("bicgstab", w),
    "gmres": lambda w, x: _solved("gmres", w, _mean(x[0, 0]) + 9),
    "transposed cg": lambda w, x: jax.grad(
        lambda m: _solved("cg", _mean(x[0]), m).sum()
    )(w[1] + 4),
    "cg whose reverse alone differs": lambda w, x: lax.custom_linear_solve(
        lambda v: v * 2, w, lambda _, y: y / 2, lambda _, y: y / 2 + 0 * x[0]
    ),
    "root": lambda w, x: _root(_mean(x[0])),
    "derivative of a root": lambda w, x: jax.jacobian(_root)(_mean(x[0])),
    "custom_vmap": lambda w, x: _with_rule(x[0]),
    "linear_call": lambda w, x: linear_call(
        lambda r, v: r * _mean(v), lambda r, v: r * v, w, x[0]
    ),
    "constant": lambda w, x: jnp.ones(3),
    "state": lambda w, x: w * 2,
    "psum": lambda w, x: lax.psum(x, "data"),
    "pmax of a function": lambda w, x: lax.pmax(jnp.sin(x), "data"),
    "pmin": lambda w, x: lax.pmin(x, "data"),
    "all_gather": lambda w, x: lax.all_gather(x, "data"),
    "one group of all": lambda w, x: lax.psum(
        x, "data", axis_index_groups=[list(range(N))]
    ),
    "cond on what is shared": lambda w, x: lax.cond(
        w[0] >= 0, lambda: _mean(x), lambda: _mean(-x)
    ),
    "cond of a mean": lambda w, x: lax.cond(_mean(x.sum()) > 0, lambda: w, lambda: -w),
    "scan of what is reduced": lambda w, x: lax.scan(
        lambda c, row: (c + _mean(row), None), w, x
    )[0],
    "a carry that is reduced last": lambda w, x: lax.scan(
        lambda c, row: (_mean(c + row), None), x[0], x
    )[0],
    "while": lambda w, x: _while(w, x, 3, lambda c: c + _mean(x[0]))[1],
    "what a while of its own end keeps": lambda w, x: _while(
        w, x, x[0, 0].astype(int), jnp.sin
    )[2],
    "jit": lambda w, x: jax.jit(lambda x: _mean(x))(x),
    "remat": lambda w, x: jax.checkpoint(lambda x: _mean(jnp.sin(x)))(x),
    "a gradient, reduced": lambda w, x: _mean(jax.grad(lambda w: (w * x).sum())(w)),
    "a gradient through psum": lambda w, x: jax.grad(
        lambda w: _mean((w * _mean(x)).sum())
    )(w),
    "custom_jvp": lambda w, x: jax.nn.relu(_mean(x)),
    "barrier": lambda w, x: lax.optimization_barrier((_mean(x), x))[0],
    "reference": functools.partial(_with_reference, reduce=True),
    "reference in a loop": functools.partial(
        _reference_in_loop, value=lambda x: _mean(x[0])
    ),
    "linear algebra": lambda w, x: jnp.linalg.solve(jnp.eye(3) * 3 + _mean(x[0]), w),
    "random": lambda w, x: jax.random.normal(jax.random.key(w[0].astype(int)), (3,)),
    "vmap": lambda w, x: jax.vmap(lambda row: lax.psum(row, "data"))(x),
    "another axis": lambda w, x: jax.vmap(
        lambda v: lax.psum(v, "batch"), axis_name="batch"
    )(_mean(x)),
    "ring": lambda w, x: jdp.collectives.ring_all_reduce(x.ravel(), "data"),
    "tree": lambda w, x: jdp.collectives.reduce_broadcast_all_reduce(x.ravel(), "data"),
    "broadcast": lambda w, x: jdp.broadcast_from(x, 2),
    "sorted": lambda w, x: lax.sort((_mean(x), _mean(x))),
    # By JAX's contract a function of its operands.
    "pure_callback": lambda w, x: jax.pure_callback(np.sin, w, w),
    "pure_callback of a mean": lambda w, x: jax.pure_callback(
        lambda v: v.sum(), _SCALAR, _mean(x)
    ),
    "buffer_callback": lambda w, x: buffer_callback.buffer_callback(
        lambda context, out, v: np.copyto(np.asarray(out), np.asarray(v)), w
    )(w),
    "callback, reduced": lambda w, x: _mean(io_callback(_count(), _SCALAR)),
    "callback of one": lambda w, x: jdp.broadcast_from(
        io_callback(_count(), _SCALAR), 1
    ),
    "printing": lambda w, x: jax.debug.print("") or jax.debug.callback(_count()) or w,
    "ffi": lambda w, x: jnp.linalg.qr(jnp.eye(3) + w)[0],
    "pallas_call": lambda w, x: pl.pallas_call(
        _double, out_shape=jax.ShapeDtypeStruct((3,), "float32"), interpret=True
    )(w),
    "rbg": lambda w, x: jax.random.normal(jax.random.key(7, impl="rbg"), (3,)),
    "unsafe_rbg": lambda w, x: jax.random.normal(
        jax.random.split(jax.random.key(7, impl="unsafe_rbg"))[1], (3,)
    ),
}
DIFFERS = {
    "batch": lambda w, x: x,
    "axis_index": lambda w, x: lax.axis_index("data"),
    "ppermute": lambda w, x: lax.ppermute(x, "data", [(i, i ^ 1) for i in range(N)]),
    "psum_scatter": lambda w, x: lax.psum_scatter(jnp.arange(4.0), "data"),
    "all_to_all": lambda w, x: lax.all_to_all(
        jnp.arange(4.0) + x[0, 0], "data", 0, 0, tiled=True
    ),
    "groups": lambda w, x: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]),
    "a sum with what is reduced": lambda w, x: x + _mean(x),
    "cond of its own": lambda w, x: lax.cond(x[0, 0] > 0, lambda: w, lambda: -w),
    "switch of its own": lambda w, x: lax.switch(
        lax.axis_index("data") % 2, [lambda: 0.0, lambda: 1.0]
    ),
    "select of its own": lambda w, x: jnp.where(x[0, 0] > 0, w, -w),
    "scan carry": lambda w, x: lax.scan(lambda c, row: (c + row, None), w, x)[0],
    "scan carry, one round later": lambda w, x: lax.scan(
        lambda c, row: ((c[1], row), None), (w, w), x
    )[0][0],
    "scan output": lambda w, x: lax.scan(lambda c, row: (c, row), w, x)[1],
    "a scan of no length": lambda w, x: lax.scan(
        lambda c, row: (_mean(c), None), x[0], x[:0]
    )[0],
    "while of its own end": lambda w, x: _while(
        w, x, x[0, 0].astype(int) + 3, lambda c: c + 1
    )[1],
    "while that learns its end": lambda w, x: lax.while_loop(
        lambda c: c[0] < 9,
        lambda c: (c[0] + 1 + c[2], c[1] + 1, x[0, 0] ** 2),
        (0.0, 0.0, 0.0),
    )[1],
    "jit": lambda w, x: jax.jit(lambda x: jnp.sin(x))(x),
    "remat": lambda w, x: jax.checkpoint(jnp.sin)(x),
    "gradient": lambda w, x: jax.grad(lambda w: (w * x).sum())(w),
    "custom_jvp": lambda w, x: jax.nn.relu(x),
    "custom_vjp": lambda w, x: optax.ctc_loss(
        jnp.ones((2, 5, 3)) * x[:, None],
        jnp.zeros((2, 5)),
        jnp.ones((2, 2), int),
        jnp.zeros((2, 2)),
    ),
    "barrier": lambda w, x: lax.optimization_barrier((_mean(x), x))[1],
    "reference": functools.partial(_with_reference, reduce=False),
    "reference in a loop": functools.partial(_reference_in_loop, value=lambda x: x[0]),
    "an index of its own": lambda w, x: w[x[0, 0].astype(int) % 3],
    "linear algebra": lambda w, x: jnp.linalg.solve(jnp.eye(3) * 9 + x[0], w),
    "cg": lambda w, x: jax.scipy.sparse.linalg.cg(lambda v: 3 * v, x[0], maxiter=3)[0],
    "cg of its own matrix": lambda w, x: jax.scipy.sparse.linalg.cg(
        lambda v: (3 + x[0, 0] ** 2) * v, w, maxiter=3
    )[0],
    "root": lambda w, x: _root(w, 2 + x[0, 0] / 8),
    "linear_call": lambda w, x: linear_call(
        lambda r, v: r * v, lambda r, v: r * v, x[0], w
    ),
    "callback": _host_sum,
    "io_callback": lambda w, x: io_callback(_count(), _SCALAR),
    "io_callback of what is shared": lambda w, x: io_callback(_count(), _SCALAR, w),
    "pure_callback of nothing": lambda w, x: jax.pure_callback(_count(), _SCALAR),
    "pure_callback of its own": lambda w, x: jax.pure_callback(np.sin, x, x),
    "buffer_callback": lambda w, x: buffer_callback.buffer_callback(
        _fill, _SCALAR, has_side_effect=True
    )(w),
    "buffer_callback of nothing": lambda w, x: buffer_callback.buffer_callback(
        _fill, _SCALAR
    )(),
    "callback in a jit": lambda w, x: jax.jit(
        lambda: w * io_callback(_count(), _SCALAR)
    )(),
    "callback in a scan": lambda w, x: lax.scan(
        lambda c, _: (c + io_callback(_count(), _SCALAR), None), w, None, length=2
    )[0],
    "callback in a linear solve": lambda w, x: lax.custom_linear_solve(
        lambda v: v * 2,
        w,
        lambda _, y: y / 2 + jax.pure_callback(_count(), _SCALAR),
    ),
    "a cond that a callback decides": lambda w, x: lax.cond(
        io_callback(_count(), _SCALAR) % 2 > 0, lambda: w, lambda: w + 1
    ),
    "rng_uniform": lambda w, x: lax.rng_uniform(0.0, w[2], (3,)),
    "random": lambda w, x: jax.random.normal(
        jax.random.fold_in(jax.random.key(0), lax.axis_index("data")), (3,)
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same_is_known_to_be(name):
    for found in _found_in(follow(SAME[name])):
        assert not found.spread.axes and not found.spread.is_local
        assert found.is_same


@pytest.mark.parametrize("name", DIFFERS)
def test_what_differs_is_known_to(name):
    found = follow(DIFFERS[name])
    assert found.spread.axes == {"data"}
    assert not found.is_same


def test_what_was_sent_is_told_from_what_was_not():
    sent = {
        "ppermute": DIFFERS["ppermute"],
        "added up": lambda w, x: x + lax.ppermute(x, "data", [(0, 1)]),
        "callback": _host_sum,
        "callback of nothing": DIFFERS["pure_callback of nothing"],
        "rng_uniform": DIFFERS["rng_uniform"],
        "scattered": DIFFERS["psum_scatter"],
        "groups": DIFFERS["groups"],
    }
    local = {
        "batch": lambda w, x: x,
        "beside a sum": lambda w, x: x + lax.psum(x, "data"),
        "axis_index": DIFFERS["axis_index"],
    }
    found = follow(lambda w, x: {k: fn(w, x) for k, fn in (sent | local).items()})
    assert {name for name, x in found.items() if x.spread.is_local} == {*local}
    external = {name for name, x in found.items() if x.spread.is_external}
    assert external == {"callback", "callback of nothing", "rng_uniform"}


@dataclasses.dataclass(frozen=True)
class _Effect(effects.Effect):
    """Of a primitive that JAX does not have, such as one that talks over MPI."""


def test_what_declares_an_effect_may_read_anything():
    primitive = Primitive("read_sensor")
    primitive.def_effectful_abstract_eval(lambda x: (x, {_Effect()}))
    spread = _follow_only(lambda w, x: primitive.bind(w))
    assert spread.axes == {"data"} and spread.is_external and not spread.is_local


def test_axes_are_told_apart():
    found = follow(
        lambda w, x: {
            "": lax.psum(x, BOTH),
            "one by one": lax.pmean(lax.psum(x, "node"), "data"),
            "node": lax.pmean(x, "data"),
            "data": lax.psum(x, "node"),
            "data ": lax.axis_index("data"),
            "node data": x,
            "node, sent": lax.psum(lax.ppermute(x, BOTH, [(0, 1)]), "data"),
        },
        BOTH,
    )
    axes = {name: x.spread.axes for name, x in found.items()}
    assert axes == {
        "": set(),
        "one by one": set(),
        "node": {"node"},
        "data": {"data"},
        "data ": {"data"},
        "node data": {"node", "data"},
        "node, sent": {"node"},
    }
    assert not found["node, sent"].spread.is_local
    _assert_true(found)


def random_program(rng, depth=3):
    """A program of random operations on a list of values of shape (3,)."""

    def run(w, x):
        values = [w, x[0], jnp.ones(3), _mean(x[1])]
        for _ in range(8):
            values.append(_random_value(rng, values, depth))
        return tuple(values)

    return run


def _random_value(rng, values, depth):
    a, b = (values[rng.integers(len(values))] for _ in range(2))
    kind = rng.integers(9 if depth else 5)
    match kind:
        case 0:
            return a + b
        case 1:
            return jnp.sin(a) * b
        case 2:
            return lax.pmean(a, "data")
        case 3:
            return lax.ppermute(a, "data", [(i, (i + 1) % N) for i in range(N)])
        case 4:
            return jnp.where(a > b, a, b)
        case 5:  # No reductions in branches: a branch may be a replica's own.
            return lax.cond(a[0] > b[0], lambda: a, lambda: b * 2)
        case 6:
            seed = int(rng.integers(1 << 30))

            def body(carry, row):
                inner = np.random.default_rng(seed)
                new = _random_value(inner, [*carry, row, a], depth - 1)
                return (carry[1], new), carry[0]

            return lax.scan(body, (a, b), jnp.stack([b, a, b]))[1][-1]
        case 7:
            return jax.jit(lambda a, b: (a * b, a))(a, b)[1]
        case 8:
            limit = jnp.abs(a[0]).astype(int) % 3
            step = (lambda c: (c[0] + 1, c[1] + b, c[2]), (0, a * 0, b))
            return lax.while_loop(lambda c: c[0] < limit, *step)[1 + rng.integers(2)]


@pytest.mark.parametrize("seed", range(6))
def testrandom_programs_differ_no_more_than_is_said(seed):
    found = follow(random_program(np.random.default_rng(seed)))
    assert {bool(x.spread.axes) for x in found} == {True, False}
    _assert_true(found)


# --- Reductions that only some replicas reach ----------------------------------------


def _refused(fn, axis_name="data"):
    with pytest.raises(ValueError, match="some would wait for the others") as raised:
        follow(fn, axis_name)
    return str(raised.value)


DIVIDED = {
    "psum": lambda x: lax.psum(x, "data"),
    "ppermute": lambda x: lax.ppermute(x, "data", [(0, 1)]),
    "all_gather": lambda x: lax.all_gather(x, "data").sum(0),
    "psum_scatter": lambda x: lax.psum_scatter(jnp.ones(N), "data") + x,
    "jdp.average": lambda x: jdp.average(x),
    "jdp.sync_gradients": lambda x: jdp.sync_gradients(x),
    "jdp.broadcast_from": lambda x: jdp.broadcast_from(x, 0),
    "jdp.ring_all_reduce": lambda x: jdp.collectives.ring_all_reduce(
        x.ravel(), "data"
    ).reshape(x.shape),
}


@pytest.mark.parametrize("solver", ["cg", "bicgstab", "gmres"])
def test_a_solver_that_replicas_end_by_themselves_is_refused(solver):
    assert "`while` loop" in _refused(lambda w, x: _solved(solver, x[0]))


def test_newtons_step_is_that_of_one_device():
    def loss_fn(w, batch):
        return jnp.mean((jnp.tanh(batch @ w) - batch.sum(1)) ** 2)

    def make(mean_of):
        def step(w, batch):
            f = functools.partial(mean_of, batch=batch)
            grads = jax.grad(f)(w)

            def apply(v):
                return jax.jvp(jax.grad(f), (w,), (v,))[1] + v / 2

            found = jax.scipy.sparse.linalg.cg(apply, grads, maxiter=4)[0]
            return w - found / 4, {}

        return step

    def mean_of(w, batch):
        return jdp.mean_loss(loss_fn)(w, batch)

    batch = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    step = jdp.data_parallel(make(mean_of), world=harness.local_world(4))
    expected, _ = make(loss_fn)(jnp.ones(3), batch)
    found, _ = step(jnp.ones(3), batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("place", ["cond", "while", "nested", "test"])
@pytest.mark.parametrize("name", DIVIDED)
def test_a_reduction_that_some_replicas_do_not_reach_is_refused(name, place):
    send = DIVIDED[name]

    def run(w, x):
        mine = x[0, 0] > 0
        if place == "cond":
            return lax.cond(mine, send, jnp.sin, x)
        if place == "nested":
            return lax.cond(
                mine,
                lambda x: lax.fori_loop(0, 2, lambda _, c: jax.jit(send)(c), x),
                jnp.sin,
                x,
            )
        if place == "while":
            return lax.while_loop(
                lambda c: c[1] < x[0, 0], lambda c: (send(c[0]), c[1] + 1), (x, 0)
            )
        return lax.while_loop(lambda c: send(c).sum() + c[0, 0] < 3, lambda c: c + 1, x)

    text = _refused(run)
    assert f"`{name}`" in text or f"`lax.{name}`" in text
    assert "test_sameness.py:" in text
    word = "choose" if place in ("cond", "nested") else "end"
    assert f"that the replicas along data may {word} " in text


@pytest.mark.parametrize(
    "decide",
    [
        lambda: io_callback(lambda: np.bool_(True), jax.ShapeDtypeStruct((), bool)),
        lambda: jax.pure_callback(
            lambda: np.bool_(True), jax.ShapeDtypeStruct((), bool)
        ),
        lambda: lax.rng_uniform(0.0, 1.0, ()) > 0.5,
    ],
)
def test_what_hosts_and_devices_decide_may_not_reduce(decide):
    text = _refused(lambda w, x: lax.cond(decide(), _mean, jnp.sin, x))
    assert "`lax.psum` is in a branch" in text
    assert "lax.pmax(condition, 'data')" in text
    follow(lambda w, x: lax.cond(lax.pmax(decide(), "data"), _mean, jnp.sin, x))


def test_what_all_replicas_decide_alike_may_reduce():
    def run(w, x):
        shared = _mean(x.sum()) > 0
        y = lax.cond(shared, lambda: _mean(x), lambda: x)
        return lax.while_loop(
            lambda c: c[1] < 3, lambda c: (_mean(c[0]), c[1] + 1), (y, 0)
        )

    _assert_true(follow(run))


def test_a_branch_that_nodes_choose_may_reduce_within_a_node():
    def run(axis):
        return lambda w, x: lax.cond(
            lax.axis_index("node") == 0, lambda: lax.psum(x, axis), lambda: x
        )

    found = follow(run("data"), BOTH)
    assert found.spread.axes == {"node", "data"}
    assert "replicas along node may choose" in _refused(run("node"), BOTH)
    assert "replicas along node may choose" in _refused(run(BOTH), BOTH)


def test_printing_in_a_branch_of_its_own_is_no_reduction():
    def run(w, x):
        return (
            lax.cond(
                x[0, 0] > 0, lambda: jax.debug.callback(lambda v: None, x), lambda: None
            )
            or w
        )

    _assert_true(follow(run))


def test_a_program_is_followed_in_linear_time():
    layer = jax.jit(lambda x: jnp.sin(x) + 1)

    def nested(x, depth):
        if not depth:
            return layer(x)
        half = jax.jit(functools.partial(nested, depth=depth - 1))
        return half(half(x))

    # 2^40 calls, of 40 jaxprs.
    assert _follow_only(lambda w, x: nested(x, 40)).axes == {"data"}


def _follow_only(fn):
    world = harness.local_world(N)
    mapped = jax.shard_map(
        lambda w, x: fn(w, x),
        mesh=world.mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    traced = jax.make_jaxpr(mapped)(jnp.ones(3), np.ones((N, 3), np.float32))
    body, inputs = compat.sharded_program(getattr(traced, "jaxpr", traced))
    (spread,) = sameness.find_spreads(body, inputs, ("data",))
    return spread
