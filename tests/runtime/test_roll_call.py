"""The roll call as a pure protocol; see `test_roll_call_sockets` for real sockets."""

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from jdp.runtime import job_key, roll_call
from tests.runtime import roll_call_fuzz

HELLO = roll_call.make_hello(0, 3, node="a")


def _hello(process_id, **changes):
    fresh = {"process_id": process_id, "instance": f"{process_id:032x}", **changes}
    return msgspec.structs.replace(HELLO, **fresh)


def _roll(*hellos):
    roll = roll_call.open_roll(_hello(0), deadline_s=10.0)
    for hello in hellos:
        roll = roll_call.receive(roll, hello)
    return roll


@hypothesis.given(st.permutations([1, 2, 3, 1, 2, 3]))
def test_every_order_of_arrival_ends_with_the_nodes_by_process(order):
    roll = roll_call.open_roll(_hello(0, num_processes=4), deadline_s=10.0)
    for k, process_id in enumerate(order):
        node = "ab"[process_id // 2]
        hello = _hello(process_id, num_processes=4, node=node)
        roll = roll_call.receive(roll, hello)
        verdict = roll_call.judge(roll, now_s=0.0)
        is_complete = len({*order[: k + 1]}) == 3
        assert (verdict is not None) == is_complete
    assert verdict == roll_call.RollCallVerdict(nodes=["a", "a", "b", "b"])


def test_missing_processes_are_named_at_the_deadline():
    roll = _roll(_hello(2))
    assert roll_call.judge(roll, now_s=9.9) is None
    verdict = roll_call.judge(roll, now_s=10.0)
    assert "1 of 3 processes did not come in time: 1." in verdict.error


def test_many_missing_processes_are_cut_short():
    roll = roll_call.open_roll(_hello(0, num_processes=100), deadline_s=0.0)
    error = roll_call.judge(roll, now_s=1.0).error
    assert "99 of 100" in error and "10, ..." in error


@pytest.mark.parametrize(
    "hello,expected",
    [
        (_hello(1, num_processes=2), "`num_processes` is 3 in process 0 .* and 2 in"),
        (_hello(3), "`process_id` must be below 3, got 3"),
        (_hello(0, instance="other"), "`process_id=0` was given twice"),
        (_hello(1, jax_version="0.0.1"), r"and 0.0.1 in process 1 .* same version"),
        *[
            (
                _hello(1, settings={**HELLO.settings, name: "other"}),
                rf"`{name}` is {value} in process 0 .* and other in process 1 .* alike",
            )
            for name, value in HELLO.settings.items()
        ],
        (_hello(1, settings={}), "`jax_enable_x64` is False .* and None in process 1"),
    ],
)
def test_a_process_that_does_not_fit_is_an_error_for_all(hello, expected):
    roll = _roll(hello, _hello(2))
    error = roll_call.judge(roll, now_s=0.0).error
    assert error is not None
    pytest.raises(RuntimeError, _raise, error).match(expected)


def _raise(text):
    raise RuntimeError(text)


def test_the_first_error_stays():
    roll = _roll(_hello(3), _hello(1, num_processes=9))
    assert "got 3" in roll_call.judge(roll, now_s=0.0).error


KEYS = [None, job_key.make()]


def _refusal(decode, *args):
    with pytest.raises(roll_call.RollCallRefused) as caught:
        decode(*args)
    return str(caught.value)


@pytest.mark.parametrize("key", KEYS, ids=["no key", "key"])
def test_decoding_inverts_encoding(key):
    challenge = roll_call.make_challenge(key)
    line = roll_call.encode_challenge(challenge)
    assert roll_call.decode_challenge(line) == challenge
    assert challenge.key_id == roll_call.key_id(key)
    line = roll_call.encode_hello(HELLO, challenge, key)
    assert roll_call.decode_hello(line, challenge, key) == HELLO
    for verdict in (
        roll_call.RollCallVerdict(error="A line.\nAnd one more."),
        roll_call.RollCallVerdict(nodes=["a", "b", "c"], host="10.0.0.1", session="5e"),
    ):
        args = challenge, HELLO.instance, key
        line = roll_call.encode_verdict(verdict, *args)
        assert roll_call.decode_verdict(line, challenge, HELLO, key) == verdict


def test_keys_are_told_apart_and_not_shown():
    first, second = job_key.make(), job_key.make()
    ids = {roll_call.key_id(key) for key in (None, first, second)}
    assert len(ids) == 3 and first.hex() not in "".join(ids)


@pytest.mark.parametrize("key", KEYS, ids=["no key", "key"])
@pytest.mark.parametrize("theirs", [None, job_key.make()], ids=["no key", "other"])
def test_a_line_of_another_key_challenge_or_process_is_refused(key, theirs):
    challenge, other = (roll_call.make_challenge(key) for _ in range(2))
    expected = "it does not prove the key of this job"
    hello = roll_call.encode_hello(HELLO, challenge, key)
    assert expected in _refusal(roll_call.decode_hello, hello, other, key)
    verdict = roll_call.RollCallVerdict(error="x")
    said = roll_call.encode_verdict(verdict, challenge, HELLO.instance, key)
    mine = _hello(2)
    for args in ((other, HELLO, key), (challenge, mine, key)):
        assert expected in _refusal(roll_call.decode_verdict, said, *args)
    # A hello is no verdict and the other way around.
    _refusal(roll_call.decode_verdict, hello, challenge, HELLO, key)
    _refusal(roll_call.decode_hello, said, challenge, key)
    if theirs is key:
        return
    assert expected in _refusal(roll_call.decode_hello, hello, challenge, theirs)
    args = challenge, HELLO, theirs
    assert expected in _refusal(roll_call.decode_verdict, said, *args)


BODIES = {
    "bad UTF-8": b'{"protocol":"\xff\xfe"}',
    "nested": b'{"x":' + b"[" * 7000 + b"]" * 7000 + b"}",
    "surrogate": b'{"protocol":"\\ud800"}',
    "huge": b'{"protocol":"jdp-roll-call-4","process_id":' + b"9" * 5000 + b"}",
    "negative": msgspec.json.encode(_hello(-1)),
    "beyond its own number": msgspec.json.encode(_hello(3)),
    "escape": msgspec.json.encode(_hello(1, host="a\x1b[2J")),
    "long": msgspec.json.encode(_hello(1, node="n" * 513)),
    "old": msgspec.json.encode(_hello(1, protocol="jdp-roll-call-1")),
    "nothing": b"",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("key", KEYS, ids=["no key", "key"])
def test_nonsense_is_refused_from_holders_of_the_key_too(key, body):
    challenge = roll_call.make_challenge(key)
    _refusal(roll_call.decode_hello, body + b"\n", challenge, key)
    _refusal(roll_call.decode_challenge, body + b"\n")
    signed = roll_call._sign(key, roll_call._hello_context(challenge), body)
    _refusal(roll_call.decode_hello, signed, challenge, key)
    context = roll_call._verdict_context(challenge, HELLO.instance)
    signed = roll_call._sign(key, context, body)
    _refusal(roll_call.decode_verdict, signed, challenge, HELLO, key)


@pytest.mark.parametrize("has_key", [False, True])
def test_whatever_comes_is_refused_or_a_message(has_key):
    roll_call_fuzz.fuzz(3000, seed=1, has_key=has_key)


def test_sessions_have_keys_of_their_own():
    key = job_key.make()
    found = {roll_call.session_key(k, s) for k in (None, key) for s in ("a", "b")}
    assert len(found) == 4 and {len(k) for k in found} == {job_key.KEY_BYTES}
