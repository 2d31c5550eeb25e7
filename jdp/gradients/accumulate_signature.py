"""Signature of accumulation: which types does `jdp.accumulate_gradients` return?

The types of `jdp.value_and_grad`; see `jdp.gradients.signatures`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Unpack, cast, overload

import jax
from jax.typing import ArrayLike

from jdp.gradients.noise import GradientNorms
from jdp.gradients.signatures import (
    GradFn,
    GradFnWith,
    GradFnWithThree,
    GradFnWithTwo,
    GradOptions,
    No,
    P,
    Pair,
    State,
    V,
    Yes,
)
from jdp.types import PyTree


class AccumulateOptions(GradOptions, total=False):
    """Options that do not change the type of the result."""

    dtype: Any


class AccumulateGradients(Protocol):
    """The type of `jdp.accumulate_gradients`."""

    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: No = ...,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[AccumulateOptions],
    ) -> GradFn[P, jax.Array]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: Yes,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[AccumulateOptions],
    ) -> GradFn[P, Pair]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: No = ...,
        find_unused: Yes,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWith[P, jax.Array, PyTree]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: Yes,
        find_unused: Yes,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWith[P, Pair, PyTree]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: No = ...,
        find_unused: No = ...,
        find_norms: Yes,
        hook_state: None = ...,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWith[P, jax.Array, GradientNorms]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: Yes,
        find_unused: No = ...,
        find_norms: Yes,
        hook_state: None = ...,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWith[P, Pair, GradientNorms]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: No = ...,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: State,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWith[P, jax.Array, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: Yes,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: State,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWith[P, Pair, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, V],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: bool = ...,
        find_unused: Yes,
        find_norms: Yes,
        hook_state: None = ...,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWithTwo[P, V, PyTree, GradientNorms]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, V],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: bool = ...,
        find_unused: Yes,
        find_norms: No = ...,
        hook_state: State,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWithTwo[P, V, PyTree, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, V],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: bool = ...,
        find_unused: No = ...,
        find_norms: Yes,
        hook_state: State,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWithTwo[P, V, GradientNorms, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, V],
        num_micro_batches: int,
        *,
        argnums: Literal[0] = ...,
        has_aux: bool = ...,
        find_unused: Yes,
        find_norms: Yes,
        hook_state: State,
        **options: Unpack[AccumulateOptions],
    ) -> GradFnWithThree[P, V, PyTree, GradientNorms, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        num_micro_batches: int,
        *,
        argnums: int | Sequence[int],
        has_aux: No = ...,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[AccumulateOptions],
    ) -> Callable[P, tuple[jax.Array, Any]]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        num_micro_batches: int,
        *,
        argnums: int | Sequence[int],
        has_aux: Yes,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[AccumulateOptions],
    ) -> Callable[P, tuple[Pair, Any]]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Any],
        num_micro_batches: int,
        *,
        argnums: int | Sequence[int],
        has_aux: bool = ...,
        find_unused: bool = ...,
        find_norms: bool = ...,
        hook_state: PyTree = ...,
        **options: Unpack[AccumulateOptions],
    ) -> Callable[P, Any]: ...


def of_accumulate_gradients(fn: Callable[..., Any]) -> AccumulateGradients:
    """Returns `fn`, with the type of `jdp.accumulate_gradients`."""
    return cast(AccumulateGradients, fn)
