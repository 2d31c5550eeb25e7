"""A short run of the fuzzer, which `make soak` runs for a million messages each."""

import random

import pytest

from jdp.eager import checks, messages
from jdp.eager.messages import Batch, ProtocolError, Response, Spec
from jdp.eager.response_cache import ResponseCache
from tests.eager import eager_fuzz


@pytest.mark.parametrize("part", eager_fuzz.FUZZERS)
def test_nonsense_is_refused_by_the_typed_refusal_alone(part):
    counts = eager_fuzz.FUZZERS[part](random.Random(part), 1500)
    assert counts["taken"] > 50 and counts["refused"] > 50


@pytest.mark.parametrize("check", ["check_places", "check_response", "check_data"])
def test_the_fuzzer_finds_a_check_that_is_not_there(monkeypatch, check):
    monkeypatch.setattr(checks, check, lambda *args, **kwargs: None)
    with pytest.raises((LookupError, ValueError, TypeError, AssertionError)):
        eager_fuzz.fuzz_rank(random.Random(1), 20_000)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x90\xa4text",
        b"\x9a\x00\x91\x92\xa1\xff\xc4\x00",  # a name that is not UTF-8.
        b"\x91" * 5000,
    ],
)
def test_bytes_that_are_no_message_are_refused(payload):
    for decode in (
        messages.decode_from_rank,
        messages.decode_batch,
        messages.decode_spec,
    ):
        with pytest.raises(ProtocolError):
            decode(payload)


def test_a_name_may_lose_its_old_slot_and_its_new_one_at_once():
    cache = ResponseCache()
    spec = messages.encode_spec(Spec("all_reduce", "float32", (1,), op="sum"))
    cache.apply(Batch((Response(("a",), (spec,), 0, (), (0,)),)))
    cache.apply(Batch((Response(("a",), (spec,), 0, (), (1,)),), (), (1, 0)))
    assert cache.find(messages.Request("a", spec), 0) is None


@pytest.mark.parametrize("dtype", ["(,", "2i4,f4", "O", "float33", "", "a" * 99, "V8"])
def test_what_is_no_dtype_is_refused(dtype):
    spec = messages.encode_spec(Spec("all_reduce", dtype, (1,), op="sum"))
    with pytest.raises(ProtocolError, match="a request of all_reduce has dtype"):
        messages.decode_spec(spec)
