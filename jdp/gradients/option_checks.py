"""Option checks: which plans, hooks and all-reduces a synchronisation takes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jdp import collectives
from jdp.collectives import (
    AutoAllReduce,
    PallasAllReduce,
    auto,
    checked_sums,
    xla,
)
from jdp.collectives.checked_sums import CheckedReduce, CheckedReduceGroup
from jdp.collectives.host.host_all_reduce import HostAllReduce
from jdp.hooks import base
from jdp.hooks.base import CommHook
from jdp.trees import buckets
from jdp.trees.buckets import BucketPlan
from jdp.types import AllReduce, AxisName

_PUBLIC = vars(collectives)
# Public functions that sum, with their names.
_SUMS = {
    id(_PUBLIC[name]): name
    for name in (
        "butterfly_all_reduce",
        "fixed_tree_all_reduce",
        "halving_doubling_all_reduce",
        "hierarchical_all_reduce",
        "psum_all_reduce",
        "reduce_broadcast_all_reduce",
        "ring_all_reduce",
    )
}
# Functions that do not return a sum, with their names.
_NO_SUMS = {
    id(fn): f"jdp.collectives.{name}.{field}"
    for name in ("HALVING_DOUBLING", "PSUM", "RING", "SHARED_MEMORY", "TCP")
    for field, fn in _PUBLIC[name]._asdict().items()
    if fn is not None
}
_NO_SUMS |= {
    id(_PUBLIC[name]): f"jdp.collectives.{name}"
    for name in collectives.__all__
    if id(_PUBLIC[name]) not in _SUMS
    and not isinstance(_PUBLIC[name], AutoAllReduce | PallasAllReduce | HostAllReduce)
}
_NO_SUMS |= {
    id(fn): f"jax.lax.{name}"
    for name, fn in {
        "all_gather": lax.all_gather,
        "all_to_all": lax.all_to_all,
        "pmax": lax.pmax,
        "pmean": lax.pmean,
        "pmin": lax.pmin,
        "ppermute": lax.ppermute,
        "psum_scatter": lax.psum_scatter,
    }.items()
}


def check_plan(plan: Any) -> BucketPlan | None:
    """Returns a plan.

    Raises:
      TypeError: it is not a plan.
    """
    buckets.check_plan(plan)
    return plan


def check_hook(hook: Any, packing: Any) -> CommHook | None:
    """Returns a hook.

    Raises:
      TypeError: it is not a hook.
      ValueError: `packing` is unknown, or "tuple" with a hook.
    """
    if hook is not None:
        base.check_hook(hook)
    if packing not in (None, "flat", "tuple"):
        raise ValueError(f"`packing` must be 'flat' or 'tuple', got {packing!r}.")
    if hook is not None and packing == "tuple":
        raise ValueError(
            "`packing='tuple'` sends leaves as they are, but a hook takes flat "
            "buffers. Leave one of the two out."
        )
    return hook


def find_all_reduce(all_reduce: Any, packing: str | None = None) -> AllReduce:
    """Returns the argument `all_reduce=` of a user as one value.

    Its functions check their results while they are traced.

    Args:
      all_reduce: the argument; None: XLA's.
      packing: the argument `packing=`.

    Raises:
      ValueError: it is a function of `jdp.collectives` or of JAX that does not sum, or
        it is not a function and not "auto", or `packing` is "tuple" and it packs.
      TypeError: a field of an `AllReduce` has a wrong type.
    """
    if all_reduce is None:
        return xla.PLAIN
    value = _resolve(all_reduce, "`all_reduce`")
    if packing == "tuple" and not isinstance(value.reduce, AutoAllReduce):
        raise ValueError(
            "`packing='tuple'` sends leaves as they are, but `all_reduce` takes flat "
            "buffers. Leave one of the two out."
        )
    return value


def _resolve(all_reduce: Any, subject: str) -> AllReduce:
    if isinstance(all_reduce, str) and all_reduce == "auto":
        return auto.auto_all_reduce.value
    if isinstance(all_reduce, AutoAllReduce | PallasAllReduce | HostAllReduce):
        return all_reduce.value
    value = _as_value(all_reduce)
    function, options = _unwrapped(value.reduce)
    name = _NO_SUMS.get(id(function))
    if name is None and options.get("op", "sum") != "sum":
        name = _name_of(function)
        name = name and f"jdp.collectives.{name}(op={options['op']!r})"
    if name is not None:
        raise ValueError(
            f"{subject} must sum buffers over the replicas, but `{name}` does not. "
            f"{_REMEDIES.get(name, _PASS_A_SUM)}"
        )
    if isinstance(function, str) or not callable(function):
        raise ValueError(
            f"{subject} must be a function of `jdp.collectives`, 'auto' or None, got "
            f"{all_reduce!r}."
        )
    return _with_checks(value)


def _with_checks(value: AllReduce) -> AllReduce:
    """Returns an all-reduce whose functions check what they return.

    Raises:
      TypeError: a field has a wrong type.
    """
    functions = {"reduce_group": value.reduce_group, "choose": value.choose}
    for member, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(
                f"`{member}` of `all_reduce` must be a function or None, got "
                f"{function!r}."
            )
    if not isinstance(value.takes_scale, bool):
        raise TypeError(
            "`takes_scale` of `all_reduce` must be True or False, got "
            f"{value.takes_scale!r}."
        )
    if not isinstance(value.name, str):
        raise TypeError(f"`name` of `all_reduce` must be text, got {value.name!r}.")
    group, choose = value.reduce_group, value.choose
    return dataclasses.replace(
        value,
        reduce=CheckedReduce(value.reduce),
        reduce_group=None if group is None else CheckedReduceGroup(group),
        choose=None if choose is None else _CheckedChoice(choose),
    )


@dataclasses.dataclass(frozen=True)
class _CheckedChoice:
    """`choose` of an `AllReduce`, which must return what `all_reduce=` takes."""

    function: Callable[..., Any]

    def __call__(self, buffer: jax.ShapeDtypeStruct, axis_name: AxisName) -> AllReduce:
        checked_sums.check_call("choose", self.function, (buffer, axis_name), {})
        chosen = self.function(buffer, axis_name)
        if chosen is None:
            raise TypeError(
                "`choose` of `all_reduce` must return the all-reduce for a buffer, "
                "such as `jdp.AllReduce(jax.lax.psum)`, got None."
            )
        return _resolve(chosen, "The result of `choose` of `all_reduce`")


_OBJECTS = ("pallas_all_reduce", "shared_memory_all_reduce", "tcp_all_reduce")
_SUM_NAMES = sorted([*_SUMS.values(), *_OBJECTS])
_PASS_A_SUM = f"Pass one of `jdp.collectives` that does: {', '.join(_SUM_NAMES)}."
_REMEDIES = {
    "jdp.collectives.adasum": "Take gradients with `jdp.local_gradients`, and combine "
    "all of them in one call: `grads = jdp.collectives.adasum(grads)`.",
}


def _as_value(all_reduce: Any) -> AllReduce:
    if isinstance(all_reduce, AllReduce):
        return all_reduce
    function, _ = _unwrapped(all_reduce)
    return AllReduce(all_reduce, name=_name_of(function) or AllReduce.name)


def _unwrapped(function: Any) -> tuple[Any, dict[str, Any]]:
    """Takes a function out of each `functools.partial`, with its options."""
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    return function, options


def _name_of(function: Any) -> str | None:
    """Returns the name of a function of jdp or JAX that sums, else None."""
    if isinstance(function, AutoAllReduce | PallasAllReduce | HostAllReduce):
        return function.value.name
    return "psum" if function is lax.psum else _SUMS.get(id(function))
