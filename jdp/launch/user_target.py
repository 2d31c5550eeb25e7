"""User target: is there the script or module that a job is to run?

Modules are looked up without importing anything.
"""

import importlib.machinery
import os
import sys
from collections.abc import Sequence


def check_script(path: str) -> None:
    """Raises ValueError if there is no script at `path`."""
    if not os.path.exists(path):
        hint = "Give a path"
        if _has_module(path):
            hint = f"Use `-m {path}` to run the module of that name, or give a path"
        raise ValueError(
            f"There is no script {path!r} in {_folder()}. {hint} that Python could run."
        )
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise ValueError(
            f"`{path}` is a folder without a `__main__.py`. Give the path of a script."
        )


def check_module(name: str) -> None:
    """Raises ValueError if there is no module `name` that could be run."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"`-m` takes the dotted name of a module, such as `package.train`, got "
            f"{name!r}. Leave out `-m` to run a script by its path."
        )
    if not _has_module(name):
        raise ValueError(
            f"There is no module {name!r} that could be run: it was looked for in "
            f"{_folder()} and on `sys.path`. A package needs a `__main__.py`."
        )


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "the current folder, which was deleted"


def _has_module(name: str) -> bool:
    """Whether `python -m name` might find a module; imports nothing."""
    top, *parts = name.split(".")
    spec = _find_top(top)
    for part in (*parts, None):
        if spec is None:
            return False
        folders = spec.submodule_search_locations
        if folders is None:
            return part is None
        child = _find_in(part or "__main__", list(folders))
        if child is None and _edits_its_path(spec):
            return True
        spec = child
    return spec is not None


def _find_top(name: str) -> importlib.machinery.ModuleSpec | None:
    spec = _find_in(name, ["", *sys.path])  # "" is the current folder.
    if spec is not None:
        return spec
    for finder in sys.meta_path:  # Built-in modules, and editable installations.
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None


def _find_in(
    name: str, folders: Sequence[str]
) -> importlib.machinery.ModuleSpec | None:
    # Only the last part of a name: with the full name, a namespace package would look
    # for its parent in `sys.modules`.
    return importlib.machinery.PathFinder.find_spec(name, folders)


def _edits_its_path(spec: importlib.machinery.ModuleSpec) -> bool:
    """Whether only an import could tell which modules the package has."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        with open(spec.origin, "rb") as file:
            return b"__path__" in file.read()
    except OSError:
        return False
