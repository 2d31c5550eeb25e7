"""Fuzz: lines that no process would say, at the roll call's decoders and its state.

`python -m tests.runtime.roll_call_fuzz --messages 1000000 --seed 1`
"""

import argparse
import random
import time

import msgspec

from jdp.runtime import job_key, roll_call
from tests.runtime.transport_fuzz import mutate

_NUM_PROCESSES = 4
_TEXTS = ("", "a", "\x00", "é", "𝄞", "x" * 600, roll_call.PROTOCOL, "0" * 32)
_ODD = (None, True, -1, 0, 3, 4, 2**31, 2**70, 0.5, [], {}, ["a"], *_TEXTS)


def fuzz(num_messages: int, *, seed: int, has_key: bool) -> None:
    """Says `num_messages` to each decoder: a refusal, or what `encode` would write."""
    rng = random.Random(seed)
    key = job_key.make() if has_key else None
    own = roll_call.make_hello(0, _NUM_PROCESSES, node="n")
    roll = roll_call.open_roll(own, deadline_s=1.0)
    for number in range(num_messages):
        challenge = roll_call.make_challenge(key)
        said = _mangle(rng, roll_call.encode_challenge(challenge), None, "")
        _decode(roll_call.decode_challenge, said)
        hello = roll_call.make_hello(rng.randrange(_NUM_PROCESSES), 4, node="n")
        line = roll_call.encode_hello(hello, challenge, key)
        context = roll_call._hello_context(challenge)
        said = _mangle(rng, line, key, context)
        heard = _decode(roll_call.decode_hello, said, challenge, key)
        if heard is not None:
            roll = _enter(roll, own, heard, number)
        verdict = roll_call.RollCallVerdict(nodes=["n"] * _NUM_PROCESSES, host="::1")
        line = roll_call.encode_verdict(verdict, challenge, own.instance, key)
        context = roll_call._verdict_context(challenge, own.instance)
        said = _mangle(rng, line, key, context)
        _decode(roll_call.decode_verdict, said, challenge, own, key)


def _enter(roll, own, hello, number):
    """The state machine takes any hello that was decoded, and always has a verdict."""
    roll = roll_call.receive(roll, hello)
    assert roll.present[0] == own
    verdict = roll_call.judge(roll, now_s=2.0)
    assert verdict is not None and (verdict.error is None) == (len(roll.present) == 4)
    assert (verdict.error or "").encode() is not None  # It can be sent and shown.
    if number % 50 == 0 or verdict.error is None:
        return roll_call.open_roll(own, deadline_s=1.0)
    return roll


def _decode(decode, *args):
    try:
        found = decode(*args)
    except roll_call.RollCallRefused as error:
        assert str(error).encode()
        return None
    assert msgspec.json.encode(found)
    return found


def _mangle(rng, line: bytes, key: bytes | None, context: str) -> bytes:
    """Changes a line, or what is signed in it, or says something else altogether."""
    body = line[2 * job_key.CODE_BYTES :] if context else line
    match rng.randrange(5):
        case 0:
            return mutate(rng, line)
        case 1:
            return rng.randbytes(rng.randrange(200)) + b"\n"
        case 2:
            changed = mutate(rng, body.removesuffix(b"\n"))
        case 3:
            fields = msgspec.json.decode(body)
            for name in rng.sample(sorted(fields), rng.randint(1, 2)):
                fields[name] = rng.choice(_ODD)
            changed = msgspec.json.encode(fields)
        case _:
            depth = rng.choice((10, 1000, 5000))
            changed = b'{"nodes":' + b"[" * depth + b"]" * depth + b"}"
    return roll_call._sign(key, context, changed) if context else changed + b"\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for has_key in (False, True):
        start_s = time.monotonic()
        fuzz(args.messages, seed=args.seed, has_key=has_key)
        seconds = time.monotonic() - start_s
        print(f"roll call, key {has_key}: {args.messages} lines each, {seconds:.1f} s")


if __name__ == "__main__":
    main()
