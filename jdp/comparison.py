"""Comparison: do the processes have the same program, and the same values?"""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jdp import agreement, buckets, differences, per_replica, wire
from jdp.mesh import World
from jdp.types import PyTree

_BLOCK_BYTES = 1 << 16  # a difference is narrowed down to one block.
_MAX_DETAIL_BYTES = 1 << 21  # a key-value store is no place for more.


class Difference(msgspec.Struct, frozen=True):
    """Where process `process` differs from process 0; nowhere if it is -1."""

    process: int = -1
    index: int = -1


def compare_programs(
    world: World,
    jaxpr: Any,
    arguments: dict[str, PyTree],
    *,
    topic: str,
    advice: str = "",
) -> None:
    """Compares one traced program between the processes; see `check_same_program`.

    Args:
      world: the processes.
      jaxpr: the program; only its text counts.
      arguments: the trees that go into it, by the name that an error gives them.
      topic: what the processes are doing, for errors.
      advice: the end of the error for another program.
    """
    if world.store is None:
        return
    text = str(jaxpr)  # JAX prints no addresses of functions.

    def explain(*args: Any) -> str:
        return differences.explain_programs(*args) + advice

    compare_described(world, topic, describe_leaves(arguments), text, explain)


def compare_values(
    world: World, tree: PyTree, *, name: str, topic: str, advice: str = ""
) -> None:
    """Compares a tree bit by bit between the replicas; see `check_replicas`.

    Args:
      world: the processes.
      tree: see `check_replicas`.
      name: of the tree, for errors.
      topic: what the processes are doing, for errors.
      advice: the end of the error for another value.
    """
    compare_programs(world, "", {name: tree}, topic=topic)
    with agreement.reporting(world, topic):
        are_own = per_replica.are_own(tree)
        arrays = [
            np.empty(0) if are_own[i] else _local_copy(tree, i, x)
            for i, x in enumerate(jax.tree.leaves(tree))
        ]
    difference = _first_difference(world, topic, [_digest(as_bytes(x)) for x in arrays])
    if difference.process < 0:
        return
    process, leaf = difference.process, difference.index
    data = as_bytes(arrays[leaf])
    blocks = [data[i : i + _BLOCK_BYTES] for i in range(0, len(data), _BLOCK_BYTES)]
    difference = _first_difference(world, topic, [_digest(b) for b in blocks], process)
    block = difference.index
    found = agreement.meet(
        world,
        topic,
        blocks[block] if world.process_index in (0, process) else b"",
        lambda bodies: msgspec.msgpack.encode([bodies[0], bodies[process]]),
        then_raises=True,
    )
    ours, theirs = wire.decode(found, list[bytes], what="What two processes hold")
    path = buckets.leaf_paths(tree)[leaf]
    raise RuntimeError(
        f"`{path if name == 'tree' else name + path}` differs between the replicas: "
        + differences.explain_first_element(
            arrays[leaf], block * _BLOCK_BYTES, ours, theirs, process
        )
        + advice
    )


def compare_described(
    world: World,
    topic: str,
    leaves: list[tuple[str, str]],
    text: str,
    explain_text: Callable[[differences.Details, differences.Details, int], str],
) -> None:
    """Compares leaves and a text; raises on every process with what differs."""
    digests = [_digest(msgspec.msgpack.encode(leaves)), _digest(text.encode())]
    difference = _first_difference(world, topic, digests)
    if difference.process >= 0:
        explain = differences.explain_leaves if difference.index == 0 else explain_text
        process = difference.process
        raise RuntimeError(_explain(world, topic, process, leaves, text, explain))


def _first_difference(
    world: World, topic: str, digests: Sequence[bytes], only: int | None = None
) -> Difference:
    """Finds the lowest index at which a process' digests are not those of process 0."""

    def decide(bodies: list[bytes]) -> bytes:
        lists = [
            wire.decode(body, list[bytes], what=f"The digests of process {process}")
            for process, body in enumerate(bodies)
        ]
        differences = [
            Difference(process, index)
            for process, theirs in enumerate(lists)
            for index, (a, b) in enumerate(zip(lists[0], theirs, strict=True))
            if a != b and only in (None, process)
        ]
        first = min(differences, key=lambda d: (d.index, d.process), default=None)
        return msgspec.msgpack.encode(first or Difference())

    body = msgspec.msgpack.encode(list(digests))
    found = agreement.meet(world, topic, body, decide)
    return wire.decode(found, Difference, what="The difference that process 0 found")


def _explain(
    world: World,
    topic: str,
    process: int,
    leaves: list[tuple[str, str]],
    text: str,
    explain: Callable[[differences.Details, differences.Details, int], str],
) -> str:
    """Says in words how `process` differs from process 0."""
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
    return agreement.meet(world, topic, mine, decide, then_raises=True).decode()


def describe_leaves(arguments: dict[str, PyTree]) -> list[tuple[str, str]]:
    """Returns path, dtype and shape of each leaf of named trees."""
    described = []
    for name, tree in arguments.items():
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        for path, leaf in flat:
            aval = jax.typeof(leaf) if not hasattr(leaf, "shape") else leaf
            shape = ",".join(map(str, aval.shape))
            path_text = f"{name}{jax.tree_util.keystr(path)}"
            described.append((path_text, f"{aval.dtype}[{shape}]"))
    return described


def _local_copy(tree: PyTree, index: int, leaf: Any) -> np.ndarray:
    """Copies a leaf to the host; its copies on the local devices must be equal."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    path = buckets.leaf_paths(tree)[index]
    if not leaf.is_fully_replicated:
        raise ValueError(
            f"`{path}` is split over the replicas ({leaf.sharding}); only what every "
            "replica holds whole can be compared."
        )
    first, *others = (shard.data for shard in leaf.addressable_shards)
    value = host_copy(first)
    for other in others:
        copy = host_copy(other)
        if as_bytes(copy) != as_bytes(value):
            raise RuntimeError(
                f"`{path}` differs between replicas of one process, on devices "
                f"{first.device} and {other.device}."
            )
    return value


def host_copy(leaf: Any) -> np.ndarray:
    """Returns an array, number or the data of keys, in the dtype that JAX gives it."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)
    value = np.asarray(leaf)
    dtype = value.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return value.astype(jax.dtypes.canonicalize_dtype(dtype), copy=False)


def as_bytes(x: np.ndarray) -> bytes:
    """Returns the values of an array in order."""
    return np.ascontiguousarray(x).tobytes()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
