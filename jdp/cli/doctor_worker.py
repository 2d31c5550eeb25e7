"""Processes of `jdp doctor`: which devices do they see, and do collectives work?"""

import dataclasses
import faulthandler
import json
import pathlib
import sys

import jax
import numpy as np

import jdp
from jdp import eager
from jdp.collectives.pallas import gpu_topology
from jdp.eager import session
from jdp.eager.execution.base import CollectiveTask, Implementation

_TIMEOUT_S = 60.0  # for starting; a process that hangs ends after twice as long.


def main(folder: str) -> None:
    """Runs one process; writes its report to a file named by its number."""
    faulthandler.dump_traceback_later(2 * _TIMEOUT_S, exit=True)
    world = jdp.init(timeout_s=_TIMEOUT_S)
    # Leaves no files behind, and tunes nothing.
    options = dataclasses.replace(
        eager.EagerOptions.from_environ(),
        timeline="",
        flight_recorder_capacity=0,
        autotune=False,
        autotune_log="",
    )
    eager.init(world, options)
    rank, size = world.process_index, world.process_count
    total = int(eager.all_reduce(np.array(rank + 1), op="sum", name="doctor"))
    expected = size * (size + 1) // 2
    engine = session.current_engine()
    report = {
        "backend": jax.default_backend(),
        "device": world.local_devices[0].device_kind,
        "num_devices": world.num_local_replicas,
        "topology": _describe_topology(world),
        "is_right": total == expected,
        "outcome": "works"
        if total == expected
        else f"gave {total} instead of {expected}",
        "implementations": [
            (each.name, each.describe(), _what_it_takes(each))
            for each in engine.executor.sets[0].implementations
        ],
    }
    eager.barrier()
    eager.shutdown()
    pathlib.Path(folder, str(rank)).write_text(json.dumps(report))


def _what_it_takes(implementation: Implementation) -> str:
    """Names the arrays of 1 MiB that it would sum, if no earlier one took them."""
    takes = []
    for kind, is_on_device in (("host", False), ("device", True)):
        task = CollectiveTask(
            "all_reduce", "sum", np.dtype(np.float32), 1 << 20, is_on_device
        )
        if is_on_device and jax.default_backend() == "cpu":
            continue  # All arrays are on the host.
        if implementation.is_enabled(task):
            takes.append(kind)
    return f"takes {' and '.join(takes)} arrays" if takes else "not here"


def _describe_topology(world: jdp.World) -> dict[str, str]:
    """Returns facts about GPUs for the custom all-reduce; empty on other devices."""
    topology = gpu_topology.find_topology(world)
    if topology.platform != "gpu":
        return {}
    connected = {True: "yes", False: "no", None: f"? {topology.unknown_because}"}
    return {
        "driver": gpu_topology.find_driver_version(),
        "hosts": str(topology.num_hosts),
        "compute capability": str(topology.compute_capability or "not NVIDIA's"),
        "NVLink between all": connected[topology.is_fully_connected],
        "switch that reduces": "yes" if topology.has_multicast else "no",
    }


if __name__ == "__main__":
    main(sys.argv[1])
