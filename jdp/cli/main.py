"""Command line: which commands has `jdp`?"""

from typing import Annotated

import typer

import jdp
from jdp.bench import (
    collectives,
    eager,
    hooks,
    join,
    kernel,
    leaves,
    local,
    overhead,
    parameter_server,
    step,
    train,
    zero1,
)
from jdp.cli import doctor, launch, plan, timeline

# Plain messages: boxes break them in the middle of paths and commands.
app = typer.Typer(
    help="Data-parallel training for JAX.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("launch", context_settings=launch.CONTEXT_SETTINGS)(launch.launch)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
bench = typer.Typer(
    help="Time jdp in turns with other systems.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
bench.command("step")(step.bench_step)
bench.command("train")(train.bench_train)
bench.command("collectives")(collectives.bench_collectives)
bench.command("kernel")(kernel.bench_kernel)
bench.command("join")(join.bench_join)
bench.command("hooks")(hooks.bench_hooks)
bench.command("local")(local.bench_local)
bench.command("zero1")(zero1.bench_zero1)
bench.command("leaves")(leaves.bench_leaves)
bench.command("eager")(eager.bench_eager)
bench.command("parameter-server")(parameter_server.bench_parameter_server)
bench.command("overhead")(overhead.bench_overhead)
app.add_typer(bench, name="bench")
timelines = typer.Typer(
    help="Look at what ranks of the eager engine did.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
timelines.command("diff")(timeline.diff)
timelines.command("merge")(timeline.merge)
app.add_typer(timelines, name="timeline")


def main() -> None:
    """Runs the command line `jdp`."""
    app(prog_name="jdp")


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
