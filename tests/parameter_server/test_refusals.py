"""What does not belong together, or comes from strangers."""

import functools
import logging
import os
import re
import socket
import threading
import time
from contextlib import nullcontext

import jax
import numpy as np
import optax
import pytest

from jdp import hooks, parameter_server
from jdp.parameter_server import (
    admission,
    by_leaf,
    keys,
    messages,
    shards,
    shared_memory_lane,
    updates,
)
from jdp.parameter_server.messages import (
    Ping,
    Pong,
    SharedMemoryOffer,
    Version,
    WorkerHello,
)
from jdp.parameter_server.sockets import ClientSockets
from tests import rarely
from tests.parameter_server.jobs import ThreadJob, free_addresses, wait_for
from tests.runtime import strangers

MULTI_STEPS = optax.MultiSteps(optax.sgd(0.1), 2)
PARAMS = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    mode = parameter_server.asynchronous()
    with ThreadJob(folder, PARAMS, optax.sgd(1.0), mode=mode) as job:
        yield job
        assert not job.errors


def _still_works(job):
    with job.worker() as worker:
        worker.pull()
        worker.push(PARAMS)
        return worker.flush() == "applied"


@pytest.mark.parametrize(
    "params,message",
    [
        (
            {**PARAMS, "w": np.zeros((2, 4), np.float32)},
            r"`\['w'\]` is float32\[2,3\] on the server and float32\[2,4\] on worker 7",
        ),
        (
            {"w": PARAMS["w"], "bias": PARAMS["b"]},
            r"`\['b'\]` on the server is `\['bias'\]` on worker 7",
        ),
        ({**PARAMS, "x": PARAMS["b"]}, r"`\['x'\]` is only on worker 7"),
    ],
)
def test_another_model_is_refused_with_the_path_and_both_values(job, params, message):
    with pytest.raises(RuntimeError, match=message):
        job.worker(7, params=params)
    assert _still_works(job)


@pytest.mark.parametrize("has_checkpoints", [True, False])
@pytest.mark.parametrize("known", [(1, 80), (1, 0), (2, 3), (0, 0), (3, 0)], ids=str)
def test_a_worker_is_refused_where_the_servers_have_lost_what_it_has_seen(
    known, has_checkpoints
):
    known, version = Version(*known), Version(2, 10)
    hello = WorkerHello(b"s", 0, 0, 2, [], "", known, None)
    own = admission.Admission(0, 2, [], "", has_checkpoints)
    text = admission.find_objection(hello, own, version)
    # With checkpoints, update 80 was said to be lost, and training goes on.
    is_lost = known > version or (known == Version(1, 80) and not has_checkpoints)
    assert is_lost == ("they started again without a checkpoint" in text)


def test_a_worker_that_calls_nan_finite_is_refused(tmp_path, monkeypatch):
    with ThreadJob(tmp_path, PARAMS, optax.sgd(1.0)) as own, own.worker() as worker:
        worker.pull()
        monkeypatch.setattr(worker._packer, "pack", _pack_nan)
        with pytest.raises(RuntimeError, match="claims that a gradient is finite, but"):
            worker.push(PARAMS)
            worker.flush()
        worker.close()


def _pack_nan(leaves, memory):
    for part in memory:
        np.frombuffer(part, np.float32)[:] = np.nan
    return True


def test_what_is_no_number_of_samples_is_refused_and_the_worker_goes_on(tmp_path):
    mixed = {"key": jax.random.PRNGKey(0), "x": np.ones(16)}
    with ThreadJob(tmp_path, PARAMS, optax.sgd(1.0)) as own, own.worker() as worker:
        worker.pull()
        for wrong in ("x", None, np.ones(1)):
            with pytest.raises(TypeError, match="`num_samples` must be a number, got"):
                worker.push(PARAMS, num_samples=wrong)
        for batch, found in ((mixed, "2, 16"), ((), "none"), (1.0, "none")):
            with pytest.raises(ValueError, match=f"first dimension.* got {found}"):
                list(worker.steps(lambda params, _: (0.0, params), [batch]))
        batch = {"scale": 2.0, "x": np.ones(16)}
        assert list(worker.steps(lambda params, _: (0.0, params), [batch])) == [0.0]


def test_another_hook_is_refused(job):
    with pytest.raises(RuntimeError, match="`hook` is 'int8' on worker 0 and ''"):
        job.worker(hook=hooks.int8())


def test_another_number_of_servers_is_refused(job):
    place = parameter_server.Place(
        role="worker",
        index=0,
        addresses=(job.addresses[0], job.addresses[0]),
        key_file=job.key_file,
    )
    with pytest.raises(
        RuntimeError, match=r"0 of 1 listens here, and .* server \d of 2"
    ):
        parameter_server.Worker(PARAMS, place=place)


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_wrong_address_and_wrong_keys_are_errors_in_time(job, tmp_path, has_keys):
    (address,) = free_addresses(1) if has_keys else job.addresses
    key_file = job.key_file
    if not has_keys:
        key_file = str(tmp_path / "other keys")
        parameter_server.make_keys(key_file)
    place = parameter_server.Place(
        role="worker", index=0, addresses=(address,), key_file=key_file
    )
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=f"not answered for 0.5 s: 0 at {address}"):
        options = parameter_server.WorkerOptions(timeout_s=0.5)
        parameter_server.Worker(PARAMS, place=place, options=options)
    assert time.monotonic() - start_s < 5.0


def test_another_version_is_refused_on_both_sides(job, monkeypatch):
    monkeypatch.setattr(messages, "VERSION", 9)
    header = messages.encode(Pong(0))
    monkeypatch.undo()
    found = keys.read_keys(job.key_file)
    sockets = ClientSockets(job.addresses, found, most_bytes=0)
    heard = []

    def ask():
        sockets.send(0, header)
        sockets.poll(0.05)
        heard.extend(sockets.receive())
        return heard

    wait_for(ask)
    sockets.close()
    text = "speaks version 9 of the parameter server's protocol, and this process ver"
    with pytest.raises(messages.RefusedError, match=text):
        messages.decode(heard[0].header, messages.to_worker)
    with pytest.raises(messages.MessageError, match=text):
        messages.decode(header, messages.to_worker)


def test_strangers_and_garbage_are_dropped(job, caplog):
    endpoint = f"tcp://{job.addresses[0]}"
    found, ping = keys.read_keys(job.key_file), messages.encode(Ping(b"nobody", 0))
    refusals = job.servers[0]._service._refusals
    refusals._messages._quiet_until_s = -1.0  # whatever was refused by tests before.
    with caplog.at_level(logging.WARNING, "jdp"), strangers.fire(endpoint):
        sockets = ClientSockets(job.addresses, found, most_bytes=0)
        wait_for(
            lambda: sockets.send(0, ping) or sockets.poll(0.05) or sockets.receive()
        )
        for garbage in (b"", b"\x01", b"\x01\x00", b"\x01\x00\xff" * 9, bytes(5000)):
            sockets.send(0, garbage)
            sockets.send(0, garbage, bytes(10))
        with job.worker(timeout_s=20.0) as worker:
            for _ in range(20):
                worker.pull()
                worker.push(PARAMS)
        time.sleep(0.2)
        sockets.close()
    logged = [r for r in caplog.records if "Server 0 has refused" in r.getMessage()]
    assert 1 <= len(logged) < 5
    assert _still_works(job)


def test_hellos_that_are_refused_do_not_flood_the_log(job, caplog):
    """Also those that are welcome, of a worker that leaves and comes again."""
    caplog.set_level(logging.INFO)
    known, ping = keys.read_keys(job.key_file), messages.encode(Ping(b"nobody", 0))
    num_refused = job.servers[0].metrics["refused"]
    others = ClientSockets(job.addresses, known, most_bytes=100)
    wait_for(lambda: others.send(0, ping) or others.poll(0.05) or others.receive())
    plan = shards.plan_shards(PARAMS, 1).plan
    for i in range(200):
        session = i.to_bytes(8, "little")
        other = WorkerHello(session, 0, 0, 9, [], "", Version(), None)
        others.send(0, messages.encode(other), None)
        fits = WorkerHello(
            session, 3, 0, 1, shards.describe_leaves(plan), "", Version(), None
        )
        others.send(0, messages.encode(fits), None)
        others.send(0, messages.encode(messages.Leave(session)), None)
    wait_for(lambda: job.servers[0].metrics["refused"] >= num_refused + 200)
    others.close()
    lines = [r.message for r in caplog.records if re.match("Worker [03] ", r.message)]
    assert len([x for x in lines if "Server 0 of 1 listens here" in x]) <= 2
    assert len([x for x in lines if x == "Worker 3 has come."]) <= 2
    assert _still_works(job)


def test_who_sends_too_much_is_cut_off(job):
    found = keys.read_keys(job.key_file)
    sockets = ClientSockets(job.addresses, found, most_bytes=0)
    for _ in range(3):
        sockets.send(0, b"\x01\x00", bytes(64 << 20))
        time.sleep(0.1)
    sockets.close()
    assert _still_works(job)


def test_a_lane_must_be_what_it_says(tmp_path, monkeypatch):
    made = shared_memory_lane.make_lane(1000)
    assert made is not None
    own, file = made
    offer = file.offer
    own.pushed[:3] = b"abc"
    assert os.stat(offer.path).st_mode & 0o777 == 0o600
    opened = shared_memory_lane.open_lane(offer, least_bytes=1000)
    assert opened is not None and bytes(opened.pushed[:3]) == b"abc"
    other = tmp_path / "file"
    other.write_bytes(bytes(4096 + 2000))
    with other.open("r+b") as plain:
        path = f"/proc/self/fd/{plain.fileno()}".replace(
            "self", offer.path.split("/")[2]
        )
        for wrong in (
            SharedMemoryOffer(offer.path, bytes(16), 1000),
            SharedMemoryOffer(offer.path, offer.token, 999),
            SharedMemoryOffer(offer.path, offer.token, 1 << 40),
            SharedMemoryOffer("/etc/passwd", offer.token, 1000),
            SharedMemoryOffer("/proc/1/fd/../../../etc/passwd", offer.token, 1000),
            SharedMemoryOffer("/proc/999999999/fd/1", offer.token, 1000),
            SharedMemoryOffer(
                re.sub(r"[0-9]", "\u0661", offer.path), offer.token, 1000
            ),
            SharedMemoryOffer(offer.path + "\0", offer.token, 1000),
            SharedMemoryOffer(offer.path, offer.token, -1),
            SharedMemoryOffer(path, bytes(16), 1000),
        ):
            assert shared_memory_lane.open_lane(wrong, least_bytes=1) is None
    assert shared_memory_lane.open_lane(offer, least_bytes=1001) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)  # as memory of another user.
        assert shared_memory_lane.open_lane(offer, least_bytes=1000) is None
    file.close()
    assert shared_memory_lane.open_lane(offer, least_bytes=1000) is None


def test_a_server_without_memory_says_so_to_itself_and_its_workers(
    tmp_path, monkeypatch
):
    mode = parameter_server.asynchronous()
    with ThreadJob(tmp_path, PARAMS, optax.sgd(1.0), mode=mode) as job:

        def fail(*args):
            text = "RESOURCE_EXHAUSTED: Out of memory allocating 17 bytes."
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(job.servers[0]._service._executor.updater, "apply", fail)
        with pytest.raises(RuntimeError, match="Server 0 has failed: RESOURCE_EXHAUST"):
            with job.worker() as worker:
                worker.pull()
                worker.push(PARAMS)
                worker.pull()
    (error,) = job.errors
    assert "Server 0 is out of memory on" in str(error)


def test_a_server_without_memory_at_its_start_says_so(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise MemoryError("no 17 bytes")

    monkeypatch.setattr(updates.Updater, "warm_up", fail)
    job = ThreadJob(tmp_path, PARAMS, optax.sgd(1.0))
    heard = []

    def ask():
        try:
            job.worker()
        except RuntimeError as error:
            heard.append(str(error))

    thread = threading.Thread(target=ask, name="worker")
    thread.start()
    with pytest.raises(
        RuntimeError, match="Server 0 is out of memory on .*no 17 bytes"
    ):
        job.start(0)
    thread.join(10.0)
    assert "The server has failed: Server 0 is out of memory" in heard[0]


def _one_leaf_scales_the_next_step():
    """One leaf reaches the state, and from there all others, a step later."""

    def update(updates, state, params=None):
        first = jax.tree.leaves(updates)[0].sum()
        return jax.tree.map(lambda x: x * state, updates), first

    return optax.GradientTransformation(lambda params: jax.numpy.ones(()), update)


@pytest.mark.parametrize(
    "tx,is_by_leaf",
    [
        (optax.adamw(1e-3), True),
        (optax.chain(optax.clip(1.0), optax.lamb(1e-3)), True),
        (optax.masked(optax.sgd(0.1), lambda p: jax.tree.map(lambda _: True, p)), True),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
        # No gradient is as large as that; two leaves of one size.
        (optax.chain(optax.clip_by_global_norm(1e30), optax.sgd(0.1)), False),
        (optax.apply_if_finite(optax.sgd(0.1), 3), False),
        (optax.scale_by_lbfgs(), False),
        (optax.contrib.dadapt_adamw(1.0), False),
        (optax.contrib.prodigy(1.0), False),
        (optax.contrib.mechanize(optax.sgd(0.1)), False),
        (_one_leaf_scales_the_next_step(), False),
        (optax.inject_hyperparams(optax.adam)(1e-3), True),
        (optax.adafactor(1e-3), True),
        (optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(), True),
        (parameter_server.scale_by_staleness(optax.adam(1e-3)), True),
    ],
    ids="adamw lamb masked global-norm large-norm if-finite lbfgs dadapt prodigy "
    "mechanize next-step injected adafactor multi-steps staleness".split(),
)
def test_an_optimizer_that_needs_all_leaves_is_refused_for_several_servers(
    tx, is_by_leaf
):
    params = {f"w{i}": np.zeros((3, 4), np.float32) for i in range(4)}
    by_leaf.check_is_by_leaf(tx, params, shards.plan_shards(params, 1))
    if is_by_leaf:
        by_leaf.check_is_by_leaf(tx, params, shards.plan_shards(params, 2))
        return
    text = r"mixes leaves: `\['w\d'\]` and `\['w\d'\]`, for example, and each of the 2"
    with pytest.raises(ValueError, match=text):
        by_leaf.check_is_by_leaf(tx, params, shards.plan_shards(params, 2))


def _scaled(find_scale):
    """Scales by what `find_scale` makes of the tree, from the state of the step."""

    def update(updates, state, params=None):
        scale = find_scale(updates)
        updates = jax.tree.map(lambda x: x * state, updates)
        return updates, jax.lax.fori_loop(0, 2, lambda _, s: s + scale, state)

    return optax.GradientTransformation(lambda params: jax.numpy.ones(()), update)


def _add_noise_by_shape(updates, params):
    key = jax.random.key(0)
    return jax.tree.map(lambda x: x + jax.random.normal(key, x.shape), updates)


@pytest.mark.parametrize(
    "tx,message",
    [
        (optax.add_noise(1.0, 0.5, key=jax.random.key(0)), "draws random numbers"),
        (optax.noisy_sgd(0.1, key=0), "updates `.*` differently if it has all 4 lea"),
        (_scaled(lambda updates: len(jax.tree.leaves(updates))), "counts leaves"),
        (_scaled(optax.tree.size), "than if it has the 2 leaves of server 0"),
        (_scaled(lambda updates: 4), None),
        (optax.stateless(_add_noise_by_shape), None),
        (optax.conditionally_mask(optax.adam(0.1), lambda step, **_: step > 1), None),
        (optax.contrib.muon(0.1), None),
        (
            optax.masked(optax.sgd(0.1), lambda p: {k: x.ndim for k, x in p.items()}),
            "cannot be given the leaves of server 0 alone: a mask.*'ndim'",
        ),
        (optax.freeze({f"w{i}": i == 1 for i in range(4)}), None),
        (optax.monitor({"x": lambda u: 1}), "another structure after its first"),
    ],
    ids="noise noisy-sgd leaves size constant by-shape cond muon mask freeze "
    "grows".split(),
)
def test_an_optimizer_that_steps_otherwise_on_some_leaves_is_refused(tx, message):
    params = {f"w{i}": np.zeros((3, 4), np.float32) for i in range(4)}
    by_leaf.check_is_by_leaf(tx, params, shards.plan_shards(params, 1))
    expected = pytest.raises(ValueError, match=message) if message else nullcontext()
    with expected:
        by_leaf.check_is_by_leaf(tx, params, shards.plan_shards(params, 2))


def test_hyperparameters_of_the_widest_dtype_are_refused_for_several_servers():
    params = {"w0": np.zeros(12, np.float32), "w1": np.zeros(12, jax.numpy.bfloat16)}
    plan = shards.plan_shards(params, 2)
    make = functools.partial(optax.inject_hyperparams, optax.sgd)
    with pytest.raises(
        ValueError, match="widest dtype of all leaves, as `optax.inject_hy"
    ):
        by_leaf.check_is_by_leaf(make()(0.1), params, plan)
    tx = make(hyperparam_dtype=jax.numpy.float32)(0.1)
    by_leaf.check_is_by_leaf(tx, params, plan)


@pytest.mark.parametrize(
    "tx,message",
    [
        (optax.contrib.reduce_on_plateau(), "=` only, .* required .*: 'value'"),
        (
            optax.contrib.sam(optax.sgd(1.0), optax.sgd(1.0), opaque_mode=True),
            "grad_fn must be provided",
        ),
        (optax.stateless(lambda grads, params: grads["w"] + ()), "unsupported operand"),
    ],
    ids="plateau sam other".split(),
)
def test_an_optimizer_that_takes_other_arguments_is_refused_at_the_start(tx, message):
    one, two = (shards.plan_shards(PARAMS, n) for n in (1, 2))
    with pytest.raises((TypeError, ValueError), match=message):
        updates.Updater(PARAMS, tx, one, 0, jax.devices()[0])
    with pytest.raises((TypeError, ValueError), match=message):
        by_leaf.check_is_by_leaf(tx, PARAMS, two)


SAM = optax.contrib.sam(optax.sgd(1.0), optax.sgd(0.5), sync_period=2)


@pytest.mark.parametrize(
    "tx,scale",
    [
        (SAM, 1),
        (optax.chain(optax.scale(2.0), SAM), 2),
        (parameter_server.scale_by_staleness(SAM), 1 / 4),
    ],
    ids="alone chained scaled".split(),
)
def test_an_optimizer_without_an_argument_for_staleness_is_not_given_any(tx, scale):
    plan = shards.plan_shards(PARAMS, 1)
    by_leaf.check_is_by_leaf(tx, PARAMS, shards.plan_shards(PARAMS, 2))
    updater = updates.Updater(PARAMS, tx, plan, 0, jax.devices()[0])
    ones = [np.ones(aval.shape, aval.dtype) for aval in plan.of_server[0].avals]
    updater.apply([ones], [1.0], staleness=4)
    found = [np.empty_like(x) for x in ones]
    updater.copy_into(found)  # A step up, to where the next gradient is taken.
    np.testing.assert_array_equal(found, [0.5 * scale * x for x in ones])


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: parameter_server.sync(backup=-1), "`backup` must be at least 0"),
        (lambda: parameter_server.bounded(staleness=0), "`staleness` must be at lea"),
        (lambda: parameter_server.ServerOptions(lease_s=0), "`lease_s` must be from"),
        (
            lambda: parameter_server.ServerOptions(checkpoint_every=3),
            "needs a `checkpoint_dir`",
        ),
        (
            lambda: parameter_server.ServerOptions(nonfinite="skip"),
            '"reject" or "apply", got \'skip\'',
        ),
        (lambda: parameter_server.WorkerOptions(timeout_s=0), "`timeout_s` must be"),
        (
            lambda: parameter_server.ServerOptions(checkpoint_dir=""),
            "`checkpoint_dir` must be the path of a folder or None, got ''",
        ),
        (
            lambda: parameter_server.ServerOptions(lease_s=float("nan")),
            "`lease_s` must be from 0.01 to 1e6 seconds, got nan",
        ),
        (
            lambda: parameter_server.Place(role="server", index=1, addresses=("a:1",)),
            "less than the 1 servers, got 1",
        ),
        (
            lambda: parameter_server.Place(role="worker", index=0, addresses=("a",)),
            "must be host:port with a port",
        ),
        (
            lambda: shards.plan_shards({"a": np.zeros(3, np.float32)}, 2),
            "1 leaves, too few for 2 servers",
        ),
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "kind,name,value",
    [
        *[("ServerOptions", "lease_s", v) for v in ("5", None, True, 1j)],
        ("ServerOptions", "start_timeout_s", "1"),
        *[("ServerOptions", "checkpoint_every", v) for v in (1.5, True, "1", None)],
        *[("ServerOptions", "checkpoint_dir", v) for v in (5, b"x", True)],
        ("ServerOptions", "hook", "int8"),
        ("ServerOptions", "device", "cpu"),
        *[("WorkerOptions", "timeout_s", v) for v in ("5", None)],
        ("WorkerOptions", "wait_timeout_s", "5"),
        ("WorkerOptions", "hook", hooks.int8),
        ("WorkerOptions", "device", 0),
    ],
)
def test_options_of_a_wrong_type_are_named(kind, name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be .* got {value!r}"[:40]):
        getattr(parameter_server, kind)(**{name: value})


SERVED = {"role": "server", "index": 0, "addresses": ("127.0.0.1:9",)}


@pytest.mark.parametrize(
    "name, value",
    [
        *[("index", v) for v in ("0", 1.0, True, None)],
        *[("num_workers", v) for v in (1.5, "2", True)],
        *[("addresses", v) for v in ("127.0.0.1:99", None, (5,), (b"127.0.0.1:9",))],
        *[("key_file", v) for v in (None, 5)],
    ],
)
def test_a_place_of_a_wrong_type_is_named(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be"):
        parameter_server.Place(**{**SERVED, name: value})


def test_an_address_with_a_scheme_is_refused():
    with pytest.raises(ValueError, match="`addresses` must be host:port .* 'http://a"):
        parameter_server.Place(**{**SERVED, "addresses": ("http://a:29",)})


def test_numbers_of_numpy_are_whole_numbers(tmp_path):
    one = np.int64(1)
    place = parameter_server.Place(
        role="worker", index=np.int32(0), addresses=["a:1"], num_workers=one
    )
    assert place == parameter_server.Place(
        role="worker", index=0, addresses=("a:1",), num_workers=1
    )
    found = (
        place.index,
        place.num_workers,
        parameter_server.bounded(staleness=one).staleness,
        parameter_server.sync(backup=one).backup,
        parameter_server.ServerOptions(
            checkpoint_every=one, checkpoint_dir="x"
        ).checkpoint_every,
    )
    assert [type(x) for x in found] == [int] * 5


@pytest.mark.parametrize(
    "name, change",
    [
        *[("tx", {"tx": tx}) for tx in (None, optax.sgd, 5, MULTI_STEPS)],
        ("place", {"place": "x"}),
        *[
            ("options", {"options": options})
            for options in ({}, parameter_server.WorkerOptions())
        ],
        *[
            (r"params\['a'\]", {"params": {"a": leaf}})
            for leaf in ("x", object(), np.ma.masked_array(np.ones(2, np.float32)))
        ],
    ],
)
def test_arguments_of_a_wrong_type_are_named(name, change):
    given = {
        "params": PARAMS,
        "tx": optax.sgd(1.0),
        "place": parameter_server.Place(**SERVED),
        **change,
    }
    params, tx = given.pop("params"), given.pop("tx")
    with pytest.raises(TypeError, match=f"`{name}` (must be|is a masked array)"):
        parameter_server.Server(params, tx, **given)
    if name == "tx":
        with pytest.raises(TypeError, match="`tx` must be an optimizer"):
            parameter_server.scale_by_staleness(tx)
    if type(tx) is optax.MultiSteps:
        with pytest.raises(TypeError, match=r"or `.*\.gradient_transformation\(\)`"):
            parameter_server.scale_by_staleness(tx)


@pytest.mark.parametrize("path", [None, 987])
def test_keys_need_a_path(path):
    with pytest.raises(TypeError, match="`path` must be the path of a file, got"):
        parameter_server.make_keys(path)


@pytest.mark.parametrize("power", [None, "1", 1j, True])
def test_a_power_that_is_no_number_is_named(power):
    with pytest.raises(TypeError, match="`power` must be a number"):
        parameter_server.scale_by_staleness(optax.sgd(1.0), power=power)


def test_a_worker_names_what_is_of_a_wrong_type(job):
    with pytest.raises(TypeError, match="`shared_memory` must be True or False"):
        parameter_server.WorkerOptions(shared_memory="no")
    place = parameter_server.Place(**{**SERVED, "role": "worker"})
    with pytest.raises(TypeError, match="`options` must be"):
        parameter_server.Worker(
            PARAMS, place=place, options=parameter_server.ServerOptions()
        )
    with job.worker() as worker:
        worker.pull()
        masked = np.ma.masked_array(PARAMS["b"], [1, 0, 0])
        with pytest.raises(TypeError, match=r"`grads\['b'\]` is a masked array"):
            worker.push({**PARAMS, "b": masked})
        with pytest.raises(TypeError, match=r"`grads\['b'\]` .*byte order"):
            worker.push({**PARAMS, "b": np.ones(3, ">f4")})
        with pytest.raises(TypeError, match="`grad_fn` must return .*, got float"):
            next(worker.steps(lambda params, batch: 1.0, [np.ones((2, 2))]))
        with pytest.raises(TypeError, match="`batches` must be an iterable"):
            next(worker.steps(lambda params, batch: (1.0, params), None))
        worker.push(PARAMS)
        assert worker.flush() == "applied"


@pytest.mark.parametrize("backup", [2, 5])
def test_a_round_that_waits_for_no_worker_is_refused(tmp_path, backup):
    mode = parameter_server.sync(backup=backup)
    job = ThreadJob(tmp_path, PARAMS, optax.sgd(1.0), mode=mode, num_workers=2)
    with pytest.raises(ValueError, match=f"number of workers, 2, got {backup}"):
        job.start(0)
    job.kwargs["mode"] = "sync"
    with pytest.raises(TypeError, match="`mode` must be `sync.*, got 'sync'"):
        job.start(0)


def test_a_host_without_an_address_is_named(tmp_path):
    job = ThreadJob(tmp_path, PARAMS, optax.sgd(1.0))
    job.addresses = ("256.1.1.1:5555",)
    with pytest.raises(RuntimeError, match="listen at 256.1.1.1:5555: '256.1.1.1' has"):
        job.start(0)
    job.addresses = ("*:5555",)
    with pytest.raises(RuntimeError, match=r"`addresses` has '\*:5555', to which"):
        job.worker()


@pytest.mark.parametrize("what", ["other keys", "garbage", "silence"])
def test_each_kind_of_stranger_leaves_a_line_in_the_log(tmp_path, caplog, what):
    with ThreadJob(tmp_path, PARAMS, optax.sgd(1.0)) as own:
        if what == "other keys":
            path = str(tmp_path / "other keys")
            parameter_server.make_keys(path)
            sockets = ClientSockets(own.addresses, keys.read_keys(path), most_bytes=0)
            wait_for(lambda: "not have the keys of this job" in caplog.text)
            sockets.close()
        else:
            host, _, port = own.addresses[0].rpartition(":")
            sent = b"GET / HTTP/1.1\r\n\r\n" + bytes(90) if what == "garbage" else b""
            for _ in range(3):
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(sent)
            wait_for(lambda: "it speaks another protocol" in caplog.text)
        assert "Connections dropped that are not of this job: 1; of the last" in (
            caplog.text
        )


def test_a_number_that_two_workers_have_is_refused_by_name(tmp_path, caplog):
    with ThreadJob(
        tmp_path,
        PARAMS,
        optax.sgd(1.0),
        num_workers=2,
        mode=parameter_server.asynchronous(),
        options=parameter_server.ServerOptions(lease_s=4.0, start_timeout_s=0.5),
    ) as own:
        process = rf"process {os.getpid()} on {re.escape(socket.gethostname())}"
        text = rf"index 0 is taken: {process} has it and is alive, and {process} uses"
        with own.worker() as worker:
            with pytest.raises(RuntimeError, match=text + ".*--first"):
                own.worker()
            worker.pull()
            worker.push(PARAMS)
        # Worker 1 never comes: the other one had its place.
        own.threads[0].join(20.0)
        assert not own.threads[0].is_alive()
    assert re.search("Worker 0 is refused: .*" + text, caplog.text)
    assert "1 of 2 workers have never come, and others had the same" in caplog.text
    assert "Connections dropped" not in caplog.text


def test_a_number_that_no_worker_has_is_refused(tmp_path):
    with pytest.raises(ValueError, match="less than `num_workers`, got 7 of 2"):
        parameter_server.Place(
            role="worker", index=7, addresses=("a:1",), num_workers=2
        )
    with ThreadJob(tmp_path, PARAMS, optax.sgd(1.0), num_workers=2) as own:
        own.num_workers = None  # The worker does not know.
        with pytest.raises(
            RuntimeError, match="7 is out of range.* workers 0 to 1.*Place"
        ):
            own.worker(7)


def test_a_push_before_any_pull_is_refused_in_sync_mode(tmp_path):
    with ThreadJob(tmp_path, PARAMS, optax.sgd(1.0)) as own, own.worker() as worker:
        with pytest.raises(RuntimeError, match="`push` before any `pull`: in sync"):
            worker.push(PARAMS)
        worker.pull()
        worker.push(PARAMS)
        assert worker.flush() == "applied"


@pytest.mark.parametrize("has_come", rarely.cases([True, False], often=(True,)))
def test_a_wait_that_is_too_long_names_the_workers_that_are_waited_for(
    tmp_path, has_come
):
    with ThreadJob(tmp_path, PARAMS, optax.sgd(1.0), num_workers=3) as own:
        others = [own.worker(i) for i in (1, 2)] if has_come else []
        worker = own.worker(0, wait_timeout_s=3.0)
        worker.pull()
        worker.push(PARAMS)
        if others:
            others[1].pull()
            others[1].push(PARAMS)
        names = "worker 1: look" if has_come else "worker 1, 2: look"
        with pytest.raises(RuntimeError, match=f"a push is settled.*wait for {names}"):
            worker.flush()
        for each in (worker, *others):
            each.close()


def test_a_worker_after_the_end_is_told_that_nothing_listens(tmp_path):
    with ThreadJob(tmp_path, PARAMS, optax.sgd(1.0), num_workers=1) as own:
        with own.worker() as worker:
            worker.pull()
        own.threads[0].join(10.0)
        with pytest.raises(RuntimeError, match="Nothing listens there now: the job is"):
            own.worker(timeout_s=0.5)


@pytest.mark.parametrize(
    "hook",
    [
        hooks.power_sgd(2),
        hooks.power_sgd(2, start_step=3),
        hooks.chain(hooks.power_sgd(2), hooks.cast("bfloat16")),
    ],
    ids=["power_sgd", "power_sgd that begins later", "power_sgd in bfloat16"],
)
def test_a_hook_that_sends_in_rounds_cannot_compress_a_push(tmp_path, hook):
    params = {"w": np.zeros((24, 16), np.float32), "b": np.zeros(16, np.float32)}
    job = ThreadJob(tmp_path, params, optax.sgd(1.0))
    with pytest.raises(ValueError, match="cannot compress a push: its result does not"):
        job.worker(hook=hook)


def test_parameters_must_be_floats():
    with pytest.raises(TypeError, match=r"`params\['step'\]` is int32"):
        shards.plan_shards({"step": np.zeros((), np.int32)}, 1)


def test_keys_are_private(tmp_path):
    path = tmp_path / "keys"
    parameter_server.make_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        parameter_server.make_keys(path)
    path.chmod(0o644)
    with pytest.raises(RuntimeError, match="can be read or written by other users"):
        keys.read_keys(str(path))
    with pytest.raises(RuntimeError, match="cannot be read: No such file"):
        keys.read_keys(str(tmp_path / "none"))


def test_without_a_launcher_it_is_said_what_to_do():
    with pytest.raises(RuntimeError, match="`jdp launch --servers 1 --workers 2"):
        parameter_server.Worker(PARAMS)


def test_an_address_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = ThreadJob(tmp_path, PARAMS, optax.sgd(1.0))
        job.addresses = (f"127.0.0.1:{server.getsockname()[1]}",)
        with pytest.raises(RuntimeError, match="cannot listen at 127.0.0.1:"):
            job.start(0)
