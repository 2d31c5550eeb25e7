"""Eight CPU devices for every test; nothing may be left behind."""

import jax
import psutil
import pytest

from jdp.runtime import environment, guard

jax.config.update("jax_num_cpu_devices", 8)


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


@pytest.fixture
def launched():
    """Checks that no process of any launch made by this test lives after it."""
    own = psutil.Process()

    def ids():
        found = {}
        for process in psutil.process_iter():
            try:
                launch_id = process.environ().get(environment.LAUNCH_ID)
                if launch_id and process.ppid() == own.pid:
                    found[process.pid] = launch_id
            except (psutil.Error, OSError):
                continue
        return found

    yield
    for launch_id in ids().values():
        assert not guard.find_processes(launch_id)
