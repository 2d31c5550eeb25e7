"""Decorator: how does the train step of an nnx model run on all replicas?"""

from collections.abc import Callable
from typing import Any, Protocol, overload

from jdp.fingerprints import record
from jdp.fingerprints.record import RecordTo
from jdp.flax_nnx.module_step import ModuleStep
from jdp.replicas.mesh import World
from jdp.step.call_arguments import Names
from jdp.step.options import StepOptions
from jdp.step.signature import P, R


class StepDecorator(Protocol):
    """`jdp.flax_nnx.data_parallel` with options and without a step."""

    def __call__(self, step: Callable[P, R], /) -> ModuleStep[P, R]:
        """Returns the compiled step of all replicas."""
        ...


@overload
def data_parallel(
    step: Callable[P, R],
    /,
    *,
    world: World | None = ...,
    static_argnames: Names = ...,
    replicated_argnames: Names = ...,
    donate_state: bool = ...,
    split_batches: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    check_every: int | None = ...,
    record_fingerprints: RecordTo = ...,
    compiler_options: dict[str, Any] | None = ...,
    num_shards: int | None = ...,
) -> ModuleStep[P, R]: ...
@overload
def data_parallel(
    step: None = None,
    /,
    *,
    world: World | None = ...,
    static_argnames: Names = ...,
    replicated_argnames: Names = ...,
    donate_state: bool = ...,
    split_batches: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    check_every: int | None = ...,
    record_fingerprints: RecordTo = ...,
    compiler_options: dict[str, Any] | None = ...,
    num_shards: int | None = ...,
) -> StepDecorator: ...
def data_parallel(
    step: Any = None,
    /,
    *,
    world: World | None = None,
    static_argnames: Names = None,
    replicated_argnames: Names = None,
    donate_state: bool = False,
    split_batches: bool = False,
    check_vma: bool = True,
    static_graph: bool = False,
    check_every: int | None = None,
    record_fingerprints: RecordTo = None,
    compiler_options: dict[str, Any] | None = None,
    num_shards: int | None = None,
) -> Any:
    """Turns a step that changes nnx objects into a compiled step of all replicas.

    It takes the place of `nnx.jit`. Models, optimizers, metrics and rng streams are
    arguments, which the step changes in place; every other argument is a batch, unless
    an option names it:

        @jdp.flax_nnx.data_parallel
        def train_step(model, optimizer, metrics, batch):
            grad_fn = jdp.flax_nnx.value_and_grad(loss_fn, has_aux=True)
            (loss, logits), grads = grad_fn(model, batch)
            metrics.update(loss=loss, logits=logits, labels=batch["label"])
            optimizer.update(model, grads)

    After a call, the objects of the caller have the new values, and new attributes,
    as after `nnx.jit`. Every process calls the step the same number of times.

    The results equal the results on one device with the samples of all replicas, up to
    the order of summation. Dropout masks, and other random numbers for samples, are
    each replica's part of the numbers that one device would draw. The `update` of an
    `nnx.metrics.Metric` counts the samples of all replicas; numbers without a
    dimension, such as a loss, are averaged. `nnx.BatchNorm` needs
    `convert_batch_norm`.

    Args:
      step: the step of one replica, a function of named arguments.
      world: see `jdp.data_parallel`, as for all options but `donate_state`.
      static_argnames: see there.
      replicated_argnames: see there.
      donate_state: whether the new values reuse the memory of the old ones. With True,
        arrays that the program keeps elsewhere, as `nnx.clone(model)` or
        `nnx.state(model)` do, are gone after the step. With False, as in `nnx.jit`,
        the objects take their memory twice during a step.
      split_batches: see `jdp.data_parallel`.
      check_vma: see there.
      static_graph: see there.
      check_every: see there.
      record_fingerprints: see there.
      compiler_options: see there.
      num_shards: see there.

    Returns:
      A callable with the arguments of `step`, which returns what `step` returns, as
      metrics of `jdp.data_parallel`: numbers that differ between the replicas are
      averaged, and a `jdp.PerReplica` has one row per replica.

    Raises:
      TypeError: `step` is not a function, takes `*args`, or an option has the wrong
        type.
      ValueError: a name in an option is not a parameter of the step.
      TypeError: from a call: no argument is an nnx object; the step returns one; or an
        error of `jdp.data_parallel`.
      ValueError: from a call: the step changes an object that is not an argument; or
        an error of `jdp.data_parallel`, such as a parameter that differs between the
        replicas because `nnx.value_and_grad` was left in place.
      RuntimeError: from a call: see `jdp.data_parallel`.
    """
    options = StepOptions(
        world=world,
        static_argnames=static_argnames,
        replicated_argnames=replicated_argnames,
        donate_state=donate_state,
        split_batches=split_batches,
        num_states=1,
        check_vma=check_vma,
        static_graph=static_graph,
        compiler_options=compiler_options,
        check_every=check_every,
        record_fingerprints=record.as_record(record_fingerprints),
        num_shards=num_shards,
    )
    if step is None:
        return lambda step: ModuleStep(step, options)
    return ModuleStep(step, options)
