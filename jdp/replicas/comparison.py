"""Comparison: do the processes have the same program, and the same values?"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from jdp.backward import captured
from jdp.backward.captured import Found
from jdp.replicas import agreement, differences, host_copies, per_replica, wire
from jdp.replicas.mesh import World
from jdp.trees import tree_paths
from jdp.types import PyTree

_MAX_ARRAYS = 10_000
_BLOCK_BYTES = 1 << 16  # a difference is narrowed down to one block.
_MAX_DETAIL_BYTES = 1 << 21  # largest record in the key-value store.
_SAME_JDP = "Install the same jdp in every process."


class Difference(msgspec.Struct, frozen=True):
    """First difference between `process` and process 0; -1 where they agree."""

    process: int = -1
    index: int = -1


class _CapturedArray(msgspec.Struct, frozen=True):
    """Description of an array that the program of one process holds."""

    spec: str
    digest: bytes
    has_value: bool


def compare_programs(
    world: World,
    jaxpr: Any,
    arguments: dict[str, PyTree],
    *,
    topic: str,
    advice: str = "",
    jaxprs: Sequence[Any] = (),
) -> None:
    """Compares one traced program between the processes; see `check_same_program`.

    Args:
      world: the processes.
      jaxpr: the program; only its text is compared.
      arguments: the trees that it takes, by the names that errors use.
      topic: the activity of the processes, for errors.
      advice: the end of the error if the programs differ.
      jaxprs: closed jaxprs whose constants are compared, which costs a hash of each.
    """
    if world.store is None:
        return
    with agreement.reporting(world, topic):
        found = captured.find(jaxprs)
    text = str(jaxpr)  # JAX prints no addresses of functions.

    def explain(*args: Any) -> str:
        return differences.explain_programs(*args) + advice

    leaves = describe_leaves(arguments, shows_weak_type=True)
    compare_described(world, topic, leaves, text, explain, found)


def compare_values(
    world: World,
    tree: PyTree,
    *,
    name: str,
    topic: str,
    advice: str = host_copies.SAME_VALUES,
) -> None:
    """Compares a tree bit by bit between the replicas; see `check_replicas`.

    Args:
      world: the processes.
      tree: see `check_replicas`.
      name: the name of the tree, for errors.
      topic: the activity of the processes, for errors.
      advice: the end of the error if a value differs.
    """
    if world.store is not None:
        leaves = describe_leaves({name: tree})
        compare_described(world, topic, leaves, "", differences.explain_programs)
    with agreement.reporting(world, topic):
        are_own, paths = per_replica.are_own(tree), tree_paths.leaf_paths(tree)
        arrays = [
            np.empty(0) if are_own[i] else host_copies.of_replicas(world, x, paths[i])
            for i, x in enumerate(jax.tree.leaves(tree))
        ]
    difference = _first_difference(
        world, topic, [host_copies.digest(host_copies.as_bytes(x)) for x in arrays]
    )
    if difference.process < 0:
        return
    process, leaf = difference.process, difference.index
    path = tree_paths.leaf_paths(tree)[leaf]
    raise RuntimeError(
        f"`{path if name == 'tree' else name + path}` differs between the replicas: "
        + _name_element(world, topic, arrays[leaf], process)
        + advice
    )


def compare_described(
    world: World,
    topic: str,
    leaves: list[tuple[str, str]],
    text: str,
    explain_text: Callable[[differences.Details, differences.Details, int], str],
    arrays: Found | None = None,
) -> None:
    """Compares leaves, a text, and the arrays that a program captures.

    Raises:
      RuntimeError: something differs. Every process raises, and names the difference.
    """
    digests = [
        host_copies.digest(msgspec.msgpack.encode(leaves)),
        host_copies.digest(text.encode()),
    ]
    if arrays is not None:
        digests.append(arrays.digest)
    difference = _first_difference(world, topic, digests)
    process = difference.process
    if process < 0:
        return
    if arrays is not None and difference.index == 2:
        raise RuntimeError(_explain_arrays(world, topic, process, arrays))
    explain = differences.explain_leaves if difference.index == 0 else explain_text
    raise RuntimeError(_explain(world, topic, process, leaves, text, explain))


def _first_difference(world: World, topic: str, digests: Sequence[bytes]) -> Difference:
    """Finds the lowest index at which a process has another digest than process 0."""

    def decide(bodies: list[bytes]) -> bytes:
        lists = [
            wire.decode(body, list[bytes], what=f"The digests of process {process}")
            for process, body in enumerate(bodies)
        ]
        for process, theirs in enumerate(lists):
            if len(theirs) != len(lists[0]):
                raise wire.Malformed(
                    f"Process {process} has {len(theirs)} digests, process 0 has "
                    f"{len(lists[0])}. {_SAME_JDP}"
                )
        differences = [
            Difference(process, index)
            for process, theirs in enumerate(lists)
            for index, (a, b) in enumerate(zip(lists[0], theirs, strict=True))
            if a != b
        ]
        first = min(differences, key=lambda d: (d.index, d.process), default=None)
        return msgspec.msgpack.encode(first or Difference())

    body = msgspec.msgpack.encode(list(digests))
    found = agreement.meet(world, topic, body, decide)
    what = "The difference that process 0 found"
    difference = wire.decode(found, Difference, what=what)
    is_none = difference == Difference()
    is_one = 0 < difference.process < world.process_count
    if not is_none and not (is_one and 0 <= difference.index < len(digests)):
        raise wire.Malformed(
            f"{what} is in digest {difference.index} of process {difference.process}; "
            f"there are {len(digests)} digests of {world.process_count} processes. "
            f"{_SAME_JDP}"
        )
    return difference


def _explain(
    world: World,
    topic: str,
    process: int,
    leaves: list[tuple[str, str]],
    text: str,
    explain: Callable[[differences.Details, differences.Details, int], str],
) -> str:
    """Explains how `process` differs from process 0."""
    details = differences.Details(leaves, zlib.compress(text.encode(), level=1))
    body = msgspec.msgpack.encode(details)
    if len(body) > _MAX_DETAIL_BYTES:
        body = msgspec.msgpack.encode(differences.Details(leaves[:10_000], b""))

    def decide(bodies: list[bytes]) -> bytes:
        ours, theirs = (
            wire.decode(
                bodies[p], differences.Details, what=f"The details of process {p}"
            )
            for p in (0, process)
        )
        return explain(ours, theirs, process).encode()

    mine = body if world.process_index in (0, process) else b""
    said = agreement.meet(world, topic, mine, decide, then_raises=True)
    return wire.decode_text(said)


def _name_element(
    world: World, topic: str, array: np.ndarray | None, process: int
) -> str:
    """Names the first element of an array that differs on `process`.

    Args:
      world: the processes.
      topic: the activity of the processes, for errors.
      array: the array, with the same dtype and shape on process 0 and `process`; the
        other processes do not read it.
      process: the process whose array differs in its bits from process 0's.
    """
    is_asked = world.process_index in (0, process) and array is not None
    data = b"" if array is None or not is_asked else host_copies.as_bytes(array)
    blocks = [data[i : i + _BLOCK_BYTES] for i in range(0, len(data), _BLOCK_BYTES)]

    def find_block(bodies: list[bytes]) -> bytes:
        what = "The digests of blocks of process {}"
        ours, theirs = (
            wire.decode(bodies[p], list[bytes], what=what.format(p))
            for p in (0, process)
        )
        # The arrays have one dtype and shape, so the numbers of blocks are equal.
        pairs = enumerate(zip(ours, theirs, strict=True))
        found = next((i for i, (a, b) in pairs if a != b), None)
        if found is None:
            raise wire.Malformed(
                f"Process {process} has another digest than process 0, and the same "
                f"blocks. {_SAME_JDP}"
            )
        return msgspec.msgpack.encode(found)

    def explain(bodies: list[bytes]) -> bytes:
        assert array is not None
        return differences.explain_first_element(
            array, block * _BLOCK_BYTES, bodies[0], bodies[process], process
        ).encode()

    mine = msgspec.msgpack.encode([host_copies.digest(b) for b in blocks])
    found = agreement.meet(world, topic, mine, find_block)
    block = wire.decode(found, int, what="The block that process 0 found")
    if is_asked and not 0 <= block < len(blocks):
        raise wire.Malformed(
            f"Process 0 found block {block} of an array to differ, which has "
            f"{len(blocks)} blocks. {_SAME_JDP}"
        )
    mine = blocks[block] if is_asked else b""
    said = agreement.meet(world, topic, mine, explain, then_raises=True)
    return wire.decode_text(said)


def _explain_arrays(world: World, topic: str, process: int, found_here: Found) -> str:
    """Names the first captured array that differs on `process`."""
    arrays = [
        _CapturedArray(x.spec, x.digest, x.value is not None)
        for x in found_here.arrays[:_MAX_ARRAYS]
    ]

    def decide(bodies: list[bytes]) -> bytes:
        what = "The captured arrays of process {}"
        ours, theirs = (
            wire.decode(bodies[p], list[_CapturedArray], what=what.format(p))
            for p in (0, process)
        )
        # One list may be a prefix of the other.
        pairs = enumerate(zip(ours, theirs, strict=False))
        found = next((i for i, (a, b) in pairs if a.digest != b.digest), None)
        if found is None:
            told = f"process {process} uses the same arrays differently from process 0."
            return msgspec.msgpack.encode((told, -1))
        a, b = ours[found], theirs[found]
        if a.spec == b.spec and a.has_value:
            head = f"{a.spec}{found_here.arrays[found].line()}"
            return msgspec.msgpack.encode((head, found))
        told = f"{a.spec} on process 0, {b.spec} on process {process}."
        return msgspec.msgpack.encode((told, -1))

    is_asked = world.process_index in (0, process)
    mine = msgspec.msgpack.encode(arrays) if is_asked else b""
    found = agreement.meet(world, topic, mine, decide, then_raises=True)
    what = "The array that process 0 found"
    text, index = wire.decode(found, tuple[str, int], what=what)
    text = wire.printable(text)
    if index >= len(found_here.arrays):
        raise wire.Malformed(
            f"Process 0 found captured array {index} to differ; this process has "
            f"{len(found_here.arrays)}. {_SAME_JDP}"
        )
    if index >= 0:
        array = found_here.arrays[index].value if is_asked else None
        text += f": {_name_element(world, topic, array, process)}"
    return differences.explain_captured(text)


def describe_leaves(
    arguments: dict[str, PyTree], *, shows_weak_type: bool = False
) -> list[tuple[str, str]]:
    """Returns path, dtype and shape of each leaf of named trees.

    Args:
      arguments: trees, by name.
      shows_weak_type: whether to mark leaves of weak type. JAX traces again for them,
        even if the text of the program is the same.
    """
    described = []
    for name, tree in arguments.items():
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        for path, leaf in flat:
            aval = jax.typeof(leaf) if not hasattr(leaf, "shape") else leaf
            shape = ",".join(map(str, aval.shape))
            path_text = f"{name}{jax.tree_util.keystr(path)}"
            spec = f"{aval.dtype}[{shape}]"
            is_of_numpy = isinstance(leaf, np.ndarray | np.generic)
            if shows_weak_type and not is_of_numpy and jax.typeof(leaf).weak_type:
                spec += differences.WEAK_TYPE
            described.append((path_text, spec))
    return described
