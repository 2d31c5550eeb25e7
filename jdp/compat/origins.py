"""Origins: the code that made an equation.

Markers identify parts of jdp, with or without tracebacks. Stack frames identify other
packages, and name functions in messages.
"""

import contextlib
import os
from typing import Any

import jax
from jax._src import source_info_util

# Parts of jdp whose equations analyses look for.
BATCH_NORM = "jdp.batch_norm"
OWN_DRAWS = "jdp.draws"  # random numbers that have nothing to do with samples.
_COLLECTIVES = "jdp.collectives."


def bound_by(part: str) -> contextlib.AbstractContextManager[Any]:
    """While tracing: marks equations as made by a part of jdp; see `is_bound_by`.

    The mark is a name scope, which `jit`, `scan`, `remat`, `vmap`, custom derivatives
    and transposition keep. Equations in a `jit` inside this context are not marked.
    """
    return jax.named_scope(part)


def bound_by_collective(name: str) -> contextlib.AbstractContextManager[Any]:
    """While tracing: marks equations as made by `jdp.collectives.<name>`."""
    return bound_by(_COLLECTIVES + name)


def is_bound_by(eqn: Any, part: str) -> bool:
    """Whether an equation, or the equation it is transposed from, has a mark."""
    return part in _scopes(eqn)


def collective_of(eqn: Any) -> str | None:
    """Returns the function of `jdp.collectives` that made an equation, if one did."""
    found = part_of(eqn, _COLLECTIVES)
    return None if found is None else found.removeprefix(_COLLECTIVES)


def part_of(eqn: Any, prefix: str) -> str | None:
    """Returns the part of jdp that bound an equation, if its name begins so."""
    return next((x for x in _scopes(eqn) if x.startswith(prefix)), None)


def _scopes(eqn: Any) -> list[str]:
    """Returns the name scopes of an equation, without transformations."""
    stack = eqn.source_info.name_stack.stack
    return [x.name for x in stack if isinstance(x, source_info_util.Scope)]


def frames_of(eqn: Any) -> list[tuple[str, str]]:
    """Returns file and qualified name of each function that made an equation."""
    found = eqn.source_info.traceback
    return [(f.file_name, f.function_name) for f in found.frames] if found else []


def user_line(eqn: Any) -> str | None:
    """Returns the file and line, outside of installed packages, of an equation."""
    found = eqn.source_info.traceback
    for frame in found.frames if found else ():
        path = frame.file_name
        is_library = "site-packages" in path or path.startswith((_OWN_FOLDER, "<"))
        if not is_library and not path.startswith(_PYTHON_FOLDER):
            return f"{path.rpartition('/')[2]}:{frame.line_num}"
    return None


def caller_in_jdp(eqn: Any) -> str | None:
    """Returns the outermost function of jdp that made an equation, or None."""
    name = None
    for file, function in frames_of(eqn):
        if file.startswith(_OWN_FOLDER):
            name = function.split(".<locals>")[0].removesuffix(".__call__")
        elif name is not None:
            break
    return name


_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON_FOLDER = os.path.dirname(os.__file__) + os.sep
