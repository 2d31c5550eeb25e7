"""The bodies of the custom all-reduce, interpreted on the CPU; races are errors.

The whole set is behind the marker `kernels`: `make test-kernels`.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp import compat
from jdp.collectives import PallasAllReduce
from jdp.collectives.pallas import kernel_launch
from jdp.collectives.pallas.choice import Launch
from jdp.collectives.pallas.peers import (
    ClusterPeers,
    Peers,
    RemotePeers,
    SoloPeers,
    Tiling,
)
from jdp.compat import mosaic_kernels
from jdp.compat.mosaic_kernels import SignalAll
from tests import rarely
from tests.collectives import kernel_interpreter as interpreter

LAUNCH = Launch(num_blocks=2, num_warpgroups=2)
PEERS = ("replicas", "cluster", "alone")
ALGORITHMS = ("one_stage", "two_stage", "multimem")
ALL_SIZES = (1, 511, 512, 4096, 5003, 3 * 1024 + 8, 9 * 1024)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def _inputs(n, size, dtype):
    """Whole numbers, of which all sums are exact in 16 bits."""
    return np.random.default_rng(size).integers(-8, 8, (n, size)).astype(dtype)


def _run(peers, xs, algorithm, *, launch=LAUNCH, make_scale=lambda: None, seed=0):
    """Returns what each replica got, and the races."""
    n, size = xs.shape
    if peers == "replicas":
        return interpreter.run_on_replicas(
            lambda x, axis: kernel_launch.all_reduce_on_replicas(
                x, axis, n, algorithm, launch, make_scale()
            ),
            xs,
            seed=seed,
        )
    if peers == "cluster":
        found = interpreter.run_on_one(
            lambda xs: kernel_launch.all_reduce_in_cluster(
                xs, algorithm, launch, make_scale()
            ),
            xs,
            seed=seed,
        )
        return interpreter.Outcome(list(found.results[0]), found.races)
    rank = n - 1
    kernel = kernel_launch.all_reduce_alone(
        n, size, xs.dtype, algorithm, launch, rank=rank
    )
    parts = []
    if algorithm == "two_stage":
        parts = [kernel_launch.parts_of(jnp.asarray(xs), launch, rank=rank)]
        assert parts[0].shape == kernel.part_shape
    return interpreter.run_on_one(
        lambda xs, parts=None: kernel.run(xs, parts), xs, *parts, seed=seed
    )


def _check(outcome, expected):
    assert outcome.races == []
    for result in outcome.results:
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)


def _is_unpadded(size, dtype):
    vector = 16 // jnp.dtype(dtype).itemsize
    return size % vector == 0 and size >= 128 * vector


def _cases(replicas, dtypes, sizes):
    cases = []
    for case in itertools.product(PEERS, ALGORITHMS, replicas, dtypes, sizes):
        peers, algorithm, _, dtype, size = case
        if algorithm == "multimem" and (peers != "replicas" or dtype != jnp.float32):
            continue
        if peers == "alone" and not _is_unpadded(size, dtype):
            continue
        cases.append(case)
    return cases


def _name(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(
    ("peers", "algorithm", "n", "dtype", "size"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case[2] == 4))
        for case in _cases((2, 4, 8), (jnp.float32, jnp.bfloat16), (5003, 3 * 1024 + 8))
    ],
    ids=_name,
)
def test_every_replica_gets_the_sum(peers, algorithm, n, dtype, size):
    xs = _inputs(n, size, dtype)
    expected = xs.astype(np.float32).sum(0).astype(dtype)
    _check(_run(peers, xs, algorithm), expected)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("peers", "algorithm", "n", "dtype", "size"),
    _cases((2, 4, 6, 8), DTYPES, ALL_SIZES),
    ids=_name,
)
def test_every_replica_gets_the_sum_in_every_order(peers, algorithm, n, dtype, size):
    xs = _inputs(n, size, dtype)
    expected = xs.astype(np.float32).sum(0).astype(dtype)
    launches = (LAUNCH, Launch(1, 1), Launch(3, 2, unroll=2))
    for seed, launch in enumerate(3 * launches):
        unrolled = launch.unroll * 128 * 16 // jnp.dtype(dtype).itemsize
        if peers == "alone" and size < unrolled:
            continue
        _check(_run(peers, xs, algorithm, launch=launch, seed=seed), expected)


@pytest.mark.parametrize("algorithm", ["one_stage", "two_stage"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=_name)
def test_sums_are_kept_in_float32_and_rounded_once(algorithm, dtype):
    """One large value and many halves of its last digit: lost one by one in 16 bits."""
    n, info = 8, jnp.finfo(dtype)
    xs = np.full((n, 2048), float(info.eps) / 2, dtype)
    xs[0] = 1
    exact = 1 + (n - 1) * float(info.eps) / 2
    expected = np.full(2048, exact, np.float32).astype(dtype)
    assert expected[0] > 1
    _check(_run("replicas", xs, algorithm), expected)


@pytest.mark.parametrize("algorithm", ["one_stage", "two_stage"])
@pytest.mark.parametrize("n", [4, 6])
def test_replicas_get_bitwise_the_same_where_the_order_of_sums_matters(algorithm, n):
    xs = np.random.default_rng(n).standard_normal((n, 3 * 1024 + 4), np.float32)
    xs *= 10.0 ** np.random.default_rng(1).integers(-4, 4, xs.shape)
    outcome = _run("replicas", xs.astype(np.float32), algorithm)
    assert outcome.races == []
    for result in outcome.results:
        np.testing.assert_array_equal(result, outcome.results[0])
    exact = xs.astype(np.float64).sum(0)
    bound = n * np.finfo(np.float32).eps * np.abs(xs).astype(np.float64).sum(0)
    assert (np.abs(outcome.results[0] - exact) <= bound).all()


@pytest.mark.parametrize(
    ("peers", "algorithm"),
    [
        ("replicas", "one_stage"),
        ("replicas", "two_stage"),
        ("replicas", "multimem"),
        ("cluster", "one_stage"),
        ("cluster", "two_stage"),
    ],
)
def test_a_scale_is_multiplied_before_the_sum_is_rounded(peers, algorithm):
    dtype = jnp.float32 if algorithm == "multimem" else jnp.float16
    n = 4
    xs = np.full((n, 2048), 30000, dtype)  # Their sum overflows float16.
    expected = np.full(2048, 30000, dtype)
    for scale in (lambda: 0.25, lambda: jnp.full((1,), 0.25)):
        _check(_run(peers, xs, algorithm, make_scale=scale), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_replicas_on_two_axes_of_a_mesh(algorithm):
    xs = _inputs(4, 5003, np.float32)
    outcome = interpreter.run_on_replicas(
        PallasAllReduce(algorithm), xs, mesh_shape={"node": 2, "data": 2}
    )
    _check(outcome, xs.sum(0))


@pytest.mark.parametrize("algorithm", ["one_stage", "two_stage"])
def test_an_axis_that_is_not_reduced_keeps_apart(algorithm):
    xs = _inputs(4, 2048, np.float32)

    def reduce(x, _):
        y = PallasAllReduce(algorithm)(x, "data")
        assert compat.varying_axes(y) == {"model"}
        return y

    outcome = interpreter.run_on_replicas(
        reduce,
        xs,
        mesh_shape={"model": 2, "data": 2},
    )
    assert outcome.races == []
    for i, result in enumerate(outcome.results):
        first = i // 2 * 2
        np.testing.assert_array_equal(result, xs[first] + xs[first + 1])


@pytest.mark.parametrize("names", [("node", "data"), ("data", "node")])
@pytest.mark.parametrize("algorithm", ["one_stage", "two_stage"])
def test_axes_that_are_not_neighbours_in_the_mesh(names, algorithm):
    """Where the lanes of a signal find their peers is no straight line here."""
    sizes = {"node": 2, "model": 2, "data": 2}
    xs = _inputs(8, 2048, np.float32)
    outcome = interpreter.run_on_replicas(
        lambda x, _: PallasAllReduce(algorithm)(x, names), xs, mesh_shape=sizes
    )
    assert outcome.races == []
    expected = xs.reshape(2, 2, 2, -1).sum((0, 2), keepdims=True)
    expected = np.broadcast_to(expected, (2, 2, 2, 2048)).reshape(8, -1)
    np.testing.assert_array_equal(outcome.results, expected)


# --- What users call ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "op"),
    rarely.cases(
        [(100, "sum"), (100, "mean"), (70_000, "mean"), (70_000, "sum")],
        often=[(100, "sum"), (70_000, "mean")],
    ),
)
def test_the_algorithm_follows_the_size(op, size):
    xs = _inputs(8, size, np.float32)
    outcome = interpreter.run_on_replicas(
        lambda x, axis: PallasAllReduce()(x, axis, op=op), xs
    )
    _check(outcome, xs.sum(0) / (8 if op == "mean" else 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
def test_gradients_are_averaged_inside_of_the_kernel(dtype):
    grads = {"w": (64, 33), "b": (33,), "v": (7, 100)}
    sizes = {name: int(np.prod(shape)) for name, shape in grads.items()}
    xs = 4 * _inputs(4, sum(sizes.values()), dtype)
    ends = np.cumsum([0, *sizes.values()])

    def sync(x, axis):
        tree = {
            name: x[a:b].reshape(grads[name])
            for name, a, b in zip(grads, ends[:-1], ends[1:], strict=True)
        }
        plan = jdp.plan_buckets(tree, bucket_bytes=1000, first_bucket_bytes=1000)
        assert len(plan.buckets) > 1
        tree = jdp.sync_gradients(
            tree,
            plan=plan,
            axis_name=axis,
            all_reduce=jdp.collectives.pallas_all_reduce,
        )
        return jnp.concatenate([tree[name].ravel() for name in grads])

    outcome = interpreter.run_on_replicas(sync, xs)
    _check(outcome, (xs.astype(np.float32).sum(0) / 4).astype(dtype))


@pytest.mark.parametrize("divide_by", ["weight", "active", "world"])
def test_weighted_gradients_take_the_inverse_weight(divide_by):
    """The total rides in the first bucket; the others are divided by the kernel."""
    xs = _inputs(4, 3001, np.float32)
    amounts = xs[:, -1] = np.array([3.0, 0.0, 1.0, 4.0], np.float32)
    counted = amounts if divide_by == "weight" else (amounts > 0).astype(np.float32)
    divisor = 4.0 if divide_by == "world" else counted.sum()

    def sync(x, axis):
        tree, weight = {"a": x[:1000], "b": x[1000:-1]}, x[-1]
        plan = jdp.plan_buckets(tree, bucket_bytes=1000, first_bucket_bytes=1000)
        assert len(plan.buckets) == 2
        tree = jdp.sync_gradients(
            tree,
            plan=plan,
            axis_name=axis,
            all_reduce=jdp.collectives.pallas_all_reduce,
            weight=weight,
            divide_by=divide_by,
        )
        return jnp.concatenate([tree["a"], tree["b"]])

    outcome = interpreter.run_on_replicas(sync, xs)
    assert outcome.races == []
    expected = (counted[:, None] * xs[:, :-1]).sum(0) / divisor
    for result in outcome.results:
        np.testing.assert_allclose(result, expected, rtol=3e-7)
        np.testing.assert_array_equal(result, outcome.results[0])


# --- Kernels broken on purpose ------------------------------------------------------


def _meet_unless(skipped):
    def mutate(monkeypatch, kind):
        meet = kind.meet

        def sometimes(self, phase):
            if phase != skipped:
                meet(self, phase - (phase > skipped))

        monkeypatch.setattr(kind, "meet", sometimes)

    return mutate


def _wait_for_fewer(monkeypatch, kind):
    from jax.experimental import pallas as pl

    wait = pl.semaphore_wait
    monkeypatch.setattr(
        pl,
        "semaphore_wait",
        lambda sem, n, decrement: wait(sem, n - 1, decrement=False),
    )


def _signal_with(change):
    """Changes which peers are signalled, the first time that a warpgroup meets."""

    def mutate(monkeypatch, kind):
        calls = itertools.count()

        class Changed(SignalAll):
            def __init__(self, offsets, is_remote):
                if next(calls) == 0:
                    offsets = change(offsets)
                super().__init__(offsets, is_remote)

        monkeypatch.setattr(mosaic_kernels, "SignalAll", Changed)

    return mutate


def _signal_ahead_of_the_data(monkeypatch, kind):
    """The first signal is given at once, not after what it is to tell of."""
    enter, signal_all = kind.enter, kind._signal_all
    calls = itertools.count()

    def enter_and_signal(self, *scratch):
        enter(self, *scratch)
        signal_all(self)

    monkeypatch.setattr(kind, "enter", enter_and_signal)
    monkeypatch.setattr(
        kind, "_signal_all", lambda self: next(calls) > 0 and signal_all(self)
    )


def _shift_the_second_stage(monkeypatch, kind):
    for_each_tile, loops = Tiling.for_each_tile, itertools.count()

    def shifted(self, num_tiles):
        run = for_each_tile(self, num_tiles)
        if next(loops) % 2 == 0:
            return run
        return lambda fn: run(lambda i: fn(jax.lax.rem(i + 1, num_tiles)))

    monkeypatch.setattr(Tiling, "for_each_tile", shifted)


def _share_a_counter(monkeypatch, kind):
    """All warpgroups of a block count in the first counter."""

    def enter(self, arrived):
        self._arrived = arrived.at[0]

    monkeypatch.setattr(Peers, "enter", enter)


MUTANTS = {
    "no middle barrier": (_meet_unless(1), "race", (RemotePeers, ClusterPeers)),
    "no end barrier": (_meet_unless(2), "race", (RemotePeers,)),
    "waits for one signal too few": (
        _wait_for_fewer,
        "race",
        (RemotePeers, ClusterPeers),
    ),
    "sends one signal too few": (
        _signal_with(lambda offsets: offsets[1:]),
        "deadlock",
        (RemotePeers, ClusterPeers, SoloPeers),
    ),
    "signals one peer twice and another one never": (
        _signal_with(lambda offsets: (offsets[-1], *offsets[1:])),
        "deadlock",
        (RemotePeers, ClusterPeers),
    ),
    "signals ahead of the data": (
        _signal_ahead_of_the_data,
        "race",
        (RemotePeers, ClusterPeers),
    ),
    "another tile map in the second stage": (
        _shift_the_second_stage,
        "race",
        (RemotePeers, ClusterPeers),
    ),
    "warpgroups share a counter": (_share_a_counter, "race", (RemotePeers,)),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name, (_, _, kinds) in MUTANTS.items() for kind in kinds],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("n", [2, 4])
def test_a_broken_two_stage_kernel_is_found(monkeypatch, name, kind, n):
    mutate, expected, _ = MUTANTS[name]
    mutate(monkeypatch, kind)
    peers = {RemotePeers: "replicas", ClusterPeers: "cluster", SoloPeers: "alone"}[kind]
    # Several tiles for each warpgroup of each part.
    xs = _inputs(n, n * 8 * 512, np.float32)
    if expected == "deadlock":
        with pytest.raises(interpreter.DeadlockError, match=r"of \d+ signals came"):
            _run(peers, xs, "two_stage")
    else:
        assert _run(peers, xs, "two_stage").races


@pytest.mark.parametrize("algorithm", ["one_stage", "multimem"])
def test_without_an_end_barrier_peers_read_what_is_freed(monkeypatch, algorithm):
    monkeypatch.setattr(RemotePeers, "meet", lambda self, phase: None)
    monkeypatch.setattr(RemotePeers, "meet_by_switch", lambda self: None)
    outcome = _run("replicas", _inputs(4, 4096, np.float32), algorithm)
    assert any("its program" in race for race in outcome.races)


def test_a_tail_given_to_another_warpgroup_is_a_race(monkeypatch):
    """The tail overlaps with the last whole tile."""
    for_each_tile = Tiling.for_each_tile

    def moved(self, num_tiles):
        return lambda fn: for_each_tile(self, num_tiles)(
            lambda i: fn(i) if not self.has_tail else _with_tail_at_first(self, fn, i)
        )

    def _with_tail_at_first(tiling, fn, i):
        fn(i)
        jax.experimental.pallas.when(i == 0)(
            lambda: fn(jnp.int32(tiling.num_tiles - 1))
        )

    monkeypatch.setattr(Tiling, "for_each_tile", moved)
    xs = _inputs(2, 4 * 512 + 4, np.float32)
    assert _run("replicas", xs, "one_stage").races
