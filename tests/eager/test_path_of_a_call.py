"""The path of a call: how many modules of the eager engine one all-reduce enters."""

import pathlib
import sys
import threading
import time

import numpy as np
import pytest

import jdp
from jdp import eager
from tests import harness

pytestmark = pytest.mark.multiprocess

_ROOM = str(pathlib.Path(eager.__file__).parent) + "/"


def _count_modules():
    """Returns the modules that an all-reduce enters: of a new name, and of a cached."""
    entered, is_on = set(), False

    def note(frame, event, arg):
        path = frame.f_code.co_filename
        if is_on and event == "call" and path.startswith(_ROOM):
            entered.add(path.removeprefix(_ROOM))

    threading.setprofile(note)  # for the thread of the engine, which starts next.
    eager.init(jdp.init(timeout_s=60.0))
    threading.setprofile(None)
    x, found = np.ones(1000, np.float32), []
    for name in ("warm", "warm", *"aabbccdd"):
        eager.barrier()
        time.sleep(0.3)  # The barrier is over on the thread of the engine as well.
        entered.clear()
        sys.setprofile(note)
        is_on = True
        eager.all_reduce(x, name=name)
        time.sleep(0.05)  # Its thread and the coordinator end the cycle.
        is_on = False
        sys.setprofile(None)
        found.append(set(entered))
    eager.shutdown()
    # Once a second the coordinator also looks which rank is late: not in each call.
    return [sorted(set.intersection(*found[k::2])) for k in (2, 3)]


@pytest.mark.slow
def test_an_all_reduce_enters_few_modules():
    by_rank = harness.run_checked(_count_modules, 2)
    for rank, found in enumerate(by_rank):
        for modules, most in zip(found, (8, 6), strict=True):
            decides = [each for each in modules if each.startswith("coordinator/")]
            assert len(modules) - len(decides) <= 14, modules
            assert len(decides) <= (most if rank == 0 else 0), decides
