"""Servers and workers over real sockets, in threads of one process."""

import itertools
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdp import hooks, parameter_server
from jdp.parameter_server import shards, updates
from tests import harness, rarely
from tests.parameter_server.jobs import ThreadJob, run_workers, wait_for
from tests.parameter_server.proxy import Proxy

GRADS = harness.jit_fast(jax.value_and_grad(harness.oracle_loss))


def _shards(batches, sizes):
    """Each worker's part of every batch."""
    ends = np.cumsum([0, *sizes])
    return [
        [{k: v[a:b] for k, v in batch.items()} for batch in batches]
        for a, b in itertools.pairwise(ends)
    ]


@pytest.mark.parametrize(
    "num_servers,shared_memory,tx",
    [
        (1, True, optax.adam(0.01)),
        (1, False, optax.adam(0.01)),
        (3, True, optax.sgd(0.1, momentum=0.9)),
        (2, False, optax.sgd(0.1, momentum=0.9)),
    ],
)
def test_sync_has_the_parameters_of_one_device_on_the_whole_batch(
    tmp_path, num_servers, shared_memory, tx
):
    params, batches = harness.oracle_params(), harness.oracle_batches(6)
    sizes = (9, 5, 2)
    shards = _shards(batches, sizes)

    def train(worker, index):
        values = list(worker.steps(GRADS, shards[index]))
        assert worker.counts == {"applied": 6, "late": 0, "rejected": 0}
        return values, worker.version, worker.pull()

    job = ThreadJob(tmp_path, params, tx, num_servers=num_servers, num_workers=3)
    with job:
        results = run_workers(job, train, 3, shared_memory=shared_memory)
        for thread in job.threads:  # All have left, so the servers end.
            thread.join(10.0)
            assert not thread.is_alive()
    expected, losses = harness.train_alone(params, batches, tx)
    for _, version, found in results:
        assert version == (1, 6)
        chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=2e-6)
    weights = np.array(sizes) / sum(sizes)
    means = weights @ np.array([values for values, _, _ in results])
    np.testing.assert_allclose(means, losses, rtol=1e-5)


def _ones(value=1.0):
    return {"w": np.full((4, 3), value, np.float32), "b": np.full(5, value, np.float32)}


def _descended(by):
    """What plain descent makes of zeros."""
    return jax.tree.map(lambda x: 0 * x - np.float32(by), _ones())


def _job(folder, **kwargs):
    options = parameter_server.ServerOptions(
        **{"lease_s": 5.0, **kwargs.pop("options", {})}
    )
    return ThreadJob(
        folder, _ones(0.0), kwargs.pop("tx", optax.sgd(1.0)), options=options, **kwargs
    )


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"]
)
@pytest.mark.parametrize("weights", [(1, 1, 1), (1e30, 1e30, 1e-30), (1e-30,) * 3])
def test_a_mean_of_finite_gradients_is_finite_and_of_equal_ones_their_own(
    dtype, weights
):
    dtype = jnp.dtype(dtype)
    params = {"w": np.zeros(5, dtype)}
    plan = shards.plan_shards(params, 1)
    largest, least = (float(getattr(jnp.finfo(dtype), n)) for n in ("max", "tiny"))
    grads = np.asarray([largest, -largest, 4 * least, 3, 0], dtype)

    def update(*pushes):
        tx = optax.stateless(lambda updates, params: updates)
        made = updates.Updater(params, tx, plan, 0, jax.local_devices()[0])
        made.apply([[push] for push in pushes], weights, 0)
        return made.save()[0]

    np.testing.assert_array_equal(update(grads, grads, grads), grads)
    found = update(grads, grads, np.asarray([largest, largest, 0, 0, 1], dtype))
    assert np.isfinite(found.astype(np.complex64)).all()
    if weights[2] < weights[0]:
        np.testing.assert_array_equal(found, grads)


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize(
    "tx",
    [
        optax.noisy_sgd(0.1, key=jax.random.key(0)),
        pytest.param(
            optax.noisy_sgd(0.1, key=jax.random.key(0, impl="rbg")),
            marks=pytest.mark.slow,
        ),
        # Its moments are of the dtype of the parameters, then of the step size.
        optax.inject_hyperparams(optax.adam)(1e-2, eps=1e-3),
        optax.chain(optax.sgd(0.1), optax.monitor({"norm": optax.tree.norm})),
    ],
    ids="key other-key settles grows".split(),
)
def test_a_state_of_any_form_steps_as_on_one_device_and_outlives_a_restart(
    tx, num_before
):
    params = {"a": jnp.ones(4, jnp.bfloat16), "norm": jnp.ones(3)}
    plan, device = shards.plan_shards(params, 1), jax.local_devices()[0]
    (shard,) = plan.of_server
    first = updates.Updater(params, tx, plan, 0, device)
    grads = jax.tree.map(lambda x: x / 3, params)
    push = [np.zeros(a.shape, a.dtype) for a in shard.avals]
    shards.copy_leaves(shard, jax.tree.leaves(grads), push)

    @jax.jit
    def step(params, state):
        found, state = tx.update(grads, state, params)
        return optax.apply_updates(params, found), state

    expected = params, tx.init(params)
    for _ in range(num_before):
        first.apply([push], [1.0], 0)
        expected = step(*expected)
    again = updates.Updater(params, tx, plan, 0, device)
    assert again.describe() == first.describe()
    again.load(first.save())
    for _ in range(2):
        again.apply([push], [1.0], 0)
        expected = step(*expected)
    found = [np.zeros_like(x) for x in push]
    again.copy_into(found)
    copied = [np.zeros_like(x) for x in push]
    shards.copy_leaves(shard, jax.tree.leaves(expected[0]), copied)
    for own, other in zip(found, copied, strict=True):
        np.testing.assert_allclose(
            own.astype(np.float32), other.astype(np.float32), rtol=1e-6
        )


def test_a_state_that_never_settles_is_refused():
    def update(updates, state, params=None):
        return updates, jnp.concatenate([state, state])

    tx = optax.GradientTransformation(lambda params: jnp.zeros(1), update)
    plan = shards.plan_shards({"w": np.zeros(2, np.float32)}, 1)
    with pytest.raises(ValueError, match="after each of the first 4 updates"):
        updates.Updater(
            {"w": np.zeros(2, np.float32)}, tx, plan, 0, jax.local_devices()[0]
        )


def test_a_gradient_that_overflows_in_the_dtype_of_the_hook_is_rejected(tmp_path):
    params = {"w": np.zeros(3, np.float32)}
    hook = hooks.cast("float16")
    options = parameter_server.ServerOptions(hook=hook)
    with ThreadJob(tmp_path, params, optax.sgd(1.0), options=options) as job:
        with job.worker(hook=hook) as worker:
            worker.pull()
            for value, outcome in ((1e6, "rejected"), (2.0, "applied")):
                worker.push({"w": np.full(3, value, np.float32)})
                assert worker.flush() == outcome
                found = worker.pull()["w"]
    np.testing.assert_array_equal(found, -2.0 * np.ones(3))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_dtypes_of_parameters_and_gradients_are_taken_as_jax_does(tmp_path, kind):
    params = {"w": np.zeros(3), "b": 0.0}
    with ThreadJob(tmp_path, params, optax.sgd(1.0)) as job, job.worker() as worker:
        pulled = worker.pull()
        assert pulled["w"].dtype == pulled["b"].dtype == np.float32
        worker.push(jax.grad(lambda p: p["w"].sum() + p["b"])(pulled))
        pulled = worker.pull()
        worker.push({"w": kind(np.ones(3)), "b": kind(np.ones(()))})
        found = worker.pull()
        for wrong, message in (
            ({"w": np.ones(2), "b": 1.0}, r"`grads\['w'\]` is float32\[2\], and the p"),
            (
                {"w": np.ones(3, np.int32), "b": 1.0},
                r"is int32\[3\], .* is float32\[3\]",
            ),
            ({"w": np.ones(3)}, r"structure of the parameters.\n.*'b'"),
        ):
            with pytest.raises(ValueError, match=message):
                worker.push(wrong)
        with pytest.raises(TypeError, match=r"`grads\['b'\]` must be an array, got s"):
            worker.push({"w": np.ones(3), "b": "x"})
    chex.assert_trees_all_equal(found, {"w": np.full(3, -2.0), "b": np.float32(-2)})


def test_async_applies_each_push_and_says_how_stale_it_was(tmp_path):
    mode = parameter_server.asynchronous()
    tx = parameter_server.scale_by_staleness(optax.sgd(1.0))
    with _job(tmp_path, mode=mode, tx=tx) as job:
        with job.worker(0) as ahead, job.worker(1) as behind:
            assert ahead.mode == "asynchronous()"
            behind.pull()
            ahead.pull()
            for _ in range(4):
                ahead.push(_ones())
                ahead.pull()
            behind.push(_ones())  # at parameters that four updates have changed.
            found = behind.pull()
            assert behind.version == (1, 5) and ahead.version == (1, 4)
        # Four updates of staleness 0, one of 4.
        chex.assert_trees_all_close(found, _descended(4 + 1 / 4))
        metrics = job.servers[0].metrics
    assert metrics["staleness"] == {"0": 4, "4": 1} and metrics["updates"] == 5
    assert metrics["pushes"] == {"applied": 5, "late": 0, "rejected": 0}
    num_bytes = sum(-(-x.nbytes // 64) * 64 for x in [np.zeros(17, np.float32)])
    assert metrics["pushed_bytes"] == 5 * num_bytes
    assert metrics["pulls"] == 7 and metrics["pulled_bytes"] == 7 * num_bytes


def test_workers_come_and_go_in_async_mode(tmp_path):
    with _job(tmp_path, mode=parameter_server.asynchronous()) as job:
        for index in range(3):
            with job.worker(index) as worker:
                worker.pull()
                worker.push(_ones())
                assert worker.flush() == "applied"
                found = worker.pull()
        chex.assert_trees_all_close(found, _descended(3))


def test_a_pull_that_was_begun_before_hides_behind_the_computation(tmp_path):
    with _job(tmp_path, mode=parameter_server.asynchronous()) as job:
        with job.worker() as worker:
            worker.pull()
            worker.prefetch()
            wait_for(lambda: not worker._connection._client.is_pulling)
            worker.push(_ones())
            worker.flush()
            chex.assert_trees_all_close(worker.pull(), _descended(0))
            chex.assert_trees_all_close(worker.pull(), _descended(1))


def test_bounded_holds_back_who_is_too_far_ahead(tmp_path):
    with _job(tmp_path, mode=parameter_server.bounded(staleness=2)) as job:
        with job.worker(0) as fast, job.worker(1) as slow:
            fast.pull()
            for _ in range(2):
                fast.push(_ones())
                assert fast.flush() == "applied"
            fast.push(_ones())
            for worker in (fast, slow):
                worker.prefetch()
            slow.pull()
            assert slow.version == (1, 2)
            assert fast._connection._client.is_pushing
            slow.push(_ones())
            assert slow.flush() == fast.flush() == "applied"
            slow.pull()
            assert slow.version == (1, 4)
            # Who leaves is not waited for.
            fast.push(_ones())
            slow.close()
            assert fast.flush() == "applied"


def test_a_backup_is_not_waited_for_and_its_gradient_is_dropped(tmp_path):
    with _job(tmp_path, mode=parameter_server.sync(backup=1), num_workers=3) as job:
        with job.worker(0) as a, job.worker(1) as b, job.worker(2) as late:
            for worker in (a, b, late):
                worker.pull()
            for worker in (a, b):
                worker.push(_ones())
            assert a.flush() == b.flush() == "applied"
            late.push(_ones(100.0))
            assert late.flush() == "late"
            chex.assert_trees_all_close(late.pull(), _descended(1))
            late.push(_ones(2.0))
            a.pull()
            a.push(_ones(4.0), num_samples=3)
            assert a.flush() == late.flush() == "applied"
            chex.assert_trees_all_close(late.pull(), _descended(1 + (3 * 4 + 2) / 4))
        assert job.servers[0].metrics["pushes"]["late"] == 1


@pytest.mark.parametrize(
    "policy,outcome", [("reject", "rejected"), ("apply", "applied")]
)
def test_gradients_that_are_not_finite_are_rejected_and_counted(
    tmp_path, policy, outcome
):
    bad = _ones()
    bad["b"][2] = np.nan
    options = {"nonfinite": policy}
    with _job(tmp_path, options=options, num_workers=2, num_servers=2) as job:

        def train(worker, index):
            worker.pull()
            worker.push(bad if index else _ones(2.0))
            return worker.flush(), worker.pull(), worker.version

        results = run_workers(job, train, 2)
        assert [found[0] for found in results] == ["applied", outcome]
        for _, params, version in results:
            assert version == (1, 1)
            assert np.isnan(params["b"][2]) == (policy == "apply")
            if policy == "reject":
                chex.assert_trees_all_close(params, _descended(2))


@pytest.mark.parametrize(
    "hook,rtol",
    [
        pytest.param(hooks.cast(jnp.bfloat16), 2**-8, marks=pytest.mark.slow),
        (hooks.int8(), 1 / 127),
        (hooks.top_k(1), 0),
    ],
    ids=["cast", "int8", "top_k"],
)
def test_a_push_may_be_compressed(tmp_path, hook, rtol):
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), _ones())
    options = {"hook": hook}
    with _job(tmp_path, options=options, num_servers=2) as job:
        with job.worker(hook=hook, shared_memory=rtol > 0.005) as worker:
            worker.pull()
            worker.push(grads)
            found = worker.pull()
    largest = max(abs(x).max() for x in jax.tree.leaves(grads))
    for x, g in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(x, -g, rtol=0, atol=rtol * largest)


def test_what_is_not_sent_at_once_is_sent_later(tmp_path):
    hook = hooks.top_k(0.25)
    mode = parameter_server.asynchronous()
    with _job(tmp_path, mode=mode, options={"hook": hook}) as job:
        with job.worker(hook=hook) as worker:
            worker.pull()
            worker.push(_ones())
            first = worker.pull()
            assert sum(int((x == -1).sum()) for x in jax.tree.leaves(first)) == 5
            # What is not finite is neither applied nor kept.
            worker.push(_ones(np.inf))
            assert worker.flush() == "rejected"
            for _ in range(3):
                worker.push(_ones(0.0))
                worker.flush()
            # A fourth of 17 elements, rounded up, each time: all after four pushes.
            chex.assert_trees_all_close(worker.pull(), _descended(1))
        metrics = job.servers[0].metrics
        # 5 elements and their places, each in lines of 64 bytes.
        assert metrics["pushed_bytes"] == 5 * 128


def _vanish(worker):
    """Ends a worker without a word, as if its host was gone."""
    worker._connection._client.session = b"nobody"
    worker._connection._client.hellos.clear()
    worker._connection._failure = "gone"
    worker.close()


def test_a_round_goes_on_without_who_is_silent_and_takes_it_back(tmp_path, caplog):
    options = {"lease_s": 0.4}
    with _job(tmp_path, options=options, num_workers=3, num_servers=2) as job:
        with job.worker(0) as a, job.worker(1) as b:
            gone = job.worker(2)
            for worker in (a, b, gone):
                worker.pull()
            # What arrived before counts in its round.
            gone.push(_ones(3.0))
            wait_for(lambda: job.servers[0]._service._leader.num_waiting == 1)
            _vanish(gone)
            a.push(_ones())
            b.push(_ones(2.0))
            assert a.flush() == b.flush() == "applied"
            chex.assert_trees_all_close(a.pull(), _descended(2))
            b.pull()
            for worker in (a, b):
                worker.push(_ones())
            assert a.flush() == "applied"
            chex.assert_trees_all_close(a.pull(), _descended(3))
    assert "Worker 2 has been silent for 0.4 s; it is left out" in caplog.text


@pytest.mark.parametrize("shared_memory", rarely.cases([True, False], often=(False,)))
def test_a_link_that_is_cut_loses_and_doubles_nothing(tmp_path, shared_memory):
    mode = parameter_server.asynchronous()
    with _job(tmp_path, mode=mode, options={"lease_s": 0.8}) as job:
        server = job.addresses
        with Proxy(server[0]) as proxy:
            job.addresses = (proxy.address,)
            with job.worker(shared_memory=shared_memory) as worker:
                for step in range(30):
                    if step % 10 == 5:
                        proxy.cut()
                    worker.push(_ones())
                    if step % 10 == 5:
                        # Longer than the lease, once.
                        threading.Event().wait(1.2 if step == 5 else 0.1)
                        proxy.mend()
                    worker.pull()
                assert worker.version == (1, 30)
                assert worker.counts["applied"] == 30
                chex.assert_trees_all_close(worker.pull(), _descended(30))
        job.addresses = server


def test_servers_go_on_from_the_checkpoint_of_a_stop(tmp_path, caplog):
    folder = tmp_path / "checkpoints"
    options = {"checkpoint_dir": folder, "checkpoint_every": 2}
    mode, tx = parameter_server.asynchronous(), optax.sgd(1.0, momentum=0.5)
    found = []
    for _ in range(2):
        with _job(tmp_path, mode=mode, tx=tx, options=options) as job:
            with job.worker() as worker:
                for _ in range(3):
                    worker.pull()
                    worker.push(_ones())
                worker.flush()
                found.append((worker.version, worker.pull()))
    # Momentum goes on too: steps of 1, 1.5, 1.75, ...
    steps = np.cumsum([2 - 0.5**n for n in range(6)])
    chex.assert_trees_all_close(found[0][1], _descended(steps[2]))
    chex.assert_trees_all_close(found[1][1], _descended(steps[5]))
    assert worker.version == (2, 6)
    assert "the checkpoint of update 3: of 3 updates, 0 are lost" in caplog.text
    with pytest.raises(ValueError, match="has server-0-of-1, and there are 2 servers"):
        _job(tmp_path, mode=mode, tx=tx, options=options, num_servers=2).start(0)
    job = _job(tmp_path, mode=mode, tx=optax.adam(1.0), options=options)
    with pytest.raises(ValueError, match=r"has `.*trace.*this program has `.*count"):
        job.start(0)


def test_without_a_checkpoint_workers_are_told_that_servers_began_anew(tmp_path):
    mode = parameter_server.asynchronous()
    with _job(tmp_path, mode=mode) as job, job.worker() as worker:
        worker.pull()
        worker.push(_ones())
        worker.flush()
        job.servers[0].stop()
        job.threads[0].join(10.0)
        job.start(0)
        with pytest.raises(RuntimeError, match="1.0, and worker 0 has seen 1.1: they"):
            worker.pull()
        worker.close()
