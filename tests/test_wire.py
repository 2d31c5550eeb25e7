import msgspec
import pytest

from jdp import wire
from tests import wire_fuzz


class _Note(msgspec.Struct):
    text: str
    numbers: list[int] = []


def test_decode_inverts_encode():
    data = msgspec.msgpack.encode(_Note("a", [1, 2]))
    assert wire.decode(data, _Note, what="A note") == _Note("a", [1, 2])


@pytest.mark.parametrize(
    "data,why",
    [
        (b"", "Input data was truncated"),
        (b"\x81\xa4text\xa2\xff\xfe", "UnicodeDecodeError"),
        (b"\x81\xa1x" + b"\x91" * 100_000, "RecursionError"),
        (b"\xc1", "MessagePack data is malformed"),
        (msgspec.msgpack.encode({"text": 5}), "Expected `str`, got `int`"),
    ],
)
def test_what_is_malformed_is_refused_by_name(data, why):
    with pytest.raises(wire.Malformed, match="A note is malformed") as caught:
        wire.decode(data, _Note, what="A note")
    assert why in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("name", wire_fuzz.MESSAGES)
def test_fuzzed_messages_are_refused_or_decoded(name):
    wire_fuzz.fuzz_decoder(name, 1000, seed=1)


def test_fuzzed_records_have_a_verdict():
    wire_fuzz.fuzz_judge(1000, seed=1)


def test_a_fuzzed_store_shows_only_what_was_signed():
    wire_fuzz.fuzz_store(500, seed=1)
