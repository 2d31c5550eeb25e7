"""Fuzz: announcements, decisions and batch specs that no process makes.

`python -m tests.join.lockstep_fuzz --messages 1000000` gives as many to each decoder
and to the two ends of the protocol. A named error is all that comes of it.
"""

import argparse
import random
import time

import jax
import msgspec

from jdp.join import batch_spec, lockstep, lockstep_checks
from jdp.join.batch_spec import BatchLeafSpec, BatchSpec
from jdp.join.lockstep import Announcement, Decision
from jdp.replicas import wire
from tests.runtime.transport_fuzz import mutate

GOOD = [
    BatchSpec("PyTreeDef(*)", b'"*"', (BatchLeafSpec("(root)", "float32", (2,)),)),
    BatchSpec(
        "PyTreeDef({'a': *, 'b': [*, None]})",
        b'["dict",["a","b"],"*",["list","*",null]]',
        (
            BatchLeafSpec("['a']", "bfloat16", ()),
            BatchLeafSpec("['b'][0]", "key<rbg>", (1,)),
        ),
    ),
]
_INTS = [0, 1, 2, 3, 8, -1, 1 << 31, 1 << 62, -(1 << 63), (1 << 64) - 1]
_DTYPES = [
    "float32",
    "O",
    "V9",
    "U99999999",
    "key<fry>",
    "key<",
    "",
    "float32[2]",
    "x,y",
]
_NODES = [
    '["dict",["a",1],"*","*"]',
    '["dict",["a","a"],"*","*"]',
    '["dict",["a"]]',
    '["dict",[[1]],"*"]',
    '["dict",5,"*"]',
    '["namedtuple","sys","path"]',
    '["namedtuple",1,2,"*"]',
    '["namedtuple","collections","namedtuple","*"]',
    '["namedtuple","jax","numpy.ndarray","*"]',
    '["list",' * 300 + '"*"' + "]" * 300,
    "[" * 5000,
    '["tuple","*",null,["list"]]',
    "{}",
    "1e999",
    '"\udcff"',
]


def draw_spec(rng):
    """A spec as a list."""
    if rng.random() < 0.6:
        return msgspec.to_builtins(rng.choice(GOOD), builtin_types=(bytes,))
    nodes = rng.choice(_NODES).encode(errors="replace")
    if rng.random() < 0.3:
        nodes = mutate(rng, nodes)
    leaves = [
        [
            rng.choice(["a", "", "\n" * 9]),
            rng.choice(_DTYPES),
            [rng.choice(_INTS) for _ in range(rng.randrange(3))],
        ]
        for _ in range(rng.randrange(3))
    ]
    return [rng.choice(["PyTreeDef(*)", "x"]), rng.choice([nodes, None]), leaves]


def draw_announcement(rng):
    """An announcement as a list."""
    sizes = [rng.choice([1, 2, 8, *_INTS[:7]]) for _ in range(rng.randrange(4))]
    if rng.random() < 0.7:
        sizes = [s for s in sizes if 0 <= s < 9]
    specs = [[0, draw_spec(rng)]] if sizes and rng.random() < 0.6 else []
    if rng.random() < 0.1:
        specs.append([rng.choice(_INTS), draw_spec(rng)])
    has_ended = rng.random() < 0.1
    error = rng.choice([None, None, None, "ValueError: x"]) if has_ended else None
    objection = None if rng.random() < 0.95 else "has no batch"
    reading_s = rng.choice([0.0, 0.0, 0.1, -1.0, float("nan"), float("inf"), 1e9])
    return [sizes, specs, has_ended, error, objection, reading_s]


def draw_decision(rng):
    """A decision as a list."""
    sizes = [rng.choice([1, 2, 8] * 9 + _INTS[:7]) for _ in range(rng.randrange(4))]
    specs = [[0, 0]] if rng.random() < 0.6 else []
    specs += [[rng.choice(_INTS[:5]), rng.choice(_INTS[:6])]] * (rng.random() < 0.2)
    proposal = draw_spec(rng) if rng.random() < 0.4 else None
    error = None if rng.random() < 0.9 else "why"
    culprit = None if rng.random() < 0.8 else rng.choice(_INTS)
    return [sizes, specs, proposal, rng.random() < 0.1, error, False, culprit]


def _decode(rng, message, kind):
    data = msgspec.msgpack.encode(message)
    if rng.random() < 0.1:
        data = mutate(rng, data)
    try:
        return wire.decode(data, kind, what="It")
    except wire.Malformed:
        return None


def fuzz_announcements(rng, num_messages):
    """Process 0, and what others announce; returns how many made sense."""
    num_good, state, is_over = 0, None, True
    for i in range(num_messages):
        if is_over or i % 200 == 0:
            state = lockstep.start_coordinator(2, timeout_s=100.0)
            own = lockstep.MemberState(prefetch=4)
            own = lockstep.read(own, (2,), ((0, GOOD[0]),))
        own = lockstep.read(own, (1,))
        own, mine = lockstep.announce(own)
        theirs = _decode(rng, draw_announcement(rng), Announcement)
        is_over = theirs is None
        if is_over:
            continue
        is_over = False
        for process, message in enumerate((mine, theirs)):
            fault = lockstep_checks.find_announcement_fault(state, process, message)
            if fault is not None:
                assert process == 1 and fault.startswith("Process 1 announces "), fault
                assert len(fault) < 1000
                is_over = True
        if is_over:
            continue
        num_good += 1
        state, decision = lockstep.decide(state, [mine, theirs])
        own = lockstep.receive(own, decision)
        assert msgspec.msgpack.encode(decision)
        is_over = decision.is_final
    return num_good


def fuzz_decisions(rng, num_messages):
    """Another process, and what process 0 decides; returns how many made sense."""
    num_good = 0
    specs, proposal, spec = [], None, -1
    for i in range(num_messages):
        if i % 100 == 0:
            specs, proposal, spec = [], None, -1
        decision = _decode(rng, draw_decision(rng), Decision)
        if decision is None:
            continue
        is_agreed = proposal is not None and decision.error is None
        fault = lockstep_checks.find_decision_fault(
            decision, num_specs=len(specs) + is_agreed, spec=spec, num_processes=2
        )
        if fault is not None:
            assert fault.startswith("Process 0 decided on ") and len(fault) < 1000
            continue
        num_good += 1
        if is_agreed:
            specs.append(proposal)
        proposal = decision.proposal
        changes = dict(decision.specs)
        for k in range(len(decision.sizes)):
            spec = changes.get(k, spec)
            assert 0 <= spec < len(specs)
    return num_good


def fuzz_specs(rng, num_messages):
    """The structure and the zeros of a batch; returns how many could be made."""
    num_good = 0
    for _ in range(num_messages):
        spec = _decode(rng, draw_spec(rng), BatchSpec)
        if spec is None or batch_spec.find_fault(spec) is not None:
            continue
        treedef = batch_spec.find_treedef(spec, [])
        if treedef is None:
            continue
        num_good += 1
        is_small = all(max(leaf.shape, default=0) < 9 for leaf in spec.leaves)
        if is_small and rng.random() < 0.01:  # It takes long.
            zeros = batch_spec.make_zeros(spec, 2)
            jax.tree.unflatten(treedef, zeros)
            assert all(len(x) == 2 for x in zeros)
    return num_good


FUZZES = {
    "announcements": fuzz_announcements,
    "decisions": fuzz_decisions,
    "batch specs": fuzz_specs,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, fuzz in FUZZES.items():
        start_s = time.monotonic()
        num_good = fuzz(random.Random(args.seed), args.messages)
        print(
            f"{name}: {args.messages} messages, {num_good} of them good, "
            f"{time.monotonic() - start_s:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
