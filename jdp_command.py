"""The command `jdp`, from its first moment: how does it meet an interrupt?

Importing jax takes a second or more, and a KeyboardInterrupt that is raised in one of
its callbacks is lost. So until the command runs, an interrupt ends the process as it
ends any other program. The module is not in the package, which would come before it.
"""

import signal
import sys


def main() -> None:
    """Runs the command line `jdp`."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from jdp.cli import main as cli

    cli.preload(sys.argv[1:])
    # `jdp launch` listens to signals itself, as soon as there is something to end.
    if is_usual and sys.argv[1:2] != ["launch"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()
