"""Watched values: which values of a step differ between replicas or hold samples?

Only the whole program of a step tells. So a step with such a question is traced first
without an answer, and then again with the answers.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdp.compat import annotations


class Answer(NamedTuple):
    """Facts about one watched value."""

    shape: tuple[int, ...]  # on one replica.
    differs: bool | None  # between replicas; None: in some calls only.
    # The dimension that grows by the number of replicas if each has the samples of all;
    # None if there is none.
    sample_dim: int | None
    # Whether that dimension holds the samples of all replicas, as `lax.all_gather` with
    # `tiled=True` returns them.
    has_all_samples: bool = False


@dataclasses.dataclass
class WatchedValues:
    """Values that are watched in one trace of a step.

    Attributes:
      answers: per call of `ask`; None: in the first trace of a step.
      shapes: shapes of the values, per call of `ask` so far.
    """

    answers: Sequence[tuple[Answer, ...]] | None = None
    shapes: list[tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=list)

    def ask(
        self, xs: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], tuple[Answer, ...] | None]:
        """Asks about values.

        Returns:
          The values, to be used in place of the arguments; and the answers, None in a
          first trace.

        Raises:
          ValueError: the two traces of the step ask about different values.
        """
        number = len(self.shapes)
        self.shapes.append(tuple(jnp.shape(x) for x in xs))
        if self.answers is None:
            marked = [annotations.watch(x, number, i) for i, x in enumerate(xs)]
            return marked, None
        answers = self.answers[number : number + 1]
        if [[a.shape for a in given] for given in answers] != [[*self.shapes[-1]]]:
            raise ValueError(
                "A step that updates metrics does something else when it is traced a "
                "second time. Let the order of its updates, and the shapes of their "
                "arguments, depend on its arguments alone."
            )
        return list(xs), answers[0]
