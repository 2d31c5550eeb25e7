"""Is a process known to wait for others only from when it can?"""

import threading
import time
import types

import jax
import jax.numpy as jnp

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


def test_a_main_thread_that_runs_python_is_not_held_up():
    found = {}

    def ask_during(name, run):
        def ask():
            time.sleep(0.1)
            found[name] = progress.is_held_up()

        asking = threading.Thread(target=ask)
        asking.start()
        run()
        asking.join()

    @jax.jit
    def last(n):  # For half a second and more.
        return jax.lax.fori_loop(0, n, lambda _, x: x @ x, jnp.eye(256)).sum()

    last(0).block_until_ready()
    n = 256
    while True:
        begun_s = time.monotonic()
        float(last(n))
        if time.monotonic() - begun_s > 0.5:
            break
        n *= 2

    def spin():
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            pass

    def meet():
        with progress.waiting():
            time.sleep(0.3)

    ask_during("float", lambda: float(last(n)))
    ask_during("method", lambda: last(n).block_until_ready())
    ask_during("function", lambda: jax.block_until_ready(last(n)))
    ask_during("python", spin)
    ask_during("meeting", meet)
    held_up = {"float", "method", "function"}
    assert {name for name, is_so in found.items() if is_so} == held_up
    assert len(found) == 5
