"""Forked children: they cannot use the engine of their parent, and hear so at once."""

import json
import os
import signal

import numpy as np
import pytest

import jdp
from jdp import eager
from tests import harness

pytestmark = pytest.mark.multiprocess


def _call_all(done, late):
    """Calls everything in a child; by call its error, or its value."""
    x = np.ones(2)
    calls = {
        "all_reduce": lambda: eager.all_reduce(x, name="a"),
        "unnamed": lambda: eager.all_gather(x),
        "group": lambda: eager.grouped_all_reduce([x]),
        "no leaves": lambda: eager.grouped_all_reduce([]),
        "all_to_all": lambda: eager.all_to_all(x),
        "objects": lambda: eager.all_gather_object(1),
        "barrier": eager.barrier,
        "join": eager.join,
        "add": lambda: eager.add_process_set([0]),
        "submit": lambda: eager.submit(np.sin, x),
        "init": eager.init,
        "late": lambda: eager.synchronize(late).tolist(),
        "timeline": eager.stop_timeline,
        # What needs no other process.
        "done": lambda: eager.synchronize(done).tolist(),
        "poll": lambda: eager.poll(late),
        "rank": lambda: [eager.rank(), eager.size(), eager.local_rank()],
        "ranks": lambda: list(eager.global_process_set.ranks),
        "included": eager.global_process_set.included,
        "is_initialized": eager.is_initialized,
        "shutdown": eager.shutdown,
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _in_child(fn):
    """Calls `fn` in a child that is forked; returns what it does, and the status."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # Ends a child that waits for ever.
        try:
            os.write(writer, json.dumps(fn()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found = json.loads(pipe.read() or b"{}")
    return found, os.waitpid(pid, 0)[1]


def _fork():
    world = jdp.init(timeout_s=60.0)
    first, _ = _in_child(lambda: harness.error_text(eager.init)[0])
    eager.init(world)
    rank = eager.rank()
    done = eager.all_reduce_async(np.ones(2), op="sum", name="done")
    eager.barrier()  # The child sees it done, and not read.
    late = eager.all_reduce_async(np.ones(2), name="late") if rank == 0 else done
    found, status = _in_child(lambda: _call_all(done, late))
    found = {"init before the parent": first, **found}
    eager.barrier()
    if rank == 1:
        eager.all_reduce(np.ones(2), name="late")
    total = eager.all_reduce(np.array(rank), op="sum", name="afterwards")
    eager.shutdown()
    return found, status, int(total)


def test_a_forked_child_hears_at_once_that_it_cannot_use_the_engine():
    for rank, (found, status, total) in enumerate(harness.run_checked(_fork, 2)):
        assert status == 0 and total == 1, "the parent goes on"
        names = list(found)
        may, must_not = names[names.index("done") :], names[: names.index("done")]
        if rank == 1:
            must_not.remove("late")  # Where it is done.
        for name in must_not:
            text = str(found[name])
            assert text.startswith("RuntimeError: This process was forked"), name
            assert 'get_context("spawn")' in text
        expected = [[2.0, 2.0], True, [rank, 2, rank], [0, 1], True, False, None]
        assert [found[name] for name in may] == expected
