"""Wire: are the bytes of another process the message that they should be?

Also a process of the job may be wrong: another version of jdp, or a broken one. So
whatever comes in is decoded here, and nothing but `Malformed` comes of it.
"""

from typing import Any

import msgspec


class Malformed(RuntimeError):
    """Bytes are not the message that is due; the text says which, and why."""


def decode(data: bytes, kind: Any, *, what: str) -> Any:
    """Returns the message of class `kind` that `data` holds in MessagePack.

    Args:
      data: what came.
      kind: a `msgspec.Struct`, or a list of them.
      what: names the message, such as "The verdict of process 0".

    Raises:
      Malformed: `data` holds something else.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    # ValueError: bad UTF-8 and bad lengths; RecursionError: nested too deeply.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Malformed(_describe(data, what, error)) from None


def _describe(data: bytes, what: str, error: Any) -> str:
    return (
        f"{what} is malformed, {len(data):,} bytes ({type(error).__name__}: "
        f"{str(error)[:200]}). Install the same jdp in every process."
    )
