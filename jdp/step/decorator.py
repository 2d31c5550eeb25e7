"""Decorator: a train step of one replica becomes the step of all replicas."""

from collections.abc import Callable
from typing import Any, overload

from jdp.replicas.mesh import World
from jdp.step.call_arguments import Names
from jdp.step.data_parallel import DataParallelStep
from jdp.step.options import StepOptions
from jdp.step.replica_program import Step


@overload
def data_parallel(step: Step, /) -> DataParallelStep: ...
@overload
def data_parallel(
    step: Step,
    /,
    *,
    world: World | None = ...,
    static_argnames: Names = ...,
    replicated_argnames: Names = ...,
    donate_state: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> DataParallelStep: ...
@overload
def data_parallel(
    step: None = None,
    /,
    *,
    world: World | None = ...,
    static_argnames: Names = ...,
    replicated_argnames: Names = ...,
    donate_state: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> Callable[[Step], DataParallelStep]: ...
def data_parallel(
    step: Step | None = None,
    /,
    *,
    world: World | None = None,
    static_argnames: Names = None,
    replicated_argnames: Names = None,
    donate_state: bool = True,
    check_vma: bool = True,
    static_graph: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Turns the step of one replica into a compiled step of all replicas.

    `step(state, *batches, **more) -> (state, metrics)` is written for one replica: it
    sees that replica's samples, and averages gradients over the axis
    `world.axis_name` with `jdp.value_and_grad`, `jdp.sync_gradients` or
    `jdp.distributed_optimizer`. Also a decorator, with and without arguments, also of
    methods: `self` then belongs to the program, which is compiled once for each object,
    and its attributes are read when the step is traced.

    Arguments are batches, by position or by name, except those named here:

        @jdp.data_parallel(static_argnames="train", replicated_argnames=("rate", "key"))
        def step(state, x, *, rate, key, train=True): ...

        state, metrics = step(state, x, rate=schedule(i), key=jax.random.key(i))

    Every process calls the returned step, the same number of times. Before a program
    runs for the first time, the processes compare it, the arrays that it captures from
    outside, and the paths, shapes and dtypes of its arguments; JAX traces again for
    other shapes, and they compare again.

    Args:
      step: the step of one replica; `jax.grad` in it is that replica's own gradient,
        as under `jax.pmap`. The state must come back with the same value on every
        replica, except for its `jdp.PerReplica` parts. A metric that is the same on all
        replicas comes back as it is; others are averaged, integers and booleans in
        JAX's default float, but for those in a `jdp.PerReplica`, which come back with
        a row for each replica.
      world: the replicas; by default, at the first call, what `jdp.init` made.
      static_argnames: names of arguments that belong to the program, as of `jax.jit`:
        flags and other values with a hash, the same on every process. Another value
        compiles another program.
      replicated_argnames: names of arguments that are the same on all replicas and
        change from call to call: a learning rate, a PRNG key, the parameters of a
        teacher. Pytrees of arrays and numbers, of any shape. Of several processes all
        get the values of process 0, in one small collective; in a `jdp.Join`
        they get the values of the first process that still has data.
      donate_state: whether the memory of the state passed in is used for the new one.
        A donated state cannot be used again.
      check_vma: whether the program must show that the new state is the same on all
        replicas. jdp follows its values from the batches to the new state, through
        control flow; a reduction over the axis ends what differs. False is for a
        reduction that the program does not show, such as an `all_reduce` of your own
        of `lax.ppermute` or a callback: then only values that were never sent are
        refused. It stands for the option of `jax.shard_map` with this name.
      static_graph: whether it is an error that another trace of the step, for other
        shapes, finds other used parameters or another order of their gradients. False
        logs the difference.
      compiler_options: options of XLA for this step, over jdp's own.

    Returns:
      A callable `(state, *batches, **more) -> (state, metrics)`. The state may be
      anything that `jdp.replicate` takes; every batch is a pytree of host arrays with
      the samples of this process, or what `jdp.global_batch` returned. All go by
      position or by name, as the parameters of `step` are called.

    Raises:
      ValueError: a name is not a parameter of the step.
      TypeError: `step` is not a function, or an option is of another type.
      TypeError: from a call: the step does not take such an argument, or a leaf is not
        an array.
      RuntimeError: from a call: the processes do not have the same state or the same
        program; on every process, naming the difference.
      ValueError: from a call: a batch does not divide among the replicas, or the new
        state differs between replicas; the leaf is named. Or a metric has a row per
        sample. Or a reduction is in a `cond`, or in a `while` loop, that replicas
        decide differently, so that some would wait for ever.
      TypeError: from a call: a metric is not a number, or differs and has no mean.
      RuntimeError: from a call: the state was donated before.
    """

    options = StepOptions(
        world=world,
        static_argnames=static_argnames,
        replicated_argnames=replicated_argnames,
        donate_state=donate_state,
        check_vma=check_vma,
        static_graph=static_graph,
        compiler_options=compiler_options,
    )
    if step is None:
        return lambda step: DataParallelStep(step, options)
    return DataParallelStep(step, options)
