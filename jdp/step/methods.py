"""Methods: which step belongs to an object, and how long is it kept?"""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Entry(NamedTuple):
    owner: weakref.ref[Any]
    core: Any  # holds its owner weakly.
    handle: weakref.ref[Any] | None  # to a handle that holds the owner strongly.


class PerObject(Generic[T]):
    """One value per object, by identity; the table does not keep objects alive."""

    def __init__(
        self, make: Callable[[Any], T], hold: Callable[[T, Any], T], *, what: str
    ):
        """Starts with an empty table.

        Args:
          make: object -> its value, which must hold the object weakly.
          hold: (value, object) -> a handle for callers, which holds the object.
          what: a description of the value, for errors.
        """
        self._make = make
        self._hold = hold
        self._what = what
        self._entries: dict[int, _Entry] = {}

    def of(self, owner: Any) -> T:
        """Returns the handle of `owner`; the same one as long as it is in use.

        Raises:
          TypeError: `owner` takes no weak references.
        """
        number = id(owner)
        entry = self._entries.get(number)
        if entry is None or entry.owner() is not owner:
            entries = self._entries
            try:
                reference = weakref.ref(owner, lambda _: entries.pop(number, None))
            except TypeError:
                raise TypeError(
                    f"{self._what} cannot be a method of {type(owner).__name__}, whose "
                    "objects take no weak references. Add '__weakref__' to its "
                    "`__slots__`, or decorate a function."
                ) from None
            entry = _Entry(reference, self._make(owner), None)
        handle = None if entry.handle is None else entry.handle()
        if handle is None:
            handle = self._hold(entry.core, owner)
            self._entries[number] = entry._replace(handle=weakref.ref(handle))
        return handle


def bind_weakly(fn: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    """Returns `fn` bound to `owner`, without keeping `owner` alive.

    The result must not be called after `owner` is gone.
    """
    reference = weakref.ref(owner)

    @functools.wraps(fn)
    def method(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        assert found is not None
        return fn(found, *args, **kwargs)

    signature = inspect.signature(fn)
    parameters = [*signature.parameters.values()]
    if parameters and parameters[0].kind is not parameters[0].VAR_POSITIONAL:
        parameters = parameters[1:]
    method.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
    return method
