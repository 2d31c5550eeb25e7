"""Signatures: which types do the functions return that make gradient functions?

Their results depend on their options, as with `has_aux` of `jax.value_and_grad`, and
keep the types of the parameters, of the loss and of its arguments. The classes here
exist for type checkers; a decorator gives them to the functions, which it returns.
"""

from collections.abc import Callable, Sequence
from typing import (
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import jax
from jax.typing import ArrayLike

from jdp.gradients.noise import GradientNorms
from jdp.gradients.weighted_mean import DivideBy
from jdp.hooks.base import CommHook
from jdp.trees.buckets import BucketPlan, Packing
from jdp.types import AllReduceOption, AxisOption, PyTree

P = ParamSpec("P")  # all arguments of a loss.
Rest = ParamSpec("Rest")  # all but the parameters.
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
Pair = TypeVar("Pair", bound=tuple[Any, Any])  # the result of a loss with `has_aux`.
State = TypeVar("State")
Used = TypeVar("Used")
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)
X_co = TypeVar("X_co", covariant=True)
Y_co = TypeVar("Y_co", covariant=True)
Z_co = TypeVar("Z_co", covariant=True)
Yes = Literal[True]
No = Literal[False]


class SyncOptions(TypedDict, total=False):
    """Options of a synchronisation that do not change the type of its result."""

    weight: ArrayLike | None
    divide_by: DivideBy
    axis_name: AxisOption
    plan: BucketPlan | None
    packing: Packing | None
    all_reduce: AllReduceOption
    hook: CommHook[Any] | None


class GradOptions(SyncOptions, total=False):
    """Options of `jdp.value_and_grad` that do not change the type of its result."""

    allow_int: bool


class LocalOptions(TypedDict, total=False):
    """Options of `jdp.local_gradients` that do not change the type of its result."""

    allow_int: bool
    axis_name: AxisOption


class OfLoss(Protocol[T_contra, Rest, V_co]):
    """A function made from a loss, by which checkers tell parameters from the rest."""

    def _loss_fn(
        self, params: T_contra, /, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> V_co: ...


class GradFn(Protocol[P, V_co]):
    """Gradient function: returns `(value, grads)`.

    The value is the loss, or a pair of the loss and the second result of `loss_fn`.
    Gradients have the type of the parameters.
    """

    def _loss_fn(self, *args: P.args, **kwargs: P.kwargs) -> V_co: ...

    def __call__(
        self: OfLoss[T, Rest, V],
        params: T,
        /,
        *args: Rest.args,
        **kwargs: Rest.kwargs,
    ) -> tuple[V, T]:
        """Returns `(value, grads)`."""
        ...


class GradFnWith(Protocol[P, V_co, X_co]):
    """Gradient function with one more result: returns `((value, grads), more)`."""

    def _loss_fn(self, *args: P.args, **kwargs: P.kwargs) -> V_co: ...

    def __call__(
        self: OfLoss[T, Rest, V],
        params: T,
        /,
        *args: Rest.args,
        **kwargs: Rest.kwargs,
    ) -> tuple[tuple[V, T], X_co]:
        """Returns `((value, grads), more)`."""
        ...


class GradFnWithTwo(Protocol[P, V_co, X_co, Y_co]):
    """Gradient function with two more results: pairs of pairs."""

    def _loss_fn(self, *args: P.args, **kwargs: P.kwargs) -> V_co: ...

    def __call__(
        self: OfLoss[T, Rest, V],
        params: T,
        /,
        *args: Rest.args,
        **kwargs: Rest.kwargs,
    ) -> tuple[tuple[tuple[V, T], X_co], Y_co]:
        """Returns `(((value, grads), first), second)`."""
        ...


class GradFnWithThree(Protocol[P, V_co, X_co, Y_co, Z_co]):
    """Gradient function with three more results: pairs of pairs."""

    def _loss_fn(self, *args: P.args, **kwargs: P.kwargs) -> V_co: ...

    def __call__(
        self: OfLoss[T, Rest, V],
        params: T,
        /,
        *args: Rest.args,
        **kwargs: Rest.kwargs,
    ) -> tuple[tuple[tuple[tuple[V, T], X_co], Y_co], Z_co]:
        """Returns `((((value, grads), first), second), third)`."""
        ...


class ValueAndGrad(Protocol):
    """The type of `jdp.value_and_grad`."""

    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        argnums: Literal[0] = ...,
        *,
        has_aux: No = ...,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[GradOptions],
    ) -> GradFn[P, jax.Array]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        argnums: Literal[0] = ...,
        *,
        has_aux: Yes,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[GradOptions],
    ) -> GradFn[P, Pair]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        argnums: Literal[0] = ...,
        *,
        has_aux: No = ...,
        find_unused: Yes,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[GradOptions],
    ) -> GradFnWith[P, jax.Array, PyTree]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        argnums: Literal[0] = ...,
        *,
        has_aux: Yes,
        find_unused: Yes,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[GradOptions],
    ) -> GradFnWith[P, Pair, PyTree]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        argnums: Literal[0] = ...,
        *,
        has_aux: No = ...,
        find_unused: No = ...,
        find_norms: Yes,
        hook_state: None = ...,
        **options: Unpack[GradOptions],
    ) -> GradFnWith[P, jax.Array, GradientNorms]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        argnums: Literal[0] = ...,
        *,
        has_aux: Yes,
        find_unused: No = ...,
        find_norms: Yes,
        hook_state: None = ...,
        **options: Unpack[GradOptions],
    ) -> GradFnWith[P, Pair, GradientNorms]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        argnums: Literal[0] = ...,
        *,
        has_aux: No = ...,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: State,
        **options: Unpack[GradOptions],
    ) -> GradFnWith[P, jax.Array, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        argnums: Literal[0] = ...,
        *,
        has_aux: Yes,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: State,
        **options: Unpack[GradOptions],
    ) -> GradFnWith[P, Pair, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, V],
        argnums: Literal[0] = ...,
        *,
        has_aux: bool = ...,
        find_unused: Yes,
        find_norms: Yes,
        hook_state: None = ...,
        **options: Unpack[GradOptions],
    ) -> GradFnWithTwo[P, V, PyTree, GradientNorms]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, V],
        argnums: Literal[0] = ...,
        *,
        has_aux: bool = ...,
        find_unused: Yes,
        find_norms: No = ...,
        hook_state: State,
        **options: Unpack[GradOptions],
    ) -> GradFnWithTwo[P, V, PyTree, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, V],
        argnums: Literal[0] = ...,
        *,
        has_aux: bool = ...,
        find_unused: No = ...,
        find_norms: Yes,
        hook_state: State,
        **options: Unpack[GradOptions],
    ) -> GradFnWithTwo[P, V, GradientNorms, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, V],
        argnums: Literal[0] = ...,
        *,
        has_aux: bool = ...,
        find_unused: Yes,
        find_norms: Yes,
        hook_state: State,
        **options: Unpack[GradOptions],
    ) -> GradFnWithThree[P, V, PyTree, GradientNorms, State]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, ArrayLike],
        argnums: int | Sequence[int],
        *,
        has_aux: No = ...,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[GradOptions],
    ) -> Callable[P, tuple[jax.Array, Any]]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Pair],
        argnums: int | Sequence[int],
        *,
        has_aux: Yes,
        find_unused: No = ...,
        find_norms: No = ...,
        hook_state: None = ...,
        **options: Unpack[GradOptions],
    ) -> Callable[P, tuple[Pair, Any]]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[P, Any],
        argnums: int | Sequence[int],
        *,
        has_aux: bool = ...,
        find_unused: bool = ...,
        find_norms: bool = ...,
        hook_state: PyTree = ...,
        **options: Unpack[GradOptions],
    ) -> Callable[P, Any]: ...


def of_value_and_grad(fn: Callable[..., Any]) -> ValueAndGrad:
    """Returns `fn`, with the type of `jdp.value_and_grad`."""
    return cast(ValueAndGrad, fn)
