"""Program of two hosts with two processes each: do they reduce over TCP, and right?"""

import logging
import os
import tempfile

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jdp
from jdp.collectives import auto
from jdp.collectives.host import tcp_all_reduce
from jdp.collectives.host.placed_links import PlacedLinks
from tests import harness


def main() -> None:
    """Runs one process."""
    logging.basicConfig(level=logging.INFO)
    os.environ["JDP_CACHE_DIR"] = tempfile.mkdtemp()
    world = jdp.init(timeout_s=60.0)
    sizes = (1, 5000, 300_001)

    def sums(*xs):
        reduce = jdp.collectives.tcp_all_reduce
        return [reduce(x, "data") for x in xs]

    mapped = jax.shard_map(
        harness.as_body(sums), mesh=world.mesh, in_specs=P("data"), out_specs=P()
    )
    xs = [
        jdp.global_batch(world, np.arange(n, dtype=np.float32) + world.process_index)
        for n in sizes
    ]
    for n, x in zip(sizes, jax.jit(mapped)(*xs), strict=True):
        expected = 4 * np.arange(n, dtype=np.float32) + 6
        np.testing.assert_array_equal(np.asarray(x.addressable_data(0)), expected)
    medium = tcp_all_reduce.default_links(world, "data")
    kind = "placed" if isinstance(medium, PlacedLinks) else "flat"
    mapped = jax.shard_map(
        harness.as_body(lambda x: auto.auto_all_reduce(x, "data")),
        mesh=world.mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    (total,) = np.unique(np.asarray(jax.jit(mapped)(xs[2]).addressable_data(0))[:1])
    assert total == 6.0, total
    print(f"TCP RIGHT {kind}", flush=True)
    jdp.shutdown()


if __name__ == "__main__":
    main()
