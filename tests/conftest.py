"""Nine CPU devices for every test; nothing may be left behind."""

import jax
import psutil
import pytest

jax.config.update("jax_num_cpu_devices", 9)

# A file is run by one worker; those that take longest come first, lest one of them is
# begun when the other worker is nearly done (the option `--no-loadscope-reorder`).
_LONGEST = (
    "test_contract.py",
    "test_examples.py",
    "test_weights.py",
    "test_bench.py",
    "test_behaviours_values.py",
    "test_shared_memory.py",
    "test_behaviours_sets.py",
    "test_engine.py",
    "test_transport.py",
    "test_join.py",
    "test_cluster.py",
    "test_uneven_batches.py",
    "test_usage.py",
    "test_unused.py",
    "test_processes.py",
    "test_dispatch.py",
)


def pytest_collection_modifyitems(items):
    places = {name: i for i, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(_LONGEST)))


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
