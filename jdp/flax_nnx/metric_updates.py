"""Metric updates: how does a metric of nnx count the samples of all replicas?

Inside a step, the `update` of each `nnx.metrics.Metric` is replaced. It is traced
first, to learn what it does with its arguments:

- Numbers without a dimension, such as a loss, are averaged over the replicas.
- If no samples enter, the metric is then the same on all replicas.
- If it adds amounts to its state, the amounts of all replicas are added.
- Otherwise the samples of all replicas are gathered, and each replica counts all.
- An `update` that communicates itself is left alone.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jdp.flax_nnx import update_programs
from jdp.gradients import averaging, step_trace
from jdp.types import AxisName, as_axis_names


class _Growth(NamedTuple):
    """Amounts by which one replica's samples change a metric."""

    metric: Any
    treedef: Any  # of its state.
    before: list[jax.Array]
    amounts: list[jax.Array]  # shapes and dtypes of `before`.


class _Context:
    """Facts about the step that is being traced."""

    def __init__(self, axis_name: AxisName):
        self.axis_name = axis_name
        self.same: list[Any] = []  # arrays that are the same on all replicas.
        # Collected during the update of a `MultiMetric`, for one collective.
        self.growths: list[_Growth] | None = None

    def add(self, growths: list[_Growth]) -> None:
        """Adds the amounts of all replicas to metrics, now or later."""
        if self.growths is not None:
            self.growths += growths
            return
        amounts = [x for growth in growths for x in growth.amounts]
        totals = iter(self._sum(amounts))
        for growth in growths:
            after = [x + next(totals) for x in growth.before]
            nnx.update(growth.metric, jax.tree.unflatten(growth.treedef, after))

    def _sum(self, xs: list[jax.Array]) -> list[jax.Array]:
        """Adds arrays over the replicas, in one collective per dtype."""
        sums: list[jax.Array] = list(xs)
        for dtype in {x.dtype: None for x in xs}:
            places = [i for i, x in enumerate(xs) if x.dtype == dtype]
            flat = jnp.concatenate([xs[i].ravel() for i in places])
            total = lax.psum(flat, as_axis_names(self.axis_name))
            for i in places:
                sums[i] = total[: xs[i].size].reshape(xs[i].shape)
                total = total[xs[i].size :]
        return sums


_context: contextvars.ContextVar[_Context | None] = contextvars.ContextVar(
    "metrics of a step", default=None
)


@contextlib.contextmanager
def synced(objects: Sequence[tuple[str, Any]], axis_name: AxisName) -> Iterator[None]:
    """Makes the metrics in objects of nnx count all samples, in this context.

    Args:
      objects: objects made inside of a step, with their paths.
      axis_name: the axis, or axes, over which replicas lie.
    """
    found = {
        id(x): x
        for _, node in objects
        for _, x in nnx.iter_graph(node)
        if isinstance(x, nnx.metrics.Metric)
    }
    kinds = [(metric, type(metric)) for metric in found.values()]
    token = _context.set(_Context(axis_name))
    try:
        for metric, kind in kinds:
            object.__setattr__(metric, "__class__", _synced_class(kind))
        yield
    finally:
        _context.reset(token)
        for metric, kind in kinds:
            object.__setattr__(metric, "__class__", kind)


def note_same(x: Any) -> None:
    """Notes that an array of the step is the same on all replicas."""
    context = _context.get()
    if context is not None:
        context.same.append(x)


@functools.cache
def _synced_class(kind: type) -> type:
    """Returns a class like `kind` whose `update` counts the samples of all replicas."""

    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        context = _context.get()
        assert context is not None
        if _has_parts(self):
            with _together(context):
                kind.update(self, *args, **kwargs)  # pyright: ignore
        else:
            _Call(kind, self, args, kwargs, context).run()

    return type(kind.__name__, (kind,), {"update": update, "__module__": __name__})


def _has_parts(metric: Any) -> bool:
    """Returns whether a metric consists of other metrics."""
    return any(
        isinstance(x, nnx.metrics.Metric) and x is not metric
        for _, x in nnx.iter_graph(metric)
    )


@contextlib.contextmanager
def _together(context: _Context) -> Iterator[None]:
    """Sends the amounts of several metrics together."""
    outer, context.growths = context.growths, []
    try:
        yield
        growths = context.growths
    finally:
        context.growths = outer
    context.add(growths)


class _Call:
    """One call of the `update` of a metric."""

    def __init__(
        self,
        kind: type,
        metric: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: _Context,
    ):
        self._kind = kind
        self._metric = metric
        self._context = context
        self._leaves, self._treedef = jax.tree.flatten((args, kwargs))
        # The places of the arrays among the leaves; other leaves are static.
        self._places = [i for i, x in enumerate(self._leaves) if _is_array(x)]
        self._graph, self._state = nnx.split(metric)

    def run(self) -> None:
        """Updates the metric."""
        arrays = [self._leaves[i] for i in self._places]
        states, treedef = jax.tree.flatten(self._state)
        program = jax.make_jaxpr(self._after)(states, arrays)
        if update_programs.has_collective(program):
            return self._update(arrays)
        used = {i - len(states) for i in update_programs.used_inputs(program)}
        numbers = [i for i in used if i >= 0 and not jnp.ndim(arrays[i])]
        arrays = self._average(arrays, numbers)
        if not self._counts_samples(program, states, arrays, used):
            return self._update(arrays)
        if update_programs.only_adds(program, len(states)):
            amounts = self._after([jnp.zeros_like(x) for x in states], arrays)
            growth = _Growth(self._metric, treedef, states, amounts)
            return self._context.add([growth])
        names = as_axis_names(self._context.axis_name)
        for i in used:
            if i >= 0 and jnp.ndim(arrays[i]):
                arrays[i] = lax.all_gather(arrays[i], names, tiled=True)
        return self._update(arrays)

    def _after(self, states: list[Any], arrays: list[Any]) -> list[Any]:
        """Returns the state after the update of a metric with other states."""
        treedef = jax.tree.structure(self._state)
        state = jax.tree.unflatten(treedef, states)
        metric = nnx.merge(self._graph, state, copy=True)
        self._update(arrays, metric)
        return jax.tree.leaves(nnx.state(metric))

    def _update(self, arrays: list[Any], metric: Any = None) -> None:
        leaves = list(self._leaves)
        for i, x in zip(self._places, arrays, strict=True):
            leaves[i] = x
        args, kwargs = jax.tree.unflatten(self._treedef, leaves)
        target = self._metric if metric is None else metric
        self._kind.update(target, *args, **kwargs)  # pyright: ignore

    def _average(self, arrays: list[Any], numbers: list[int]) -> list[Any]:
        """Returns the arguments with some of them averaged over the replicas."""
        same = self._context.same
        local = {
            i: arrays[i]
            for i in sorted(numbers)
            if not any(arrays[i] is x for x in same)
        }
        weighting = step_trace.current().weighting
        means = averaging.average_weighted(
            local, self._context.axis_name, weighting.of_metrics
        )
        return [means.get(i, x) for i, x in enumerate(arrays)]

    def _counts_samples(
        self, program: Any, states: list[Any], arrays: list[Any], used: set[int]
    ) -> bool:
        """Returns whether the update depends on arrays with a row per sample."""
        if any(i >= 0 and jnp.ndim(arrays[i]) for i in used):
            return True
        twice = [
            jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)
            if jnp.ndim(x)
            else x
            for x in arrays
        ]
        # It may depend on the number of samples alone.
        try:
            other = jax.make_jaxpr(self._after)(states, twice)
        except Exception:  # The user's code, with twice as many samples.
            return True
        constants = update_programs.constants
        return constants(program) != constants(other)


def _is_array(x: Any) -> bool:
    if not isinstance(x, jax.Array) and not hasattr(x, "dtype"):
        return False
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_
