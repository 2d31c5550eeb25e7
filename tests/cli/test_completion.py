"""`jdp completion`: what a shell completes with it."""

import shutil
import subprocess
import sys

import pytest
import typer.testing

from jdp.cli import main
from tests import commands


@pytest.fixture
def shell(tmp_path):
    """Runs a script of a shell, in which `jdp` is this one."""
    (tmp_path / "jdp").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m jdp.cli.main "$@"\n'
    )
    (tmp_path / "jdp").chmod(0o755)
    environ = commands.environ()
    environ["PATH"] = f"{tmp_path}:{environ['PATH']}"

    def run(program, script):
        process = subprocess.run(
            [program, "-c", script],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (process.returncode, process.stderr) == (0, "")
        return process.stdout.split()

    return run


_IN_BASH = """
eval "$(jdp completion bash)"
complete -p jdp > /dev/null
complete_words() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    _jdp_completion jdp
    printf '%s\\n' "${COMPREPLY[@]}" --
}
complete_words jdp la
complete_words jdp bench parameter
complete_words jdp launch --no
"""


@pytest.mark.multiprocess
def test_bash_completes_commands_and_options(shell):
    found = shell("bash", _IN_BASH)
    options = ["--nodes", "--node-rank", "--no-pin", "--no-table"]
    first, _, second, _, *third = found
    assert (first, second) == ("launch", "parameter-server")
    assert sorted(third[:-1]) == sorted(options)


@pytest.mark.multiprocess
def test_zsh_and_fish_ask_for_the_same(shell):
    # As the scripts do; the shells may not be here.
    zsh = shell(
        "sh", "_JDP_COMPLETE=complete_zsh _TYPER_COMPLETE_ARGS='jdp timeline m' jdp"
    )
    assert "merge" in " ".join(zsh) and "diff" not in " ".join(zsh)
    fish = shell(
        "sh",
        "_JDP_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args "
        "_TYPER_COMPLETE_ARGS='jdp timeline m' jdp",
    )
    assert fish[0] == "merge"


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_it_can_read(name):
    runner = typer.testing.CliRunner()
    found = runner.invoke(main.app, ["completion", name])
    assert found.exit_code == 0 and f"complete_{name}" in found.stdout
    program = shutil.which(name)
    if program is not None:
        subprocess.run([program, "-n"], input=found.stdout, text=True, check=True)


def test_another_shell_is_refused():
    runner = typer.testing.CliRunner()
    found = runner.invoke(main.app, ["completion", "csh"])
    assert found.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in " ".join(found.stderr.split())
