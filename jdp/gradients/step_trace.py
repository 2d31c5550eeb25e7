"""Step trace: the facts found while a step is traced.

The user's function stands between the step and the functions of jdp that it calls. So
one context variable holds the `StepTrace` of the step, and `current` returns it; from
there on it is an argument.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, get_args

import jax

from jdp import compat, types
from jdp.backward import exchange
from jdp.backward.loss import LossProgram, is_of_synced_batch_norm
from jdp.collectives import xla
from jdp.compat import trace_reuse
from jdp.gradients import (
    hook_reduction,
    reduce,
    reduce_options,
    step_warnings,
    weighted_mean,
)
from jdp.gradients.reduce import ReduceOptions
from jdp.gradients.step_facts import LossFacts, Synchronization
from jdp.gradients.watched_values import WatchedValues
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.trees import buckets
from jdp.trees.buckets import BucketPlan, Packing
from jdp.types import AxisName


class StepWeighting:
    """Weighting of one step: from `jdp.Join`, and as its gradients had it."""

    def __init__(self, ambient: Weighting | None = None):
        """Starts before the function of the step is called.

        Args:
          ambient: the weighting where no `weight=` is passed; from `jdp.Join`.
        """
        self.ambient = ambient
        self._jax_trace = compat.current_trace()
        self._last: Weighting | None = None
        self._is_out_of_reach = False  # a weight was given in a loop or a branch.

    def note(self, weighting: Weighting) -> None:
        """Notes how gradients were weighted."""
        if compat.current_trace() is self._jax_trace:
            self._last = weighting
        else:
            self._is_out_of_reach = True

    def without_arrays(self) -> "StepWeighting":
        """Returns a copy that outlives the trace: amounts become shapes."""
        copy = StepWeighting(_as_aval(self.ambient))
        copy._jax_trace = None
        copy._last = _as_aval(self._last)
        copy._is_out_of_reach = self._is_out_of_reach
        return copy

    @property
    def noted(self) -> Weighting | None:
        """The weighting of the last gradients outside of loops and branches."""
        return self._last or self.ambient

    def of_metrics(self) -> Weighting | None:
        """Returns the weighting of the metrics: the weighting of the last gradients.

        Raises:
          ValueError: only a loop or a branch of the step knows the weight.
        """
        if self._last is None and self._is_out_of_reach:
            raise ValueError(
                "The step weights its gradients inside of a `scan`, a `cond` or a "
                "`jit`, where its metrics do not know the weight. Average them there, "
                "with `jdp.average(metrics, weight=...)`."
            )
        return self.noted


@dataclasses.dataclass
class StepTrace:
    """Facts of one trace of a step, in the order of the program."""

    losses: list[LossFacts] = dataclasses.field(default_factory=list)
    synchronizations: list[Synchronization] = dataclasses.field(default_factory=list)
    weighting: StepWeighting = dataclasses.field(default_factory=StepWeighting)
    warns_at_once: bool = False  # whether nothing reads the facts after the trace.
    # Whether to find which metrics may differ between replicas, also where there is one
    # replica; and by leaf whether they do.
    needs_differing: bool = False
    has_no_rows: bool = False  # whether metrics of any shape have no rows of samples.
    differing: list[bool] | None = None
    model_axes: tuple[str, ...] = ()  # along which the step communicates itself.
    watched: WatchedValues = dataclasses.field(default_factory=WatchedValues)
    # By name of a leaf of the state: what helps if it differs between the replicas.
    remedies: dict[str, str] = dataclasses.field(default_factory=dict)

    def restart(self, watched: WatchedValues) -> None:
        """Forgets what a first trace found, except for answers."""
        self.losses.clear()
        self.synchronizations.clear()
        self.watched = watched

    def add_loss(self, facts: LossFacts) -> None:
        """Notes a loss that was traced."""
        self.losses.append(facts)
        if self.warns_at_once and (facts.never_used or facts.undecided):
            step_warnings.warn_of_loss(facts)

    def add_reduction(
        self,
        options: ReduceOptions,
        weighting: Weighting | None,
        riders: Sequence[jax.Array],
        loss: LossFacts | None = None,
        done: Collection[int] = (),
        *,
        is_weighed: bool,
    ) -> None:
        """Notes a reduction of gradients, and their weighting for the step's metrics.

        Args:
          options: the options; with a plan.
          weighting: weight of this replica; None: equal weights.
          riders: further arrays in the buckets.
          loss: facts about the loss; None: only gradients were given.
          done: leaf indices that were not sent.
          is_weighed: whether the backward pass weighted the gradients.
        """
        is_late = (
            weighting is not None
            and not self.is_ambient(weighting)
            and not is_weighed
            and not compat.is_alone(options.axis_name)
        )
        weight_bytes = _weight_bytes(options, weighting, riders, done)
        if is_weighed and weight_bytes and loss is not None and loss.has_exchanges:
            # The backward pass needs the weights of all replicas before it.
            assert weighting is not None
            num_replicas = compat.axis_size(options.axis_name)
            weight_bytes += num_replicas * weighting.amount.dtype.itemsize
        by_samples = weighting is not None and weighting.divide_by == "weight"
        self.note(weighting)
        self.add_synchronization(
            options,
            None if weighting is None else weighting.divide_by,
            riders,
            loss,
            done,
            is_weighed_late=is_late and by_samples,
            is_weighed_blindly=is_late and loss is None,
            weight_bytes=weight_bytes,
        )

    def add_synchronization(
        self,
        options: ReduceOptions,
        divide_by: DivideBy | None,
        riders: Sequence[jax.Array],
        loss: LossFacts | None,
        done: Collection[int],
        *,
        is_weighed_late: bool = False,
        is_weighed_blindly: bool = False,
        weight_bytes: int = 0,
    ) -> None:
        """Notes a reduction of gradients; see `add_reduction` and `Synchronization`."""
        plan, hook = options.plan, options.hook
        assert plan is not None
        num_replicas = compat.axis_size(options.axis_name)
        hook_bytes = 0
        if hook is not None:
            hook_bytes = hook_reduction.hook_bytes(hook, plan, done, num_replicas)
        packing, algorithm = _describe_routes(options, plan, done)
        made = Synchronization(
            plan=plan,
            packing=packing,
            algorithm=algorithm,
            hook=None if hook is None else hook.name,
            hook_bytes=hook_bytes,
            num_replicas=num_replicas,
            riders=tuple(buckets.LeafSpec(x.shape, x.dtype) for x in riders),
            divide_by=divide_by,
            weight_bytes=weight_bytes,
            loss=loss,
            is_weighed_late=is_weighed_late,
            is_weighed_blindly=is_weighed_blindly,
        )
        self.synchronizations.append(made)
        if self.warns_at_once and divide_by is not None and loss is not None:
            step_warnings.warn_of_weights([made], [loss])

    def warn(self) -> None:
        """Warns of facts that point to a mistake; once per loss."""
        for facts in self.distinct_losses():
            step_warnings.warn_of_loss(facts)
        if any(made.divide_by for made in self.synchronizations):
            step_warnings.warn_of_weights(self.synchronizations, self.losses)

    def follow(
        self, before: "StepTrace | None", name: str, *, is_main: bool, is_fixed: bool
    ) -> None:
        """Warns of mistakes in a first trace, and of differences in a later trace.

        Args:
          before: the last trace of the step; None: this is the first.
          name: name of the step.
          is_main: whether this process warns.
          is_fixed: whether a difference is an error.

        Raises:
          ValueError: the losses differ, and `is_fixed`.
        """
        if before is not None:
            old, new = before.distinct_losses(), self.distinct_losses()
            step_warnings.compare_graphs(
                name, old, new, is_main=is_main, is_fixed=is_fixed
            )
        elif is_main:
            self.warn()

    def distinct_losses(self) -> list[LossFacts]:
        """Returns each loss once; micro-batches of two sizes trace one loss twice."""
        found: dict[Hashable, LossFacts] = {}
        for facts in self.losses:
            # One call that asks for unused parameters is enough.
            if facts.finds_unused or facts.graph not in found:
                found[facts.graph] = facts
        return list(found.values())

    def resolve(
        self, weight: jax.typing.ArrayLike | None, divide_by: DivideBy
    ) -> Weighting | None:
        """Returns how this replica counts; None: all replicas count the same.

        A traced weight below zero, which no replica can have, becomes NaN. A mean with
        a weight of NaN is NaN.

        Args:
          weight: the user's argument; None: the ambient weighting.
          divide_by: see `jdp.sync_gradients`.

        Raises:
          ValueError: `weight` is not a scalar or is a negative constant, or `divide_by`
            is unknown.
          TypeError: `weight` is not a real number.
        """
        check_divide_by(divide_by)
        if weight is not None:
            return weighted_mean.as_weighting(weight, divide_by)
        ambient = self.weighting.ambient
        if ambient is None or divide_by == "weight":
            return ambient
        return ambient._replace(divide_by=divide_by)

    def note(self, weighting: Weighting | None) -> None:
        """Notes how gradients were weighted, for the metrics of the step."""
        if weighting is not None:
            self.weighting.note(weighting)

    def is_ambient(self, weighting: Weighting) -> bool:
        """Whether this is the ambient weighting: the caller passed no weight."""
        ambient = self.weighting.ambient
        return ambient is not None and weighting.amount is ambient.amount


_current: contextvars.ContextVar[StepTrace | None] = contextvars.ContextVar(
    "step_trace", default=None
)


def current() -> StepTrace:
    """Returns the trace of the current step; outside a step, a new trace that warns."""
    return _current.get() or StepTrace(warns_at_once=True)


@contextlib.contextmanager
def running(trace: StepTrace, ambient: Weighting | None = None) -> Iterator[None]:
    """Makes `trace` the current one while the function of a step is called.

    Args:
      trace: collects the facts.
      ambient: see `StepWeighting`.
    """
    trace.weighting = StepWeighting(ambient)
    token = _current.set(trace)
    try:
        with trace_reuse.only_here():
            yield
    finally:
        _current.reset(token)


def facts_of(
    program: LossProgram, axis_name: AxisName, *, finds_unused: bool = False
) -> LossFacts:
    """Returns the facts about a loss, read from its program."""
    exchanges = program.exchanges(types.as_axis_names(axis_name))
    synced = [eqn for eqn in exchanges if is_of_synced_batch_norm(eqn)]
    others = [eqn for eqn in exchanges if not is_of_synced_batch_norm(eqn)]
    return LossFacts(
        program.key_paths,
        program.timeline,
        program.never_used,
        program.undecided,
        program.synced_in_backward,
        program.batch_norms,
        tuple(dict.fromkeys(str(eqn.source_info.name_stack) for eqn in synced)),
        tuple(dict.fromkeys(map(exchange.describe, others))),
        bool(exchanges),
        tuple(sum(_num_bytes(var.aval) for var in eqn.invars) for eqn in synced),
        finds_unused,
    )


def _num_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def check_divide_by(divide_by: str) -> None:
    """Raises ValueError if `divide_by` is unknown."""
    if divide_by not in get_args(DivideBy):
        raise ValueError(
            f"`divide_by` must be 'weight', 'active' or 'world', got {divide_by!r}."
        )


def _as_aval(weighting: Weighting | None) -> Weighting | None:
    if weighting is None:
        return None
    x = weighting.amount
    return weighting._replace(amount=jax.ShapeDtypeStruct(x.shape, x.dtype))


def _weight_bytes(
    options: ReduceOptions,
    weighting: Weighting | None,
    riders: Sequence[jax.Array],
    done: Collection[int],
) -> int:
    """Returns the bytes of the weight that travels with the gradients."""
    if weighting is None or compat.is_alone(options.axis_name):
        return 0
    plan, dtypes = options.plan, [x.dtype for x in riders]
    if options.hook is None and plan is not None:  # Else it travels with riders alone.
        sent = buckets.remaining_buckets(plan, done)
        dtypes = [*[plan.leaves[bucket[0]].dtype for bucket in sent], *dtypes]
    num_replicas = compat.axis_size(options.axis_name)
    return weighted_mean.num_encoded_bytes(dtypes, weighting, num_replicas)


def _describe_routes(
    options: ReduceOptions, plan: BucketPlan, done: Collection[int]
) -> tuple[Packing, str]:
    """Returns how buckets are packed, and the names of the all-reduces they take."""
    label = options.all_reduce.name
    if options.hook is not None:  # It packs buckets as it likes.
        return "flat", label
    if options.all_reduce is xla.PLAIN:
        return options.packing or buckets.default_packing(), label
    if options.all_reduce is not reduce_options.AUTO:
        return "flat", label
    routes = [
        reduce.choose_route([plan.leaves[i] for i in bucket], options)
        for bucket in buckets.remaining_buckets(plan, done)
    ]
    names = dict.fromkeys(all_reduce.name for all_reduce, _ in routes)
    is_flat = all(packing == "flat" for _, packing in routes)
    return "flat" if is_flat else "tuple", ", ".join(names) or label
