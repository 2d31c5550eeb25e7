"""Options of `jdp launch` that are of no use are refused."""

import pytest
import typer.testing

from jdp.cli import main


@pytest.mark.parametrize(
    ("arguments", "option", "text"),
    [
        (["-n", "1", "--address", "a:1"], "--address", "goes with '--servers' and"),
        (["-n", "1", "--restarts", "3"], "--restarts", "goes with '--servers' and"),
        (["-n", "1", "--no-table"], "--table", "goes with '--servers' and"),
        (["-n", "1", "--json"], "--json", "goes with '--servers' and"),
        (
            ["--servers", "1", "--workers", "1", "--nodes", "2"],
            "--nodes",
            "goes with '-n'",
        ),
        (
            ["--servers", "1", "--workers", "1", "--coordinator", "a:1"],
            *("--coordinator", "goes with '-n'"),
        ),
        (
            ["--servers", "1", "--workers", "1", "--json", "--table"],
            *("--json", "goes without '--table'"),
        ),
    ],
)
def test_options_of_the_other_kind_of_job_are_refused(arguments, option, text):
    runner = typer.testing.CliRunner()
    found = runner.invoke(main.app, ["launch", *arguments, "x.py"])
    assert found.exit_code == 2
    assert f"{option}: {text}" in " ".join(found.stderr.replace("│", " ").split())
