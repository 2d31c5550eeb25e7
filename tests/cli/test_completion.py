"""`jdp completion`: what a shell completes with it."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
import typer.testing

from jdp.cli import main
from tests import commands, harness


@pytest.fixture
def environ(tmp_path):
    """Variables of a shell in which `jdp` is this one."""
    (tmp_path / "jdp").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m jdp.cli.main "$@"\n'
    )
    (tmp_path / "jdp").chmod(0o755)
    environ = commands.environ()
    return {**environ, "PATH": f"{tmp_path}:{environ['PATH']}"}


@pytest.fixture
def shell(environ):
    """Runs a script of a shell."""

    def run(program, script):
        process = subprocess.run(
            [program, "-c", script],
            cwd=harness.ROOT,
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


@pytest.mark.slow
@pytest.mark.multiprocess
def test_zsh_and_fish_ask_for_the_same(shell):
    # As the scripts do, also where the shells are not here.
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


def _type(words, lines, *, environ, until):
    """Types lines into an interactive shell, each a while after the last one."""
    fd, own_fd = pty.openpty()
    process = subprocess.Popen(
        words,
        stdin=own_fd,
        stdout=own_fd,
        stderr=own_fd,
        env=environ,
        start_new_session=True,
    )
    os.close(own_fd)
    shown = b""
    try:
        for line, awaited in zip(lines, until, strict=True):
            os.write(fd, line)
            seen, deadline_s = len(shown), time.monotonic() + 40
            while awaited not in shown[seen:]:
                assert time.monotonic() < deadline_s, shown
                if select.select([fd], [], [], 0.1)[0]:
                    shown += os.read(fd, 1 << 16)
    finally:
        process.kill()
        process.wait()
        os.close(fd)


@pytest.mark.multiprocess
def test_zsh_completes_where_it_is_typed(tmp_path, environ):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    environ |= {"HOME": str(tmp_path), "TERM": "xterm"}
    start = b'autoload -U compinit; compinit -u -D; eval "$(jdp completion zsh)"'
    _type(
        ["zsh", "-f", "-i"],
        [
            start + b"; echo is $((40 + 2))\n",
            b"jdp timeline m\t",
            b"\x15jdp launch --no-p\t",
        ],
        environ=environ,
        until=[b"is 42", b"merge", b"in"],
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_fish_completes_commands_options_and_files(shell, tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    script = (
        "jdp completion fish | source; "
        'complete -C "jdp timeline m"; complete -C "jdp launch --no-p"; '
        'complete -C "jdp launch -n 2 examples/digi"'
    )
    found = " ".join(shell("fish", script))
    assert found.startswith("merge Merge the timelines") and "diff" not in found
    assert "--no-pin" in found and "examples/digits.py" in found
