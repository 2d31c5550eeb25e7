"""Host functions: functions of Python that a program on the CPU calls while it runs.

The callbacks of JAX make a program run in the thread that calls it, before the call
returns. In the main thread, the signal handlers of the user then run inside the
callback, and what they raise, such as KeyboardInterrupt, is lost in the error of the
program. A program with host functions is dispatched like any other, and calls them from
a thread of XLA.

The structures are laid out as in XLA's `xla/ffi/api/c_api.h`, which only ever appends
fields.
"""

import atexit
import collections
import contextlib
import ctypes
import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_TARGET = "jdp_host_function"
_logger = logging.getLogger("jdp")
_METADATA = 1  # XLA_FFI_Extension_Metadata
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE


class HostFunction(NamedTuple):
    """A function, and the memory that it gets."""

    # Called with the results, to be filled, and the operands; all are views.
    run: Callable[[list[np.ndarray], list[np.ndarray]], None]
    results: Sequence[jax.ShapeDtypeStruct]
    operands: Sequence[jax.ShapeDtypeStruct]


def can_see(dtype: Any) -> bool:
    """Whether arrays of this dtype look to a host function as they are.

    XLA packs int4, float4 and narrower numbers, several into a byte. A view of numpy
    has a byte for each, so it would reach beyond the end of the memory.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits >= 8
    return True


def lower(
    ctx: Any,
    operands: Sequence[Any],
    function: HostFunction,
    *,
    aliases: Mapping[int, int],
) -> Any:
    """Lowers to a call of the function; XLA does not remove or repeat it.

    Args:
      ctx: context of the lowering rule.
      operands: values of the program, of dtypes that it `can_see`.
      function: the function; it lives as long as the program.
      aliases: which result takes the memory of which operand.
    """
    _register_target()
    kept = _Kept(function)
    ctx.module_context.add_keepalive(kept)
    rule = jax.ffi.ffi_lowering(
        _TARGET, has_side_effect=True, operand_output_aliases=dict(aliases)
    )
    return rule(ctx, *operands, number=np.uint64(kept.number))


class _Kept:
    """Holds a function; a program keeps it.

    A program may be dropped while it runs, for example with the last step of a loop.
    So its functions are kept for `_KEPT_S` more.
    """

    def __init__(self, function: HostFunction):
        self.number = next(_numbers)
        _functions[self.number] = function
        # Not `__del__`: a program of a global is dropped after the modules.
        weakref.finalize(self, _drop, self.number).atexit = False


def _drop(number: int) -> None:
    now_s = time.monotonic()
    _dropped.append((now_s, number))
    while _dropped and now_s - _dropped[0][0] > _KEPT_S:
        _functions.pop(_dropped.popleft()[1], None)


_numbers = itertools.count()
_functions: dict[int, HostFunction] = {}
_dropped: collections.deque[tuple[float, int]] = collections.deque()  # (when, number)
_KEPT_S = 3600.0  # far longer than the programs that are under way at a time.
_registration = threading.Lock()


class _Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
    ]


class _Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _ErrorArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    ]


class _Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        (
            "create_error",
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments)),
        ),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
    ]


class _Buffers(ctypes.Structure):  # XLA_FFI_Args and XLA_FFI_Rets
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]


class _Scalar(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_uint64))]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("scalars", ctypes.POINTER(ctypes.POINTER(_Scalar))),
    ]


class _CallFrame(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("operands", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    ]


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _handle(frame: Any) -> int | None:
    """Implements `XLA_FFI_Handler`; returns an error, or None."""
    frame = frame.contents
    if frame.extension and frame.extension.contents.type == _METADATA:
        known = ctypes.cast(frame.extension, ctypes.POINTER(_MetadataExtension))
        version = known.contents.metadata.contents.version
        version.major = frame.api.contents.version.major
        version.minor = frame.api.contents.version.minor
        return None
    try:
        assert frame.stage == _EXECUTE
        number = frame.attributes.scalars[0].contents.value[0]
        function = _functions[number]
        results = _views(frame.results, function.results)
        function.run(results, _views(frame.operands, function.operands))
    except BaseException as error:
        _logger.debug("A function on the host failed.", exc_info=True)
        return _make_error(frame.api.contents, f"{type(error).__name__}: {error}")
    return None


def _views(
    buffers: _Buffers, avals: Sequence[jax.ShapeDtypeStruct]
) -> list[np.ndarray]:
    return [
        _view(buffers.buffers[i].contents.data, aval) for i, aval in enumerate(avals)
    ]


def _view(address: int | None, aval: jax.ShapeDtypeStruct) -> np.ndarray:
    num_bytes = aval.size * aval.dtype.itemsize
    if num_bytes == 0:
        return np.empty(aval.shape, aval.dtype)
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return np.ndarray(aval.shape, aval.dtype, memory)


def _make_error(api: _Api, message: str) -> int | None:
    arguments = _ErrorArguments(
        ctypes.sizeof(_ErrorArguments), None, message.encode(), _INTERNAL
    )
    return api.create_error(ctypes.byref(arguments))


@functools.cache
def _register_once() -> None:
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handle), platform="cpu")
    atexit.register(_wait_for_programs, os.getpid())


def _wait_for_programs(process_id: int) -> None:
    """Waits for the programs under way, before the interpreter ends.

    A thread of XLA that then called Python would abort the process.
    """
    if os.getpid() != process_id:  # In a forked child there are no threads of XLA.
        return
    with contextlib.suppress(RuntimeError):  # The backend has ended, too.
        devices = np.array(jax.local_devices(backend="cpu"))
        split = NamedSharding(Mesh(devices, "x"), PartitionSpec("x"))
        # XLA runs programs over all devices of a process one after another.
        last = jax.jit(jnp.negative)(jax.device_put(np.zeros(len(devices)), split))
        jax.block_until_ready(last)


def _register_target() -> None:
    with _registration:
        _register_once()
