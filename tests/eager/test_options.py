"""Options: what they may be, and the variables that set them."""

import dataclasses
from typing import get_type_hints

import pytest

from jdp.eager import EagerOptions
from jdp.eager.options import PREFIX

KINDS = get_type_hints(EagerOptions)
TEXTS = {int: ("12", 12), float: ("2.5", 2.5), str: ("a b", "a b"), bool: ("1", True)}
_TEXTS_OF = {"spin_s": ("0.5", 0.5)}  # At most a second.
_BESIDE = {"stall_shutdown_s": {PREFIX + "STALL_WARNING_S": "1"}}


def test_without_variables_they_are_the_defaults():
    assert EagerOptions.from_environ({}) == EagerOptions()
    environ = {"HOME": "/", "JDP_OTHER": "x", "jdp_eager_autotune": "1"}
    assert EagerOptions.from_environ(environ) == EagerOptions()


@pytest.mark.parametrize("name", KINDS)
def test_every_option_has_a_variable(name):
    text, value = _TEXTS_OF.get(name, TEXTS[KINDS[name]])
    environ = {PREFIX + name.upper(): text} | _BESIDE.get(name, {})
    options = EagerOptions.from_environ(environ)
    assert getattr(options, name) == value
    assert type(getattr(options, name)) is KINDS[name]


def test_the_environment_is_that_of_the_process(monkeypatch):
    monkeypatch.setenv(PREFIX + "FUSION_BYTES", "7")
    assert EagerOptions.from_environ().fusion_bytes == 7
    assert EagerOptions().fusion_bytes == 128 << 20


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", False), ("1", True), ("true", True), ("False", False), ("TRUE", True)],
)
def test_a_switch_has_few_spellings(text, value):
    options = EagerOptions.from_environ({PREFIX + "AUTOTUNE": text})
    assert options.autotune is value


@pytest.mark.parametrize("variable", ["FUSION_BYTE", "TIMELINES", ""])
def test_a_variable_that_is_no_option_is_refused(variable):
    with pytest.raises(ValueError, match="there is no such option") as caught:
        EagerOptions.from_environ({PREFIX + variable: "1"})
    assert f"`{PREFIX}{variable}`" in str(caught.value)
    assert PREFIX + "FUSION_BYTES" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "wanted"),
    [
        ("AUTOTUNE", "yes", "0 or 1"),
        ("AUTOTUNE", "", "0 or 1"),
        ("FUSION_BYTES", "64MB", "a whole number"),
        ("FUSION_BYTES", "1.5", "a whole number"),
        ("CACHE_CAPACITY", "", "a whole number"),
        ("TIMEOUT_S", "soon", "a number"),
        ("STALL_WARNING_S", "", "a number"),
    ],
)
def test_a_value_that_is_none_of_its_type_is_refused(variable, text, wanted):
    with pytest.raises(ValueError) as caught:
        EagerOptions.from_environ({PREFIX + variable: text})
    assert str(caught.value) == f"`{PREFIX}{variable}` must be {wanted}, got {text!r}."


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("FUSION_BYTES", "-1", "`fusion_bytes` must be at least 0, got -1"),
        ("CYCLE_TIME_S", "nan", "`cycle_time_s` must be at least 0, got nan"),
        ("TIMEOUT_S", "inf", "`timeout_s` must be at least 0, got inf"),
        ("TIMEOUT_S", "0", "`timeout_s` must be from 0.01 to 1e6 seconds, got 0"),
    ],
)
def test_a_value_out_of_range_is_refused(variable, text, message):
    with pytest.raises(ValueError, match=message):
        EagerOptions.from_environ({PREFIX + variable: text})


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("value", [None, [1], b"x"])
def test_an_argument_of_another_type_is_refused(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be of type"):
        EagerOptions(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fusion_bytes", True),
        ("fusion_bytes", 1.0),
        ("fusion_bytes", "1"),
        ("timeout_s", True),
        ("timeout_s", "1"),
        ("autotune", 1),
        ("timeline", 1),
    ],
)
def test_numbers_switches_and_texts_are_not_mixed(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be of type"):
        EagerOptions(**{name: value})


def test_a_whole_number_is_a_number():
    assert EagerOptions(timeout_s=3).timeout_s == 3


def test_a_shutdown_comes_after_the_warning_or_never():
    with pytest.raises(ValueError, match=r"`stall_shutdown_s` \(5\) must be 0 or at"):
        EagerOptions(stall_warning_s=10, stall_shutdown_s=5)
    for warning_s, shutdown_s in ((10, 0), (10, 10), (0, 5), (0, 0)):
        options = EagerOptions(stall_warning_s=warning_s, stall_shutdown_s=shutdown_s)
        assert options.stall_shutdown_s == shutdown_s


def test_they_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EagerOptions().fusion_bytes = 1  # pyright: ignore


def test_a_core_is_not_taken_for_longer_than_a_second():
    assert EagerOptions(spin_s=1.0).spin_s == 1.0
    with pytest.raises(ValueError, match="`spin_s` must be at most 1 second.*got 1.5"):
        EagerOptions(spin_s=1.5)
