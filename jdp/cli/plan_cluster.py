"""Cluster of `jdp plan`: how long would communication take on another cluster?"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.table
import typer

from jdp.collectives.cost_model import Cost, Links, Node, Work, predict
from jdp.trees import buckets
from jdp.trees.buckets import BucketPlan

MAX_REPLICAS = 100_000
MAX_BUCKETS = 100_000
_FLAT = (
    "ring",
    "bidirectional_ring",
    "halving_doubling",
    "butterfly",
    "tree",
    "star",
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes with devices, and their links."""

    num_nodes: int
    devices_per_node: int
    across: Links  # between devices of different nodes.
    within: Links  # between devices of one node.

    @property
    def num_replicas(self) -> int:
        """Number of devices of all nodes."""
        return self.num_nodes * self.devices_per_node


class Buffer(NamedTuple):
    """A bucket of gradients."""

    num_bytes: int
    dtype: Any


def make_cluster(
    nodes: int | None,
    devices_per_node: int | None,
    latency_us: float | None,
    bandwidth_gbps: float | None,
    node_latency_us: float | None,
    node_bandwidth_gbps: float | None,
    compute_ns_per_byte: float | None,
) -> Cluster | None:
    """Makes the cluster that the options describe; None if all options are None.

    Raises:
      typer.BadParameter: a required option is missing, or a value is out of range.
    """
    given = {
        "--nodes": nodes,
        "--devices-per-node": devices_per_node,
        "--latency-us": latency_us,
        "--bandwidth-gbps": bandwidth_gbps,
        "--node-latency-us": node_latency_us,
        "--node-bandwidth-gbps": node_bandwidth_gbps,
        "--compute-ns-per-byte": compute_ns_per_byte,
    }
    if all(value is None for value in given.values()):
        return None
    if nodes is None or latency_us is None or bandwidth_gbps is None:
        needed = ("--nodes", "--latency-us", "--bandwidth-gbps")
        missing = [name for name in needed if given[name] is None]
        raise typer.BadParameter(
            f"A cluster also needs {', '.join(missing)}.", param_hint=missing[0]
        )
    per_node = 1 if devices_per_node is None else devices_per_node
    if nodes * per_node > MAX_REPLICAS:
        raise typer.BadParameter(
            f"{nodes} x {per_node} is more than {MAX_REPLICAS:,} replicas.",
            param_hint="--nodes",
        )
    compute_s = 1e-9 * (compute_ns_per_byte or 0.0)
    across = _links("--bandwidth-gbps", latency_us, bandwidth_gbps, compute_s)
    within = _links(
        "--node-bandwidth-gbps",
        latency_us if node_latency_us is None else node_latency_us,
        bandwidth_gbps if node_bandwidth_gbps is None else node_bandwidth_gbps,
        compute_s,
    )
    return Cluster(nodes, per_node, across, within)


def buffers_of(plan: BucketPlan, never_used: Collection[int]) -> list[Buffer]:
    """Returns the buckets of a plan, without the leaves that are not sent."""
    found = []
    for bucket in buckets.remaining_buckets(plan, never_used):
        specs = [plan.leaves[i] for i in bucket]
        size = sum(math.prod(spec.shape) for spec in specs)
        found.append(Buffer(size * specs[0].dtype.itemsize, specs[0].dtype))
    return found


def buffers_of_size(
    num_bytes: int,
    *,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
) -> list[Buffer]:
    """Cuts `num_bytes` of float32 gradients into buckets.

    Args:
      num_bytes: size of all gradients.
      bucket_bytes: size of each bucket but the first and the last.
      first_bucket_bytes: size of the first bucket. Without both sizes, it is as large
        as the others; if only one size is given, the other is the default of
        `plan_buckets`.

    Raises:
      typer.BadParameter: a size is not positive, or there are too many buckets.
    """
    if bucket_bytes is None and first_bucket_bytes is None:
        first_bucket_bytes = buckets.DEFAULT_BUCKET_BYTES
    elif first_bucket_bytes is None:
        first_bucket_bytes = buckets.DEFAULT_FIRST_BUCKET_BYTES
    if bucket_bytes is None:
        bucket_bytes = buckets.DEFAULT_BUCKET_BYTES
    options = {"--bucket-mib": bucket_bytes, "--first-bucket-mib": first_bucket_bytes}
    for option, size in options.items():
        if size <= 0:
            raise typer.BadParameter(
                "must be at least one byte beside --gradient-mib.", param_hint=option
            )
    rest = max(0, num_bytes - first_bucket_bytes)
    num_full, last = divmod(rest, bucket_bytes)
    if num_full + 2 > MAX_BUCKETS:
        raise typer.BadParameter(
            f"makes more than {MAX_BUCKETS:,} buckets.", param_hint="--gradient-mib"
        )
    sizes = [num_bytes - rest, *[bucket_bytes] * num_full]
    if last:
        sizes.append(last)
    return [Buffer(size, np.dtype(np.float32)) for size in sizes]


def predict_step(buffers: Sequence[Buffer], cluster: Cluster) -> dict[str, Any]:
    """Predicts the time of a step's all-reduces, one bucket after another.

    Returns:
      The cluster, and per algorithm the rounds, the bytes that one replica sends, and
      the seconds; the fastest first.
    """
    names = [*_FLAT]
    if cluster.num_nodes > 1 and cluster.devices_per_node > 1:
        names.append("hierarchical")
    rows = []
    for name in names:
        by_buffer = {b: _predict(name, b, cluster) for b in set(buffers)}
        costs = [by_buffer[buffer] for buffer in buffers]
        work = sum((cost.work for cost in costs), Work())
        rows.append(
            {
                "algorithm": name,
                "num_rounds": work.num_rounds,
                "sent_bytes": work.sent_bytes,
                "communication_s": sum(cost.communication_s for cost in costs),
                "computation_s": sum(cost.computation_s for cost in costs),
                "total_s": sum(cost.total_s for cost in costs),
            }
        )
    rows.sort(key=lambda row: row["total_s"])
    return {
        "num_nodes": cluster.num_nodes,
        "devices_per_node": cluster.devices_per_node,
        "num_replicas": cluster.num_replicas,
        "num_buckets": len(buffers),
        "num_bytes": sum(buffer.num_bytes for buffer in buffers),
        "algorithms": rows,
    }


def make_table(predicted: dict[str, Any]) -> rich.table.Table:
    """Returns the result of `predict_step` as a table."""
    noun = "bucket" if predicted["num_buckets"] == 1 else "buckets"
    table = rich.table.Table(
        title=f"A step on {predicted['num_nodes']:,} nodes of "
        f"{predicted['devices_per_node']}, {predicted['num_buckets']:,} {noun}, "
        f"{predicted['num_bytes'] / 1e6:.4g} MB: predicted"
    )
    table.add_column("all-reduce", no_wrap=True)
    for name in ("rounds", "MB sent", "sending ms", "reducing ms", "total ms"):
        table.add_column(name, justify="right")
    for row in predicted["algorithms"]:
        table.add_row(
            row["algorithm"],
            f"{row['num_rounds']:,}",
            f"{row['sent_bytes'] / 1e6:.4g}",
            f"{1e3 * row['communication_s']:.4g}",
            f"{1e3 * row['computation_s']:.4g}",
            f"{1e3 * row['total_s']:.4g}",
        )
    return table


def _predict(name: str, buffer: Buffer, cluster: Cluster) -> Cost:
    # An algorithm over all devices is as slow as the links between nodes.
    links = cluster.within if cluster.num_nodes == 1 else cluster.across
    return predict(
        name,
        buffer.num_bytes,
        cluster.num_replicas,
        links,
        dtype=buffer.dtype,
        node=Node(cluster.devices_per_node, cluster.within),
    )


def _links(
    option: str, latency_us: float, bandwidth_gbps: float, compute_s: float
) -> Links:
    if bandwidth_gbps <= 0:
        raise typer.BadParameter(
            f"{bandwidth_gbps:g} must be positive.", param_hint=option
        )
    return Links(1e-6 * latency_us, 1e9 / 8 * bandwidth_gbps, compute_s)
