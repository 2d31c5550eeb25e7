"""Training on uneven inputs: torch's numbers, and those of one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from tests import harness

pytestmark = pytest.mark.multiprocess


def _host(tree):
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), tree)


def _flat(params):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


# --- torch's numbers ----------------------------------------------------------------


def _torch_case():
    case = np.load(harness.REFERENCE / "torch_2_13_join.npz")
    params = [(case[f"init.W{i}"], case[f"init.b{i}"]) for i in range(3)]
    return case, params


def _torch_step(tx):
    """A step that knows nothing of weights: the `Join` tells it who has data."""

    @jdp.data_parallel
    def step(carry, batch):
        params, state = carry
        loss, grads = jdp.value_and_grad(harness.torch_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), {"loss": loss}

    return step


def _weighted_torch_loss(params, batch, weight):
    x, y = batch
    errors = jax.vmap(lambda x, y: harness.torch_loss(params, (x, y)))(x, y)
    return (errors * weight).sum() / weight.sum()


def _weighted_torch_step(tx, divide_by):
    @jdp.data_parallel
    def step(carry, batch, weight):
        params, state = carry
        grad_fn = jdp.value_and_grad(
            _weighted_torch_loss, weight=weight.sum(), divide_by=divide_by
        )
        loss, grads = grad_fn(params, batch, weight)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), {"loss": loss}

    return step


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
}
DIVISORS = {"div_initial": "world", "div_effective": "active"}


def _optimizers_on(num_processes):
    # On more processes more is reduced; what the optimizer makes of it stays.
    return list(OPTIMIZERS) if num_processes == 2 else ["momentum"]


def _train_as_torch(world):
    case, params = _torch_case()
    # Four processes take half of a rank's samples each: the mean stays what it is.
    share = world.process_count // 2
    rank, part = divmod(world.process_index, share)
    x, y = (case[f"w2_5_8.{name}"][rank] for name in "XY")
    x, y = (np.split(a, share, axis=1)[part] for a in (x, y))
    batches = [(x[k], y[k]) for k in range((5, 8)[rank])]
    errors = {}
    for optimizer, (divisor, divide_by) in itertools.product(
        _optimizers_on(world.process_count), DIVISORS.items()
    ):
        tx, name = OPTIMIZERS[optimizer](), f"w2_5_8.{optimizer}.{divisor}"
        expected = case[f"{name}.traj"]

        step = _torch_step(tx)
        carry = jdp.replicate(world, (params, tx.init(params)))
        with jdp.Join([step], divide_by=divide_by):
            for k, batch in enumerate(batches):
                carry, _ = step(carry, batch)
                error = np.abs(_flat(_host(carry[0])) - expected[k + 1]).max()
                errors[f"{name} Join {k}"] = error
        jdp.check_replicas(step.last_state, world=world)
        final = _flat(_host(step.last_state[0]))
        errors[f"{name} Join"] = np.abs(final - case[f"{name}.final"][rank]).max()

        step = _weighted_torch_step(tx, divide_by)
        carry = jdp.replicate(world, (params, tx.init(params)))
        count = 0
        for batch, weight in jdp.join_batches(batches, world=world):
            carry, _ = step(carry, batch, weight)
            error = np.abs(_flat(_host(carry[0])) - expected[count + 1]).max()
            errors[f"{name} batches {count}"] = error
            count += 1
        assert count == 8
        jdp.check_replicas(carry, world=world)

    step = _torch_step(optax.sgd(0.1))
    state = optax.sgd(0.1).init(params)
    carry = jdp.replicate(world, (params, state))
    message = ""
    try:
        with jdp.Join([step], throw_on_early_termination=True):
            for batch in batches:
                carry, _ = step(carry, batch)
    except RuntimeError as error:
        message = str(error)
    error = np.abs(_flat(_host(carry[0])) - case["w2_5_8.throw.final"][rank]).max()
    errors["throw"] = error
    return errors, message


def _in_two():
    return {"torch": _train_as_torch(jdp.init())}


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.slow
def test_processes_train_as_those_of_torch_do(find_four, num_processes):
    found = harness.run_checked(_in_two, 2) if num_processes == 2 else find_four(1)
    values = [value["torch"] for value in found]
    counts = np.repeat([5, 8], num_processes // 2)
    for (errors, message), num_batches in zip(values, counts, strict=True):
        num_cases = len(DIVISORS) * len(_optimizers_on(num_processes))
        assert len(errors) == num_cases * (num_batches + 1 + 8) + 1
        assert max(errors.values()) < 1e-5, errors
        assert "exhausted" in message
    assert values[0][1] == "Rank 0 exhausted all inputs."


# --- One device ---------------------------------------------------------------------


def _in_four():
    """What four processes find; one job for many tests."""
    world = jdp.init()
    found = {"every sample": _train_on_every_sample(world)}
    if world.num_local_replicas == 1:
        found["joined"] = _train_joined(world)
        found["other states"] = _end_with_other_states(world)
        found["torch"] = _train_as_torch(world)
    return found


@pytest.fixture(scope="module")
def find_four():
    """Their answers, by the devices of each."""
    return functools.cache(
        lambda devices: harness.run_checked(_in_four, 4, devices_per_process=devices)
    )


COUNTS = (3, 0, 5, 5)


def _own_batches(process, count, size=4):
    rng = np.random.default_rng(10 + process)
    return [
        {
            "x": rng.normal(size=(size, 5)).astype(np.float32),
            "y": rng.normal(size=(size, 3)).astype(np.float32),
        }
        for _ in range(count)
    ]


def _alone(tx, counts):
    """One device: in each iteration the mean over the batches that there are."""

    @harness.jit_fast
    def step(params, state, batches):
        grads = [jax.grad(harness.oracle_loss)(params, batch) for batch in batches]
        mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *grads)
        updates, state = tx.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    params = harness.oracle_params()
    state = tx.init(params)
    everyone = [_own_batches(p, c) for p, c in enumerate(counts)]
    for k in range(max(counts)):
        batches = [batches[k] for batches in everyone if k < len(batches)]
        params, state = step(params, state, batches)
    return _flat(jax.tree.map(np.asarray, params))


def _oracle_step(tx):
    @jdp.data_parallel
    def step(carry, batch):
        params, state = carry
        loss, grads = jdp.value_and_grad(harness.oracle_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return step


def _optimizers():
    # Three steps a window, so that processes run out inside of one.
    window = optax.MultiSteps(optax.adam(0.05), every_k_schedule=3)
    return {"adam": optax.adam(0.05), "accumulation": window}


def _train_joined(world):
    own = _own_batches(world.process_index, COUNTS[world.process_index])
    finals = {}
    for name, tx in _optimizers().items():
        step = _oracle_step(tx)
        params = harness.oracle_params()
        carry = jdp.replicate(world, (params, tx.init(params)))
        example = carry, _own_batches(0, 1)[0]
        with jdp.Join([step], example=example):
            for batch in own:
                carry, _ = step(carry, batch)
        jdp.check_replicas(step.last_state, world=world)
        finals[name] = _flat(_host(step.last_state[0]))
    finals["sharded"] = _train_sharded(world, own)
    return finals


class _ShardedAdam(jdp.Joinable, jdp.JoinHook):
    """Adam, each replica holding the moments of a part of the parameters alone."""

    def __init__(self, world, params):
        self.world, self.size, self.tx = world, params.size, optax.adam(0.05)
        part = -(-params.size // world.num_replicas)
        moments = self.tx.init(np.zeros(part, np.float32))
        spread = jax.tree.map(
            lambda x: np.broadcast_to(x, (world.num_local_replicas, *np.shape(x))),
            moments,
        )
        self.state = jdp.replicate(world, params), jdp.global_batch(world, spread)
        sharded, whole = PartitionSpec(world.axis_name), PartitionSpec()
        self.step = jax.jit(
            jax.shard_map(
                functools.partial(self._step, part),
                mesh=world.mesh,
                in_specs=((whole, sharded), sharded, sharded),
                out_specs=(whole, sharded),
                check_vma=False,
            )
        )

    def _step(self, part, state, batch, weight):
        params, moments = state
        moments = jax.tree.map(lambda x: x[0], moments)
        grad_fn = jdp.value_and_grad(_flat_loss, weight=weight[0])
        _, grads = grad_fn(params, batch)
        start = part * jax.lax.axis_index("data")
        mine = jax.lax.dynamic_slice(_padded(grads, 4 * part), (start,), (part,))
        update, moments = self.tx.update(mine, moments)
        updates = jax.lax.all_gather(update, "data", tiled=True)[: self.size]
        return params + updates, jax.tree.map(lambda x: x[None], moments)

    def __call__(self, batch, has_data=1.0):
        jdp.Join.notify_join_context(self)
        self._run(batch, 1.0)

    def _run(self, batch, weight):
        weights = np.full(self.world.num_local_replicas, weight, np.float32)
        placed = jdp.global_batch(self.world, (batch, weights))
        self.state = self.step(self.state, *placed)

    @property
    def join_world(self):
        return self.world

    def join_hook(self, **kwargs):
        return self

    def main_hook(self):
        self._run(jax.tree.map(np.zeros_like, _own_batches(0, 1)[0]), 0.0)


def _padded(x, size):
    return jnp.concatenate([x, jnp.zeros(size - x.size, x.dtype)])


def _flat_loss(flat, batch):
    shapes = {"b0": (16,), "b1": (3,), "w0": (5, 16), "w1": (16, 3)}
    params, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        params[name] = flat[start : start + size].reshape(shape)
        start += size
    return harness.oracle_loss(params, batch)


def _train_sharded(world, own):
    sharded = _ShardedAdam(world, _flat(harness.oracle_params()))
    with jdp.Join([sharded]):
        for batch in own:
            sharded(batch)
    assert isinstance(sharded.state[1][0].mu.sharding, NamedSharding)
    return _host(sharded.state[0])


@pytest.mark.slow
def test_four_processes_train_as_one_device_does(find_four):
    values = [found["joined"] for found in find_four(1)]
    expected = {name: _alone(tx, COUNTS) for name, tx in _optimizers().items()}
    # A process that has joined updates the moments that it alone holds, with the
    # gradients of the others: as plain Adam does.
    expected["sharded"] = expected["adam"]
    for finals in values:
        for name, final in finals.items():
            # Adam divides by the root of squares: rounding is amplified at first.
            np.testing.assert_allclose(final, expected[name], atol=2e-5, err_msg=name)
            np.testing.assert_array_equal(final, values[0][name])


SIZES = ([3, 4, 0, 1], [], [6, 2], [1, 5, 5, 2, 3])


def _uneven_batches(process):
    everything = _own_batches(process, len(SIZES[process]), size=6)
    pairs = zip(everything, SIZES[process], strict=True)
    return [jax.tree.map(lambda x, n=n: x[:n], batch) for batch, n in pairs]


def _weighted_loss(params, batch, weight):
    h = jnp.tanh(batch["x"] @ params["w0"] + params["b0"])
    errors = ((h @ params["w1"] + params["b1"] - batch["y"]) ** 2).mean(-1)
    return (errors * weight).sum() / weight.sum()


def _train_on_every_sample(world):
    tx = jdp.distributed_optimizer(optax.sgd(0.1, momentum=0.9))

    @jdp.data_parallel
    def step(carry, batch, weight):
        params, state = carry
        grad_fn = jdp.local_gradients(_weighted_loss)
        loss, grads = grad_fn(params, batch, weight)
        updates, state = tx.update(grads, state, params, weight=weight.sum())
        metrics = {"loss": loss, "squares": (weight**2).sum() / weight.sum()}
        return (optax.apply_updates(params, updates), state), metrics

    @jdp.data_parallel
    def accumulated(carry, batch, weight):
        params, state = carry
        grad_fn = jdp.accumulate_gradients(
            lambda p, both: _weighted_loss(p, *both), 2, weight=weight
        )
        loss, grads = grad_fn(params, (batch, weight))
        updates, state = alone.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), {"loss": loss}

    alone = optax.sgd(0.1, momentum=0.9)
    params = harness.oracle_params()
    found = []
    for fn in (step, accumulated):
        carry = jdp.replicate(world, (params, tx.init(params)))
        own = (batch for batch in _uneven_batches(world.process_index))
        losses = []
        for batch, weight in jdp.join_batches(own, world=world):
            carry, metrics = fn(carry, batch, weight)
            losses.append(float(metrics["loss"]))
        jdp.check_replicas(carry, world=world)
        found.append((_flat(_host(carry[0])), losses))
    return found


@pytest.mark.parametrize("devices_per_process", [1, 2])
@pytest.mark.slow
def test_every_sample_counts_once_and_the_same(find_four, devices_per_process):
    everyone = [_uneven_batches(process) for process in range(4)]
    batches = []
    for k in range(max(map(len, everyone))):
        parts = [batches[k] for batches in everyone if k < len(batches)]
        batches.append(jax.tree.map(lambda *xs: np.concatenate(xs), *parts))
    params, losses = harness.train_alone(
        harness.oracle_params(), batches, optax.sgd(0.1, momentum=0.9)
    )
    for found in find_four(devices_per_process):
        for final, found_losses in found["every sample"]:
            np.testing.assert_allclose(final, _flat(params), atol=1e-6)
            np.testing.assert_allclose(found_losses, losses, rtol=1e-6)


def _end_with_other_states(world):
    """Each process goes on from a state of its own, which nothing notices."""

    @jdp.data_parallel(donate_state=False)
    def step(state, batch):
        return state, {"mean": batch.mean()}

    own = jax.device_put([np.float32(world.process_index)], list(world.local_devices))
    state = jax.make_array_from_single_device_arrays((), world.replicated, own)
    with jdp.Join([step], example=(state, np.ones(2))):
        for _ in range((2, 3, 3, 1)[world.process_index]):
            step(state, np.ones(2, np.float32))
        before = float(step.last_state.addressable_data(0))
    return before, float(step.last_state.addressable_data(0))


@pytest.mark.slow
def test_the_final_state_is_that_of_the_last_joiner_with_the_highest_index(find_four):
    values = [found["other states"] for found in find_four(1)]
    assert values == [(0, 2), (1, 2), (2, 2), (3, 2)]


def _join_without_example():
    world = jdp.init(timeout_s=3.0)
    tx = optax.sgd(0.1)
    step = _oracle_step(tx)
    params = harness.oracle_params()
    carry = jdp.replicate(world, (params, tx.init(params)))

    def run():
        with jdp.Join([step]):
            for batch in _own_batches(0, 2 * world.process_index):
                step(carry, batch)

    return harness.error_text(run)


def test_a_step_that_was_never_called_asks_for_an_example():
    outcome = harness.run_processes(_join_without_example, 2)
    assert "Pass `example=(state, *batches)` to `jdp.Join`" in outcome.values[0][0]
