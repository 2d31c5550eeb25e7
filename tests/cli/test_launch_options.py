"""Options of `jdp launch` that are of no use are refused."""

import dataclasses
import re

import pytest
import typer.testing

from jdp.cli import launch, main
from jdp.launch import launch as launching
from jdp.parameter_server import launching as role_launching


def _refusal(*arguments):
    runner = typer.testing.CliRunner()
    found = runner.invoke(main.app, ["launch", *arguments])
    assert found.exit_code == 2
    return " ".join(found.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--servers", "1"], "--servers and --workers must be at least 1, got 1 and 0"),
        (["--workers", "2"], "--servers and --workers must be at least 1, got 0 and 2"),
        (["--servers", "1", "--address", "a:1"], "--address needs a --key-file"),
        (["--servers", "1", "--workers", "1", "--first", "-1"], "--first must be"),
        (["-n", "0"], "-n must be"),
        (["-n", "1", "--nodes", "0"], "--nodes must be"),
        (["-n", "1", "--nodes", "2"], "--coordinator"),
        (["-H", "a b"], "-H must be host:slots"),
        (["-H", "a:1,b:2"], "-H must have equal slots"),
        (["-H", "a,b", "--ssh", " "], "--ssh must be a command"),
        (["-H", "a,b", "--grace-s", "-1"], "--grace-s must be"),
        (["-H", "localhost,10.0.0.2"], "-H begins with 'localhost', whose address"),
        (["-H", "a,b", "--coordinator", "a"], "--coordinator must be host:port"),
    ],
)
def test_refusals_name_options_as_they_are_typed(arguments, text):
    refusal = _refusal(*arguments, __file__)
    assert text in refusal
    assert "_" not in refusal.replace("parameter_server.make_keys", "")


def test_one_of_servers_and_workers_is_told_what_else_other_hosts_need():
    refusal = _refusal("--servers", "1", __file__)
    assert "pass the --address of all servers and a --key-file" in refusal


@pytest.mark.parametrize(
    "words",
    [[], ["launch"], ["bench"], ["timeline"], ["timeline", "merge"], ["plan"]],
    ids=" ".join,
)
def test_help_is_whole_and_shows_no_types_of_python(words):
    runner = typer.testing.CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    found = runner.invoke(main.app, [*words, "--help"])
    assert found.exit_code == 0
    usage, *rest = found.stdout.splitlines()
    assert not any("..." in line for line in rest)
    assert "list[" not in found.stdout
    if words == ["launch"]:
        assert usage.endswith("launch [OPTIONS] [SCRIPT] [ARGS]...")
    _, commands, listed = found.stdout.partition("Commands:")
    if commands:  # in the imperative: "Show", not "Shows".
        verbs = re.findall(r"(?m)^  \S+ +(\S+)", listed)
        assert verbs and not any(verb.endswith("s") for verb in verbs)


@pytest.mark.parametrize(
    ("arguments", "option", "text"),
    [
        (["-n", "1", "--address", "a:1"], "--address", "goes with '--servers' and"),
        (["-n", "1", "--restarts", "3"], "--restarts", "goes with '--servers' and"),
        (["-n", "1", "--no-table"], "--table", "goes with '--servers' and"),
        (["-n", "1", "--json"], "--json", "goes with '--servers' and"),
        (["-n", "1", "--ssh", "x"], "--ssh", "goes with '-H'."),
        (["-n", "1", "--python", "x"], "--python", "goes with '-H'."),
        (["-H", "a,b", "--nodes", "2"], "--nodes", "goes without '-H'."),
        (["-H", "a,b", "--node-rank", "1"], "--node-rank", "goes without '-H'."),
        (["-H", "a", "--restarts", "3"], "--restarts", "goes with '--servers' and"),
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


def test_every_field_that_a_message_names_has_an_option():
    classes = launching.LaunchOptions, role_launching.RoleOptions
    fields = {field.name for each in classes for field in dataclasses.fields(each)}
    without = {"coordinator_address", "has_shares", "key", "report"}  # Never named.
    assert fields - without <= launch._BY_FIELD.keys()
    help_text = typer.testing.CliRunner().invoke(main.app, ["launch", "--help"]).stdout
    assert all(option in help_text for option in launch._BY_FIELD.values())
