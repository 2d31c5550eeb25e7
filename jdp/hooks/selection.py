"""Selection: where are the largest elements of a buffer, without sorting it?"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SORTED_SIZE = 1 << 14  # elements; up to here `lax.top_k` is about as fast.
_SAMPLE_SIZE = 1 << 16  # elements, at least; up to twice as many.
_WORD_BITS = 32


class _Search(NamedTuple):
    """Search for a threshold of magnitudes, as integers."""

    threshold: jax.Array  # ()
    lowest: jax.Array  # (); where the threshold can be.
    highest: jax.Array  # ()
    stride: jax.Array  # (); largest change of the threshold.
    is_found: jax.Array  # bool ()
    above: jax.Array  # uint32 (ceil(n / 32),); bits of the elements above `threshold`.
    equal: jax.Array  # the same for the elements equal to it.


def find_largest(x: jax.Array, *, least: int, most: int) -> jax.Array:
    """Finds between `least` and `most` elements of the largest magnitude.

    No other element is larger than any of them. NaN counts as larger than infinity, and
    infinity as larger than any number.

    The elements above a threshold are found, and elements equal to it, in order of
    position, in the places that are left. The first threshold comes from a sample. All
    elements are counted, and a search corrects the threshold if the count is out of
    bounds. So the result does not depend on where the sample is taken. One pass over
    `x` is the rule if `least` is 3/4 of `most`. Short buffers are sorted.

    Args:
      x: shape (n,), a real floating dtype.
      least: at least 1.
      most: at least `least`, at most n.

    Returns:
      Positions, int32 (most,), all different. A position from n on is an unused place.
    """
    if x.size <= _SORTED_SIZE:
        return lax.top_k(jnp.abs(x), most)[1]
    # An odd step takes every column of a matrix whose width is a power of two.
    sample = x[:: x.size // _SAMPLE_SIZE | 1]
    share = sample.size / x.size
    top = int(jnp.iinfo(_key_dtype(x.dtype)).max)
    first = _search(
        sample,
        top // 2,
        stride=top,
        # Inside the bounds, since the share in the sample is not exact.
        least=max(int((0.6 * least + 0.4 * most) * share), 1),
        most=int((0.3 * least + 0.7 * most) * share) + 1,
    )
    sixteenth = 1 << max(int(jnp.finfo(x.dtype).nmant) - 4, 0)
    found = _search(x, first.threshold, stride=sixteenth, least=least, most=most)
    bits, num_bits = _first_bits(jnp.concatenate([found.above, found.equal]), most)
    slots = lax.iota(jnp.int32, most)
    places = bits % (found.above.size * _WORD_BITS)
    return jnp.where(slots < num_bits, places, x.size + slots)


def _search(
    x: jax.Array, start: jax.Array | int, *, stride: int, least: int, most: int
) -> _Search:
    """Finds a threshold, beginning at `start`.

    At most `most` elements are above it, and at least `least` are above or equal.
    """
    dtype = _key_dtype(x.dtype)
    top = int(jnp.iinfo(dtype).max)
    whole = x.size // _WORD_BITS * _WORD_BITS

    def advance(search: _Search) -> _Search:
        # XLA would compute the magnitudes outside of the loop, and store them.
        y, threshold = lax.optimization_barrier((x, search.threshold))
        # In two parts, as XLA copies an array that it pads.
        parts = [_magnitudes(y[:whole]), _magnitudes(y[whole:])]
        above = _pack([part > threshold for part in parts])
        equal = _pack([part == threshold for part in parts])
        num_above = lax.population_count(above).sum()
        num_equal = lax.population_count(equal).sum()
        is_low = num_above > most
        is_high = num_above + num_equal < least
        lowest = jnp.where(is_low, threshold + 1, search.lowest)
        highest = jnp.where(is_high, threshold - 1, search.highest)
        # Bisection, but in small strides first, as it begins close to its end.
        change = jnp.minimum((highest - lowest) >> 1, search.stride)
        better = jnp.where(is_low, lowest + change, highest - change)
        is_found = ~(is_low | is_high)
        return _Search(
            threshold=jnp.where(is_found, threshold, better),
            lowest=lowest,
            highest=highest,
            stride=jnp.minimum(search.stride, top // 4) * 4,
            is_found=is_found,
            above=above,
            equal=equal,
        )

    def like_x(value: jax.Array | int | bool, shape: tuple[int, ...], dtype: Any):
        # It varies over mesh axes as `x` does, as the state of a loop must.
        return jnp.zeros_like(x, dtype, shape=shape) + jnp.asarray(value, dtype)

    words = (-(-x.size // _WORD_BITS),)
    begin = _Search(
        threshold=like_x(start, (), dtype),
        lowest=like_x(0, (), dtype),
        highest=like_x(top, (), dtype),
        stride=like_x(stride, (), dtype),
        is_found=like_x(False, (), jnp.bool_),
        above=like_x(0, words, jnp.uint32),
        equal=like_x(0, words, jnp.uint32),
    )
    return lax.while_loop(lambda search: ~search.is_found, advance, begin)


def _key_dtype(dtype: Any) -> np.dtype:
    """Returns the integers that order magnitudes by bits, NaN above infinity."""
    return jnp.dtype(f"int{jnp.finfo(dtype).bits}")


def _magnitudes(x: jax.Array) -> jax.Array:
    dtype = _key_dtype(x.dtype)
    return lax.bitcast_convert_type(x, dtype) & jnp.iinfo(dtype).max


def _pack(parts: list[jax.Array]) -> jax.Array:
    """Packs bool arrays, of m elements in total, into uint32 (ceil(m / 32),).

    Only the last part has a size that is not a multiple of 32.
    """
    packed = []
    for bits in parts:
        bits = jnp.pad(bits, (0, -bits.size % _WORD_BITS))
        words = bits.reshape(-1, _WORD_BITS).astype(jnp.uint32)
        words = words << lax.iota(jnp.uint32, _WORD_BITS)
        packed.append(words.sum(1, dtype=jnp.uint32))
    return jnp.concatenate(packed)


def _first_bits(words: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns where the first `size` set bits are, and how many bits are set.

    Args:
      words: uint32 (m,).
      size: number of bits that are looked for.

    Returns:
      Positions, int32 (size,), of which those after the last set bit mean nothing; and
      the number of set bits, int32 ().
    """
    counts = lax.population_count(words).astype(jnp.int32)
    ends = lax.cumsum(counts)
    starts = ends - counts
    # Each word that has set bits is written to the slot of its first set bit, from
    # where a maximum spreads it to the slots of the others.
    slots = jnp.where(counts > 0, starts, size)
    firsts = jnp.zeros_like(counts, shape=(size,))
    firsts = firsts.at[slots].set(lax.iota(jnp.int32, words.size), mode="drop")
    word_of = lax.cummax(firsts)
    word = words[word_of]
    rank = lax.iota(jnp.int32, size) - starts[word_of]  # among the bits of the word.
    place = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = word & np.uint32((1 << width) - 1)
        num_low = lax.population_count(low).astype(jnp.int32)
        is_high = rank >= num_low
        word = jnp.where(is_high, word >> width, low)
        rank = jnp.where(is_high, rank - num_low, rank)
        place = jnp.where(is_high, place + width, place)
    return word_of * _WORD_BITS + place, ends[-1]
