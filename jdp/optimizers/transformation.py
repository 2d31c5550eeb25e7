"""Transformation: which types does an optimizer of jdp take and return?

optax declares updates and states as any tree of arrays. The optimizers of jdp declare
more: updates have the type of the gradients, and a new state the type of the old. As in
optax, a class narrows the fields of the named tuple that it inherits from.
"""

from typing import Any, Generic, Protocol, TypeVar

import optax
from jax.typing import ArrayLike

from jdp.types import PyTree

T = TypeVar("T")
S = TypeVar("S")
State_co = TypeVar("State_co", covariant=True)


class InitFn(Protocol[State_co]):
    """Makes the first state of an optimizer."""

    def __call__(self, params: PyTree) -> State_co:
        """Returns the state for `params`, a pytree of arrays."""
        ...


class UpdateFn(Protocol):
    """Takes a step of an optimizer."""

    def __call__(
        self,
        updates: T,
        state: S,
        params: PyTree | None = None,
        *,
        used: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[T, S]:
        """Returns updates to be added to the parameters, and the next state.

        Args:
          updates: the gradients.
          state: the result of `init` or of the last call.
          params: the parameters.
          used: which parameters were used, a tree of booleans like the gradients.
          **extra_args: further arguments for the inner optimizer.
        """
        ...


class SyncedUpdateFn(Protocol):
    """Takes a step on gradients that it averages over the replicas."""

    def __call__(
        self,
        updates: T,
        state: S,
        params: PyTree | None = None,
        *,
        used: PyTree | None = None,
        weight: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[T, S]:
        """Returns updates to be added to the parameters, and the next state.

        Args:
          updates: the gradients of this replica.
          state: the result of `init` or of the last call.
          params: the parameters.
          used: which parameters this replica used.
          weight: number of samples of this replica.
          **extra_args: further arguments for the inner optimizer.
        """
        ...


class Transformation(optax.GradientTransformationExtraArgs, Generic[State_co]):
    """An optax transformation that keeps the types of gradients and state."""

    init: InitFn[State_co]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: UpdateFn  # pyright: ignore[reportIncompatibleVariableOverride]


class SyncedTransformation(optax.GradientTransformationExtraArgs, Generic[State_co]):
    """An optax transformation that averages gradients, and keeps their types."""

    init: InitFn[State_co]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: SyncedUpdateFn  # pyright: ignore[reportIncompatibleVariableOverride]
