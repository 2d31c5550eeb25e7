"""Programs: whole compiled steps, ordered among the other operations."""

import functools
import hashlib
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from jdp.backward import captured
from jdp.eager import argument_types, session
from jdp.eager.diagnosis.flight_recorder import Record
from jdp.eager.entries import Entry
from jdp.eager.messages import Request, Spec, encode_spec
from jdp.eager.submission import Handle
from jdp.types import PyTree

_MAX_KNOWN = 256

R = TypeVar("R")


def submit(step: Callable[..., R], *args: PyTree, name: str | None = None) -> R:
    """Runs a compiled step once all processes have submitted it.

    Every process calls it, in any order relative to other operations. The engine
    compares the programs and starts operations in the same order everywhere. A program
    with collectives that is called directly, while the engine runs others, has no such
    order.

    Args:
      step: returned by `jdp.data_parallel` or `jax.jit`.
      *args: its arguments.
      name: see `all_reduce`; None: the name of the step.

    Returns:
      The results of the step; they are ready.

    Raises:
      TypeError: `step` is not compiled.
      RuntimeError: on all processes, if they have submitted different programs; see
        also `synchronize`.
      Exception: raised by the step.
    """
    return submit_async(step, *args, name=name).result()


def submit_async(
    step: Callable[..., R], *args: PyTree, name: str | None = None
) -> Handle[R]:
    """Begins `submit`."""
    engine = session.current_engine()
    default = f"submit.{_name_of(step)}"
    name = default if name is None else argument_types.check_name(name)
    spec = Spec("submit", fingerprint=_fingerprint(step, args))
    record = Record(name, "submit", op=spec.fingerprint)
    record.submitted_s = time.perf_counter()
    run = functools.partial(step, *args)
    entry = Entry(Request(name, encode_spec(spec)), record, None, run)
    engine.submit([entry])
    return Handle([entry], _only)


@runtime_checkable
class FingerprintedStep(Protocol):
    """Compiled step that describes its program, as by `jdp.data_parallel`."""

    def fingerprint(self, *args: PyTree) -> str:
        """Returns a text that is the same on all ranks that have the same program."""
        ...


class _Fingerprints:
    """Cache of fingerprints, by step and shapes of its arguments."""

    by_key: dict[Any, tuple[Any, str]] = {}


def _fingerprint(step: Any, args: tuple[PyTree, ...]) -> str:
    leaves, treedef = jax.tree.flatten(args)
    avals = tuple([_aval(leaf) for leaf in leaves])
    key = (id(step), treedef, avals)
    known = _Fingerprints.by_key.get(key)
    if known is not None and known[0] is step:
        return known[1]
    if isinstance(step, FingerprintedStep):
        text = step.fingerprint(*args)
    elif isinstance(step, jax.stages.Wrapped):
        jaxpr = step.trace(*args).jaxpr
        text = f"{jaxpr}\n{captured.find([jaxpr]).digest.hex()}"
    else:
        raise TypeError(
            f"`step` must be compiled, by `jdp.data_parallel` or `jax.jit`, got {step}."
        )
    shapes = " ".join(f"{dtype}{list(shape)}" for shape, dtype in avals)
    digest = hashlib.sha256(f"{shapes}\n{text}".encode()).hexdigest()[:16]
    fingerprint = f"{_name_of(step)} {digest}"
    if len(_Fingerprints.by_key) == _MAX_KNOWN:
        _Fingerprints.by_key.clear()
    _Fingerprints.by_key[key] = (step, fingerprint)
    return fingerprint


def _aval(leaf: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(leaf, np.ndarray | jax.Array):
        return tuple(leaf.shape), str(leaf.dtype)
    array = np.asarray(leaf)
    return array.shape, type(leaf).__name__


def _name_of(step: Any) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _only(values: list[Any]) -> Any:
    return values[0]
