"""Parts of draws: slices of what `jax.random` draws in the whole shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp.compat import draws
from jdp.compat.draws import Part
from tests import harness, rarely

N = 3
PARTS = [Part((2, 3, 4), 1, N), Part((1, 2), 0, N), Part((3, 2), 1, N)]


def _slices(whole, part, keys_ndim=0):
    return jnp.stack(jnp.split(whole, N, axis=keys_ndim + part.dim))


def _parts(draw, part):
    """What `draw` gives each replica, stacked."""
    return jnp.stack([draw(part, jnp.int32(i)) for i in range(N)])


@harness.jit_fast
def _found_and_expected(key):
    keys = jax.random.split(key, 2)
    found, expected = [], []
    for part in PARTS:
        for width in (16, 32):

            def draw(part, index, width=width):
                return draws.part_of_bits(key, part, index, bit_width=width)

            dtype = jnp.dtype(f"uint{width}")
            whole = jax.random.bits(key, part.whole_shape, dtype)
            found.append(_parts(draw, part))
            expected.append(_slices(whole, part))

        def split(part, index):
            made = draws.part_of_split(key, part, index)
            return jax.random.key_data(made)

        found.append(_parts(split, part))
        whole = jax.random.split(key, part.whole_shape)
        expected.append(_slices(jax.random.key_data(whole), part))
    part = PARTS[1]

    def draw_each(part, index):
        return draws.part_of_bits(keys, part, index, bit_width=32)

    whole = jax.vmap(lambda k: jax.random.bits(k, part.whole_shape))(keys)
    return [*found, _parts(draw_each, part)], [*expected, _slices(whole, part, 1)]


@pytest.mark.parametrize(
    "kind, is_partitionable",
    rarely.cases(
        [("threefry2x32", True), ("threefry2x32", False), ("rbg", True)],
        often=[("threefry2x32", True)],
    ),
)
def test_parts_are_slices_of_the_whole_draw(kind, is_partitionable):
    with jax.threefry_partitionable(is_partitionable):
        found, expected = _found_and_expected(jax.random.key(3, impl=kind))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@functools.partial(jax.jit, static_argnums=1)
def _found_and_whole(key, part):
    whole = jax.random.bits(key, part.whole_shape, jnp.uint64)
    return draws.part_of_bits(key, part, jnp.int32(1), bit_width=64), whole


def test_words_of_64_bits_are_slices_too():
    part = Part((2, 3), 0, N)
    with jax.enable_x64(True):
        found, whole = _found_and_whole(jax.random.key(0), part)
    assert found.dtype == jnp.uint64
    np.testing.assert_array_equal(found, whole[2:4])


def test_positions_beyond_32_bits_are_exact():
    """As of the attention of a large batch; too large to draw the whole here."""
    part = Part((3, 2, 1 << 20), 1, 1 << 14)
    for index in (0, 1, part.num_parts - 1):
        high, low = harness.jit_fast(lambda i: draws._positions(part, i))(
            jnp.int32(index)
        )
        for place in [(0, 0, 0), (0, 1, 7), (2, 1, (1 << 20) - 1)]:
            outer, middle, inner = place
            rows = outer * part.num_parts * 2 + index * 2 + middle
            expected = (rows << 20) + inner
            assert (int(high[place]) << 32) + int(low[place]) == expected


def test_a_part_costs_no_more_than_a_draw_of_its_size():
    part = Part((4, 5), 0, 1000)
    key = jax.random.key(0)

    def draw(index):
        return draws.part_of_bits(key, part, index, bit_width=32)

    text = str(jax.make_jaxpr(draw)(jnp.int32(0)))
    assert "threefry2x32" in text and "4000" not in text and "20000" not in text
