"""Programs that end, each in its own way; the others must hear the right thing."""

import time

import numpy as np

import jdp
from jdp import eager
from jdp.replicas import progress

_MANY = 400_000


def run(how: str, late: int) -> None:
    """One process of a program that ends without `eager.shutdown`."""
    world = jdp.init(timeout_s=30.0)
    eager.init(world)
    rank, size = eager.rank(), eager.size()
    ends = size - 1
    for _ in range(3):
        eager.all_reduce(np.ones(10), name="x")
    eager.barrier()
    if rank == late:
        time.sleep(0.3)
    x = np.full(_MANY, rank, np.float32)
    handles = [eager.all_reduce_async(x, op="sum", name=f"last {i}") for i in range(4)]
    if rank == ends:
        if how == "raises":
            raise KeyError("from the program")
        return
    total = size * (size - 1) / 2
    if how == "ends":  # What all have submitted runs, also what comes a bit later.
        assert all(eager.synchronize(handle)[0] == total for handle in handles)
    try:
        eager.all_reduce(x, name="alone")
    except RuntimeError as error:
        assert progress.culprit_of(error) == ends  # A launcher names it.
        print(f"RANK {rank} HEARD {error}", flush=True)
