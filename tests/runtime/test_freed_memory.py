"""Does freed memory stay in the process, so that the next step touches no new pages?"""

import os
import platform
import subprocess
import sys

import pytest

from jdp.runtime import freed_memory
from tests import rarely

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the C library is not glibc"
)

# A program with 48 MB of temporary memory, or 80 MB per device on a thread of XLA:
# prints the page faults of the median call, as the heap may still grow in some calls,
# by how the threads' allocations happen to fall.
PROGRAM = """
import resource, statistics
import jax, jax.numpy as jnp
import sys
import jdp

num_devices, num_rows = map(int, sys.argv[1:])
jdp.init(num_cpu_devices=num_devices)
fn = jax.jit(lambda x, w: jnp.sum((x @ w) @ w.T))
arguments = jnp.ones((num_rows, 64)), jnp.ones((64, 4000))
faults = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    placed = [jax.device_put(arguments, device) for device in jax.devices()]
    jax.block_until_ready([fn(*arguments) for arguments in placed])
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median_low(faults[3:]))
"""


def _count_faults(num_devices: int, num_rows: int, **variables: str) -> int:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(num_devices), str(num_rows)],
        env=kept | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(result.stdout.split()[-1])


@pytest.mark.parametrize(
    "num_devices,num_rows", rarely.cases([(1, 3000), (2, 5000)], often=[(1, 3000)])
)
def test_a_program_touches_no_new_pages(num_devices, num_rows):
    assert _count_faults(num_devices, num_rows) < 500


@pytest.mark.parametrize(
    "variables",
    rarely.cases(
        [
            {freed_memory.SWITCH: "0"},
            {"MALLOC_TOP_PAD_": "131072"},
            {"GLIBC_TUNABLES": "glibc.malloc.top_pad=131072"},
        ],
        often=[{freed_memory.SWITCH: "0"}],
    ),
    ids=["switched off", "own variables", "own tunables"],
)
def test_the_users_choice_is_kept(variables):
    # 48 MB in pages of 4 KiB.
    assert _count_faults(1, 3000, **variables) > 10_000


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda name: None)
    assert not freed_memory.keep()
