"""Fuzz: senseless words of another process while processes compare programs.

Each comparison runs as process 0 and as process 1, and what the other one says is
changed. A RuntimeError is all that comes of it.
"""

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np

from jdp.backward.captured import Captured, Found
from jdp.replicas import (
    agreement,
    comparison,
    differences,
    host_copies,
    meeting,
    shared_replicas,
)
from jdp.replicas.meeting import MeetingRecord
from jdp.replicas.mesh import World
from tests import harness

Change = Callable[[int, bytes], bytes]  # by the number of the meeting.
_Jaxpr = type("_Jaxpr", (), {"eqns": ()})


def _leaves(world: World) -> None:
    leaves = [("state", "float32[2]"), ("batch", f"int32[{1 + world.process_index}]")]
    explain = differences.explain_programs
    comparison.compare_described(world, "test", leaves, "a = mul b 2.0", explain)


def _texts(world: World, explain: Callable[..., str]) -> None:
    text = "`a` is here\n`b` is {}".format("elsewhere" if world.process_index else "it")
    leaves = [("a", "float32[2]"), ("b", "float32[2]")]
    comparison.compare_described(world, "test", leaves, text, explain)


def _values(world: World) -> None:
    value = np.arange(40, dtype=np.float32) * (1.0 + world.process_index)
    comparison._name_element(world, "test", value, 1)


def _arrays(world: World) -> None:
    value = np.arange(4, dtype=np.float32) * (1.0 + world.process_index)
    digest = host_copies.digest(value.tobytes())
    arrays = [
        Captured("int32[]", b"same", np.int32(3), _Jaxpr, None),
        Captured("float32[4]", digest, value, _Jaxpr, None),
    ]
    comparison._explain_arrays(world, "test", 1, Found(arrays, digest))


@dataclasses.dataclass(frozen=True)
class _DeviceElsewhere:
    """A device of another process, as a mesh shows it."""

    process_index: int


def share_replica(world: World) -> None:
    """Gives the only replica of `harness.run_threads` a device of each process.

    All threads have their samples on the device of process 0.
    """
    elsewhere = map(_DeviceElsewhere, range(1, world.process_count))
    world.__dict__["grid"] = np.array([[*world.mesh.devices.flat, *elsewhere]], object)


def _samples(world: World) -> None:
    share_replica(world)
    batch = {"x": jnp.arange(4) * (1 + world.process_index), "y": jnp.zeros(3)}
    shared_replicas.compare_samples(world, (batch,), name="step")


FLOWS = {
    "leaves": _leaves,
    "places": functools.partial(_texts, explain=differences.explain_places),
    "programs": functools.partial(_texts, explain=differences.explain_programs),
    "values": _values,
    "arrays": _arrays,
    "samples": _samples,
}


class _Run(NamedTuple):
    """What both processes say in an honest run."""

    worlds: list[World]
    said: list[bytes]  # by process 1, in each meeting.
    verdicts: list[bytes]  # of process 0.


def _listen(flow: Callable[[World], Any]) -> _Run:
    said, verdicts = [], []
    worlds: dict[int, World] = {}
    meet = agreement.meet

    def note(world, topic, body, decide, *, then_raises=False):
        del then_raises  # It would wait for readers.
        verdict = meet(world, topic, body, decide)
        if world.process_index == 1:
            said.append(body)
            verdicts.append(verdict)
        return verdict

    def run(world):
        worlds[world.process_index] = world
        with contextlib.suppress(RuntimeError):
            flow(world)

    with _meeting(note):
        assert harness.run_threads(run, 2) == [None] * 2
    return _Run([worlds[0], worlds[1]], said, verdicts)


@contextlib.contextmanager
def _meeting(meet: Callable[..., bytes]) -> Iterator[None]:
    original = agreement.meet
    agreement.meet = meet
    try:
        yield
    finally:
        agreement.meet = original


def _answer(run: _Run, change: Change) -> Callable[..., bytes]:
    """A meeting with the other process of `run`, whose words are changed."""
    index = 0

    def meet(world, topic, body, decide, *, then_raises=False):
        nonlocal index
        del then_raises
        known = run.verdicts if world.process_index == 1 else run.said
        theirs = change(index, known[index] if index < len(known) else b"")
        index += 1
        if world.process_index == 1:
            return theirs
        records = [MeetingRecord(topic, body), MeetingRecord(topic, theirs)]
        outcome = meeting.judge(records, decide, range(2))
        assert msgspec.msgpack.encode(outcome)
        if outcome.error is not None:
            raise RuntimeError(outcome.error)
        return outcome.body

    return meet


def fuzz(
    flow: str, mangle: Callable[[random.Random, bytes], bytes], count: int, *, seed: int
) -> int:
    """Runs a comparison `count` times; returns how many ended as honest ones do."""
    rng, run = random.Random(seed), _listen(FLOWS[flow])
    num_good, at, changed = 0, -1, b""

    def change(index: int, body: bytes) -> bytes:
        nonlocal changed
        if index == at:
            changed = _mangle(rng, mangle, body)
            return changed
        return body

    for number in range(count):
        at = rng.randrange(max(1, len(run.said)))
        try:
            with _meeting(_answer(run, change)):
                FLOWS[flow](run.worlds[number % 2])
        except RuntimeError as error:  # Of which `wire.Malformed` is one.
            text = str(error)
            assert text.replace("\n", "").isprintable(), text
            num_good += "Malformed" not in text and "malformed" not in text
        else:
            num_good += 1
    return num_good


def _mangle(rng, mangle, body: bytes) -> bytes:
    try:
        msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = msgspec.msgpack.encode(body)  # A text, or bytes of an array.
        if rng.random() < 0.5:
            return rng.randbytes(rng.randrange(300))
    return mangle(rng, body)


def make_fuzzes(mangle: Callable[[random.Random, bytes], bytes]) -> dict[str, Any]:
    """Returns a fuzzer of each comparison, by name."""
    return {
        f"comparison of {name}": functools.partial(fuzz, name, mangle) for name in FLOWS
    }
