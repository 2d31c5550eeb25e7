"""Types that the functions of jdp keep, for type checkers alone; nothing here runs."""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import jdp
import jdp.flax_nnx
from jdp import eager, parameter_server
from jdp.hooks import CommHook, ErrorFeedbackState, PowerSGDState
from jdp.optimizers.skip_unused import SkipUnusedState


class Batch(NamedTuple):
    x: jax.Array


class Params(NamedTuple):
    w: jax.Array


class State(NamedTuple):
    params: Params
    num_steps: int


Metrics = dict[str, jax.Array]
Value = tuple[jax.Array, Metrics]
Result = tuple[State, Metrics]
Norms: TypeAlias = jdp.GradientNorms


def loss_fn(params: Params, batch: Batch, scale: float = 1.0) -> jax.Array:
    return jnp.mean(batch.x * params.w) * scale


def loss_and_metrics(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
    return loss_fn(params, batch), {}


def loosely_typed(params: Params, batch: Batch) -> tuple[Any, ...]:
    return loss_fn(params, batch), {}


def of_two(a: Params, b: Batch) -> jax.Array:
    return loss_fn(a, b)


def placement(world: jdp.World, state: State, host: NDArray[np.float32]) -> None:
    assert_type(jdp.replicate(world, state), State)
    assert_type(jdp.replicate(world, state, process=1), State)
    assert_type(jdp.replicate(world, host), jax.Array)
    assert_type(jdp.replicate(world, 0.5), jax.Array)
    assert_type(jdp.replicate(world, {"w": host, "v": host}), dict[str, jax.Array])
    assert_type(jdp.replicate(world, {"w": state.params.w}), dict[str, jax.Array])
    assert_type(jdp.replicate(world, {"p": state}), dict[str, State])
    assert_type(jdp.global_batch(world, Batch(state.params.w)), Batch)
    assert_type(jdp.global_batch(world, host), jax.Array)
    assert_type(jdp.global_batch(world, {"x": host}), dict[str, jax.Array])
    assert_type(jdp.copy_per_replica(state), jdp.PerReplica[State])
    assert_type(jdp.copy_per_replica(state).value.params, Params)
    assert_type(jdp.copy_per_replica(host), jdp.PerReplica[jax.Array])
    rows: jdp.PerReplica = jdp.PerReplica(state)
    assert_type(rows.value, Any)


def gradients(params: Params, batch: Batch) -> None:
    grad_fn = jdp.value_and_grad(loss_fn, weight=batch.x.size, all_reduce="auto")
    assert_type(grad_fn(params, batch), tuple[jax.Array, Params])
    assert_type(grad_fn(params, batch=batch, scale=2.0), tuple[jax.Array, Params])
    with_aux = jdp.value_and_grad(loss_and_metrics, has_aux=True)
    assert_type(with_aux(params, batch), tuple[Value, Params])
    (loss, metrics), grads = with_aux(params, batch)
    assert_type((loss, metrics, grads), tuple[jax.Array, Metrics, Params])
    with_used = jdp.value_and_grad(loss_fn, find_unused=True)
    assert_type(with_used(params, batch)[0], tuple[jax.Array, Params])
    with_norms = jdp.value_and_grad(loss_and_metrics, has_aux=True, find_norms=True)
    found = with_norms(params, batch)
    assert_type(found, tuple[tuple[Value, Params], jdp.GradientNorms])
    hook = jdp.hooks.power_sgd(4)
    state = jdp.hooks.init_state(hook, params)
    hooked = jdp.value_and_grad(loss_fn, hook=hook, hook_state=state)
    assert_type(hooked(params, batch)[1], PowerSGDState)
    both = jdp.value_and_grad(loss_fn, find_norms=True, hook=hook, hook_state=state)
    assert_type(
        both(params, batch),
        tuple[tuple[tuple[jax.Array, Params], Norms], PowerSGDState],
    )
    every = jdp.value_and_grad(
        loss_and_metrics,
        has_aux=True,
        find_unused=True,
        find_norms=True,
        hook=hook,
        hook_state=state,
    )
    (((value, grads), _), norms), state = every(params, batch)
    assert_type((value, grads, norms), tuple[Value, Params, Norms])
    assert_type(state, PowerSGDState)
    second = jdp.value_and_grad(of_two, 1)(params, batch)
    assert_type(second[0], jax.Array)
    loss, _ = jdp.value_and_grad(of_two, argnums=(0, 1))(params, batch)
    assert_type(loss, jax.Array)


def gradients_of_other_functions(params: Params, batch: Batch) -> None:
    """Losses of which less is known are taken, too."""
    loss, _ = jdp.value_and_grad(lambda p: loss_fn(p, batch))(params)
    assert_type(loss, jax.Array)
    loss, _ = jdp.value_and_grad(lambda p, b: loss_fn(p, b))(params, batch)
    assert_type(loss, jax.Array)
    loss, _ = jdp.value_and_grad(jax.jit(loss_fn))(params, batch)
    assert_type(loss, jax.Array)
    loss, _ = jdp.value_and_grad(jax.checkpoint(loss_fn))(params, batch, scale=2.0)
    assert_type(loss, jax.Array)

    def wrapped(*args: Any, **kwargs: Any) -> jax.Array:
        return loss_fn(*args, **kwargs)

    loss, _ = jdp.value_and_grad(wrapped)(params, batch, scale=2.0)
    assert_type(loss, jax.Array)
    jax.jit(jdp.value_and_grad(loss_fn))(params, batch)
    with_aux = jdp.value_and_grad(loosely_typed, has_aux=True)
    assert_type(with_aux(params, batch)[1], Params)


def further_gradients(params: Params, batch: Batch, used: Params) -> None:
    micro = jdp.accumulate_gradients(loss_and_metrics, 4, has_aux=True, dtype="float32")
    assert_type(micro(params, batch), tuple[tuple[jax.Array, Metrics], Params])
    plain = jdp.accumulate_gradients(loss_fn, 4, find_unused=True)
    assert_type(plain(params, batch)[0], tuple[jax.Array, Params])
    local = jdp.local_gradients(loss_fn)(params, batch)
    assert_type(local, tuple[jax.Array, Params])
    (local, _) = jdp.local_gradients(loss_fn, find_unused=True)(params, batch)
    assert_type(local, tuple[jax.Array, Params])
    assert_type(jdp.sync_gradients(params), Params)
    pair = jdp.sync_gradients(params, used=used, divide_by="active")
    assert_type(pair, tuple[Params, Params])
    with_norms = jdp.sync_gradients(params, find_norms=True)
    assert_type(with_norms, tuple[Params, jdp.GradientNorms])
    hook = jdp.hooks.top_k(0.1)
    hook_state = jdp.hooks.init_state(hook, params)
    hooked = jdp.sync_gradients(params, used=used, hook=hook, hook_state=hook_state)
    assert_type(hooked, tuple[tuple[Params, Params], ErrorFeedbackState])
    assert_type(jdp.sync_in_backward(params), Params)
    assert_type(jdp.mean_loss(loss_fn)(params, batch, scale=2.0), jax.Array)
    assert_type(jdp.average({"loss": 1.0}), dict[str, jax.Array])
    assert_type(jdp.average(params, weight=2), Params)
    assert_type(jdp.average(1.0), jax.Array)
    assert_type(jdp.broadcast_from(params, 0), Params)
    assert_type(jdp.sync_buffers(params), Params)
    assert_type(jdp.sync_buffers(params, policy="local"), jdp.PerReplica[Params])
    plan = jdp.plan_buckets(params)
    buffers = jdp.flatten_buckets(plan, params)
    assert_type(jdp.unflatten_buckets(plan, buffers), Params)


@jdp.data_parallel
def step(state: State, batch: Batch) -> tuple[State, Metrics]:
    return state, {"loss": loss_fn(state.params, batch)}


@jdp.data_parallel(static_argnames="train", replicated_argnames=("rate", "key"))
def step_with_options(
    state: State, batch: Batch, *, rate: float, train: bool = True
) -> tuple[State, Metrics]:
    return state, {"loss": loss_fn(state.params, batch) * rate * train}


@jdp.data_parallel
def step_of_arrays(
    state: State, images: jax.Array, labels: jax.Array, *, rate: float = 1.0
) -> tuple[State, Metrics]:
    return state, {"loss": jnp.mean(images @ labels) * rate}


@jdp.data_parallel
def step_of_dict(
    state: State, batch: dict[str, jax.Array], weight: jax.Array
) -> tuple[State, Metrics]:
    return state, {"loss": jnp.mean(batch["x"] * weight)}


@jdp.data_parallel
def step_with_weight(
    state: State, batch: Batch, weight: jax.Array
) -> tuple[State, Metrics]:
    return state, {"loss": jnp.mean(batch.x * weight)}


States = tuple[Params, optax.OptState]
ThreeResults = tuple[Params, optax.OptState, jax.Array]


@jdp.data_parallel(num_states=2)
def step_of_states(
    params: Params, opt_state: optax.OptState, batch: jax.Array, *, rate: float = 1.0
) -> ThreeResults:
    return params, opt_state, jnp.mean(batch) * rate


@jdp.data_parallel(num_states=2, split_batches=True)
def step_without_metrics(
    params: Params, opt_state: optax.OptState, batch: dict[str, jax.Array]
) -> States:
    return params, opt_state


def plain(
    params: Params, opt_state: optax.OptState, x: jax.Array, y: jax.Array
) -> ThreeResults:
    return params, opt_state, jnp.mean(x * y)


@jdp.data_parallel
def state_alone(state: State, batch: jax.Array) -> State:
    return state


@jdp.data_parallel(split_batches=True)
def state_alone_with_options(state: State, batch: Batch, *, rate: float = 1.0) -> State:
    return state


class Trainer:
    @jdp.data_parallel(num_states=2)
    def of_states(self, params: Params, state: State, batch: Batch) -> State:
        return state

    @jdp.data_parallel
    def alone(self, state: Params, batch: Batch) -> Params:
        return state

    @jdp.data_parallel(donate_state=False)
    def alone_with_options(self, state: Params, batch: Batch) -> Params:
        return state

    @jdp.data_parallel
    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        return state, {"loss": loss_fn(state.params, batch)}

    @jdp.data_parallel(donate_state=False)
    def kept(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        return state, {"loss": loss_fn(state.params, batch)}

    @staticmethod
    @jdp.data_parallel
    def static(state: State, batch: Batch) -> tuple[State, Metrics]:
        return state, {"loss": loss_fn(state.params, batch)}

    @classmethod
    @jdp.data_parallel(donate_state=False)
    def of_class(cls, state: State, batch: Batch) -> tuple[State, Metrics]:
        return state, {"loss": loss_fn(state.params, batch)}


def steps(world: jdp.World, state: State, batch: Batch, trainer: Trainer) -> None:
    assert_type(step(state, batch), Result)
    assert_type(step(state=state, batch=batch), Result)
    assert_type(step_with_options(state, batch, rate=0.1, train=False), Result)
    assert_type(trainer.step(state, batch), Result)
    assert_type(trainer.kept(state, batch=batch), Result)
    assert_type(Trainer.step(trainer, state, batch), Result)
    assert_type(trainer.static(state, batch), Result)
    assert_type(trainer.of_class(state, batch), Result)
    assert_type(Trainer.of_class(state, batch), Result)
    assert_type(Trainer.static(state, batch), Result)
    assert_type(step.last_state, State | None)
    made = jdp.data_parallel(lambda s, b: (s, b), world=world)
    made(state, batch)
    assert_type(eager.submit(step, state, batch, name="a"), Result)
    with jdp.Join([step, trainer.step]):
        state, _ = step(state, batch)
    for found, weight in jdp.join_batches([batch], world=world):
        assert_type(found, Batch)
        assert_type(weight, NDArray[np.float32])


def steps_of_several_states(
    params: Params,
    state: State,
    opt_state: optax.OptState,
    host: NDArray[np.float32],
    batch: Batch,
    trainer: Trainer,
) -> None:
    """A step with `num_states` returns what it declares, and so does a state alone."""
    assert_type(step_of_states(params, opt_state, batch.x), ThreeResults)
    assert_type(step_of_states(params, opt_state, host, rate=0.1), ThreeResults)
    assert_type(
        step_of_states(params=params, opt_state=opt_state, batch=batch.x), ThreeResults
    )
    made = jdp.data_parallel(plain, num_states=2)
    assert_type(made(params, opt_state, batch.x, batch.x), ThreeResults)
    assert_type(made(params, opt_state, host, host), ThreeResults)
    assert_type(step_without_metrics(params, opt_state, {"x": batch.x}), States)
    assert_type(step_without_metrics(params, opt_state, {"x": host}), States)
    assert_type(trainer.of_states(params, state, batch), State)
    assert_type(state_alone(state, batch.x), State)
    assert_type(state_alone(state, host), State)
    assert_type(state_alone_with_options(state, batch, rate=0.1), State)
    assert_type(state_alone.last_state, State | None)
    assert_type(trainer.alone(params, batch), Params)
    assert_type(trainer.alone_with_options(params, batch), Params)


@jdp.replicated
def evaluate(params: Params, batch: Batch) -> Metrics:
    return {"loss": loss_fn(params, batch)}


@jdp.replicated(split_batches=True, replicated_argnames="rate")
def evaluate_with_options(
    params: Params, x: jax.Array, weight: jax.Array, *, rate: float = 1.0
) -> Value:
    return jnp.mean(x * weight) * rate, {}


class Evaluator:
    @jdp.replicated
    def measure(self, params: Params, batch: Batch) -> jax.Array:
        return loss_fn(params, batch)


def replicated_functions(
    params: Params, batch: Batch, host: NDArray[np.float32], evaluator: Evaluator
) -> None:
    assert_type(evaluate(params, batch), Metrics)
    assert_type(evaluate(params, batch=batch), Metrics)
    assert_type(evaluate(params, batch, weight=host), Metrics)
    assert_type(evaluate.over(params, [batch]), Metrics)
    assert_type(evaluate_with_options(params, batch.x, batch.x), Value)
    assert_type(evaluate_with_options(params, host, weight=host, rate=0.1), Value)
    assert_type(evaluate_with_options(params, host), Value)
    assert_type(evaluate_with_options.over(params, [host], rate=0.1), Value)
    assert_type(evaluator.measure(params, batch), jax.Array)
    assert_type(evaluator.measure(params, batch, weight=host), jax.Array)
    assert_type(evaluator.measure.over(params, [batch]), jax.Array)


class Model:
    """Stands for a module of nnx."""


class Optimizer:
    """Stands for an optimizer of nnx."""


@jdp.flax_nnx.data_parallel
def module_step(model: Model, optimizer: Optimizer, batch: Batch) -> Metrics:
    return {}


@jdp.flax_nnx.data_parallel(split_batches=True, replicated_argnames="rate")
def module_step_of_dict(
    model: Model,
    optimizer: Optimizer,
    metrics: Model,
    batch: dict[str, jax.Array],
    *,
    rate: float = 1.0,
) -> None: ...


class ModuleTrainer:
    @jdp.flax_nnx.data_parallel
    def step(self, model: Model, x: jax.Array) -> jax.Array:
        return x.mean()


def steps_of_modules(
    model: Model,
    optimizer: Optimizer,
    batch: Batch,
    host: NDArray[np.float32],
    trainer: ModuleTrainer,
) -> None:
    assert_type(module_step(model, optimizer, batch), Metrics)
    assert_type(module_step(model, optimizer, batch=batch), Metrics)
    module_step_of_dict(model, optimizer, model, {"x": batch.x}, rate=0.1)
    module_step_of_dict(model, optimizer, model, {"x": host})
    assert_type(trainer.step(model, batch.x), jax.Array)
    assert_type(trainer.step(model, host), jax.Array)
    assert_type(ModuleTrainer.step(trainer, model, batch.x), jax.Array)


def steps_of_host_arrays(
    world: jdp.World, state: State, host: NDArray[np.float32], batch: Batch
) -> None:
    """A step is written with `jax.Array`s and called with numpy's."""
    assert_type(step_of_arrays(state, host, host, rate=2.0), Result)
    assert_type(step_of_arrays(state, host, batch.x), Result)
    assert_type(step_of_arrays(state, batch.x, batch.x), Result)
    assert_type(step_of_dict(state, {"x": host}, host), Result)
    mixed = {"x": host, "y": host}
    assert_type(step_of_dict(state, mixed, host), Result)
    assert_type(step_of_dict(state, {"x": batch.x}, host), Result)
    for found, weight in jdp.join_batches([batch], world=world):
        assert_type(step_with_weight(state, found, weight), Result)
    for data, weight in jdp.join_batches([mixed], world=world):
        assert_type(step_of_dict(state, data, weight), Result)


def optimizers(params: Params, state: optax.OptState) -> None:
    tx = jdp.distributed_optimizer(optax.adam(1e-3))
    updates, _ = tx.update(params, state, params, used=params, weight=3)
    assert_type(updates, Params)
    zero = jdp.zero1(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    assert_type(zero.init(params), jdp.ZeroState)
    made = zero.update(params, zero.init(params), params)
    assert_type(made, tuple[Params, jdp.ZeroState])
    skipping = jdp.skip_unused(optax.adamw(1e-3))
    skipped = skipping.update(params, skipping.init(params), params, used=params)
    assert_type(skipped, tuple[Params, SkipUnusedState])
    optax.chain(skipping, optax.scale(2.0))
    whole = jdp.consolidate(zero.init(params), like=State(params, 0))
    assert_type(whole, State)
    assert_type(jdp.spread(whole, like=zero.init(params)), jdp.ZeroState)
    template = jdp.checkpoint_template(zero.init(params), num_replicas=4)
    assert_type(jdp.reshard(template, like=zero.init(params)), jdp.ZeroState)
    local = jdp.local_sgd(optax.sgd(0.1), period=8)
    assert_type(local.update(params, local.init(params)).step, jax.Array)
    outer = jdp.diloco(optax.sgd(0.1), period=8).init(params)
    assert_type(outer.step, jax.Array)


def hooks(params: Params) -> None:
    assert_type(jdp.hooks.cast(jnp.bfloat16), CommHook[tuple[()]])
    assert_type(jdp.hooks.init_state(jdp.hooks.int8(), params), tuple[()])
    assert_type(jdp.hooks.chain(jdp.hooks.power_sgd(2)), CommHook[PowerSGDState])
    anything: CommHook = jdp.hooks.chain(jdp.hooks.power_sgd(2), jdp.hooks.int8())
    jdp.value_and_grad(loss_fn, hook=anything)


def named(params: Params, host: NDArray[np.float32], x: jax.Array) -> None:
    assert_type(eager.all_reduce(params, op="sum", wire_dtype="float16"), Params)
    assert_type(eager.all_reduce(host), NDArray[np.float32])
    assert_type(eager.all_reduce(2.5).shape, tuple[Any, ...])
    handle = eager.all_reduce_async({"x": x}, name="x")
    assert_type(handle, eager.Handle[dict[str, jax.Array]])
    assert_type(eager.synchronize(handle, timeout_s=3), dict[str, jax.Array])
    assert_type(handle.result(), dict[str, jax.Array])
    assert_type(eager.broadcast(params, root=1), Params)
    assert_type(eager.broadcast_async(params).result(), Params)
    assert_type(eager.all_gather(params), Params)
    assert_type(eager.all_gather_async(x).result(), jax.Array)
    assert_type(eager.reduce_scatter(x, op="sum"), jax.Array)
    assert_type(eager.reduce_scatter_async(x).result(), jax.Array)
    assert_type(eager.grouped_all_reduce(params), Params)
    assert_type(eager.grouped_all_gather_async(params).result(), Params)
    assert_type(eager.grouped_reduce_scatter(params), Params)
    assert_type(eager.all_to_all(x), jax.Array)
    assert_type(eager.all_to_all(x, [1, 2]), tuple[jax.Array, NDArray[np.int32]])
    assert_type(eager.all_to_all_async(x).result(), jax.Array)
    assert_type(eager.broadcast_object({"epoch": 3}), dict[str, int])
    from_root = {"epoch": 3} if eager.rank() == 0 else None
    assert_type(eager.broadcast_object(from_root), dict[str, int])
    assert_type(eager.broadcast_object(None), Any)
    assert_type(eager.all_gather_object("host"), list[str])
    assert_type(eager.broadcast_parameters(params), Params)
    assert_type(eager.broadcast_optimizer_state(params), Params)
    assert_type(eager.join(), int)
    assert_type(eager.join_async(), eager.Handle[int])
    result = eager.submit_async(step, State(params, 0), Batch(x)).result()
    assert_type(result, tuple[State, Metrics])
    eager.submit(jax.jit(loss_fn), params, Batch(x))


def servers(params: Params, batches: Iterable[Batch]) -> None:
    with parameter_server.Worker(params) as worker:
        assert_type(worker.pull(), Params)
        worker.push(params, num_samples=3)
        for loss in worker.steps(jdp.value_and_grad(loss_fn), batches):
            assert_type(loss, jax.Array)
        for _ in worker.steps(jax.value_and_grad(loss_fn), batches):
            pass
    parameter_server.Server(params, optax.sgd(0.1), mode=parameter_server.sync())
