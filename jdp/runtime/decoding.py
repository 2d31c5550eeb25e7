"""Decoding: how do bytes of a peer or a file become a value, or one kind of error?"""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_SHOWN = 500  # characters of foreign text in a message or a log.


class DecodeError(ValueError):
    """The bytes are not of the type that is expected here."""


def decode(decoder: Callable[[Any], T], data: bytes | memoryview) -> T:
    """Returns `decoder(data)`, where `decoder` is a function of msgspec.

    msgspec raises its own `DecodeError` for most bytes, UnicodeDecodeError for text
    that is not UTF-8, RecursionError for what is nested too deeply, and MemoryError.
    All mean one thing where the bytes come from outside of this process.

    Args:
      decoder: such as `msgspec.msgpack.Decoder(Message).decode`.
      data: whatever has come.

    Raises:
      DecodeError: for any `data` that `decoder` refuses.
    """
    try:
        return decoder(data)
    # Those of msgspec, UnicodeDecodeError and OverflowError among them.
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as err:
        text = printable(str(err)) or type(err).__name__
    raise DecodeError(text)


def printable(text: str, *, most: int = _MOST_SHOWN) -> str:
    """Returns foreign text as one line that a log or a terminal can show.

    Args:
      text: whatever a peer has sent.
      most: characters that are shown; the rest is cut off.
    """
    shown = text if len(text) <= most else text[:most] + "..."
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
