"""`jdp completion`: how does a shell learn to complete commands of `jdp`?"""

import enum
from typing import Annotated

import typer
from typer import completion as of_typer

VARIABLE = "_JDP_COMPLETE"  # by which a shell asks for completions.


class Shell(enum.StrEnum):
    """A shell for which there are completions."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell.", show_default=False)],
) -> None:
    """Print what makes a shell complete commands of `jdp`.

    Add a line to its startup file, or write the output into a folder that it reads:

    bash: eval "$(jdp completion bash)" in ~/.bashrc

    zsh: eval "$(jdp completion zsh)" in ~/.zshrc, after compinit

    fish: jdp completion fish > ~/.config/fish/completions/jdp.fish
    """
    typer.echo(_make_script(prog_name="jdp", complete_var=VARIABLE, shell=shell.value))


def init() -> None:
    """Makes typer answer a shell that asks for completions."""
    of_typer.completion_init()  # pyright: ignore[reportPrivateImportUsage]


# typer has public options for the same, which help would show beside `completion`.
_make_script = of_typer.get_completion_script  # pyright: ignore[reportPrivateImportUsage]
