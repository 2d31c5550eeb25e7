"""Command line: which commands has `jdp`?"""

import errno
import os
import sys
from typing import Annotated

import typer

import jdp
from jdp.cli import completion, lazy_group
from jdp.cli.lazy_group import Command, Group

_BENCH = {
    "step": "Time a data-parallel step beside other systems.",
    "scaling": "Time a step on several numbers of processes.",
    "train": "Train a GPT in turns beside other systems, on the CPU.",
    "collectives": "Time every all-reduce, and test the cost model.",
    "kernel": "Time the kernels of the custom all-reduce.",
    "join": "Time loops with `jdp.join_batches` and `jdp.Join`.",
    "hooks": "Time a step with each communication hook.",
    "local": "Time steps of DiLoCo with and without communication.",
    "zero1": "Time a step of Adam with and without `jdp.zero1`.",
    "shards": "Time a step with and without `num_shards`.",
    "leaves": "Measure the CPU time to trace a step of many parameters.",
    "eager": "Time the eager engine beside torch, Horovod and jit.",
    "parameter-server": "Time one parameter server with two workers.",
    "overhead": "Measure Python's time per call, and tracing and memory.",
}


def _bench(name: str, text: str) -> Command:
    return Command(f"jdp.bench.{name}:bench_{name}", text)


ENTRIES = {
    "launch": Command(
        "jdp.cli.launch:launch",
        "Run a program in several processes, here or on the hosts of -H.",
        # Words after the script belong to the script, even if they look like options.
        {"allow_interspersed_args": False},
    ),
    "status": Command(
        "jdp.cli.status:show",
        "Show what the processes of the jobs on this host do, as it changes.",
    ),
    "plan": Command(
        "jdp.cli.plan:plan",
        "Show the buckets that the gradients of a loss send, in order.",
    ),
    "doctor": Command(
        "jdp.cli.doctor:doctor",
        "Show what this machine has for jdp, and run a test job.",
    ),
    "bench": Group(
        "Time jdp in turns with other systems.",
        {
            name: Command(
                "jdp.bench.{0}:bench_{0}".format(name.replace("-", "_")), text
            )
            for name, text in _BENCH.items()
        },
    ),
    "timeline": Group(
        "Look at what the processes of a job did.",
        {
            "diff": Command(
                "jdp.cli.timeline:diff",
                "Show where two ranks of the eager engine diverged.",
            ),
            "merge": Command(
                "jdp.cli.timeline:merge",
                "Merge what the processes of a job did into one file.",
            ),
        },
    ),
    "fingerprint": Group(
        "Compare the states of two runs, bit for bit.",
        {
            "diff": Command(
                "jdp.cli.fingerprint:diff",
                "Show the first step, and its leaves, in which two runs differ.",
            ),
            "show": Command(
                "jdp.cli.fingerprint:show",
                "Show the steps of a record, or the leaves after one step.",
            ),
        },
    ),
    "completion": Command(
        "jdp.cli.completion:completion",
        "Print what makes a shell complete commands of `jdp`.",
    ),
}

# A full disk, a quota and a limit on the size of files.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Plain messages: boxes break them in the middle of paths and commands.
app = typer.Typer(
    cls=lazy_group.make_class(ENTRIES),
    help="Data-parallel training for JAX.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs the command line `jdp`."""
    if completion.VARIABLE in os.environ:
        completion.init()
    try:
        try:
            app(prog_name="jdp")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # Python would try to write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        where = error.filename or "output"
        typer.echo(f"jdp: {where} cannot be written ({error.strerror}).", err=True)
        sys.exit(1)


def preload(words: list[str]) -> None:
    """Imports what the command that `words` begin with needs."""
    lazy_group.preload(ENTRIES, words)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"jdp {jdp.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Data-parallel training for JAX."""


if __name__ == "__main__":
    main()
