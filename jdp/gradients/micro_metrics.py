"""Micro metrics: metrics of a whole batch, from the metrics of its micro-batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.gradients import weighted_mean
from jdp.replicas import per_replica
from jdp.trees import tree_paths
from jdp.types import PyTree


class MicroMetrics:
    """Metrics of micro-batches, per leaf: the mean of numbers, or rows of samples.

    A leaf of a `jdp.PerReplica` with one or more rows per sample has rows.
    """

    def __init__(
        self,
        run: Callable[[int], Any],
        sizes: list[int],
        num_micro_batches: int,
        *,
        is_weighed: bool,
    ):
        """Starts without metrics.

        Args:
          run: returns loss and aux of a micro-batch with a given number of samples.
          sizes: the distinct numbers of samples per micro-batch.
          num_micro_batches: with 1, no samples are averaged.
          is_weighed: whether samples have weights.
        """
        self._is_weighed = is_weighed
        self._run = run
        self._sizes = sizes
        self._is_mixed = num_micro_batches > 1
        self._treedef: Any = None
        self._paths: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._are_rows: list[bool] = []

    def leaves(
        self,
        metrics: tuple[jax.Array, PyTree],
        size: int,
        weigh: Callable[[jax.Array], jax.Array],
    ) -> list[jax.Array]:
        """Returns the leaves of the metrics of a micro-batch, numbers weighted.

        Args:
          metrics: its loss and aux.
          size: its number of samples.
          weigh: multiplies a number by the share of the micro-batch.

        Raises:
          TypeError: a leaf has no mean.
          ValueError: it has a row per sample, or another shape for another size.
        """
        leaves, self._treedef = jax.tree.flatten(metrics)
        shapes = [jnp.shape(x) for x in leaves]
        if not self._paths:
            self._paths = ["loss", *tree_paths.leaf_paths(metrics[1])]
            self._shapes = shapes
            self._are_rows = self._find_rows(metrics, size)
        for i, x in enumerate(leaves):
            self._check(i, x, size)
        return [
            x if is_row else weigh(weighted_mean.as_inexact(x))
            for x, is_row in zip(leaves, self._are_rows, strict=True)
        ]

    def join(self, parts: list[list[jax.Array]]) -> PyTree:
        """Returns the metrics of all samples.

        Args:
          parts: results of `leaves` per size, stacked: each of shape (count, ...).
        """
        joined = []
        for xs, is_row in zip(zip(*parts, strict=True), self._are_rows, strict=True):
            if is_row:
                rows = [x.reshape(-1, *x.shape[2:]) for x in xs]
                joined.append(jnp.concatenate(rows))
            else:
                joined.append(sum(x.sum(0) for x in xs))
        return jax.tree.unflatten(self._treedef, joined)

    def _find_rows(self, metrics: PyTree, size: int) -> list[bool]:
        """Returns for each leaf whether its first dimension grows with the samples."""
        found = [shape[:1] == (size,) for shape in self._shapes]
        hint = (
            " No other number of samples could be tried. If the shape is that by "
            "chance, return it behind another dimension, such as `x[None]`."
        )
        if any(map(self._must_know, jax.tree.leaves(metrics))):
            # The loss is tried at another size: a shape may match by chance.
            others = [s for s in self._sizes if s != size]
            for other in (*others, 2 * size, size + 1):
                if shapes := self._shapes_at(other):
                    pairs = list(zip(self._shapes, shapes, strict=True))
                    found = [_has_rows(*pair, (size, other)) for pair in pairs]
                    hint = ""
                    self._check_only_rows_grow(pairs, found)
                    break
        flags = zip(found, per_replica.are_own(metrics), strict=True)
        for i, (is_row, is_own) in enumerate(flags):
            if is_row and not is_own and self._is_mixed:
                kind = _kind(jax.tree.leaves(metrics)[i])
                raise ValueError(
                    f"The metric `{self._paths[i]}`, {kind}, seems to have a row per "
                    "sample of a micro-batch, and the mean over micro-batches would "
                    "mix rows of different samples. Return `jdp.PerReplica(x)` from "
                    "the loss to get the rows of all samples, in the order of the "
                    f"batch, or a mean over the samples.{hint}"
                )
        return found

    def _must_know(self, x: Any) -> bool:
        """Whether the result depends on whether a metric has rows."""
        is_taken = self._is_mixed or self._is_weighed
        return bool(jnp.shape(x)) and (
            is_taken or not jnp.issubdtype(_dtype_of(x), jnp.inexact)
        )

    def _shapes_at(self, size: int) -> list[tuple[int, ...]]:
        """Returns the shapes at another size; empty where the loss refuses it."""
        shapes: list[tuple[int, ...]] = []
        try:
            jax.eval_shape(lambda: _note_shapes(self._run(size), shapes))
        except Exception:
            return []
        return shapes

    def _check_only_rows_grow(
        self, pairs: list[tuple[tuple[int, ...], ...]], are_rows: list[bool]
    ) -> None:
        for path, (shape, other), is_row in zip(
            self._paths, pairs, are_rows, strict=True
        ):
            if shape != other and not is_row and self._is_mixed:
                raise ValueError(
                    f"The shape of the metric `{path}`, {shape}, changes with the "
                    "number of samples, and the mean over micro-batches would mix "
                    "different samples. Return a mean over the samples, or, with the "
                    "samples in its first dimension, a `jdp.PerReplica`."
                )

    def _check(self, i: int, x: Any, size: int) -> None:
        shape, first = jnp.shape(x), self._shapes[i]
        if self._are_rows[i]:
            is_fit = _has_rows(first, shape, (self._sizes[0], size))
        else:
            is_fit = shape == first
        if not is_fit:
            raise ValueError(
                f"The metric `{self._paths[i]}` has shape {first} for micro-batches of "
                f"{self._sizes[0]} samples and {shape} for micro-batches of "
                f"{size}: there is no mean over both. Return arrays of one shape, "
                "such as a mean over the samples, or let "
                "`num_micro_batches` divide the number of samples."
            )
        dtype = _dtype_of(x)
        is_number = jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_
        if not (is_number or self._are_rows[i]):
            raise TypeError(
                f"The metric `{self._paths[i]}` is {_kind(x)}, which has no mean over "
                "micro-batches. Return numbers, and take what the loss does not make "
                "from outside of it."
            )


def _has_rows(
    shape: tuple[int, ...], other: tuple[int, ...], sizes: tuple[int, int]
) -> bool:
    """Whether only the first dimensions differ, in the ratio of the sizes."""
    if len(shape) != len(other) or shape[1:] != other[1:] or not shape or not shape[0]:
        return False
    return shape[0] * sizes[1] == other[0] * sizes[0]


def _note_shapes(metrics: PyTree, shapes: list[tuple[int, ...]]) -> None:
    shapes.extend(jnp.shape(x) for x in jax.tree.leaves(metrics))


def _dtype_of(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def _kind(x: Any) -> str:
    return f"{_dtype_of(x)}{list(jnp.shape(x))}"
