"""Decorator: how does a function of a model become one on all replicas?"""

from collections.abc import Callable
from typing import Any, Protocol, overload

from jdp.evaluation.function import ReplicatedFunction
from jdp.replicas.mesh import World
from jdp.step.call_arguments import Names
from jdp.step.options import StepOptions
from jdp.step.signature import P, R


class EvaluationDecorator(Protocol):
    """`jdp.replicated` with options and without a function."""

    def __call__(self, fn: Callable[P, R], /) -> ReplicatedFunction[P, R]:
        """Returns the function on all replicas."""
        ...


@overload
def replicated(
    fn: Callable[P, R],
    /,
    *,
    world: World | None = ...,
    static_argnames: Names = ...,
    replicated_argnames: Names = ...,
    split_batches: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> ReplicatedFunction[P, R]: ...
@overload
def replicated(
    fn: None = None,
    /,
    *,
    world: World | None = ...,
    static_argnames: Names = ...,
    replicated_argnames: Names = ...,
    split_batches: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> EvaluationDecorator: ...
def replicated(
    fn: Any = None,
    /,
    *,
    world: World | None = None,
    static_argnames: Names = None,
    replicated_argnames: Names = None,
    split_batches: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Turns a function of a model, such as an evaluation, into one on all replicas.

    `fn(params, *batches, **more) -> metrics` is written for one device. Each replica
    runs it on its samples, and a call returns the results on all samples:

        @jdp.replicated
        def evaluate(params, batch):
            logits = model.apply(params, batch["image"])
            right = logits.argmax(-1) == batch["label"]
            return {"accuracy": right.mean()}

        metrics = evaluate(params, batch)               # of one batch
        metrics = evaluate.over(params, test_batches)   # of all samples of all batches

    Numbers that differ between replicas are averaged. So return means or sums over the
    samples, and apply a root or an exponential to the result: a mean of perplexities is
    not the perplexity of all samples. Results of
    `jdp.sum_over_replicas` stay sums. Metric objects of `clu.metrics` and `nnx.metrics`
    are merged; see `jdp.merge_metrics`. What is the same on all replicas is returned as
    it is, and what is in a `jdp.PerReplica` with one row per replica.

    The samples need not divide among the replicas, and a call takes `weight=`, one
    number per sample with 0 for padding, as `jdp.join_batches` yields it. Results are
    then weighted means over the samples. A function with a parameter `weight` gets the
    weights of its samples, and must use them; it gets ones where the caller passed
    none. A function without it runs on each sample as a batch of one, under `jax.vmap`,
    in calls with weights and where the samples do not divide. Results are the same
    unless the function mixes samples, for example in the statistics of a batch norm in
    training. Metric objects count samples whose weight is not 0.

    As with `jdp.data_parallel`, all processes make the same calls, with the same number
    of samples; the method `over` takes batches that differ.

    Args:
      fn: the function. Parameters are any state that `jdp.data_parallel` takes; they
        are not donated.
      world: see `jdp.data_parallel`, as for the other options.
      static_argnames: see `jdp.data_parallel`.
      replicated_argnames: see `jdp.data_parallel`.
      split_batches: see `jdp.data_parallel`.
      compiler_options: see `jdp.data_parallel`.

    Returns:
      A callable with the arguments and results of `fn`, and `weight=`, and a method
      `over(params, batches)`. Arrays in the results are arrays of this process, so that
      a process alone can compute with them; a `jdp.PerReplica` stays spread over the
      replicas.

    Raises:
      TypeError: `fn` is not a function of parameters, or an option has the wrong type.
      ValueError: a name in an option is not a parameter of `fn`. From a call: the
        samples have different numbers in different leaves; `weight` has another shape;
        or a function without a parameter `weight` returns a row per sample or a
        `jdp.PerReplica`, reduces over a named axis, or draws random numbers from a key
        that all samples share, where it runs on each sample.
    """
    options = StepOptions(
        world=world,
        static_argnames=static_argnames,
        replicated_argnames=replicated_argnames,
        donate_state=False,
        split_batches=split_batches,
        num_states=1,
        check_vma=True,
        static_graph=False,
        compiler_options=compiler_options,
    )
    if fn is None:
        return lambda fn: ReplicatedFunction(fn, options)
    return ReplicatedFunction(fn, options)
