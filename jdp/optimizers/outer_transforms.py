"""Outer transforms: optax in front of the average, where it must be linear.

In `optax.chain(clip, jdp.distributed_optimizer(tx))` each replica would clip by its own
norm. So functions of jdp that optax calls mark the gradients that they get. An analysis
of the program then checks the operations of the same call of optax in front of the
mark: only linear operations commute with the mean over the replicas.
"""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
from jax.extend.core import Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

from jdp.compat import primitives
from jdp.types import PyTree

# It clips gradients of single samples, which must come before any mean.
_PER_SAMPLE = "_privacy.py"
_UPDATE = (
    ".<locals>.update"  # In the qualified name of the `update` of a transformation.
)
# Functions in whose frames JAX traces the computation of a gradient.
_DIFFERENTIATE = frozenset({"vjp", "_vjp", "jvp", "_jvp", "linearize"})


def mark(grads: PyTree, name: str) -> PyTree:
    """Marks gradients that are about to be averaged, if optax calls the caller.

    Args:
      grads: the gradients of this replica.
      name: function that averages them, such as "zero1".
    """
    if not _is_called_by_optax():
        return grads

    def mark_one(x: Any) -> Any:
        return _marked_p.bind(x, name=name) if isinstance(x, jax.core.Tracer) else x

    return jax.tree.map(mark_one, grads)


def check(
    jaxpr: Any, differs: Callable[[Any], bool], known: dict[int, str | None]
) -> None:
    """Checks the gradients that are marked in a jaxpr, or in jaxprs inside it.

    Equations of an inner jaxpr are left to a check of that jaxpr.

    Args:
      jaxpr: an open one.
      differs: whether an atom of it may differ between the replicas.
      known: results of earlier checks: by the id of a jaxpr, the function that averages
        in it.

    Raises:
      ValueError: an operation of optax on them is not linear.
    """
    marked = {}
    for eqn in jaxpr.eqns:
        name = _mark_in(eqn, known)
        if name is not None:
            marked[id(eqn)] = eqn, name
    if not marked:
        return
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    linear: set[tuple[int, tuple[bool, ...]]] = set()
    met: dict[tuple[_Frame, ...], set[int]] = {}  # by call, equations already checked.
    for marker, name in marked.values():
        averaging = _frames_of(marker)
        if not any(_is_optax(frame) for frame in averaging):
            continue
        seen = met.setdefault(tuple(averaging), set())
        waiting = list(marker.invars)
        while waiting:
            atom = waiting.pop()
            eqn = None if hasattr(atom, "val") else makers.get(atom)
            if eqn is None or id(eqn) in seen or not differs(atom):
                continue
            seen.add(id(eqn))
            frames = _frames_of(eqn)
            shared = _last_shared(frames, averaging)
            if id(eqn) in marked or _is_origin(frames, shared, averaging):
                continue
            is_optax = all(_is_library(file) for file, *_ in frames[shared:])
            differ = [differs(x) for x in eqn.invars]
            culprit = _find_nonlinear(eqn, differ, linear) if is_optax else None
            if culprit is not None:
                raise ValueError(_explain(_frames_of(culprit), name))
            waiting += eqn.invars


def _mark_in(eqn: Any, known: dict[int, str | None]) -> str | None:
    """Returns the averaging in an equation or in its jaxprs; None if there is none."""
    if eqn.primitive is _marked_p:
        return eqn.params["name"]
    for inner in jaxprs_in_params(eqn.params):
        body = getattr(inner, "jaxpr", inner)
        if id(body) not in known:
            found = (_mark_in(each, known) for each in body.eqns)
            known[id(body)] = next((name for name in found if name), None)
        if known[id(body)] is not None:
            return known[id(body)]
    return None


def _find_nonlinear(
    eqn: Any, differ: Sequence[bool], linear: set[tuple[int, tuple[bool, ...]]]
) -> Any | None:
    """Returns an equation, or one inside it, that is not linear in differing operands.

    Args:
      eqn: an equation of optax.
      differ: for each operand, whether it may differ between the replicas.
      linear: jaxprs found to be linear, by id and by which inputs differ.
    """
    name = eqn.primitive.name
    if not any(differ):
        return None
    is_product = name in primitives.PRODUCTS and sum(differ) > 1
    if is_product or name in primitives.NONLINEAR:
        return eqn
    if name in ("cond", "select_n") and differ[0] or name == "div" and differ[1]:
        return eqn
    entering = tuple(differ[1:] if name == "cond" else differ)
    for inner in jaxprs_in_params(eqn.params):
        body = getattr(inner, "jaxpr", inner)
        key, maker = (id(body), entering), body.debug_info.func_filename
        if len(body.invars) != len(entering) or key in linear:
            continue
        if maker and not _is_library(maker):
            continue  # Optax calls a function of the user that is in a `jax.jit`.
        known: dict[Any, bool] = dict(zip(body.invars, entering, strict=True))
        for each in body.eqns:
            found = [not hasattr(x, "val") and known.get(x, False) for x in each.invars]
            culprit = _find_nonlinear(each, found, linear)
            if culprit is not None:  # JAX may have traced its own functions elsewhere.
                return culprit if maker and maker.startswith(_OPTAX) else eqn
            known.update(dict.fromkeys(each.outvars, any(found)))
        linear.add(key)
    return None


_Frame = tuple[str, str, int]  # file, qualified name and place in its bytecode.


def _frames_of(eqn: Any) -> list[_Frame]:
    """Returns the functions that made an equation, the outermost first."""
    traceback = eqn.source_info.traceback
    if not traceback:
        return []
    found = zip(*traceback.raw_frames(), strict=True)
    return [(code.co_filename, code.co_qualname, place) for code, place in found][::-1]


def _is_optax(frame: _Frame) -> bool:
    return frame[0].startswith(_OPTAX)


def _last_shared(frames: list[_Frame], others: list[_Frame]) -> int:
    """Returns the index of the innermost call that two equations share; else -1."""
    pairs = zip(frames, others, strict=False)  # One is in more calls than the other.
    for i, (one, other) in enumerate(pairs):
        if one[:2] != other[:2]:
            return i - 1
        if one != other:
            return i
    return min(len(frames), len(others)) - 1


def _is_origin(frames: list[_Frame], shared: int, averaging: list[_Frame]) -> bool:
    """Whether an equation computes the gradients that optax gets.

    It is outside the call of optax that averages. Or it is inside, where a gradient is
    taken, as by a function given to SAM, or where gradients are of single samples.
    """
    if not any(_is_optax(frame) for frame in averaging[: shared + 1]):
        return True
    return any(
        file.endswith(_PER_SAMPLE) or (file == _JAX_API and name in _DIFFERENTIATE)
        for file, name, _ in frames[shared:]
    )


def _is_library(file: str) -> bool:
    if file.startswith(_LIBRARIES):
        return True
    return file.startswith(_PYTHON) and "-packages" not in file


def _explain(frames: list[_Frame], name: str) -> str:
    found = [
        ("contrib." if file.startswith(_CONTRIB) else "") + function.split(".<")[0]
        for file, function, _ in frames
        if file.startswith(_OPTAX) and _UPDATE in function
    ]
    maker = f"optax.{found[-1]}" if found else "A transformation of optax"
    return (
        f"`{maker}` stands before `jdp.{name}` and looks at the gradients of one "
        "replica, before they are averaged: each replica would decide by its own "
        "samples. Transformations that are not linear go inside, where gradients are "
        f"averaged: `jdp.{name}(optax.chain({maker}(...), tx))` in place of "
        f"`optax.chain({maker}(...), jdp.{name}(tx))`."
    )


def _is_called_by_optax() -> bool:
    return any(file.startswith(_OPTAX) for file in _files_of_callers())


def _files_of_callers() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def _folder(name: str) -> str:
    """Returns the folder of a module, which need not be imported for that."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return os.path.dirname(spec.origin) + os.sep


_OPTAX, _PYTHON = _folder("optax"), os.path.dirname(os.__file__) + os.sep
_CONTRIB = os.path.join(_OPTAX, "contrib", "")
_LIBRARIES = (_OPTAX, _folder("jax"), "<")
_JAX_API = inspect.unwrap(jax.vjp).__code__.co_filename

_marked_p = Primitive("jdp_before_mean")
_marked_p.def_impl(lambda x, *, name: x)
_marked_p.def_abstract_eval(lambda aval, *, name: aval)
mlir.register_lowering(_marked_p, lambda ctx, x, *, name: [x])
ad.deflinear2(_marked_p, lambda cotangent, x, *, name: [cotangent])
batching.primitive_batchers[_marked_p] = lambda xs, dims, **params: (
    _marked_p.bind(*xs, **params),
    dims[0],
)
