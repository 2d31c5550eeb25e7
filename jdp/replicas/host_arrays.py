"""Host arrays: arrays of users in memory of the host, before JAX has them."""

import jax
import numpy as np

_ALIGNMENT = 64  # bytes; JAX uses memory with this alignment on CPU without a copy.
_LARGE_BYTES = 1 << 16  # below this, JAX's own copy costs less than aligned memory.


def as_host_array(leaf: object, name: str) -> np.ndarray:
    """Returns a leaf of a batch as a NumPy array.

    Raises:
      TypeError: the leaf is not an array, or has a dtype that JAX lacks. The message
        names the leaf.
    """
    check_has_no_mask(leaf, name)
    array = np.asarray(leaf)
    check_has_known_dtype(leaf, name)
    if array.dtype.kind not in "biufcV":
        raise TypeError(
            f"{name} is a {type(leaf).__name__}, not an array. Pass "
            "pytrees of arrays. Name a flag or a string in `static_argnames`. Register "
            "your own classes with `jax.tree_util.register_dataclass`."
        )
    return array


def own_copy(x: np.ndarray) -> np.ndarray:
    """Returns a copy of `x` in memory that no caller writes to.

    JAX reads a NumPy array after `jax.device_put` has returned: on CPU it uses aligned
    memory without a copy, whatever `may_alias` says, and copies other memory in a
    thread. A large copy is aligned, so that JAX does not copy again: 17 ms instead of
    49 ms for 100 MB on CPU. Read-only arrays are copied too: a loader may make them
    writeable again, or hold a writeable view.
    """
    if x.nbytes < _LARGE_BYTES:
        return np.array(x)
    memory = np.empty(x.nbytes + _ALIGNMENT, np.uint8)
    first = -memory.__array_interface__["data"][0] % _ALIGNMENT
    copy = memory[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
    np.copyto(copy, x)
    return copy


def check_has_no_mask(leaf: object, name: str) -> None:
    """Raises TypeError for a masked NumPy array, whose mask would be lost."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array of numpy, and JAX has no masks. Pass "
            "`x.filled(value)` and, if you need it, the mask as a separate array."
        )


def check_has_known_dtype(leaf: object, name: str) -> None:
    """Raises TypeError for a NumPy array in a dtype that JAX does not have."""
    if not isinstance(leaf, np.ndarray):
        return
    try:
        jax.typeof(leaf)
    except TypeError:
        if leaf.dtype.kind == "V" and leaf.dtype.names is None:
            advice = (
                "`np.savez` loses bfloat16 and narrower floats: restore the dtype, for "
                "example with `x.view(jnp.bfloat16)`."
            )
        else:
            advice = (
                "Pass numbers in the byte order of this machine, such as "
                "`x.astype(np.float32)`, and the fields of a structured array one by "
                "one."
            )
        raise TypeError(
            f"{name} has dtype {leaf.dtype}, which JAX does not have. {advice}"
        ) from None
