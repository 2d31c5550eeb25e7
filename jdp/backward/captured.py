"""Captured arrays: constants that a traced program holds.

The text of a jaxpr shows their shapes and dtypes, not their values.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal, jaxprs_in_params

from jdp import compat
from jdp.backward import flow
from jdp.compat import origins


class Captured(NamedTuple):
    """One array that a program holds."""

    spec: str  # dtype and shape; and the sharding, if no process has the whole array.
    digest: bytes  # hash of `spec` and of the elements.
    value: np.ndarray | None  # on the host; None if no process has the whole array.
    jaxpr: Any  # the open jaxpr that holds it.
    user: Any  # its variable there, or the equation with it as a literal or parameter.

    def line(self) -> str:
        """Returns the user's source line that uses it first: " (file.py:12)", or ""."""
        if hasattr(self.user, "primitive"):
            line = origins.user_line(self.user)
        else:
            line = _line_of_use(self.jaxpr, self.user)
        return "" if line is None else f" ({line})"


class Found(NamedTuple):
    """All arrays that a program holds."""

    arrays: list[Captured]  # without duplicates, in the order of the program.
    digest: bytes  # hash of all arrays and their places.


def find(jaxprs: Iterable[Any]) -> Found:
    """Finds the constants of jaxprs, at any depth, and hashes each once.

    Tracers, which are arguments of an enclosing function, have no value to compare.

    Args:
      jaxprs: closed jaxprs.
    """
    search = _ConstantSearch()
    digests = [search.digest_of(jaxpr) for jaxpr in jaxprs]
    return Found(list(search.found.values()), _hash(*digests))


class _ConstantSearch:
    """Visits each jaxpr and each array once."""

    def __init__(self) -> None:
        self.found: dict[bytes, Captured] = {}
        # By the id of a jaxpr or an array, which it holds. Digests depend on contents
        # only, since processes may share equal jaxprs differently.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def digest_of(self, jaxpr: Any) -> bytes:
        """Returns the digest of the arrays in a jaxpr, and of their places."""
        if id(jaxpr) not in self._known:
            body, consts = flow.open_jaxpr(jaxpr)
            pairs = zip(body.constvars, consts, strict=True) if consts else ()
            digests = [self._add(value, body, var) for var, value in pairs]
            for eqn in body.eqns:
                for var in eqn.invars:
                    if isinstance(var, Literal):
                        digests.append(self._add(var.val, body, eqn))
                for x in _flatten(tuple(eqn.params.values())):
                    if hasattr(x, "eqns"):
                        digests.append(self.digest_of(x))
                    elif hasattr(x, "mlir_module_serialized"):  # `jax.export`
                        digests.append(_hash(bytes(x.mlir_module_serialized)))
                    elif isinstance(x, np.ndarray | jax.Array):
                        digests.append(self._add(x, body, eqn))
            self._known[id(jaxpr)] = jaxpr, _hash(*digests)
        return self._known[id(jaxpr)][1]

    def _add(self, value: Any, jaxpr: Any, user: Any) -> bytes:
        if id(value) not in self._known:
            spec, host = _describe(value)
            found = Captured(spec, _hash_array(spec, host), host, jaxpr, user)
            self.found.setdefault(found.digest, found)
            self._known[id(value)] = value, found.digest
        return self._known[id(value)][1]


def _flatten(x: Any) -> Iterator[Any]:
    if isinstance(x, tuple | list):
        for part in x:
            yield from _flatten(part)
    else:
        yield x


def _describe(value: Any) -> tuple[str, np.ndarray | None]:
    """Returns dtype and shape of a constant, and its value on the host."""
    if isinstance(value, bool | int | float | complex | np.generic | np.ndarray):
        host = np.asarray(value)
        return _spec(host), None if host.dtype.hasobject else host
    if isinstance(value, Tracer) or not isinstance(value, jax.Array):
        return type(value).__name__, None
    spec = _spec(value)
    value = compat.without_key_type(value)
    if value.is_fully_replicated:
        return spec, np.asarray(value.addressable_data(0))
    if value.is_fully_addressable:
        return spec, np.asarray(value)
    return f"{spec} spread by {value.sharding}", None


def _spec(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _hash_array(spec: str, host: np.ndarray | None) -> bytes:
    if host is None:
        return _hash(spec.encode())
    return _hash(spec.encode(), np.ascontiguousarray(host).reshape(-1).view(np.uint8))


def _hash(*parts: Any) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(part)
    return made.digest()


def _line_of_use(jaxpr: Any, var: Any) -> str | None:
    """Returns the user's line that first uses a variable of a jaxpr."""
    for eqn in jaxpr.eqns:
        index = next((i for i, x in enumerate(eqn.invars) if x is var), None)
        if index is None:
            continue
        # `shard_map` has the line that calls the step.
        is_step = eqn.primitive.name == "shard_map"
        line = None if is_step else origins.user_line(eqn)
        inner = next(iter(jaxprs_in_params(eqn.params)), None)
        if line is None and inner is not None:
            body, _ = flow.open_jaxpr(inner)
            if len(body.invars) == len(eqn.invars):
                line = _line_of_use(body, body.invars[index])
        if line is not None:
            return line
    return None
