"""Nine CPU devices for every test; nothing may be left behind."""

import jax
import psutil
import pytest

jax.config.update("jax_num_cpu_devices", 9)


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
