"""`jdp timeline`: what it prints, its exit codes, and what it says to a typo."""

import json
import time

import pytest
import typer.testing

from jdp.cli import main
from jdp.eager.diagnosis import timeline
from tests.eager.records import Rank, all_reduce, train

NAMES = [f"grad/[{i}]" for i in range(4)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = typer.testing.CliRunner(env={"COLUMNS": "100"})

    def run(*arguments):
        result = runner.invoke(main.app, ["timeline", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return run


def _write_dumps(*extra):
    """Writes a.json and b.json; `extra` is what each submits at the end."""
    ranks = [Rank(0), Rank(1)]
    train(ranks, NAMES, 3)
    for rank, path, names in zip(ranks, ("a.json", "b.json"), extra, strict=True):
        for name in names:
            rank.submit(all_reduce(name))
        rank.dump(path, "stalled [for] 60 s")


def test_ranks_that_do_the_same(run):
    _write_dumps(["x", "y"], ["y", "x"])
    code, out, err = run("diff", "a.json", "b.json")
    assert (code, err) == (0, "")
    assert "Nothing differs between rank 0 and rank 1." in out
    assert "stalled [for] 60 s" in out and "0 of 2" in out


def test_ranks_that_went_apart(run):
    _write_dumps(["loss"], ["metric"])
    code, out, err = run("diff", "a.json", "b.json")
    assert (code, err) == (1, "")
    assert "Both ran 12 operations in the same order, up to 'grad/[3]'." in out
    (line,) = [line for line in out.splitlines() if line.startswith("Rank 0 submitted")]
    assert line.startswith(
        "Rank 0 submitted 'loss' (all_reduce sum float32[4, 2]), which rank 1 has not"
    )
    assert "Rank 1 submitted 'metric'" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["a.json", "none.json"],
            "No such file or directory: 'none.json'. Name the flight records that the",
        ),
        (["a.json", "text.json"], "text.json is not a flight record"),
        (["a.json", "a.json"], "Both dumps are of rank 0"),
        (["a.json"], "Missing argument 'B'"),
        (["a.json", "b.json", "--lines", "3"], "No such option: --lines"),
    ],
)
def test_diff_says_what_is_wrong(run, tmp_path, arguments, says):
    _write_dumps([], [])
    (tmp_path / "text.json").write_text("text")
    code, out, err = run("diff", *arguments)
    assert (code, out) == (2, "")
    assert says in err


def _write_timelines(*ranks):
    for rank in ranks:
        traced = timeline.RankTimeline(f"trace.rank{rank}.json", rank=rank)
        now_s = time.perf_counter()
        traced.add_span("x", "ALL_REDUCE", now_s, now_s + 1)
        traced.close()


def test_merge_writes_one_file(run, tmp_path):
    _write_timelines(0, 1)
    code, out, err = run("merge", "all.json", "trace.rank1.json", "trace.rank0.json")
    assert (code, out, err) == (0, "all.json: ranks 0, 1\n", "")
    events = json.loads((tmp_path / "all.json").read_text())
    assert [e["pid"] for e in events if e["ph"] == "X"] == [1, 0]


def test_merge_without_an_output_keeps_the_first_timeline(run, tmp_path):
    _write_timelines(0, 1)
    content = (tmp_path / "trace.rank0.json").read_bytes()
    code, _, err = run("merge", "trace.rank0.json", "trace.rank1.json")
    assert code == 2 and "OUT" in err
    assert "trace.rank0.json exists already. Name a new file" in err
    assert (tmp_path / "trace.rank0.json").read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["all.json", "none.json"], "No such file or directory: 'none.json'"),
        (["all.json", "text.json"], "text.json is not a timeline of jdp"),
        (["no/all.json", "trace.rank0.json"], "No such file or directory: 'no/all"),
        (["all.json", "trace.rank0.json", "trace.rank0.json"], "are both of rank 0"),
        (["all.json"], "Missing argument 'FILES'"),
        (["--out", "all.json"], "No such option: --out"),
    ],
)
def test_merge_says_what_is_wrong(run, tmp_path, arguments, says):
    _write_timelines(0)
    (tmp_path / "text.json").write_text("text")
    code, out, err = run("merge", *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_a_command_that_does_not_exist(run):
    code, _, err = run("dif", "a", "b")
    assert code == 2 and "No such command 'dif'" in err
