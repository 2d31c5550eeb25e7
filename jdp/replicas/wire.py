"""Wire: are the bytes of another process, or of a file, the message they should be?

A process of the job may be wrong too: it may run another version of jdp, or be broken.
So all bytes that come in are decoded here, and raise one kind of error.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_MOST_SHOWN = 500  # characters of foreign text in a message or a log.


class DecodeError(ValueError):
    """The bytes are not of the type that is expected here."""


class Malformed(RuntimeError):
    """Bytes are not the message that is due; the text names it and the reason."""


def decode_with(decoder: Callable[[Any], T], data: bytes | memoryview) -> T:
    """Returns `decoder(data)`, where `decoder` is a function of msgspec.

    msgspec raises its own `DecodeError` for most bytes, UnicodeDecodeError for text
    that is not UTF-8, RecursionError for deep nesting, and MemoryError. All mean the
    same where the bytes come from outside this process.

    Args:
      decoder: such as `msgspec.msgpack.Decoder(Message).decode`.
      data: the bytes that came.

    Raises:
      DecodeError: for any `data` that `decoder` refuses.
    """
    try:
        return decoder(data)
    # They include the errors of msgspec, UnicodeDecodeError and OverflowError.
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as err:
        text = f"{type(err).__name__}: {printable(str(err))}"
    raise DecodeError(text)


def decode(data: bytes, kind: Any, *, what: str) -> Any:
    """Returns the message of class `kind` that `data` holds in MessagePack.

    Args:
      data: the bytes that came.
      kind: a `msgspec.Struct`, or a list of them.
      what: names the message, such as "The verdict of process 0".

    Raises:
      Malformed: `data` is not such a message.
    """
    try:
        return decode_with(msgspec.msgpack.Decoder(kind).decode, data)
    except DecodeError as error:
        raise Malformed(
            f"{what} is malformed, {len(data):,} bytes ({printable(str(error))}). "
            "Install the same jdp in every process."
        ) from None


def decode_text(data: bytes) -> str:
    """Returns foreign bytes as lines of text that a log or a terminal can show.

    Bytes that are not UTF-8, or not printable, are escaped.
    """
    lines = data.decode(errors="backslashreplace").split("\n")
    return "\n".join(printable(line, most=len(line)) for line in lines)


def printable(text: str, *, most: int = _MOST_SHOWN) -> str:
    """Returns foreign text as one line that a log or a terminal can show.

    Args:
      text: text that a peer has sent.
      most: number of characters to show; the rest is cut off.
    """
    shown = text if len(text) <= most else text[:most] + "..."
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
