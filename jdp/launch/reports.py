"""Reports: how does a launcher show why its job has ended?"""

import signal
from collections.abc import Container

from jdp.launch import endings, output
from jdp.launch.endings import Exit
from jdp.launch.logs import LogFiles


def show_cause(
    forwarder: output.Forwarder,
    cause: Exit | signal.Signals | None,
    own: Container[int],
) -> None:
    """Prints what went wrong, and the last lines of the culprit.

    Args:
      forwarder: prints them.
      cause: reason of the end; None: nothing went wrong.
      own: processes of this host.
    """
    if isinstance(cause, Exit):
        forwarder.print_line(f"jdp launch: {endings.describe_exit(cause)}.")
        if cause.process_id in own:
            forwarder.print_tail(cause.process_id)
    elif cause is not None:
        forwarder.print_line(f"jdp launch: ended by {endings.signal_name(cause)}.")


def show_to_all(forwarder: output.Forwarder, logs: LogFiles | None, text: str) -> None:
    """Prints a line about the job, also into the log of every process.

    Args:
      forwarder: prints it.
      logs: the logs; None: there are no logs.
      text: one line, without the name of the command.
    """
    forwarder.print_line(f"jdp launch: {text}")
    if logs is not None:
        logs.take_line(f"jdp launch: {text}")
