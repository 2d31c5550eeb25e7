"""Process: how does one of `harness.run_processes` start and end soonest?"""

import atexit
import gc
import importlib
import os
import sys


def main() -> None:
    """Imports all that a job needs, and runs it."""
    # Of what is imported nothing becomes garbage; to look for it, meanwhile and at the
    # end, takes a third of the time of a process that does little else.
    gc.disable()
    if "TESTS_END_AS_USUAL" not in os.environ:
        atexit.register(_end)
    harness = importlib.import_module("tests.harness")
    importlib.import_module(sys.argv[1])
    gc.freeze()
    gc.enable()
    harness.main()


def _end() -> None:
    # Registered first, so all other exit handlers have run. To take apart what was
    # imported would take as long as a fifth of the imports; examples and scripts of
    # other tests do. Only what has not failed comes here; see `user_program`.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
