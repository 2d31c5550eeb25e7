"""Saved values: which arrays of a checkpoint fit a state, and how do they get there?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.optimizers import device_rows


def with_rows(path: str, value: Any, num_rows: int, count: int) -> Any:
    """Returns saved rows of replicas as the rows of another number of replicas.

    Args:
      path: the path of the array, for errors.
      value: host array, or PRNG keys.
      num_rows: length of the first dimension of the result.
      count: rows of each replica, one per device; see `device_rows`.

    Raises:
      TypeError: integers or keys differ between the replicas.
    """
    shape = (num_rows, *value.shape[1:])
    if value.shape == shape:
        return value
    if count == 1:
        return _with_rows(path, value, num_rows)
    of_devices = device_rows.by_device(value, count)
    stack = jnp.stack if is_key(value) else np.stack
    rows: Any = stack([_with_rows(path, x, num_rows // count) for x in of_devices])
    return device_rows.by_replica(rows)


def _with_rows(path: str, value: Any, num_replicas: int) -> Any:
    shape = (num_replicas, *value.shape[1:])
    if has_equal_rows(value):
        rows = jnp if is_key(value) else np
        return rows.broadcast_to(value[0], shape)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        raise TypeError(
            f"`{path}`, {value.dtype}, differs between the {value.shape[0]} replicas "
            f"that saved it; it cannot be averaged for {num_replicas} others. Make "
            "this part anew, and put it in the place of the saved values, with one row "
            "per replica that is here."
        )
    wide = np.promote_types(value.dtype, np.float32)
    mean = value.astype(wide).mean(0).astype(value.dtype)
    return np.broadcast_to(mean, shape)


def host(value: Any, name: str, like: Any) -> Any:
    """Returns a value in a dtype of JAX, on the host unless it is a key.

    Raises:
      ValueError: it does not fit the array `like`; the message has its `name`.
    """
    if not is_key(value) and not isinstance(value, jax.Array):
        # Python numbers and arrays of 64 bits get the dtypes of JAX.
        given = np.asarray(value)
        value = given.astype(jax.dtypes.canonicalize_dtype(given.dtype))
        if given.dtype.kind in "iu" and (value != given).any():
            raise ValueError(
                f"`{name}` is {given.dtype} and does not fit into {value.dtype}, which "
                "JAX makes of it. Set `jax_enable_x64`, or pass smaller numbers."
            )
    value = as_array(value)
    if not is_of_kind(value, like):
        raise ValueError(f"`{name}` is {value.dtype}, but {like.dtype} here.")
    return value


def is_key(x: Any) -> bool:
    """Whether `x` is an array of PRNG keys, or stands for one."""
    is_array = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    return is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_of_kind(value: Any, like: Any) -> bool:
    """Whether a step can go on with `value`: the same dtype, or another float of JAX.

    The state of some optimizers has other floats after its first update than before.
    """
    are_floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (value, like))
    is_of_jax = are_floats and value.dtype == jax.dtypes.canonicalize_dtype(value.dtype)
    return value.dtype == like.dtype or is_of_jax


def has_equal_rows(value: Any) -> bool:
    """Whether all rows, one per replica, are the same bit for bit."""
    data = np.asarray(jax.random.key_data(value)) if is_key(value) else value
    if not data.size:
        return True
    rows = np.ascontiguousarray(data).reshape(len(data), -1).view(np.uint8)
    return bool((rows == rows[0]).all())


def as_array(x: Any) -> Any:
    """Returns an array of PRNG keys as it is, any other array on the host."""
    return x if is_key(x) else np.asarray(x)


def place(value: Any, like: Any) -> jax.Array:
    """Copies a value to where the array `like` lies."""
    if is_key(value):
        data = np.asarray(jax.random.key_data(value))
        sharded = jax.random.key_data(like) if isinstance(like, jax.Array) else None
        impl = jax.random.key_impl(value)
        return jax.random.wrap_key_data(place(data, sharded), impl=impl)
    sharding = like.sharding if isinstance(like, jax.Array) else None
    # Copies: the caller may go on writing to the array.
    if sharding is None:
        return jnp.array(value)
    return jax.make_array_from_callback(
        value.shape, sharding, lambda i: np.array(value[i])
    )


def misfit(path: str, saved: Any, here: Any) -> ValueError:
    """Returns the error for a saved shape that does not become the shape here."""
    return ValueError(
        f"`{path}` was saved with shape {list(saved)}, which does not become "
        f"{list(here)}: the checkpoint belongs to a model with other shapes."
    )
