"""Decorator: how does the train step of one replica become the step of all?"""

from collections.abc import Callable
from typing import Any, Concatenate, Protocol, overload

from typing_extensions import TypeVar

from jdp.fingerprints import record
from jdp.fingerprints.record import RecordTo
from jdp.replicas.mesh import World
from jdp.step.call_arguments import Names
from jdp.step.data_parallel import DataParallelStep
from jdp.step.options import StepOptions
from jdp.step.signature import A, P, R, Rest, S, T

M = TypeVar("M", default=Any)  # the metrics.


class StepDecorator(Protocol):
    """`jdp.data_parallel` with options and without a step."""

    @overload
    def __call__(
        self, step: Callable[Concatenate[T, Rest], T], /
    ) -> DataParallelStep[Concatenate[T, Rest], T, T]: ...
    @overload
    def __call__(
        self, step: Callable[P, tuple[S, M]], /
    ) -> DataParallelStep[P, S, tuple[S, M]]: ...
    @overload
    def __call__(
        self, step: Callable[Concatenate[A, T, Rest], T], /
    ) -> DataParallelStep[Concatenate[A, T, Rest], T, T]: ...
    def __call__(self, step: Any, /) -> Any:
        """Returns the compiled step of all replicas."""
        ...


class StatesDecorator(Protocol):
    """The same, with `num_states`: the step returns what it declares."""

    def __call__(self, step: Callable[P, R], /) -> DataParallelStep[P, Any, R]:
        """Returns the compiled step of all replicas."""
        ...


@overload
def data_parallel(
    step: Callable[P, R],
    /,
    *,
    num_states: int,
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
) -> DataParallelStep[P, Any, R]: ...
@overload
def data_parallel(
    step: Callable[Concatenate[T, Rest], T],
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
) -> DataParallelStep[Concatenate[T, Rest], T, T]: ...
@overload
def data_parallel(
    step: Callable[P, tuple[S, M]],
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
) -> DataParallelStep[P, S, tuple[S, M]]: ...
@overload
def data_parallel(
    step: Callable[Concatenate[A, T, Rest], T],
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
) -> DataParallelStep[Concatenate[A, T, Rest], T, T]: ...
@overload
def data_parallel(
    step: None = None,
    /,
    *,
    num_states: int,
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
) -> StatesDecorator: ...
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
    donate_state: bool = True,
    split_batches: bool = False,
    num_states: int = 1,
    check_vma: bool = True,
    static_graph: bool = False,
    check_every: int | None = None,
    record_fingerprints: RecordTo = None,
    compiler_options: dict[str, Any] | None = None,
    num_shards: int | None = None,
) -> Any:
    """Turns the train step of one replica into a compiled step of all replicas.

    `step(state, *batches, **more) -> (state, metrics)` is written for one replica. It
    sees the samples of that replica, and averages gradients over the axis
    `world.axis_name` with `jdp.value_and_grad`, `jdp.sync_gradients` or
    `jdp.distributed_optimizer`.

    Use it as a function or as a decorator, with or without options. A decorated method
    is compiled once per object, and reads the attributes of `self` when it is traced.

    Arguments after the state are batches, unless an option names them:

        @jdp.data_parallel(static_argnames="train", replicated_argnames=("rate", "key"))
        def step(state, x, *, rate, key, train=True): ...

        state, metrics = step(state, x, rate=schedule(i), key=jax.random.key(i))

    A step whose state has several parts takes `num_states`, and one without metrics may
    return the state alone:

        @jdp.data_parallel(num_states=2)
        def step(params, opt_state, batch):
            ...
            return params, opt_state, loss

    Every process must call the returned step the same number of times. Before a program
    runs for the first time, the processes compare its text, the arrays that it
    captures, and the paths, shapes and dtypes of its arguments. Arguments with other
    shapes are traced and compared again.

    Args:
      step: the step of one replica. `jax.grad` inside it returns the gradient of this
        replica alone, as under `jax.pmap`. The new state must be the same on every
        replica, except for its `jdp.PerReplica` parts. A metric that is the same on
        all replicas is returned unchanged. Metrics that differ are averaged (integers
        and booleans in JAX's default float dtype), unless they are in a
        `jdp.PerReplica`, which is returned with one row per replica. Metric objects of
        clu and nnx are merged, see `jdp.merge_metrics`.
      world: the replicas; by default the world that `jdp.init` returned, read at the
        first call.
      static_argnames: names of arguments that are part of the program, as in `jax.jit`:
        flags and other hashable values, the same on every process. A new value
        compiles a new program.
      replicated_argnames: names of arguments that are the same on all replicas and
        change from call to call, such as a learning rate, a PRNG key, or the parameters
        of a teacher: pytrees of arrays and numbers, of any shape. With several
        processes, all replicas get the values of process 0, in one small collective.
        Inside a `jdp.Join` they get the values of the first process that still has
        data.
      donate_state: whether the new state reuses the memory of the state passed in. A
        donated state cannot be used again.
      split_batches: whether every process passes the same whole batch, of which its
        replicas take their part. False: each process passes its own samples.
      num_states: number of arguments, at the front, that are the state. The step
        returns as many new states, and then its metrics.
      check_vma: whether the program must prove that the new state is the same on all
        replicas. jdp follows each value from the batches to the new state, through
        control flow; a reduction over the axis makes a value the same everywhere. Pass
        False if a reduction is invisible in the program, such as your own all-reduce
        made of `lax.ppermute` or of a callback. Then only values that were never sent
        to another replica are refused. The check takes the place of the option of
        `jax.shard_map` with this name.
      static_graph: whether to raise if a later trace of the step, for other shapes,
        finds other used parameters or another order of their gradients. False logs
        the difference.
      check_every: after every so many calls, all replicas compare the bits of the new
        state, in one small collective; the call waits for it. A difference, which a
        faulty device makes, raises on every process. None: never.
      record_fingerprints: a file to which process 0 writes the fingerprint of the state
        before the first step and after every 100 steps, or a `jdp.FingerprintRecord`,
        which has another period or goes on from a checkpoint. `jdp fingerprint diff`
        compares the files of two runs.
      compiler_options: XLA options for this step; they take precedence over jdp's
        defaults.
      num_shards: number of shards, a multiple of the number of replicas, into which
        each global batch is cut. Each replica computes its shards one after the other,
        by programs of one shard, and everything that is reduced follows one fixed tree
        of shards. So parameters, losses and metrics have the same bits on any number
        of replicas and processes; see docs/same_bits.md. `step` is then written for one
        shard. None: the `num_shards` of the world, which is None by default: each
        replica computes its part of the batch at once.

    Returns:
      A callable with the arguments and results of `step`. The state is any tree that
      `jdp.replicate` takes. Each batch is a pytree of host arrays with the samples of
      this process, or a result of `jdp.global_batch`. Arguments are passed by position
      or by the names of the parameters of `step`.

    Raises:
      ValueError: a name in an option is not a parameter of the step, or the step has
        fewer than `num_states` parameters.
      TypeError: `step` is not a function, or an option has the wrong type.
      TypeError: from a call: the step does not take such an argument; a leaf is not an
        array; or a metric is not a number, or differs and has no mean.
      ValueError: from a call: a batch does not divide among the replicas; the new state
        differs between replicas; a metric has one row per sample; or a collective is in
        a `cond` or a `while` loop that replicas may decide differently, so that some
        would wait forever for the others. The message names the leaf or the line.
        With `num_shards`: it does not divide among the replicas, a batch does not
        divide among the shards, or the step reads `lax.axis_index` or has a collective
        in a `while` loop or a `cond`.
      RuntimeError: from a call: the state was donated before; or the processes have
        different states or programs, in which case every process raises and names the
        difference; or `check_every` found replicas with other bits, which it names.
    """

    options = StepOptions(
        world=world,
        static_argnames=static_argnames,
        replicated_argnames=replicated_argnames,
        donate_state=donate_state,
        split_batches=split_batches,
        num_states=num_states,
        check_vma=check_vma,
        static_graph=static_graph,
        compiler_options=compiler_options,
        check_every=check_every,
        record_fingerprints=record.as_record(record_fingerprints),
        num_shards=num_shards,
    )
    if step is None:
        return lambda step: DataParallelStep(step, options)
    return DataParallelStep(step, options)
