"""`jdp launch`: what it says to a typo; what it does is in `runtime.test_launch`."""

import pytest
import typer.testing

from jdp.cli import main


@pytest.mark.parametrize(
    "arguments,hint",
    [
        (["train.py", "-n", "2"], "'-n' comes after 'train.py', which gets it."),
        (["train.py", "-n2"], "'-n2' comes after 'train.py', which gets it."),
        (["-m", "train", "--num-processes=2"], "'--num-processes=2' comes after"),
        (["train.py", "--servers", "1", "--workers", "2"], "'--servers' comes after"),
        (["train.py"], "and not both. Options of `jdp launch` come before the script."),
        (["-n", "2"], "name a program: `jdp launch -n 2 train.py`"),
    ],
)
def test_options_after_the_script_are_named(arguments, hint):
    runner = typer.testing.CliRunner(env={"COLUMNS": "100"})
    result = runner.invoke(main.app, ["launch", *arguments])
    assert result.exit_code == 2
    assert hint in " ".join(result.stderr.split())
