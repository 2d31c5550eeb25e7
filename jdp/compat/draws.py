"""Draws: how is one replica's part of a larger draw of random numbers computed?

With threefry, `jax.random` computes each number from the key and the number's position,
so that a part costs no more than a draw of its size. The formulas come from
`jax._src.random.threefry2x32`, with `jax_threefry_partitionable`, JAX's default. With
another implementation of keys, the whole is drawn and the part taken out of it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config
from jax._src.random import prng
from jax.extend import random as extended_random

_MAX_POSITIONS = 1 << 32


class Part(NamedTuple):
    """Place of one replica's part in a draw of all replicas."""

    shape: tuple[int, ...]  # of the part.
    dim: int  # the dimension along which the parts lie beside each other.
    num_parts: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the draw of all replicas."""
        size = self.shape[self.dim] * self.num_parts
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def part_of_bits(
    keys: jax.Array, part: Part, index: jax.Array, *, bit_width: int, **params: Any
) -> jax.Array:
    """Returns a part of random bits.

    Args:
      keys: PRNG keys, shape (...).
      part: the part.
      index: number of the part, int32 ().
      bit_width: 8, 16, 32 or 64.
      **params: other parameters of the primitive.

    Returns:
      unsigned integers of `bit_width`, shape (..., *part.shape): a slice of the result
      of `jax.random.bits` in the whole shape.
    """

    def draw(data: jax.Array) -> jax.Array:
        high, low = _threefry(data, part, index)
        dtype = jnp.dtype(f"uint{bit_width}")
        if bit_width < 64:
            return (high ^ low).astype(dtype)
        return high.astype(dtype) << jnp.asarray(32, dtype) | low.astype(dtype)

    if _has_positions(keys, part):
        return _for_each_key(draw, keys)
    whole = prng.random_bits(keys, bit_width=bit_width, shape=part.whole_shape)
    return _slice(whole, keys.ndim, part, index)


def part_of_split(
    keys: jax.Array, part: Part, index: jax.Array, **params: Any
) -> jax.Array:
    """Returns a part of the keys that `jax.random.split` makes.

    Args:
      keys: PRNG keys, shape (...).
      part: the part.
      index: number of the part, int32 ().
      **params: other parameters of the primitive.

    Returns:
      PRNG keys, shape (..., *part.shape).
    """

    def split(data: jax.Array) -> jax.Array:
        return jnp.stack(_threefry(data, part, index), axis=-1)

    if _has_positions(keys, part):
        data = _for_each_key(split, keys)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
    whole = prng.random_split(keys, shape=part.whole_shape)
    return _slice(whole, keys.ndim, part, index)


def part_of_gamma(
    keys: jax.Array, a: jax.Array, part: Part, index: jax.Array, *, log_space: bool
) -> jax.Array:
    """Returns a part of a draw from gamma distributions; the whole is drawn.

    Args:
      keys: PRNG keys, shape (...).
      a: parameters of the distributions, shape (..., *part.shape).
      part: the part.
      index: number of the part, int32 ().
      log_space: see `jax.random.loggamma`.

    Returns:
      The shape and dtype of `a`.
    """
    axis = keys.ndim + part.dim
    first = index * part.shape[part.dim]
    # Numbers of other parts depend on parameters of their own; these are not used.
    whole = jnp.ones((*keys.shape, *part.whole_shape), a.dtype)
    whole = lax.dynamic_update_slice_in_dim(whole, a, first, axis)
    drawn = jax.random.random_gamma_p.bind(keys, whole, log_space=log_space)
    return _slice(drawn, keys.ndim, part, index)


def implementation(eqn: Any) -> str:
    """Returns the name of the implementation of a draw's keys."""
    return eqn.invars[0].aval.dtype._impl.name


def uses_first_key(eqn: Any) -> bool:
    """Whether a draw from several keys may use the first of them for all.

    `jax.vmap` draws so from keys of XLA's generator; see `jax.random`.
    """
    generator = implementation(eqn) if eqn.invars[0].aval.shape else ""
    is_made_of_threefry = eqn.primitive.name in ("random_fold_in", "random_split")
    return generator == "unsafe_rbg" or (generator == "rbg" and not is_made_of_threefry)


# By the name of the primitive.
TAKE_PART: dict[str, Callable[..., jax.Array]] = {
    "random_bits": part_of_bits,
    "random_gamma": part_of_gamma,
    "random_split": part_of_split,
}


def _has_positions(keys: jax.Array, part: Part) -> bool:
    """Whether each number of a draw is computed from its position."""
    outer = math.prod(part.shape[: part.dim])
    inner = math.prod(part.shape[part.dim :])
    return (
        keys.dtype._impl is extended_random.threefry_prng_impl  # pyright: ignore
        and config.threefry_partitionable.value
        and 0 < inner < _MAX_POSITIONS
        and outer * part.num_parts < _MAX_POSITIONS
    )


def _for_each_key(fn: Callable[[jax.Array], jax.Array], keys: jax.Array) -> jax.Array:
    data = jax.random.key_data(keys)
    for _ in range(keys.ndim):
        fn = jax.vmap(fn)
    return fn(data)


def _threefry(
    data: jax.Array, part: Part, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns two words for each position of a part, both uint32 `part.shape`."""
    high, low = _positions(part, index)
    words = extended_random.threefry2x32_p.bind(data[0], data[1], high, low)
    return words[0], words[1]


def _positions(part: Part, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the positions in the flattened whole, as upper and lower 32 bits."""
    outer = math.prod(part.shape[: part.dim])
    inner = math.prod(part.shape[part.dim :])
    blocks = lax.iota(jnp.uint32, outer) * jnp.uint32(part.num_parts)
    high, low = _multiply(blocks + index.astype(jnp.uint32), inner)
    within = lax.broadcasted_iota(jnp.uint32, (outer, inner), 1)
    low = low[:, None] + within
    high = high[:, None] + (low < within).astype(jnp.uint32)
    return high.reshape(part.shape), low.reshape(part.shape)


def _multiply(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """Returns the 64 bits of uint32 `x` times a factor, as upper and lower half."""
    mask, shift = jnp.uint32(0xFFFF), jnp.uint32(16)
    upper, lower = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    a, b = x >> shift, x & mask
    low = b * lower
    middle = a * lower + (low >> shift)
    carried = b * upper + (middle & mask)
    high = a * upper + (middle >> shift) + (carried >> shift)
    return high, (carried << shift) | (low & mask)


def _slice(
    whole: jax.Array, num_key_dims: int, part: Part, index: jax.Array
) -> jax.Array:
    size = part.shape[part.dim]
    axis = num_key_dims + part.dim
    return lax.dynamic_slice_in_dim(whole, index * size, size, axis)
