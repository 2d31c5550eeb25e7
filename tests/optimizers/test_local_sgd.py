"""Replicas that train apart: the same as a loop over replicas in plain Python."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jdp
from jdp.optimizers import diloco
from jdp.replicas import per_replica
from tests import harness, rarely

PARAMS = harness.oracle_params()
N, STEPS = 4, 9
BATCHES = harness.oracle_batches(STEPS)


@functools.cache
def _grad_fn():
    return harness.jit_fast(jax.grad(harness.oracle_loss))


def _mean(trees):
    return jax.tree.map(lambda *xs: sum(xs) / len(xs), *trees)


def _parts(batch, n=N):
    return [jax.tree.map(lambda x, i=i: np.split(x, n)[i], batch) for i in range(n)]


class _Replicas:
    """What each replica has, in lists."""

    def __init__(self, tx):
        self.tx = tx
        self.params = [PARAMS] * N
        self.states = [tx.init(PARAMS)] * N

    def step(self, batch, average_gradients=False, active=range(N)):
        grads = [
            _grad_fn()(p, b) for p, b in zip(self.params, _parts(batch), strict=True)
        ]
        if average_gradients:
            grads = [_mean(grads)] * N
        for i in active:
            updates, self.states[i] = self.tx.update(
                grads[i], self.states[i], self.params[i]
            )
            self.params[i] = optax.apply_updates(self.params[i], updates)

    def average(self, ranks):
        mean = _mean([self.params[i] for i in ranks])
        for i in ranks:
            self.params[i] = mean


def _train(local, world, batches=BATCHES, weights=None):
    @jdp.data_parallel(world=world)
    def step(state, batch, weight):
        grad_fn = jdp.local_gradients(harness.oracle_loss, axis_name=world.axis_name)
        loss, grads = grad_fn(state.params.value, batch)
        if weights is None:
            return local.update(grads, state), {}
        return local.update(grads, state, weight=weight[0]), {}

    state = local.init(PARAMS)
    for k, batch in enumerate(batches):
        row = np.ones(N, np.float32) if weights is None else np.float32(weights[k])
        state, _ = step(state, batch, row)
    return state


def _expect(found, expected, atol=1e-6):
    for i, params in enumerate(expected):
        for k, x in params.items():
            np.testing.assert_allclose(found[k][i], x, rtol=0, atol=atol)


def _are_equal(params):
    return all((np.asarray(x) == np.asarray(x)[:1]).all() for x in params.values())


@pytest.mark.parametrize(
    ("warmup_steps", "period"),
    rarely.cases(itertools.product([0, 3], [1, 2, 4]), often=[(0, 4), (3, 2)]),
)
def test_local_sgd_averages_parameters_after_its_period(period, warmup_steps):
    tx, world = optax.sgd(0.1, momentum=0.9), harness.local_world(N)
    local = jdp.local_sgd(tx, period=period, warmup_steps=warmup_steps, world=world)
    found, expected = _train(local, world), _Replicas(tx)
    for k, batch in enumerate(BATCHES):
        later = k + 1 - warmup_steps
        expected.step(batch, average_gradients=later <= 0)
        if later > 0 and later % period == 0:
            expected.average(range(N))
    _expect(found.params.value, expected.params)
    last = STEPS - warmup_steps
    assert _are_equal(found.params.value) == (last % period == 0)


def test_a_period_of_one_is_data_parallel_training():
    world = harness.local_world(N)
    expected, _ = harness.train_alone(PARAMS, BATCHES, optax.sgd(0.1))
    for local in (
        jdp.local_sgd(optax.sgd(0.1), period=1, world=world),
        jdp.diloco(optax.sgd(0.1), period=1, outer=optax.sgd(1.0), world=world),
    ):
        found = _train(local, world)
        _expect(found.params.value, [expected] * N)
        assert _are_equal(found.params.value)


def test_within_a_node_more_often_than_across():
    world = harness.local_world(N, ("node", "data"), num_nodes=2)
    tx = optax.sgd(0.1)
    local = jdp.local_sgd(tx, period=(2, 4), axis_name=("node", "data"), world=world)
    for num_steps in (5, 6, 8):
        found, expected = _train(local, world, BATCHES[:num_steps]), _Replicas(tx)
        for k, batch in enumerate(BATCHES[:num_steps]):
            expected.step(batch)
            if (k + 1) % 4 == 0:
                expected.average(range(N))
            elif (k + 1) % 2 == 0:
                expected.average([0, 1])
                expected.average([2, 3])
        _expect(found.params.value, expected.params)


def _scaled_by_value():
    def update(grads, state, params=None, *, value, is_reversed=False, **_):
        sign = 1 if is_reversed else -1
        return jax.tree.map(lambda g: sign * value * g, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_each_replica_gets_its_own_extra_arguments(kind):
    world = harness.local_world(2)
    local = getattr(jdp, kind)(_scaled_by_value(), period=4, world=world)

    @jdp.data_parallel(world=world)
    def step(state, x):
        grads = jax.tree.map(jnp.ones_like, state.params.value)
        return local.update(grads, state, value=x[0], is_reversed=True), {}

    start = {"w": np.zeros(3, np.float32)}
    state, _ = step(local.init(start), np.array([1.0, 5.0], np.float32))
    np.testing.assert_array_equal(state.params.value["w"], [[1.0] * 3, [5.0] * 3])


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_parameter_that_one_replica_used_is_stepped_on_there(warmup_steps):
    """But with averaged gradients on all, so that they stay the same."""
    world = harness.local_world(2)
    tx = jdp.skip_unused(optax.sgd(1.0, momentum=0.9))
    local = jdp.local_sgd(tx, period=9, warmup_steps=warmup_steps, world=world)

    @jdp.data_parallel(world=world)
    def step(state, x):
        used = {"w": x[0] > 0, "v": True}
        grads = {"w": jnp.full(3, jnp.maximum(x[0], 0)), "v": jnp.ones(2)}
        return local.update(grads, state, used=used), {}

    start = {"w": np.zeros(3, np.float32), "v": np.zeros(2, np.float32)}
    state, _ = step(local.init(start), np.array([4.0, -1.0], np.float32))
    expected = [-2.0, -2.0] if warmup_steps else [-4.0, 0.0]
    np.testing.assert_array_equal(state.params.value["w"][:, 0], expected)
    momentum = state.inner.value.leaf_states["['w']"][0].trace[:, 0]
    np.testing.assert_array_equal(momentum, np.negative(expected))


def test_a_replica_counts_by_what_it_has_seen():
    tx, world = optax.sgd(0.1), harness.local_world(N)
    weights = [[1, 1, 0, 2], [1, 0, 0, 2], [3, 1, 0, 2]]
    local = jdp.local_sgd(tx, period=3, world=world)
    found = _train(local, world, BATCHES[:3], weights)
    expected = _Replicas(tx)
    for batch, row in zip(BATCHES, weights, strict=False):
        expected.step(batch, active=[i for i in range(N) if row[i]])
    counts = np.sum(weights, axis=0)
    mean = jax.tree.map(
        lambda *xs: sum(c * x for c, x in zip(counts, xs, strict=True)) / counts.sum(),
        *expected.params,
    )
    _expect(found.params.value, [mean] * N)


def test_gradients_of_a_replica_without_data_do_not_matter():
    world = harness.local_world(N)
    poisoned = jax.tree.map(np.copy, BATCHES[0])
    poisoned["x"][: len(poisoned["x"]) // N] = np.nan
    for local in (
        jdp.local_sgd(optax.adam(0.1), period=1, world=world),
        jdp.local_sgd(optax.adam(0.1), period=9, warmup_steps=1, world=world),
        jdp.diloco(optax.adam(0.1), period=1, world=world),
    ):
        found = _train(local, world, [poisoned], [[0, 1, 1, 1]])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def _diloco(tx, outer, period, num_fragments, delay, mixing, num_steps=STEPS):
    """DiLoCo in plain Python."""
    replicas = _Replicas(tx)
    leaves, treedef = jax.tree.flatten(PARAMS)
    fragments = diloco.cut_fragments(leaves, num_fragments)
    theta = list(leaves)
    states = [outer.init([leaves[i] for i in part]) for part in fragments]
    spacing, sent = period // num_fragments, {}

    def measure(step):
        if step > 0 and step % spacing == 0:
            part = fragments[(step // spacing - 1) % num_fragments]
            of_all = [jax.tree.leaves(p) for p in replicas.params]
            sent[step] = [_mean([theta[i] - own[i] for own in of_all]) for i in part]

    for k in range(num_steps):
        if delay:
            measure(k)
        replicas.step(BATCHES[k])
        if not delay:
            measure(k + 1)
        due = k + 1 - delay
        if due in sent:
            f = (due // spacing - 1) % num_fragments
            before = [theta[i] for i in fragments[f]]
            updates, states[f] = outer.update(sent.pop(due), states[f], before)
            after = optax.apply_updates(before, updates)
            of_all = [jax.tree.leaves(p) for p in replicas.params]
            for i, x in zip(fragments[f], after, strict=True):
                theta[i] = x
                for own in of_all:
                    own[i] = mixing * own[i] + (1 - mixing) * x
            replicas.params = [jax.tree.unflatten(treedef, own) for own in of_all]
    return jax.tree.unflatten(treedef, theta), replicas.params


@pytest.mark.parametrize(
    ("period", "num_fragments", "delay", "mixing"),
    rarely.cases(
        [
            (3, 1, 0, None),
            (4, 2, 0, None),
            (4, 2, 1, None),
            (4, 2, 2, 0.0),
            (6, 3, 2, 0.3),
            (3, 1, 3, None),
        ],
        often=[(3, 1, 0, None), (6, 3, 2, 0.3), (3, 1, 3, None)],
    ),
)
def test_diloco_is_that_of_plain_python(period, num_fragments, delay, mixing):
    world, tx = harness.local_world(N), optax.adam(0.01)
    local = jdp.diloco(
        tx,
        period=period,
        num_fragments=num_fragments,
        delay=delay,
        mixing=mixing,
        world=world,
    )
    found = _train(local, world)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    share = (0.5 if delay else 0.0) if mixing is None else mixing
    theta, params = _diloco(tx, outer, period, num_fragments, delay, share)
    _expect(found.params.value, params, atol=3e-6)
    for k, x in theta.items():
        np.testing.assert_allclose(found.outer_params[k], x, rtol=0, atol=3e-6)
    if num_fragments == 1 and not delay:
        assert _are_equal(found.params.value) and STEPS % period == 0


def _has_collective(eqn):
    return "psum" in eqn.primitive.name or any(
        _has_collective(inner)
        for value in eqn.params.values()
        for branch in (value if isinstance(value, tuple) else (value,))
        for inner in getattr(getattr(branch, "jaxpr", branch), "eqns", ())
    )


@pytest.mark.parametrize("delay", [0, 1])
def test_with_a_delay_what_is_sent_does_not_wait_for_the_step(delay):
    world = harness.local_world(2)
    local = jdp.diloco(
        optax.sgd(0.1), period=4, num_fragments=2, delay=delay, world=world
    )
    state = local.init(PARAMS)
    specs = jax.tree.unflatten(
        jax.tree.structure(state), per_replica.specs(state, world.axis_names)
    )

    def update(grads, state):
        return per_replica.leave(local.update(grads, per_replica.enter(state)))

    mapped = jax.shard_map(
        update, mesh=world.mesh, in_specs=(PartitionSpec(), specs), out_specs=specs
    )
    (shard_map,) = jax.make_jaxpr(mapped)(PARAMS, state).eqns
    jaxpr = shard_map.params["jaxpr"]
    late = set(jaxpr.invars[: len(PARAMS)])  # what depends on the gradients.
    waits = []
    for eqn in jaxpr.eqns:
        is_late = any(v in late for v in eqn.invars if not hasattr(v, "val"))
        if is_late:
            late.update(eqn.outvars)
        if _has_collective(eqn):
            waits.append(is_late)
    assert waits == [delay == 0]


def test_fragments_have_about_the_same_bytes_and_keep_their_order():
    sizes = [5, 1, 1, 1, 8, 2, 2, 4]
    leaves = [np.zeros(n, np.float32) for n in sizes]
    for num_fragments in range(1, 9):
        fragments = diloco.cut_fragments(leaves, num_fragments)
        assert len(fragments) == num_fragments and all(fragments)
        assert sum(fragments, []) == list(range(8))
    assert diloco.cut_fragments(leaves, 3) == [[0, 1, 2, 3], [4], [5, 6, 7]]
    with pytest.raises(ValueError, match="`num_fragments=9`, but there are 8 arrays"):
        diloco.cut_fragments(leaves, 9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jdp.local_sgd(optax.sgd(1), period=0), "`period` must be at least 1"),
        (
            lambda: jdp.local_sgd(optax.sgd(1), period=(2, 4), axis_name="data"),
            "pair of axes",
        ),
        (
            lambda: jdp.local_sgd(
                optax.sgd(1), period=(2, 5), axis_name=("node", "data")
            ),
            "a multiple of the first",
        ),
        (
            lambda: jdp.local_sgd(optax.sgd(1), period=2, warmup_steps=-1),
            "`warmup_steps`",
        ),
        (lambda: jdp.diloco(optax.sgd(1), period=0), "`period` must be at least 1"),
        (
            lambda: jdp.diloco(optax.sgd(1), period=5, num_fragments=2),
            "divide `period`",
        ),
        (
            lambda: jdp.diloco(optax.sgd(1), period=6, num_fragments=3, delay=3),
            "`delay` must be from 0 to",
        ),
        (lambda: jdp.diloco(optax.sgd(1), period=6, mixing=1.0), "`mixing`"),
    ],
)
def test_numbers_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    import orbax.checkpoint as ocp

    world = harness.local_world(N)
    local = jdp.diloco(
        optax.adam(0.01), period=4, num_fragments=2, delay=2, world=world
    )

    @jdp.data_parallel(world=world, donate_state=False)
    def step(state, batch):
        _, grads = jdp.local_gradients(harness.oracle_loss)(state.params.value, batch)
        return local.update(grads, state), {}

    state = local.init(PARAMS)
    for batch in BATCHES[:3]:  # A fragment is under way.
        state, _ = step(state, batch)
    assert any(np.any(np.asarray(x) != 0) for x in state.under_way.values())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    for batch in BATCHES[3:6]:
        state, _ = step(state, batch)
        restored, _ = step(restored, batch)
    jax.tree.map(np.testing.assert_array_equal, state, restored)


INTEGERS = {
    "int8": [-128, 127, 3],
    "uint8": [255, 0, 3],
    "int16": [2**15 - 1, -(2**15), 3],
    "int32": [2**24 + 1, 2**30 + 1, -(2**31)],
    "uint32": [2**32 - 5, 123456789, 2**24 + 1],
    "bool": [True, False, True],
}
INTEGER_METHODS = {
    "local_sgd": lambda tx, **more: jdp.local_sgd(tx, **more, period=1),
    "warmup": lambda tx, **more: jdp.local_sgd(tx, **more, period=2, warmup_steps=1),
    "diloco": lambda tx, **more: jdp.diloco(tx, **more, period=1),
    "delay": lambda tx, **more: jdp.diloco(
        tx, **more, period=2, delay=2, num_fragments=1, mixing=0.3
    ),
    "fragments": lambda tx, **more: jdp.diloco(tx, **more, period=2, num_fragments=2),
}


def _with_integers():
    leaves = {name: np.asarray(x, name) for name, x in INTEGERS.items()}
    return {**leaves, "w": np.full(3, 0.1, np.float32)}


def _run_on_integers(make, tx, steps, rows=None, weights=(1.0,) * N):
    """Trains with gradients of zero; `rows` is what replicas have to begin with."""
    world = harness.local_world(N)
    local = make(tx, world=world)
    state = local.init(jdp.replicate(world, _with_integers()))
    if rows is not None:
        own = jdp.PerReplica({**state.params.value, **rows})
        state = jdp.replicate(world, state._replace(params=own))

    @jdp.data_parallel(world=world)
    def step(state, weight):
        grads = jax.tree.map(jnp.zeros_like, state.params.value)
        return local.update(grads, state, weight=weight[0]), {}

    for _ in range(steps):
        state, _ = step(state, np.float32(weights))
    return state


@pytest.mark.parametrize(
    "tx",
    [pytest.param(optax.sgd(0.1), marks=pytest.mark.slow), optax.adam(0.1)],
    ids=["sgd", "adam"],
)
@pytest.mark.parametrize("method", INTEGER_METHODS)
def test_equal_integers_stay_bit_for_bit(method, tx):
    weights = [3.0, 5.0, 0.0, 1.0]
    state = _run_on_integers(INTEGER_METHODS[method], tx, 3, weights=weights)
    for name, x in INTEGERS.items():
        found = np.asarray(state.params.value[name])
        assert found.dtype == name
        np.testing.assert_array_equal(found, N * [x], err_msg=name)


@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
@pytest.mark.parametrize(
    "weights",
    [
        pytest.param((1, 1, 1, 1), marks=pytest.mark.slow),
        (3, 5, 0, 1),
        pytest.param((0, 0, 0, 0), marks=pytest.mark.slow),
    ],
)
def test_different_integers_become_the_rounded_mean_within_their_range(method, weights):
    rng = np.random.default_rng(0)
    rows = {"bool": rng.random((N, 3)) < 0.5}
    for name in INTEGERS.keys() - {"bool"}:
        info = np.iinfo(name)
        rows[name] = rng.integers(info.min, info.max, (N, 3), name, endpoint=True)
        rows[name][:, 2] = [info.max - 1, info.max, info.max - 1, info.max]
    make = INTEGER_METHODS[method]
    state = _run_on_integers(make, optax.sgd(0.1), 1, rows, weights)
    for name, x in rows.items():
        found = np.asarray(state.params.value[name])
        assert found.dtype == name
        if not any(weights):
            kept = x if method == "local_sgd" else N * [INTEGERS[name]]
            np.testing.assert_array_equal(found, kept)
            continue
        assert (found == found[:1]).all()
        counted = x[np.asarray(weights) > 0]
        low, high = counted.min(0), counted.max(0)
        assert ((low <= found) & (found <= high)).all()
        mean = np.average(x.astype(np.float64), 0, weights)
        limits = np.clip(np.round(mean), low.astype(float), high.astype(float))
        np.testing.assert_allclose(found[0], limits, rtol=N * 2.0**-23, atol=0.5)


def test_what_is_equal_is_not_changed_by_mixing():
    make = functools.partial(jdp.diloco, period=1, mixing=0.3)
    state = _run_on_integers(make, optax.sgd(0.1), 3, weights=(3, 5, 2, 1))
    np.testing.assert_array_equal(state.params.value["w"], np.full((N, 3), 0.1, "f"))


def test_parameters_keep_their_dtypes():
    world = harness.local_world(2)
    params = {"a": np.ones(3, jnp.bfloat16), "b": np.ones((2, 2), np.float32)}
    for local in (
        jdp.local_sgd(optax.sgd(0.1), period=1, world=world),
        jdp.diloco(optax.sgd(0.1), period=2, num_fragments=2, delay=1, world=world),
    ):

        @jdp.data_parallel(world=world)
        def step(state, batch, local=local):
            grads = jax.tree.map(
                lambda p: (p * batch.sum()).astype(p.dtype), state.params.value
            )
            return local.update(grads, state), {}

        state = local.init(params)
        for _ in range(4):
            state, _ = step(state, np.ones(2, np.float32))
        for k, x in params.items():
            assert state.params.value[k].dtype == x.dtype
            assert state.params.value[k].shape == (2, *x.shape)


def _train_apart(all_reduce):
    world = jdp.init()
    outer = optax.sgd(0.7, momentum=0.5)
    results = []
    for local in (
        jdp.diloco(
            optax.sgd(0.1),
            period=2,
            num_fragments=2,
            outer=outer,
            all_reduce=all_reduce,
        ),
        jdp.local_sgd(optax.sgd(0.1), period=2, warmup_steps=1, all_reduce=all_reduce),
    ):

        @jdp.data_parallel
        def step(state, batch, weight, local=local):
            grad_fn = jdp.local_gradients(harness.oracle_loss)
            _, grads = grad_fn(state.params.value, batch)
            return local.update(grads, state, weight=weight[0]), {}

        state = local.init(PARAMS)
        for batch in BATCHES[:5]:
            mine = _parts(batch, 2)[world.process_index]
            state, _ = step(state, mine, np.float32([1 + world.process_index]))
        jdp.check_replicas(state, world=world)  # `outer_params` are the same.
        params = {k: x.addressable_data(0) for k, x in state.params.value.items()}
        results.append({k: np.asarray(x)[0] for k, x in params.items()})
    return results


def _train_apart_by_each():
    ways = ("auto", None, jdp.collectives.ring_all_reduce)
    return [_train_apart(way) for way in ways]


@pytest.mark.multiprocess
def test_processes_average_by_the_all_reduce_that_is_given():
    for found, *others in harness.run_checked(_train_apart_by_each, 2):
        for other in others:
            chex.assert_trees_all_close(found, other, rtol=0, atol=1e-6)
        for params in found:
            assert any((params[name] != PARAMS[name]).any() for name in PARAMS)
