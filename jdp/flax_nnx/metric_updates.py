"""Metric updates: how does a metric of nnx count the samples of all replicas?

Inside a step, the `update` of each `nnx.metrics.Metric` is replaced. It is traced
first, to learn what it does with its arguments:

- Arguments that are the same on all replicas are left alone.
- Numbers without a dimension, such as a loss, are averaged over the replicas.
- Other arguments must have one dimension that grows with the samples.
- What the update sums over samples is summed over the samples of each replica, and
  these sums are added; see `partitioned_updates`.
- For any other update, the samples of all replicas are gathered, and each replica
  counts all.
- An `update` that communicates itself is left alone.

Which arguments are the same, and which hold samples, only the whole program of the step
tells; see `watched_values`.
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

from jdp import compat
from jdp.flax_nnx import partitioned_updates, update_programs
from jdp.flax_nnx.program_pairs import Total
from jdp.gradients import averaging, step_trace
from jdp.gradients.watched_values import Answer
from jdp.trees import tree_paths
from jdp.types import AxisName, as_axis_names


class _Growth(NamedTuple):
    """New states of a metric."""

    metric: Any
    treedef: Any  # of its state.
    states: list[Total]


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
        states = [x for growth in growths for x in growth.states]
        totals = iter(self._sum([x.own for x in states if x.own is not None]))
        for growth in growths:
            after = [
                _add(x.whole, None if x.own is None else next(totals))
                for x in growth.states
            ]
            nnx.update(growth.metric, jax.tree.unflatten(growth.treedef, after))

    def finish(self, metric: Any) -> None:
        """Adds now what was to be added to a metric later."""
        if any(growth.metric is metric for growth in self.growths or ()):
            growths, self.growths = self.growths or [], None
            self.add(growths)
            self.growths = []

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
        pairs, self._treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        self._leaves = [x for _, x in pairs]
        # Without the place in the pair above.
        self._paths = tree_paths.format_paths([path[1:] for path, _ in pairs])
        # The places of the arrays among the leaves; other leaves are static.
        self._places = [i for i, x in enumerate(self._leaves) if _is_array(x)]

    def run(self) -> None:
        """Updates the metric."""
        self._context.finish(self._metric)
        self._graph, self._state = nnx.split(self._metric)
        arrays = [self._leaves[i] for i in self._places]
        states = jax.tree.leaves(self._state)
        program = jax.make_jaxpr(self._after)(states, arrays)
        if update_programs.has_collective(program):
            return self._update(arrays)
        used = {i - len(states) for i in update_programs.used_inputs(program)}
        arrays, answers = self._ask(arrays, used)
        if answers is None:
            return self._update_in_first_trace(arrays)
        numbers = [
            i
            for i in used
            if i >= 0 and answers[i].differs is not False and not answers[i].shape
        ]
        arrays = self._average(arrays, numbers)
        dims = [
            self._sample_dim(i, answer, is_used=i in used)
            for i, answer in enumerate(answers)
        ]
        return self._update_together(states, arrays, dims, used)

    def _ask(
        self, arrays: list[Any], used: set[int]
    ) -> tuple[list[Any], Sequence[Answer] | None]:
        """Asks which arrays differ between replicas, and which hold samples.

        Returns:
          The arrays, and an answer for each; None in the first trace of a step.
        """
        axis_name, same = self._context.axis_name, self._context.same
        is_same = [any(x is y for y in same) for x in arrays]
        # A mean of numbers that are the same is that number, unless it is an integer.
        is_open = [
            jnp.ndim(x) or (i in used and not jnp.issubdtype(x.dtype, jnp.inexact))
            for i, x in enumerate(arrays)
        ]
        if compat.axis_size(axis_name) > 1 and any(
            is_open[i] and not is_same[i] for i in range(len(arrays))
        ):
            arrays, answers = step_trace.current().watched.ask(arrays)
            if answers is None:
                return arrays, None
        else:
            answers = [Answer(jnp.shape(x), not jnp.ndim(x), None) for x in arrays]
        pairs = zip(answers, is_same, strict=True)
        return arrays, [a._replace(differs=False) if s else a for a, s in pairs]

    def _update_in_first_trace(self, arrays: list[Any]) -> None:
        """Updates the metric, to the same values on all replicas."""
        names = as_axis_names(self._context.axis_name)
        self._update(arrays)
        state = nnx.state(self._metric)
        same = jax.tree.map(lambda x: lax.all_gather(x, names)[0], state)
        nnx.update(self._metric, same)

    def _sample_dim(self, place: int, answer: Answer, *, is_used: bool) -> int | None:
        """Returns the dimension of an argument that holds a replica's samples.

        Raises:
          ValueError: on one device, the argument would have unknown values.
        """
        shape, differs, dim, has_all_samples = answer
        if dim is not None and (differs or not is_used):
            return None if has_all_samples and not differs else dim
        is_plain = differs is False and (dim is None or has_all_samples)
        if not is_used or not shape or is_plain:
            return None
        axis = repr(self._context.axis_name)
        if differs is None:
            reason = (
                "differs between the replicas in some calls of a function that JAX "
                "transforms, and is the same in others. Update the metric outside of "
                "that function."
            )
        elif dim is not None:
            reason = (
                "is the same on all replicas, and yet has a row per sample of a "
                "replica, so its rows for the samples of all replicas are unknown. "
                "Leave it out, make it in the `update` of the metric, or pass what "
                "belongs to this replica's samples."
            )
        else:
            reason = (
                "differs between the replicas, but no dimension of it grows with the "
                "number of samples, so it may be a sum or a mean. Pass one row per "
                "sample; or make it the same on all replicas: "
                f"`lax.psum(x, {axis})` if it is a sum over samples, or "
                "`jdp.average(x)` if it is a mean."
            )
        name = self._paths[self._places[place]]
        raise ValueError(
            f"The argument `{name}` {list(shape)} of the update of a metric, "
            f"`{self._kind.__name__}`, {reason}"
        )

    def _update_together(
        self,
        states: list[Any],
        arrays: list[Any],
        dims: list[int | None],
        used: set[int],
    ) -> None:
        """Updates the metric by the samples of all replicas."""
        if all(dim is None for dim in dims):
            return self._update(arrays)
        names = as_axis_names(self._context.axis_name)
        n = compat.axis_size(self._context.axis_name)
        shapes = [
            _like(x, jnp.shape(x) if dim is None else _widen(jnp.shape(x), dim, n))
            for x, dim in zip(arrays, dims, strict=True)
        ]
        narrow = jax.make_jaxpr(self._after)(states, arrays)
        wide = jax.make_jaxpr(self._after)(states, shapes)
        totals = partitioned_updates.run(narrow, wide, states, arrays, dims, names)
        if totals is not None and len(totals) == len(states):
            treedef = jax.tree.structure(self._state)
            growth = _Growth(self._metric, treedef, totals)
            return self._context.add([growth])
        for i, dim in enumerate(dims):
            if dim is not None and i in used:
                arrays[i] = lax.all_gather(arrays[i], names, axis=dim, tiled=True)
            elif dim is not None:  # Only its shape may matter.
                arrays[i] = jnp.zeros(shapes[i].shape, shapes[i].dtype)
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
        local = {i: arrays[i] for i in sorted(numbers)}
        weighting = step_trace.current().weighting
        means = averaging.average_weighted(
            local, self._context.axis_name, weighting.of_metrics
        )
        return [means.get(i, x) for i, x in enumerate(arrays)]


def _is_array(x: Any) -> bool:
    if not isinstance(x, jax.Array) and not hasattr(x, "dtype"):
        return False
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_


def _add(x: Any, y: Any) -> Any:
    """Adds two arrays, either of which may be None, for zero."""
    if x is None or y is None:
        return y if x is None else x
    return x + y


def _widen(shape: Sequence[int], dim: int, factor: int) -> tuple[int, ...]:
    """Returns a shape with one dimension that is longer."""
    return tuple(k * factor if i == dim else k for i, k in enumerate(shape))


def _like(x: Any, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    """Returns the type of an array, with another shape."""
    aval: Any = jax.typeof(x)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)
