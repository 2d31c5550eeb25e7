"""Signature: which types does a step of all replicas take and return?"""

from typing import Any, Protocol

from typing_extensions import ParamSpec, TypeVar

P = ParamSpec("P", default=...)  # the arguments of a step.
Rest = ParamSpec("Rest")  # the arguments of a method, without `self`.
S = TypeVar("S", default=Any)  # the new state.
M = TypeVar("M", default=Any)  # the metrics.
Owner = TypeVar("Owner")
Owner_contra = TypeVar("Owner_contra", contravariant=True)
S_co = TypeVar("S_co", covariant=True)
M_co = TypeVar("M_co", covariant=True)


class OfMethod(Protocol[Owner_contra, Rest, S_co, M_co]):
    """Step whose first argument is an object, by which checkers know a method."""

    def _step_fn(
        self, owner: Owner_contra, /, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> tuple[S_co, M_co]: ...
