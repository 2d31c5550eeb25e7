"""Methods: one step per object, made once and kept no longer than the object."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Entry(NamedTuple):
    owner: weakref.ref[Any]
    core: Any  # refers to its owner weakly.
    handle: weakref.ref[Any] | None  # of what refers to the owner strongly.


class PerObject(Generic[T]):
    """Something for each object, by identity; neither keeps the object alive."""

    def __init__(
        self, make: Callable[[Any], T], hold: Callable[[T, Any], T], *, what: str
    ):
        """Makes nothing yet.

        Args:
          make: makes it for an object, to which it may refer weakly only.
          hold: (made, object) -> the same for a caller, which holds the object.
          what: it is, for errors.
        """
        self._make = make
        self._hold = hold
        self._what = what
        self._entries: dict[int, _Entry] = {}

    def of(self, owner: Any) -> T:
        """Returns what belongs to `owner`; the same each time while it is in use.

        Raises:
          TypeError: `owner` cannot be referred to weakly.
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
    """Returns the method `fn` of `owner`, without keeping `owner` alive.

    It may be called as long as `owner` lives.
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
