"""Signature: which types does a replicated function take and return?

It takes the arguments of the function that it was made from. The first batch may also
be in numpy arrays where the function declares `jax.Array`, and there may be a weight.
"""

from typing import TYPE_CHECKING, Any, Generic, overload

import jax
import numpy as np

from jdp.step.signature import A, B, HostArray, K, P, R, TakesOne, TakesTwo


class EvaluationCall(Generic[P, R]):
    """The call of a replicated function, for type checkers."""

    if TYPE_CHECKING:

        def _step_fn(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

        def _state_fn(self) -> Any: ...

        @overload
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
        @overload
        def __call__(
            self: TakesTwo[A, B, ..., R],
            params: A,
            batch: B,
            /,
            *batches: Any,
            weight: jax.typing.ArrayLike | None = ...,
            **named: Any,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesTwo[A, jax.Array, ..., R],
            params: A,
            batch: HostArray,
            /,
            *batches: Any,
            weight: jax.typing.ArrayLike | None = ...,
            **named: Any,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesTwo[A, dict[K, jax.Array], ..., R],
            params: A,
            batch: dict[K, HostArray] | dict[K, np.ndarray],
            /,
            *batches: Any,
            weight: jax.typing.ArrayLike | None = ...,
            **named: Any,
        ) -> R: ...
        @overload
        def __call__(
            self: TakesOne[A, ..., Any, R],
            params: A,
            /,
            *,
            weight: jax.typing.ArrayLike | None = ...,
            **named: Any,
        ) -> R: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Runs the function on one batch; see `jdp.replicated`."""
            ...
