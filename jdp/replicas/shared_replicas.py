"""Shared replicas: do processes that share a replica give it the same samples?

The devices of a replica may belong to several processes. Each puts the samples of the
replica on its own devices. With different samples the replica would train on a mix.
"""

from typing import Any

import jax
import msgspec

from jdp.replicas import agreement, host_copies, wire
from jdp.replicas.mesh import World
from jdp.trees import tree_paths
from jdp.types import PyTree


def compare_samples(world: World, batches: PyTree, *, name: str) -> None:
    """Compares the samples that the processes of each replica have given it.

    Every process calls it.

    Args:
      world: the replicas.
      batches: placed batches, split over the replicas.
      name: the name of the step, for errors.

    Raises:
      RuntimeError: two processes gave a replica different samples. Every process
        raises, and names the replica, the processes and the leaf.
    """
    topic = f"comparison of the samples for the step `{name}`"
    leaves, paths = jax.tree.leaves(batches), tree_paths.leaf_paths(batches)
    with agreement.reporting(world, topic):
        mine = _shared(world, world.process_index)
        own = {replica: _digests(world, leaves, replica) for replica in mine}

    def decide(bodies: list[bytes]) -> bytes:
        first: dict[int, tuple[int, list[bytes]]] = {}
        for process, body in enumerate(bodies):
            what = f"The samples of process {process}"
            theirs = wire.decode(body, dict[int, list[bytes]], what=what)
            if sorted(theirs) != _shared(world, process):
                raise wire.Malformed(
                    f"{what} are of other replicas than those it shares with others. "
                    "Install the same jdp in every process."
                )
            for replica, digests in theirs.items():
                other, expected = first.setdefault(replica, (process, digests))
                if digests != expected:
                    pairs = zip(paths, expected, digests, strict=False)
                    path = next((p for p, a, b in pairs if a != b), "(root)")
                    return _explain(replica, other, process, path).encode()
        return b""

    difference = agreement.meet(world, topic, msgspec.msgpack.encode(own), decide)
    if difference:
        agreement.meet(world, topic, b"", lambda _: b"", then_raises=True)
        raise RuntimeError(wire.decode_text(difference))


def _shared(world: World, process: int) -> list[int]:
    """Returns the replicas of which a process has devices, and others have, too."""
    owners = [{x.process_index for x in devices} for devices in world.grid]
    return [i for i, each in enumerate(owners) if process in each and len(each) > 1]


def _digests(world: World, leaves: list[Any], replica: int) -> list[bytes]:
    devices = set(world.grid[replica])
    found = []
    for leaf in leaves:
        shards = (x for x in leaf.addressable_shards if x.device in devices)
        copy = host_copies.host_copy(next(shards).data)
        found.append(host_copies.digest(host_copies.as_bytes(copy)))
    return found


def _explain(replica: int, first: int, second: int, path: str) -> str:
    return (
        f"Processes {first} and {second} have devices of replica {replica}, and gave "
        f"it different samples: `batch{path}` differs. Processes that share a replica "
        "pass the same batches: choose the samples by `world.local_replicas`, not by "
        "`world.process_index`, or make a mesh in which the devices of each replica "
        "belong to one process."
    )
