"""`jdp launch`: what it says to a typo; what it does is in `runtime.test_launch`."""

import sys

import pytest
import typer.testing

from jdp.cli import launch, main


@pytest.mark.parametrize(
    "arguments,hint",
    [
        (["train.py", "-n", "2"], "'-n' comes after 'train.py', which gets it."),
        (["train.py", "-n2"], "'-n2' comes after 'train.py', which gets it."),
        (["-m", "train", "--num-processes=2"], "'--num-processes=2' comes after"),
        (["train.py", "--servers", "1", "--workers", "2"], "'--servers' comes after"),
        (
            ["train.py"],
            "only one of them. Options of `jdp launch` come before the script.",
        ),
        (["-n", "2"], "name a program: `jdp launch -n 2 train.py`"),
    ],
)
def test_options_after_the_script_are_named(arguments, hint):
    runner = typer.testing.CliRunner(env={"COLUMNS": "100"})
    result = runner.invoke(main.app, ["launch", *arguments])
    assert result.exit_code == 2
    assert hint in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "words, program",
    [
        (["python", "train.py", "--lr", "1"], "train.py --lr 1"),
        (["python3.12", "-u", "-m", "package.train"], "-m package.train"),
        ([sys.executable, "train.py"], "train.py"),
        (["python"], "train.py"),
    ],
)
def test_an_interpreter_in_front_of_the_script_is_too_much(words, program):
    runner = typer.testing.CliRunner(env={"COLUMNS": "100"})
    result = runner.invoke(main.app, ["launch", "-n", "2", *words])
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    assert f"{words[0]!r} is not a script: `jdp launch` starts Python, this one" in text
    assert f"Leave it out: `jdp launch ... {program}`." in text
    assert ("PYTHONOPTIMIZE" in text) == ("-u" in words)


def test_a_script_or_a_module_named_python_is_run_as_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").write_text("")
    command = launch._command(False, ["python", "a"])
    assert (command.target, command.arguments) == ("python", ("a",))
    with pytest.raises(ValueError, match="no module 'python3'"):
        launch._command(True, ["python3"])
