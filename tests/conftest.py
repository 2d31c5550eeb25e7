"""Nine CPU devices for every test; nothing may be left behind."""

import atexit
import gc
import os
import pathlib
import shutil
import sys
import tempfile
from unittest import mock

import jax
import jaxlib
import psutil
import pytest
from jaxlib import xla_client

jax.config.update("jax_num_cpu_devices", 9)
# Of most programs only the results are of interest: a quarter of the time of tests that
# compile. What XLA does with a program stays; only its machine code becomes simpler.
jax.config.update("jax_disable_most_optimizations", True)
# The same, for a third of what is left; see `harness.jit_fast`. XLA reads its flags
# once, and ends the process at one it does not know: 0.11.2 has no other emitters.
_XLA_FLAGS = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if jaxlib.version.__version_info__ < (0, 11):
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS])
    with mock.patch.dict(os.environ, {"XLA_FLAGS": flags}):  # Not for new processes.
        xla_client.CompileOptions()

# Nothing is left in the home directory, nor found there.
os.environ["JDP_CACHE_DIR"] = tempfile.mkdtemp(prefix="jdp-test-cache-")
atexit.register(shutil.rmtree, os.environ["JDP_CACHE_DIR"], ignore_errors=True)

# Where the environment forbids to keep byte code, each process that tests start would
# compile all of jdp anew, a sixth of its start, and each worker of pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
_START = str(pathlib.Path(__file__).parent / "start")
_GIVEN = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _START not in _GIVEN:  # A worker has it from the process that started it.
    os.environ["PYTHONPATH"] = os.pathsep.join([_START, *filter(None, _GIVEN)])

# A file is run by one worker; those that take longest come first, lest one of them is
# begun when other workers are nearly done (the option `--no-loadscope-reorder`).
_LONGEST = (
    "test_contract.py",
    "test_launch.py",
    "test_transport.py",
    "test_replicated.py",
    "test_lifeline.py",
    "test_model_axes.py",
    "test_cluster.py",
    "test_training.py",
    "test_launcher_link.py",
    "test_reductions_in_programs.py",
    "test_hooks.py",
    "test_skip_unused.py",
    "test_engine_twin.py",
    "test_local_sgd.py",
    "test_sync_batch_norm.py",
    "test_refusals.py",
    "test_auto.py",
    "test_behaviours_faults.py",
    "test_as_all_reduce.py",
    "test_uneven_batches.py",
    "test_processes.py",
    "test_placement.py",
    "test_shared_memory.py",
    "test_module_step.py",
    "test_unused.py",
    "test_zero1.py",
    "test_behaviours_sets.py",
    "test_behaviours_values.py",
    "test_every_optimizer.py",
    "test_bench.py",
    "test_two_hosts.py",
    "test_examples.py",
    "test_weighted_mean.py",
    "test_weight_ranges.py",
    "test_objective.py",
    "test_pallas.py",
    "test_engine.py",
    "test_join.py",
)


def pytest_collection_modifyitems(items):
    places = {name: i for i, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(_LONGEST)))


def pytest_collection_finish():
    # What is imported stays, and tracing makes much that lives for a moment: to look
    # for garbage as often as usual takes a sixth of the time of tests that trace.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def no_process_is_left_behind():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in before and process.status() != psutil.STATUS_ZOMBIE
    ]
    assert not left, f"left behind: {left}"
