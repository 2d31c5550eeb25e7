"""Join hook: how does a step run in a `jdp.Join`, with and without data?"""

import functools
from typing import Any, Protocol

import jax
import numpy as np

from jdp.gradients.weighted_mean import DivideBy
from jdp.replicas import replication
from jdp.replicas.joinable import JoinContext, JoinHook
from jdp.replicas.mesh import World
from jdp.step import call_arguments
from jdp.types import PyTree


class JoinedStep(Protocol):
    """Attributes and methods of a step that the hook needs."""

    name: str
    last_state: PyTree | None
    join_context: JoinContext | None

    @property
    def join_world(self) -> World:
        """Replicas that the step runs on."""
        ...

    def run(
        self, divide_by: DivideBy | None, state: PyTree, batches: tuple[PyTree, ...]
    ) -> tuple[PyTree, PyTree]:
        """Runs the step; with a divisor, the first batch marks replicas with data."""
        ...


class StepJoinHook(JoinHook):
    """Runs a step in a `jdp.Join`, also for a process that has joined."""

    def __init__(
        self,
        step: JoinedStep,
        divide_by: DivideBy,
        example: tuple[PyTree, ...] | None,
    ):
        self._step = step
        self._divide_by: DivideBy = divide_by
        self._has_run = False  # true on all processes at once.
        self._arguments = example  # of the last call, with the state that it returned.

    def run(
        self, state: PyTree, batches: tuple[PyTree, ...], *, has_data: bool
    ) -> tuple[PyTree, PyTree]:
        """Runs the step; without data, the replicas of this process have weight 0."""
        step = self._step
        amount = np.full(step.join_world.num_local_rows, has_data, np.float32)
        out = step.run(self._divide_by, state, (amount, *batches))
        step.last_state = out[0]
        self._has_run = True
        self._arguments = out[0], *batches
        return out

    def main_hook(self) -> None:
        """Runs the step on zeros."""
        if self._arguments is None:
            raise RuntimeError(
                f"This process has not called the step `{self._step.name}` in the "
                "`jdp.Join`, so it has no state and no shapes to run it on zeros. Pass "
                "`example=(state, *batches)` to `jdp.Join`, or use `jdp.join_batches`."
            )
        state, *batches = self._arguments
        make_zeros = functools.partial(_zeros_of, self._step.join_world)
        zeros = call_arguments.map_batches(make_zeros, tuple(batches))
        self.run(state, zeros, has_data=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all processes the state of the last joiner."""
        step = self._step
        context = step.join_context
        assert context is not None and context.last_joiner is not None
        self._arguments = None  # Keeps nothing alive but `last_state`.
        if self._has_run:
            step.last_state = replication.copy_from(
                step.join_world, step.last_state, process=context.last_joiner
            )


def check_example(example: Any) -> None:
    """Raises TypeError unless an example is the arguments of a call."""
    if not isinstance(example, tuple | list) or not example:
        raise TypeError(
            "`example` must be the arguments of a call, `(state, *batches)`, got "
            f"{example!r}."
        )


def has_deleted(state: PyTree) -> bool:
    """Returns whether a leaf of a state was deleted, or donated to a function."""
    return any(
        isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)
    )


def _zeros_of(world: World, leaf: Any) -> np.ndarray:
    """Returns zeros in the shape of this process' part of a batch."""
    aval = jax.eval_shape(lambda x: x, leaf)
    if isinstance(leaf, jax.Array) and leaf.sharding == world.split:
        part = aval.shape[0] // world.num_replicas * world.num_local_replicas
        return np.zeros((part, *aval.shape[1:]), aval.dtype)
    return np.zeros(aval.shape, aval.dtype)
