"""Fingerprint: which 128 bits stand for a state, however its arrays are cut?"""

import dataclasses
import functools
import hashlib
import operator
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import msgspec
import numpy as np

from jdp.fingerprints import lanes
from jdp.fingerprints.lanes import Place
from jdp.replicas import agreement, host_arrays, mesh, wire
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import PerReplica
from jdp.trees import tree_paths
from jdp.types import Device, PyTree

_DIGEST_BYTES = 16
_TOPIC = "fingerprint of a state"


@dataclasses.dataclass(frozen=True)
class StateFingerprint:
    """Fingerprint of a tree; `str` of it is `digest`.

    Attributes:
      digest: digest of the whole tree, 32 hexadecimal digits.
      leaves: the digest of each leaf by its path, such as "['params']['w']", in the
        order of the tree.
    """

    digest: str
    leaves: dict[str, str]

    def __str__(self) -> str:
        return self.digest


class LeafOutline(NamedTuple):
    """Description of a leaf, without its values."""

    path: str
    spec: str  # dtype and shape, such as "float32[4,2]"; the type of another leaf.
    is_own: bool  # whether it is in a `jdp.PerReplica`.


def fingerprint_state(tree: PyTree, *, world: World | None = None) -> StateFingerprint:
    """Returns 128 bits that stand for the bits of a tree.

    Two fingerprints are equal if paths, dtypes, shapes and bits of all leaves are:
    -0.0 differs from 0.0, and NaNs with other payloads differ. Where the arrays lie,
    how they are cut and on how many devices or processes makes no difference. If a
    single element of a leaf changes, its digest always changes; other changes leave it
    alone about once in 2^128. It finds errors, not forgeries: it is not a
    cryptographic hash. `jdp/fingerprints/lanes.py` has the scheme and its source.

    The device reads each array once; 16 bytes per leaf reach the host. Of an array that
    several devices hold whole, the first copy in this process is read:
    `jdp.check_replicas` compares the copies.

    Args:
      tree: pytree of arrays of JAX or NumPy in any dtype, PRNG keys, Python numbers and
        None. A Python number differs from an array with the same value.
      world: the processes; by default the current world. Every process calls this
        function if an array is cut among devices of several processes. Otherwise no
        other process takes part.

    Returns:
      The digests of the tree and of each leaf.

    Raises:
      TypeError: a leaf is something else, or is traced.
      RuntimeError: an array was donated or deleted; or it is cut among processes, and
        one of them has another tree, or did not come within `world.timeout_s`.
    """
    outlines, leaves = flatten(tree)
    return combine(outlines, leaf_digests(outlines, leaves, world=world))


def flatten(tree: PyTree) -> tuple[list[LeafOutline], list[Any]]:
    """Returns descriptions of the leaves of a tree, and the leaves; None is a leaf.

    Raises:
      TypeError: see `fingerprint_state`.
      RuntimeError: an array was deleted.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: x is None or _is_own(x))
    are_own = (_is_own(node) for node in nodes for _ in _leaves_of(node))
    outlines, leaves = [], []
    for (path, leaf), is_own in zip(flat, are_own, strict=True):
        leaf = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
        name = _path_name(path)
        outlines.append(LeafOutline(name, _describe(name, leaf), is_own))
        leaves.append(leaf)
    return outlines, leaves


def _leaves_of(node: Any) -> list[Any]:
    return jax.tree.leaves(node, is_leaf=_is_none) if _is_own(node) else [node]


@functools.lru_cache(maxsize=1 << 14)
def _path_name(path: tree_paths.KeyPath) -> str:
    return tree_paths.format_paths([path])[0]


def is_cut_among_processes(leaf: Any) -> bool:
    """Returns whether other processes hold parts of a leaf that this one lacks."""
    return isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable or _is_whole_here(leaf)
    )


def leaf_digests(
    outlines: Sequence[LeafOutline], leaves: Sequence[Any], *, world: World | None
) -> list[bytes]:
    """Returns the digest of each leaf, 16 bytes.

    Args:
      outlines: from `flatten`.
      leaves: likewise.
      world: see `fingerprint_state`.
    """
    sums = _sum_pieces(leaves)
    cut = [i for i, leaf in enumerate(leaves) if is_cut_among_processes(leaf)]
    if cut:
        world = world or mesh.current_world()
        heads = [(outlines[i].path, outlines[i].spec) for i in cut]
        sums[cut] = _add_over_processes(world, heads, sums[cut])
    # A sum of lanes is not hashed, so that a change in it is never lost.
    rows = (_masks(tuple(outlines)) ^ sums).astype("<u4").tobytes()
    digests = [rows[i : i + _DIGEST_BYTES] for i in range(0, len(rows), _DIGEST_BYTES)]
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array | np.ndarray):
            digests[i] = _hash(digests[i] + _number_bytes(leaf))
    return digests


def combine(
    outlines: Sequence[LeafOutline], digests: Sequence[bytes]
) -> StateFingerprint:
    """Returns the fingerprint of a tree."""
    leaves = {
        outline.path: digest.hex()
        for outline, digest in zip(outlines, digests, strict=True)
    }
    return StateFingerprint(_hash(b"".join(digests)).hex(), leaves)


def _sum_pieces(leaves: Sequence[Any]) -> np.ndarray:
    """Returns the lanes of the pieces of arrays in this process: uint32 (n, 4)."""
    whole: dict[Device | None, list[tuple[int, Any]]] = defaultdict(list)
    cut: dict[Device, list[tuple[int, Any, Place]]] = defaultdict(list)
    of_host = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray):
            of_host.append((i, lanes.host_words(leaf)))
        elif not isinstance(leaf, jax.Array):
            continue
        elif _is_whole_here(leaf):
            data = leaf.addressable_data(0)
            (device,) = data.devices()
            whole[device].append((i, data))
        else:
            for data, place in _pieces(leaf):
                (device,) = data.devices()
                cut[device].append((i, data, place))
    if of_host:  # Arrays of NumPy may join a program on any device.
        whole[next(iter(whole), None)] += of_host
    of_whole, of_cut = _programs()
    found = []  # All programs run before the first result is read.
    for group in whole.values():
        found.append(([i for i, _ in group], of_whole([x for _, x in group])))
    for group in cut.values():
        starts = np.array([place.start % 2**32 for *_, place in group], np.uint32)
        strides = tuple(place.strides for *_, place in group)
        rows = of_cut([x for _, x, _ in group], starts, strides)
        found.append(([i for i, *_ in group], rows))
    sums = np.zeros((len(leaves), lanes.NUM_LANES), np.uint32)
    for indices, rows in found:
        # The pieces of a leaf on one device follow each other.
        firsts = np.flatnonzero(np.diff(indices, prepend=-1))
        rows = np.add.reduceat(np.asarray(rows), firsts, dtype=np.uint32)
        sums[np.asarray(indices)[firsts]] += rows
    return sums


@functools.cache
def _programs() -> tuple[Any, Any]:
    return jax.jit(lanes.sum_lanes), jax.jit(lanes.sum_lanes_of_cut, static_argnums=2)


def _is_whole_here(leaf: jax.Array) -> bool:
    """Returns whether one device of this process holds the whole of an array."""
    return leaf.is_fully_replicated and (
        leaf.is_fully_addressable or bool(leaf.addressable_shards)
    )


def _pieces(leaf: jax.Array) -> list[tuple[Any, Place]]:
    """Returns the parts of an array that this process counts, and their places."""
    strides = lanes.strides_of(leaf.shape)
    pieces = []
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:  # The first copy, in one of the processes.
            firsts = [part.start or 0 for part in shard.index]
            start = sum(map(operator.mul, firsts, strides))
            pieces.append((shard.data, Place(start, strides)))
    return pieces


class _Record(msgspec.Struct, frozen=True):
    """Lanes of the pieces in one process."""

    heads: bytes  # digest of the paths, dtypes and shapes.
    sums: bytes


def _add_over_processes(
    world: World, heads: list[tuple[str, str]], sums: np.ndarray
) -> np.ndarray:
    """Adds the lanes of all processes, modulo 2**32."""
    head = _hash(msgspec.msgpack.encode(heads))
    body = msgspec.msgpack.encode(_Record(head, sums.astype("<u4").tobytes()))

    def decide(bodies: list[bytes]) -> bytes:
        total = np.zeros(sums.shape, np.uint32)
        for process, body in enumerate(bodies):
            what = f"The lanes of process {process}"
            record = wire.decode(body, _Record, what=what)
            if record.heads != head or len(record.sums) != total.nbytes:
                return (
                    f"Processes 0 and {process} have trees with other arrays that are "
                    "cut among processes. Every process passes the same tree to "
                    "`jdp.fingerprint_state`, and the same number of times."
                ).encode()
            total += np.frombuffer(record.sums, "<u4").reshape(total.shape)
        return b"\0" + total.astype("<u4").tobytes()

    found = agreement.meet(world, _TOPIC, body, decide)
    if found[:1] != b"\0":
        agreement.meet(world, _TOPIC, b"", lambda _: b"", then_raises=True)
        raise RuntimeError(wire.decode_text(found))
    if len(found) != 1 + sums.nbytes:
        raise wire.Malformed(
            f"The sums of process 0 have {len(found) - 1:,} bytes instead of "
            f"{sums.nbytes:,}. Install the same jdp in every process."
        )
    return np.frombuffer(found[1:], "<u4").reshape(sums.shape)


def _describe(path: str, leaf: Any) -> str:
    """Returns dtype and shape of a leaf.

    Raises:
      TypeError: it is neither an array nor a number nor None.
      RuntimeError: it was deleted.
    """
    if isinstance(leaf, jax.Array):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"`{path}` is traced by JAX. Call `jdp.fingerprint_state` from Python, "
                "on the arrays that a step returned."
            )
        if leaf.is_deleted():
            raise RuntimeError(
                f"`{path}` was donated to a step or deleted. Take the fingerprint of "
                "the state that the step returned."
            )
    elif leaf is None:
        return "None"
    elif type(leaf) in (bool, int, float, complex):
        return f"Python {type(leaf).__name__}"
    elif not isinstance(leaf, np.ndarray) or not _is_of_bits(leaf.dtype):
        found = f"a {type(leaf).__name__}"
        if isinstance(leaf, np.ndarray):
            found = f"an array of NumPy of dtype {leaf.dtype}"
        raise TypeError(
            f"`{path}` is {found}, and must be an array of numbers in the byte order "
            "of this machine, a Python number or None."
        )
    else:
        host_arrays.check_has_no_mask(leaf, f"`{path}`")
    return _spec(leaf.dtype, leaf.shape)


@functools.lru_cache(maxsize=1 << 12)
def _spec(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _is_of_bits(dtype: np.dtype) -> bool:
    """Returns whether elements are numbers that JAX has, in some mode."""
    is_complex = jnp.issubdtype(dtype, np.complexfloating)
    is_number = dtype == np.bool_ or jnp.issubdtype(dtype, np.number)
    is_narrow = dtype.itemsize <= (16 if is_complex else 8)
    return is_number and is_narrow and dtype.isnative


@functools.lru_cache(maxsize=16)
def _masks(outlines: tuple[LeafOutline, ...]) -> np.ndarray:
    """Returns bits that stand for path, dtype and shape: uint32 (n, 4)."""
    hashes = [_hash(f"{each.path}\n{each.spec}".encode()) for each in outlines]
    return np.frombuffer(b"".join(hashes), "<u4").reshape(-1, lanes.NUM_LANES)


def _number_bytes(x: Any) -> bytes:
    """Returns bytes that stand for a Python number or None."""
    if isinstance(x, float):
        return struct.pack("<d", x)
    if isinstance(x, complex):
        return struct.pack("<2d", x.real, x.imag)
    return repr(x).encode()


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _is_none(x: Any) -> bool:
    return x is None


def _is_own(x: Any) -> bool:
    return isinstance(x, PerReplica)
