"""What the default all-reduce of processes on one host is to a program: a `psum`."""

import functools
import itertools
import logging
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp import collectives
from jdp.collectives import auto
from jdp.collectives.shared_memory.all_reduce import default_buffer
from tests import harness, rarely
from tests.collectives import contract

AXIS = "data"


def _square(x, reduce):
    return reduce(x * x, AXIS)


# Functions of x, shape (5,), in which an all-reduce is transformed.
TRANSFORMED = {
    "called": lambda x, r: _square(x, r) + 0 * x,
    "grad": lambda x, r: jax.grad(lambda x: (_square(x, r) ** 2).sum())(x),
    "grad of grad": lambda x, r: jax.grad(
        lambda x: jax.grad(lambda x: (_square(x, r) ** 3).sum())(x).sum()
    )(x),
    "jvp": lambda x, r: jax.jvp(lambda x: _square(x, r), (x,), (2 * x,))[1] + 0 * x,
    "vmap": lambda x, r: (
        jax.vmap(lambda a: _square(a * x, r))(jnp.arange(3.0)).sum(0) + 0 * x
    ),
    "vmap of grad": lambda x, r: (
        jax.vmap(jax.grad(lambda a: _square(a * x, r).sum()))(jnp.arange(3.0)).sum()
        + 0 * x
    ),
    "checkpoint": lambda x, r: jax.grad(
        jax.checkpoint(lambda x: (_square(x, r) ** 2).sum())
    )(x),
    "scan": lambda x, r: (
        jax.lax.scan(lambda c, a: (c, _square(c * a, r)), x, jnp.arange(3.0))[1].sum(0)
        + 0 * x
    ),
    "grad of scan": lambda x, r: jax.grad(
        lambda x: jax.lax.scan(lambda c, a: (c, _square(c * a, r)), x, jnp.arange(3.0))[
            1
        ].sum()
    )(x),
    "cond": lambda x, r: jax.lax.cond(
        True, lambda x: _square(x, r) + 0 * x, lambda x: x, x
    ),
    "linear_transpose": lambda x, r: (
        jax.linear_transpose(lambda x: r(x, AXIS), x)(jnp.arange(5.0))[0] + 0 * x
    ),
    "linearize": lambda x, r: jax.linearize(lambda x: _square(x, r), x)[1](x) + 0 * x,
}


def _run(world, fn, x, check_vma=True):
    body = harness.as_body(fn)
    mapped = jax.shard_map(
        body, mesh=world.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma
    )
    shape = (x.size * world.process_count,)
    split = jax.make_array_from_process_local_data(world.split, x, shape)
    found = jax.jit(mapped)(split)
    return np.stack([np.asarray(s.data) for s in found.addressable_shards])


def _differences(world, kinds):
    """Names of the transformations that give other numbers than those of `psum`."""
    own = np.arange(5 * world.num_local_replicas, dtype=np.float32) + 1
    own += 10 * world.process_index
    different = []
    for (check_vma, op), name in itertools.product(kinds, TRANSFORMED):
        found = [
            _run(
                world,
                functools.partial(
                    TRANSFORMED[name], r=functools.partial(reduce, op=op)
                ),
                own,
                check_vma,
            )
            for reduce in (collectives.auto_all_reduce, collectives.psum_all_reduce)
        ]
        if not np.allclose(*found, rtol=1e-6):
            different.append((name, op, check_vma))
    return different


def _wrong(world):
    """Cases of the contract that the default breaks."""
    jax.config.update("jax_enable_x64", True)
    wrong, n = [], world.num_replicas
    local = world.num_local_replicas
    first = world.process_index * local
    for case in [*contract.SIZES, *contract.EACH_KIND]:
        values = case.values(n)
        own = np.concatenate(values[first : first + local])
        found = _run(
            world,
            lambda x, op=case.op: collectives.auto_all_reduce(x, AXIS, op=op),
            own,
            check_vma=False,
        )
        text, _ = harness.error_text(
            lambda case=case, values=values, found=found: contract.check(
                case, values, found
            )
        )
        wrong += [(case, text)] if text else []
    return wrong


def _train(world):
    """Parameters after training with nothing said, and what `describe` says."""

    @jdp.data_parallel
    def step(params, batch):
        loss, grads = jdp.value_and_grad(harness.oracle_loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = jdp.replicate(world, harness.oracle_params())
    before = jdp.describe(step, params, harness.oracle_batches(1)[0])
    for batch in harness.oracle_batches(4):
        mine = jax.tree.map(
            lambda x: np.array_split(x, world.process_count)[world.process_index], batch
        )
        params, _ = step(params, mine)
    jdp.check_replicas(params, world=world)
    after = jdp.describe(step, params, batch)
    said = [x.synchronizations[0].algorithm for x in (before, after)]
    return said, jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)


def _everything(num_devices):
    kinds = list(itertools.product([True, False], ["sum", "mean"]))
    kinds = kinds if num_devices > 1 else [kinds[0], kinds[-1]]
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("jdp").addHandler(handler)
    logging.getLogger("jdp").setLevel(logging.INFO)
    world = jdp.init(num_cpu_devices=num_devices)
    return {
        "trained": _train(world),
        "different": _differences(world, kinds),
        "wrong": _wrong(world),
        "lines": [line for line in lines if "all_reduce" in line],
        "candidates": sorted(auto._LastSearch.found.candidates),
    }


@pytest.fixture(scope="module", params=rarely.cases([1, 4], often=(1,)))
def found(request):
    """All that two processes find, of 1 and of 4 replicas each."""
    return harness.run_checked(_everything, 2, request.param)


@pytest.mark.multiprocess
def test_the_default_trains_as_one_device_does(found):
    expected, _ = harness.train_alone(
        harness.oracle_params(), harness.oracle_batches(4), optax.sgd(0.1)
    )
    for each in found:
        said, params = each["trained"]
        assert said == ["shared_memory_all_reduce"] * 2
        for name, x in expected.items():
            np.testing.assert_allclose(params[name], x, atol=2e-6)


@pytest.mark.multiprocess
def test_the_choice_is_one_line_of_the_log(found):
    text = '`all_reduce="auto"` takes shared memory, for 2 processes of one host.'
    assert [each["lines"] for each in found] == [[text], []]
    assert all("shared_memory" in each["candidates"] for each in found)


@pytest.mark.multiprocess
def test_transformations_are_those_of_psum(found):
    assert [each["different"] for each in found] == [[], []]


@pytest.mark.multiprocess
def test_the_default_keeps_the_contract(found):
    assert [each["wrong"] for each in found] == [[], []]


def _train_in_little_room(num_bytes):
    """As in a container that has less room than the default buffer takes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("jdp").addHandler(handler)
    logging.getLogger("jdp").setLevel(logging.INFO)
    world = jdp.init()
    x = np.arange(3_000_000, dtype=np.float32)
    found = _run(world, lambda x: collectives.auto_all_reduce(x, AXIS), x)
    room = default_buffer(world, AXIS).num_bytes
    return bool((found == 2 * x).all()), room, [x for x in lines if "room" in x]


@pytest.mark.multiprocess
def test_where_there_is_little_room_it_is_taken_in_pieces():
    first, other = harness.run_checked(_train_in_little_room, 2, 1 << 20)
    assert first[:2] == other[:2] == (True, 128 << 10)
    (line,) = first[2]
    assert "room for 128 KiB of shared memory per process, not 1024" in line


def _train_without_room():
    """Errors of two calls of a step, where no memory can be made."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, 32 << 10))
    jdp.init()

    @jdp.data_parallel(donate_state=False)
    def step(params, x):
        _, grads = jdp.local_gradients(lambda p, x: (p * x.sum()).sum())(params, x)
        for _ in range(3):
            grads = collectives.shared_memory_all_reduce(grads, AXIS)
        return params - grads, {}

    def train():
        state, _ = step(np.ones(100, np.float32), np.ones((2, 1)))
        np.asarray(state.addressable_data(0))

    return [harness.error_text(train)[0] for _ in range(2)]


@pytest.mark.multiprocess
def test_where_there_is_no_room_every_call_says_so():
    for texts in harness.run_checked(_train_without_room, 2):
        for text in texts:
            assert "cannot make" in text and "bytes of shared memory" in text


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_what_numpy_stores_otherwise_is_left_to_xla(dtype):
    assert not auto.arithmetic.can_reduce(jnp.dtype(dtype))
    assert auto.arithmetic.can_reduce(jnp.bfloat16)
    assert auto.arithmetic.can_reduce(jnp.complex64)
    assert not auto.arithmetic.can_reduce(jnp.bool_)


def _train_networks(wrap):
    """Norms of the gradients of three networks, from each call of one step."""
    world, width = jdp.init(), 400
    rng = np.random.default_rng(0)
    scale = 1 / np.sqrt(width)
    shape = (3, 4, width, width)
    params = jdp.replicate(world, (scale * rng.normal(size=shape)).astype(np.float32))

    def loss(weights, x, factor):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x * factor).mean()

    def take(params, x, factor):
        return jdp.value_and_grad(loss)(params, x, factor)[1]

    wrapped = wrap(take)

    @jdp.data_parallel(donate_state=False)
    def step(params, x):
        grads = [wrapped(list(p), x, 10.0**k) for k, p in enumerate(params)]
        return params, jnp.stack([jnp.abs(g[-1]).sum() for g in grads])

    x = np.full((32, width), 1.0 + world.process_index, np.float32)
    norms = [np.asarray(step(params, x)[1].addressable_data(0)) for _ in range(10)]
    return np.stack(norms)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "wrap", rarely.cases([jax.jit, jax.checkpoint], often=(jax.jit,))
)
def test_reductions_of_nested_functions_are_not_mixed_up(wrap):
    for norms in harness.run_checked(_train_networks, 2, wrap):
        np.testing.assert_allclose(norms, norms[:1].repeat(10, 0), rtol=1e-5)
        np.testing.assert_array_less(5 * norms[0, :2], norms[0, 1:])


def _train_with_programs_between():
    """Own programs change the states between steps, which are not waited for."""
    world = jdp.init()

    @jdp.data_parallel
    def step(params, x):
        loss, grads = jdp.value_and_grad(lambda p, x: jnp.mean((x @ p) ** 2))(params, x)
        return params - 0.1 * grads, loss

    decay = jax.jit(lambda x: x * 0.9)
    x = np.ones((4 * world.num_local_replicas, 4), np.float32)
    states = [jdp.replicate(world, np.ones((4, 8), np.float32)) for _ in range(4)]
    for _ in range(20):
        states = [step(decay(state), x)[0] for state in states]
    return [float(state.addressable_data(0).sum()) for state in states]


@pytest.mark.multiprocess
@pytest.mark.parametrize("devices", rarely.cases([1, 2], often=(2,)))
def test_states_may_pass_through_own_programs_between_steps(devices):
    first, second = harness.run_checked(
        _train_with_programs_between, 2, devices_per_process=devices
    )
    assert first == second and len(set(first)) == 1


def _norms_of_tree(grads):
    return jax.tree.map(lambda g: jax.lax.pmean(jnp.abs(g).sum(), AXIS), grads)


def _norms_in_loop(grads):
    return jax.lax.fori_loop(
        0, 2, lambda i, _: _norms_of_tree(grads), jax.tree.map(lambda g: 0.0, grads)
    )


NORMS = {
    "called": _norms_of_tree,
    "jit": jax.jit(_norms_of_tree),
    "loop": _norms_in_loop,
}


def _average_between_reductions(name):
    """Sums of gradients, and means by collectives of XLA before, between and after."""
    os.environ["PJRT_NPROC"] = "1"  # As `jdp launch` does where each has one core.
    world = jdp.init(timeout_s=20.0)
    params = {f"{i:02}": np.ones((17, 100 * i + 1), np.float32) for i in range(30)}
    x = np.full((2 * world.num_local_replicas, 1), 1.0 + world.process_index)

    @jdp.data_parallel
    def step(params, x):
        def loss(p):
            return sum((q * x[0]).sum() for q in jax.tree.leaves(p))

        _, grads = jdp.local_gradients(loss)(params)
        found = [NORMS[name](grads)]
        for scaled in (grads, jax.tree.map(lambda g: 2 * g, grads)):
            synced = jdp.sync_gradients(scaled)
            means = jax.tree.map(lambda g: g.mean(), synced)
            found += [means, _norms_of_tree(grads)]
        # The step averages these, since they differ.
        return params, (found, jax.tree.map(jnp.sum, grads))

    for _ in range(30):
        params, (found, sums) = step(params, x)
    first, mean, second, double, third = found
    wrong = []
    for key, param in params.items():
        got = [tree[key] for tree in (first, second, third, sums)]
        got = [float(y) / param.size for y in got]
        got += [float(mean[key]), float(double[key]) / 2]
        wrong += [(key, got)] if not np.allclose(got, 1.5, rtol=1e-5) else []
    return wrong


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("devices", "name"),
    rarely.cases(itertools.product([1, 2], NORMS), often=[(1, "called")]),
)
def test_collectives_of_xla_do_not_wait_for_those_on_the_host_in_a_circle(
    devices, name
):
    found = harness.run_checked(
        _average_between_reductions, 2, name, devices_per_process=devices
    )
    assert found == [[], []]


def _norms(leaves):
    return jnp.stack([jax.lax.pmean(jnp.abs(x).sum(), AXIS) for x in leaves])


@jax.custom_vjp
def _norms_with_rule(leaves):
    return _norms(leaves)


_norms_with_rule.defvjp(lambda xs: (_norms(xs), None), lambda _, g: (None,))


def _print_norms(leaves):
    for x in leaves:
        jax.debug.callback(lambda norm: None, jax.lax.pmean(jnp.abs(x).sum(), AXIS))


def _repeat(leaves):
    def body(state):
        return state[0] + 1, state[0] + 0.5 * _norms(leaves)

    start = 0.0, jnp.zeros(len(leaves))
    return jax.lax.while_loop(
        lambda state: _norms(leaves)[0] > 1e9 * state[0], body, start
    )


# Means by XLA's collectives within other functions, of most of which XLA may cut the
# first element out, or which have no results.
IN_FUNCTIONS = {
    "jit": jax.jit(_norms),
    "checkpoint": jax.checkpoint(_norms),
    "grad of checkpoint": jax.grad(
        jax.checkpoint(lambda xs: jnp.sin(_norms([x * x for x in xs])).sum())
    ),
    "custom rule": _norms_with_rule,
    "branch": lambda xs: jax.lax.cond(True, _norms, lambda xs: jnp.zeros(len(xs)), xs),
    "loop": lambda xs: jax.lax.scan(lambda c, _: (c, _norms(c)), xs, length=1)[1],
    "while": _repeat,
    "prints": jax.jit(_print_norms),
    "prints in branch": lambda xs: jax.lax.cond(
        jax.lax.pmax(xs[0][0, 0], AXIS) > 0, _print_norms, lambda xs: None, xs
    ),
}


def _average_in_functions(names):
    """Names of the functions around reductions by which sums of gradients are wrong."""
    os.environ["PJRT_NPROC"] = "1"
    world = jdp.init(timeout_s=20.0)
    grads = [np.ones((17, 100 * i + 1), np.float32) for i in range(30)]
    x = np.full((2 * world.num_local_replicas, 1), 1.0 + world.process_index)
    wrong = []
    for name in names:
        take = IN_FUNCTIONS[name]

        @jdp.data_parallel
        def step(grads, x, take=take):
            found = []
            for k in (1, 2, 3):
                own = [k * g * x[0, 0] for g in grads]
                synced = [g.mean() for g in jdp.sync_gradients(own)]
                found.append((synced, take(own)))
            return grads, found

        state, results = jdp.replicate(world, grads), []
        for _ in range(60):
            state, found = step(state, x)
            results.append(found)
        sizes = np.array([g.size for g in grads])
        for k, (means, norms) in enumerate(f for fs in results for f in fs):
            factor = 1.5 * (k % 3 + 1)
            is_right = np.allclose(means, factor)
            if name in ("jit", "checkpoint", "custom rule", "branch"):
                is_right &= np.allclose(norms, factor * sizes, rtol=1e-5)
            wrong += [] if is_right else [name]
    return wrong


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))  # Each takes 20 s, alone on two cores.
@pytest.mark.parametrize("devices", [1, 2])
def test_collectives_of_xla_within_functions_are_in_order_too(devices, part):
    found = harness.run_checked(
        _average_in_functions, 2, [*IN_FUNCTIONS][part::6], devices_per_process=devices
    )
    assert found == [[], []]
