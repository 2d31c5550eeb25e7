"""Is a process known to wait for others only from when it can?"""

import time
import types

from jdp.replicas import progress


def test_a_step_needs_others_only_once_it_is_traced():
    seen = {}

    class Step:
        name = "traced_for_long"
        world = types.SimpleNamespace(process_count=2)

        @progress.counted
        def run(self):
            seen["begun_s"] = time.monotonic()
            with progress.working(needs_others=False):
                time.sleep(0.05)
                seen["tracing"] = progress.snapshot().step
                seen["traced_s"] = time.monotonic()
            seen["after"] = progress.snapshot()
            return None, None

    Step().run()
    assert seen["tracing"] is None
    assert seen["after"].step == "traced_for_long"
    # Not since its begin: another process may have ended meanwhile.
    assert seen["after"].since_s >= seen["traced_s"]
