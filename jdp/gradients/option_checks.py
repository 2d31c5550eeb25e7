"""Option checks: which plans, hooks and all-reduces a synchronisation takes."""

import functools
from typing import Any

from jax import lax

from jdp import collectives
from jdp.collectives import auto
from jdp.hooks.base import CommHook
from jdp.trees.buckets import BucketPlan
from jdp.types import AllReduce

_SUMS = (
    "butterfly_all_reduce, halving_doubling_all_reduce, hierarchical_all_reduce, "
    "pallas_all_reduce, psum_all_reduce, reduce_broadcast_all_reduce, ring_all_reduce, "
    "shared_memory_all_reduce"
)
_TYPES_OF_SUMS = (
    collectives.AutoAllReduce,
    collectives.PallasAllReduce,
    collectives.SharedMemoryAllReduce,
)
_SUM_NAMES = {*_SUMS.split(", "), "auto_all_reduce"}
# Functions that return something else than a sum, with their names.
_NO_SUMS = {
    id(half): f"jdp.collectives.{name}.{field}"
    for name in ("HALVING_DOUBLING", "PSUM", "RING", "SHARED_MEMORY")
    for field, half in getattr(collectives, name)._asdict().items()
    if half is not None
}
_NO_SUMS |= {
    id(getattr(collectives, name)): f"jdp.collectives.{name}"
    for name in collectives.__all__
    if name not in _SUM_NAMES
}
_NO_SUMS |= {
    id(getattr(lax, name)): f"jax.lax.{name}"
    for name in ("all_gather", "all_to_all", "pmax", "pmean", "pmin", "ppermute")
}
_NO_SUMS[id(lax.psum_scatter)] = "jax.lax.psum_scatter"


def check_plan(plan: Any) -> BucketPlan | None:
    """Returns a plan.

    Raises:
      TypeError: it is none.
    """
    if plan is not None and not isinstance(plan, BucketPlan):
        raise TypeError(
            "`plan` must be what `jdp.plan_buckets` returns, or None, got "
            f"{plan!r}. Pass `jdp.plan_buckets(params, bucket_bytes=...)`."
        )
    return plan


def check_hook(hook: Any, packing: Any) -> CommHook | None:
    """Returns a hook, which goes with that packing.

    Raises:
      TypeError: it is none.
      ValueError: `packing` is unknown, or "tuple" with a hook.
    """
    if hook is not None and not isinstance(hook, CommHook):
        raise TypeError(
            "`hook` must be a `jdp.hooks.CommHook`, such as `jdp.hooks.int8()`, got "
            f"{hook!r}."
        )
    if packing not in (None, "flat", "tuple"):
        raise ValueError(f"`packing` must be 'flat' or 'tuple', got {packing!r}.")
    if hook is not None and packing == "tuple":
        raise ValueError(
            "`packing='tuple'` sends leaves as they are, but a hook takes flat "
            "buffers. Leave one of the two out."
        )
    return hook


def find_all_reduce(all_reduce: Any) -> AllReduce | None:
    """Returns an all-reduce that sums; that of "auto".

    Raises:
      ValueError: it is a function of `jdp.collectives` or of JAX that returns something
        else than a sum, or it is no function and not "auto".
    """
    if isinstance(all_reduce, str) and all_reduce == "auto":
        return auto.auto_all_reduce
    if all_reduce is None:
        return None
    function, options = _unwrapped(all_reduce)
    name = _NO_SUMS.get(id(function))
    if name is None and options.get("op", "sum") != "sum" and _is_ours(function):
        name = f"jdp.collectives.{_name_of(function)}(op={options['op']!r})"
    if name is not None:
        raise ValueError(
            f"`all_reduce` must sum buffers over the replicas, but `{name}` does not. "
            f"{_REMEDIES.get(name, _PASS_A_SUM)}"
        )
    if isinstance(all_reduce, str) or not callable(function):
        raise ValueError(
            "`all_reduce` must be a function of `jdp.collectives`, 'auto' or None, got "
            f"{all_reduce!r}."
        )
    return all_reduce


_PASS_A_SUM = f"Pass one of `jdp.collectives` that does: {_SUMS}."
_REMEDIES = {
    "jdp.collectives.adasum": "Take gradients with `jdp.local_gradients`, and combine "
    "all of them in one call: `grads = jdp.collectives.adasum(grads)`.",
}


def _unwrapped(function: Any) -> tuple[Any, dict[str, Any]]:
    """Takes a function out of each `functools.partial`, with its options."""
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    return function, options


def _is_ours(function: Any) -> bool:
    return isinstance(function, _TYPES_OF_SUMS) or id(function) in _OUR_SUMS


_OUR_SUMS = {id(getattr(collectives, name)) for name in _SUM_NAMES}


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
