"""Signature: which types does a step of all replicas take and return?

A step is written with `jax.Array`s, and is called with arrays of the host as well. So
its call takes numpy arrays where the step declares `jax.Array`: for the first batches,
passed by position. For others, declare `jax.Array | np.ndarray`.
"""

from typing import TYPE_CHECKING, Any, Generic, Protocol, overload

import jax
import numpy as np
from typing_extensions import ParamSpec, TypeVar

P = ParamSpec("P", default=...)  # the arguments of a step.
Rest = ParamSpec("Rest")  # the arguments after the first ones.
S = TypeVar("S", default=Any)  # the new state.
R = TypeVar("R", default=Any)  # the results, with the new state.
T = TypeVar("T")  # the new state, of a step that returns nothing else.
K = TypeVar("K")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)
S_co = TypeVar("S_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)
HostArray = np.ndarray | jax.Array


class TakesOne(Protocol[A_contra, Rest, S_co, R_co]):
    """Step, by its first argument: the state, or the object of a method."""

    def _step_fn(
        self, a: A_contra, /, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> R_co: ...

    def _state_fn(self) -> S_co: ...


class TakesTwo(Protocol[A_contra, B_contra, Rest, R_co]):
    """Step, by its first two arguments."""

    def _step_fn(
        self, a: A_contra, b: B_contra, /, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> R_co: ...


class TakesThree(Protocol[A_contra, B_contra, C_contra, Rest, R_co]):
    """Step, by its first three arguments."""

    def _step_fn(
        self,
        a: A_contra,
        b: B_contra,
        c: C_contra,
        /,
        *args: Rest.args,
        **kwargs: Rest.kwargs,
    ) -> R_co: ...


class TakesFour(Protocol[A_contra, B_contra, C_contra, D_contra, Rest, R_co]):
    """Step, by its first four arguments."""

    def _step_fn(
        self,
        a: A_contra,
        b: B_contra,
        c: C_contra,
        d: D_contra,
        /,
        *args: Rest.args,
        **kwargs: Rest.kwargs,
    ) -> R_co: ...


class StepCall(Generic[P, S, R]):
    """The call of a step, for type checkers."""

    if TYPE_CHECKING:

        def _step_fn(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

        def _state_fn(self) -> S: ...

        @overload
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
        @overload
        def __call__(
            self: TakesTwo[A, jax.Array, Rest, R],
            state: A,
            batch: HostArray,
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesTwo[A, dict[K, jax.Array], Rest, R],
            state: A,
            batch: dict[K, HostArray] | dict[K, np.ndarray],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesThree[A, B, jax.Array, Rest, R],
            state: A,
            batch: B,
            weight: HostArray,
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesThree[A, jax.Array, jax.Array, Rest, R],
            state: A,
            inputs: HostArray,
            labels: HostArray,
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesThree[A, dict[K, jax.Array], jax.Array, Rest, R],
            state: A,
            batch: dict[K, HostArray] | dict[K, np.ndarray],
            weight: HostArray,
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesThree[A, B, dict[K, jax.Array], Rest, R],
            state: A,
            second_state: B,
            batch: dict[K, HostArray] | dict[K, np.ndarray],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesFour[A, B, jax.Array, jax.Array, Rest, R],
            state: A,
            second_state: B,
            inputs: HostArray,
            labels: HostArray,
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesFour[A, B, C, jax.Array, Rest, R],
            state: A,
            second_state: B,
            third: C,
            batch: HostArray,
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesFour[A, B, C, dict[K, jax.Array], Rest, R],
            state: A,
            second_state: B,
            third: C,
            batch: dict[K, HostArray] | dict[K, np.ndarray],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> R: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Runs one step; see `jdp.data_parallel`."""
            ...
