"""Outer transforms: what optax makes of the gradients of one replica.

In `optax.chain(clip, jdp.distributed_optimizer(tx))` each replica would clip by its own
norm. So what optax calls marks the gradients that it is given, and an analysis of the
program looks at what the same call of optax has made of them before: only what is
linear gives of their mean what it gives of the gradients of all replicas.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import optax
from jax.extend.core import Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

from jdp.types import PyTree

# What they make of a sum is not the sum of what they make of its parts. All others are
# taken for linear: a transformation of optax that is not has one of these.
_NONLINEAR = frozenset(
    "abs acos argmax argmin asin atan atan2 cbrt ceil clamp cos cosh eq erf exp exp2 "
    "expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min ne not "
    "pow reduce_and reduce_max reduce_min reduce_or reduce_prod rem round rsqrt sign "
    "sin sort sqrt square tan tanh top_k while".split()
)
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
# It clips what single samples have, which must come before any mean.
_PER_SAMPLE = "_privacy.py"


def mark(grads: PyTree, name: str) -> PyTree:
    """Marks gradients that are about to be averaged, if optax calls the caller.

    Args:
      grads: of this replica.
      name: of what averages them, such as "zero1".
    """
    if not _is_called_by_optax():
        return grads

    def mark_one(x: Any) -> Any:
        return _marked_p.bind(x, name=name) if isinstance(x, jax.core.Tracer) else x

    return jax.tree.map(mark_one, grads)


def check(jaxpr: Any, differs: Callable[[Any], bool]) -> None:
    """Checks the gradients that are marked in a jaxpr; not in those within.

    Args:
      jaxpr: an open one.
      differs: whether an atom of it may differ between the replicas.

    Raises:
      ValueError: optax made something of them that is not linear.
    """
    marked = [eqn for eqn in jaxpr.eqns if eqn.primitive is _marked_p]
    if not marked:
        return
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    seen: set[int] = set()
    for marker in marked:
        call = _outer_call(_frames_of(marker))
        waiting = list(marker.invars) if call else []
        while waiting:
            atom = waiting.pop()
            eqn = None if hasattr(atom, "val") else makers.get(atom)
            if eqn is None or id(eqn) in seen or not differs(atom):
                continue
            seen.add(id(eqn))
            frames = _frames_of(eqn)
            if not _is_in_call(frames, call):
                continue  # The gradients, as they come to optax.
            if _is_nonlinear(eqn, [differs(x) for x in eqn.invars]):
                raise ValueError(_explain(frames, marker.params["name"]))
            waiting += eqn.invars


def _is_nonlinear(eqn: Any, differ: Sequence[bool]) -> bool:
    """Whether an equation is not linear in those of its operands that differ."""
    name = eqn.primitive.name
    if not any(differ):
        return False
    if name in _NONLINEAR or (name in _PRODUCTS and sum(differ) > 1):
        return True
    if name in ("cond", "select_n") and differ[0] or name == "div" and differ[1]:
        return True
    entering = differ[1:] if name == "cond" else differ
    for inner in jaxprs_in_params(eqn.params):
        body = getattr(inner, "jaxpr", inner)
        if len(body.invars) != len(entering):
            continue
        known: dict[Any, bool] = dict(zip(body.invars, entering, strict=True))
        for each in body.eqns:
            found = [not hasattr(x, "val") and known.get(x, False) for x in each.invars]
            if _is_nonlinear(each, found):
                return True
            known.update(dict.fromkeys(each.outvars, any(found)))
    return False


_Frame = tuple[str, str, int]  # file, qualified name and place in its bytecode.


def _frames_of(eqn: Any) -> list[_Frame]:
    """The functions that made an equation, the outermost first."""
    traceback = eqn.source_info.traceback
    if not traceback:
        return []
    found = zip(*traceback.raw_frames(), strict=True)
    return [(code.co_filename, code.co_qualname, place) for code, place in found][::-1]


def _outer_call(frames: list[_Frame]) -> list[_Frame]:
    """The frames up to the first of optax; none where JAX keeps no tracebacks."""
    for i, (file, *_) in enumerate(frames):
        if file.startswith(_OPTAX):
            return frames[: i + 1]
    return []


def _is_in_call(frames: list[_Frame], call: list[_Frame]) -> bool:
    """Whether the frames are of the same call of optax, and it called no one else."""
    depth = len(call) - 1
    return (
        frames[:depth] == call[:depth]
        and len(frames) > depth
        and frames[depth][:2] == call[depth][:2]
        and all(_is_library(file) for file, *_ in frames[depth:])
    )


def _is_library(file: str) -> bool:
    if file.startswith(_LIBRARIES):
        return not file.endswith(_PER_SAMPLE)
    return file.startswith(_PYTHON) and "-packages" not in file


def _explain(frames: list[_Frame], name: str) -> str:
    found = [
        ("contrib." if file.startswith(_CONTRIB) else "") + function.split(".<")[0]
        for file, function, _ in frames
        if file.startswith(_OPTAX) and ".<locals>.update" in function
    ]
    maker = f"optax.{found[-1]}" if found else "A transformation of optax"
    return (
        f"`{maker}` stands before `jdp.{name}` and looks at the gradients of one "
        "replica, before they are averaged: each replica would decide by its own "
        "samples. What is not linear goes inside, where gradients are those of all "
        f"replicas: `jdp.{name}(optax.chain({maker}(...), tx))` in place of "
        f"`optax.chain({maker}(...), jdp.{name}(tx))`."
    )


def _is_called_by_optax() -> bool:
    return any(file.startswith(_OPTAX) for file in _files_of_callers())


def _files_of_callers() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def _folder(module: Any) -> str:
    return os.path.dirname(module.__file__) + os.sep


_OPTAX, _PYTHON = _folder(optax), _folder(os)
_CONTRIB = os.path.join(_OPTAX, "contrib", "")
_LIBRARIES = (_OPTAX, _folder(jax), "<")

_marked_p = Primitive("jdp_before_mean")
_marked_p.def_impl(lambda x, *, name: x)
_marked_p.def_abstract_eval(lambda aval, *, name: aval)
mlir.register_lowering(_marked_p, lambda ctx, x, *, name: [x])
ad.deflinear2(_marked_p, lambda cotangent, x, *, name: [cotangent])
batching.primitive_batchers[_marked_p] = lambda xs, dims, **params: (
    _marked_p.bind(*xs, **params),
    dims[0],
)
