"""Wide dtypes: how are numbers and metric objects added up without loss?

Every sum is made in 64 bits and gets its dtype at the end: in bfloat16, a sum of ones
stops at 256, and a sum of int32 may wrap.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.gradients import metric_objects


def widen(x: Any) -> np.ndarray:
    """Returns a number or an array on the host, in the widest dtype of its kind."""
    return np.asarray(x).astype(_widest(x.dtype))


def as_dtype_of(x: Any, like: Any) -> Any:
    """Returns a sum in the dtype and on the device of `like`.

    Integers that this dtype does not hold are returned as a `np.ndarray` of 64 bits.
    """
    dtype, host = like.dtype, np.asarray(x)
    if host.dtype.kind in "iu" and dtype != jnp.bool_:
        limits = jnp.iinfo(dtype)
        if ((host < limits.min) | (host > limits.max)).any():
            return host
    with np.errstate(over="ignore"):  # It is infinite, then.
        host = host.astype(dtype)
    place = like.sharding if isinstance(like, jax.Array) else None
    return jax.device_put(host, place)


def add_metrics(total: Any, node: Any) -> Any:
    """Merges a metric object into the wide one of the batches before it.

    Args:
      total: the result of the batches before it; None: there was no batch.
      node: the metric object of a batch.
    """
    if metric_objects.is_collection(node):
        old = {} if total is None else vars(total)
        parts = {k: add_metrics(old.get(k), v) for k, v in vars(node).items()}
        return type(node)(**parts)
    with jax.enable_x64(True):
        if not metric_objects.is_collecting(node):
            node = jax.tree.map(_widen_on_device, node)
        return node if total is None else metric_objects.merge_two(total, node)


def narrow_metrics(total: Any, like: Any) -> Any:
    """Returns a result of `add_metrics` in the dtypes of a batch's metric object."""
    if metric_objects.is_collection(like):
        old = vars(total)
        parts = {k: narrow_metrics(old[k], v) for k, v in vars(like).items()}
        return type(like)(**parts)
    if metric_objects.is_collecting(like):
        return total
    return jax.tree.map(as_dtype_of, total, like)


def _widen_on_device(x: Any) -> jax.Array:
    return jnp.asarray(x).astype(_widest(x.dtype))


def _widest(dtype: Any) -> Any:
    for kind, wide in (
        (jnp.signedinteger, np.int64),
        (jnp.unsignedinteger, np.uint64),
        (jnp.floating, np.float64),
        (jnp.complexfloating, np.complex128),
    ):
        if jnp.issubdtype(dtype, kind):
            return np.dtype(wide)
    return dtype
