"""Arguments: what is wrong is refused where it is called, with the argument's name."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp import eager
from jdp.eager import argument_types, encoding, submission


class _Text(str):
    def __str__(self):
        return "another"


class _Enum(enum.StrEnum):
    X = "x"


@pytest.mark.parametrize("name", ["x", np.str_("x"), _Text("x"), _Enum.X])
def test_a_name_of_any_kind_of_str_becomes_a_plain_one(name):
    checked = argument_types.check_name(name)
    assert type(checked) is str and checked == "x"


@pytest.mark.parametrize("timeout_s", [0, 2, 1.5, np.float32(0.5), np.int64(3)])
def test_a_longest_wait_is_a_number_of_seconds(timeout_s):
    checked = argument_types.check_timeout(timeout_s)
    assert type(checked) is float and checked == timeout_s


@pytest.mark.parametrize("timeout_s", [None, float("inf"), 1e300, 10**400])
def test_a_wait_longer_than_a_clock_holds_has_no_limit(timeout_s):
    assert argument_types.check_timeout(timeout_s) is None


@pytest.mark.parametrize("timeout_s", [-1, -0.001, float("-inf"), float("nan")])
def test_a_negative_wait_is_refused(timeout_s):
    with pytest.raises(ValueError, match="`timeout_s` must be at least 0 seconds, got"):
        argument_types.check_timeout(timeout_s)


@pytest.mark.parametrize("timeout_s", ["x", "1", True, b"1", [1.0], 1j])
def test_a_wait_that_is_no_number_is_refused(timeout_s):
    with pytest.raises(TypeError, match="`timeout_s` must be a number of seconds"):
        argument_types.check_timeout(timeout_s)


@pytest.mark.parametrize("name", [3, b"x", True, None, ["x"], np.array("x")])
def test_a_name_that_is_no_str_is_refused(name):
    with pytest.raises(TypeError, match="`name` must be a str, got"):
        argument_types.check_name(name)


@pytest.mark.parametrize("name", ["\ud800", "a\udcffb"])
def test_half_a_surrogate_is_refused_in_text_that_can_be_printed(name):
    with pytest.raises(ValueError, match="half a surrogate") as caught:
        argument_types.check_name(name)
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    "value", [1, np.int64(1), np.uint8(1), np.array(1), jnp.int32(1), jnp.uint8(1)]
)
def test_integers_of_numpy_and_jax_are_integers(value):
    assert type(argument_types.check_integer(value, "root")) is int
    assert argument_types.check_integer(value, "root") == 1
    ranks = eager.ProcessSet([value, 0]).ranks
    assert ranks == (0, 1) and {type(rank) for rank in ranks} == {int}
    splits = argument_types.check_splits(np.zeros(2), [value, value], 2)
    assert splits == (1, 1)


@pytest.mark.parametrize(
    "value", [1.0, True, np.True_, jnp.array(True), "1", None, np.array([1, 2])]
)
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(TypeError, match="`root` must be an integer, got"):
        argument_types.check_integer(value, "root")
    with pytest.raises(TypeError, match="`ranks` must be an integer, got"):
        eager.ProcessSet([value])


@pytest.mark.parametrize("ranks", ["01", b"01", 3, None])
def test_ranks_must_be_a_list(ranks):
    with pytest.raises(TypeError, match="`ranks` must be a list of integers"):
        eager.ProcessSet(ranks)


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.array(2.0), jnp.float32(2), jnp.bfloat16(2), jnp.array(2), np.int8(2)],
)
def test_a_factor_may_be_in_an_array_of_no_dimensions(value):
    factor = argument_types.check_factor(value, "prescale")
    assert type(factor) is float and factor == 2.0


@pytest.mark.parametrize("value", ["2", None, 1j, np.ones(1), jnp.ones(2), [2.0]])
def test_what_is_no_factor_is_refused(value):
    with pytest.raises(TypeError, match="`prescale` must be a real number"):
        argument_types.check_factor(value, "prescale")


def test_other_arguments_of_a_wrong_type_are_named():
    with pytest.raises(TypeError, match="`op` must be a str"):
        argument_types.check_op(["sum"])
    with pytest.raises(TypeError, match="`process_set` must be a set from"):
        submission.check_set([0, 1])
    with pytest.raises(TypeError, match="`wire_dtype` must be a dtype"):
        argument_types.check_dtype("fp16", "wire_dtype")


def test_keys_and_masks_are_refused_by_name():
    keys = jax.random.split(jax.random.key(0))
    with pytest.raises(TypeError, match=r"`grads\['k'\]` .*keys.*key_data"):
        argument_types.check_array(keys, "grads['k']")
    with pytest.raises(TypeError, match="key_data"):
        encoding.encode({"k": keys})
    masked = np.ma.array([1.0, 2.0], mask=[0, 1])
    with pytest.raises(TypeError, match="`grads` is a masked array"):
        argument_types.check_array(masked, "grads")
    with pytest.raises(TypeError, match="masked array"):
        encoding.encode([masked])


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_what_jax_traces_as_a_program_is_told_from_derivatives(transform):
    with pytest.raises(TypeError, match="`jit`, `jax.checkpoint` or a loop"):
        transform(lambda x: argument_types.check_array(x, "x"))(jnp.ones(3))


@pytest.mark.parametrize(
    "transform", [jax.grad, jax.vmap, lambda fn: jax.grad(jax.grad(fn))]
)
def test_derivatives_that_are_not_supported_are_told(transform):
    x = jnp.ones(3) if transform is jax.vmap else 1.0
    with pytest.raises(TypeError, match="none of second order.* `_async` have none"):
        transform(lambda x: argument_types.check_array(x, "x"))(x)


@pytest.mark.parametrize("handle", [{}, [], "x", None, np.zeros(2)])
@pytest.mark.parametrize("call", [eager.synchronize, eager.poll])
def test_what_is_no_handle_is_refused(call, handle):
    message = f"`handle` must come from .* got {type(handle).__name__}.* one at a time"
    with pytest.raises(TypeError, match=message):
        call(handle)
