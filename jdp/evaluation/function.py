"""Replicated function: what happens at a call of an evaluation on all replicas?"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast, overload

import jax
import jax.numpy as jnp
from jax import lax

from jdp.evaluation import results, sample_by_sample
from jdp.evaluation.call_batches import CallBatches
from jdp.evaluation.results import Evaluated, ResultFacts, take_local
from jdp.evaluation.sample_by_sample import SampleResults
from jdp.evaluation.signature import EvaluationCall
from jdp.evaluation.totals import Totals
from jdp.gradients import reduced_values, step_trace, weighted_mean
from jdp.gradients.reduced_values import Kind
from jdp.gradients.weighted_mean import Weighting
from jdp.join import uneven_batches
from jdp.replicas.mesh import World
from jdp.step import methods
from jdp.step.data_parallel import DataParallelStep
from jdp.step.options import StepOptions
from jdp.step.signature import A, P, R, Rest, TakesOne
from jdp.trees import nnx_objects
from jdp.types import PyTree


class ReplicatedFunction(EvaluationCall[P, R]):
    """Function on all replicas, as `jdp.replicated` returns it."""

    def __init__(self, fn: Callable[P, R], options: StepOptions):
        """Use `jdp.replicated`."""
        if not callable(fn):
            raise TypeError(
                "`fn` must be a function `(params, *batches) -> metrics`, got "
                f"{type(fn).__name__}. Pass options by name: "
                "`jdp.replicated(fn, world=world)`."
            )
        functools.update_wrapper(self, fn)
        self._fn: Callable[..., Any] = fn
        self._options = options
        self._name = getattr(fn, "__name__", "function")
        self._calls = CallBatches(fn, self._name, options)
        # `CallBatches` splits whole batches.
        own = dataclasses.replace(options, split_batches=False, takes_modules=True)
        self._step = DataParallelStep(self._make_step(), own)
        self._bound = methods.PerObject(
            lambda owner: ReplicatedFunction(methods.bind_weakly(fn, owner), options),
            _Method,
            what=f"The function `{self._name}`",
        )

    @overload
    def __get__(
        self, instance: None, owner: type | None = None
    ) -> "ReplicatedFunction[P, R]": ...
    @overload
    def __get__(
        self: TakesOne[A, Rest, Any, R], instance: A, owner: type | None = None
    ) -> "ReplicatedFunction[Rest, R]": ...
    @overload
    def __get__(
        self, instance: object, owner: type | None = None
    ) -> "ReplicatedFunction[P, R]": ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the function of an object, for a function that is a method."""
        return self if instance is None else self._bound.of(instance)

    @property
    def world(self) -> World:
        """The replicas that the function runs on."""
        return self._step.world

    def _call(
        self,
        params: PyTree,
        /,
        *batches: PyTree,
        weight: jax.typing.ArrayLike | None = None,
        **named: PyTree,
    ) -> Any:
        """Runs the function on one batch; see `jdp.replicated`."""
        found = self._run(params, batches, weight, named, needs_samples=True)
        values = take_local(found.values)
        if weight is None or found.total is None:
            return values
        has_samples = take_local(found.total) != 0
        return results.nan_unless(has_samples, values, found.facts.kinds())

    if not TYPE_CHECKING:  # For checkers, `EvaluationCall` has it.
        __call__ = _call

    def over(
        self: TakesOne[A, ..., Any, R],
        params: A,
        batches: Iterable[PyTree],
        /,
        **named: PyTree,
    ) -> R:
        """Runs the function on many batches, and returns the results on all of them.

        Every process calls it, with its own batches: any number of any sizes, read
        through `jdp.join_batches`. Each sample counts the same. Numbers are averaged
        over all samples, results of `jdp.sum_over_replicas` are added up, and metric
        objects of clu and nnx are merged.

        Args:
          params: see `jdp.replicated`.
          batches: an iterable of batches; tuples if the function takes several.
          **named: further arguments, the same in each call.

        Returns:
          The results, as the function returns them for one batch. Batches are added up
          in 64 bits, whatever the dtype of a result. A sum of integers that its dtype
          does not hold is returned as a `np.ndarray` of 64 bits.

        Raises:
          TypeError: `batches` is an array, or `weight` was passed.
          ValueError: there is no batch on any process, or no sample for a mean; or the
            function reduces a number over the replicas of one batch itself, so that it
            is not known how batches add up.
        """
        function = cast(ReplicatedFunction[..., R], self)
        function._calls.check_loop(batches, named)
        totals = Totals(function._name)
        loop = uneven_batches.join_batches(batches, world=function.world)
        for batch, weight in loop:
            arguments = function._calls.as_arguments(batch, named)
            totals.add(function._run(params, arguments, weight, dict(named)))
        return totals.finish()

    def _run(
        self,
        params: PyTree,
        batches: tuple[PyTree, ...],
        weight: jax.typing.ArrayLike | None,
        named: dict[str, PyTree],
        *,
        needs_samples: bool = False,
    ) -> Evaluated:
        call = self._calls.prepare(
            self.world, params, batches, weight, named, needs_samples=needs_samples
        )
        _, evaluated = self._step(params, call.weight, *call.batches, **call.named)
        return evaluated

    def _make_step(self) -> Callable[..., Any]:
        """Returns the step of one replica, whose new state is empty."""

        @functools.wraps(self._fn)
        def step(
            params: PyTree, weight: jax.Array | None, *batches: PyTree, **named: PyTree
        ) -> tuple[tuple[()], Evaluated]:
            trace = step_trace.current()
            trace.needs_differing = True
            bound = self._calls.signature.bind(params, *batches, **named)
            with nnx_objects.refusing_changes(self._name, params):
                if weight is None or self._calls.takes_weight:
                    found = self._run_on_batch(bound, weight)
                else:
                    found = self._run_on_samples(bound, weight)
                    trace.has_no_rows = True
            found.check_draws(self._name)  # A module that changes is named before.
            total = None
            if weight is not None:
                amount = weighted_mean.nan_if_negative(weight).sum()
                trace.note(Weighting(amount, "weight"))
                total = lax.psum(amount, self.world.axis_names)
            return (), Evaluated(found.values, total, ResultFacts(found.kinds, trace))

        step.__signature__ = self._calls.step_signature  # pyright: ignore
        return step

    def _run_on_batch(
        self, bound: inspect.BoundArguments, weight: jax.Array | None
    ) -> SampleResults:
        if weight is not None:
            bound = self._calls.with_weight(bound, weight)
        with reduced_values.collected() as noted:
            values = self._fn(*bound.args, **bound.kwargs)
        leaves = jax.tree.leaves(values)
        kinds: list[Kind | None] = [reduced_values.kind_of(x, noted) for x in leaves]
        return SampleResults(values, kinds)

    def _run_on_samples(
        self, bound: inspect.BoundArguments, weight: jax.Array
    ) -> SampleResults:
        batch = self._calls.batches_of(bound)

        def on_sample(sample: dict[str, PyTree]) -> PyTree:
            given = self._calls.with_batches(bound, sample)
            return self._fn(*given.args, **given.kwargs)

        amounts = weighted_mean.nan_if_negative(jnp.asarray(weight))
        return sample_by_sample.run(
            on_sample, batch, amounts, self.world.axis_names, self._name
        )


class _Method(ReplicatedFunction[P, R]):
    """Function of one object: shares its core's attributes and holds the object."""

    __slots__ = ("__self__",)

    def __init__(self, core: ReplicatedFunction[..., R], owner: Any):
        object.__setattr__(self, "__dict__", core.__dict__)
        self.__self__ = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self
