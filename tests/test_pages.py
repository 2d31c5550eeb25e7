"""Every code block of README and docs runs as it is printed."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import typer.main

from jdp.cli import main
from jdp.runtime import environment, launchers, user_program
from tests import commands, harness, page_blocks

_FIRST_STEPS = "docs/getting_started.md"


def _write(path, *texts):
    path.write_text("\n".join(texts))
    return path.name


def _run_alone(folder, script):
    """Runs a script in one process, and returns its output."""
    done = subprocess.run(
        [sys.executable, _write(folder / "alone.py", script)],
        cwd=folder,
        env=commands.environ() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.multiprocess
def test_the_first_example_of_the_readme_runs(tmp_path):
    name = _write(tmp_path / "train.py", page_blocks.python("README.md", 0))
    code, out, err = commands.launch(2, name, cwd=tmp_path, compiled_as="usual")
    assert code == 0, err
    (loss,) = re.findall(r"replicas: 2, loss: ([\d.]+)", out)
    assert float(loss) < 0.2  # of a sine whose variance is about 0.5


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_first_steps_print_one_loss_on_any_devices(tmp_path):
    script = page_blocks.python("docs/getting_started.md", 0)
    blocks = [b for b in page_blocks.find("console") if b.page == _FIRST_STEPS]
    alone, devices, several = (block.text.splitlines()[-1] for block in blocks)
    assert alone in _run_alone(tmp_path, script)
    divided = script.replace("jdp.init()", "jdp.init(num_cpu_devices=4)")
    assert divided != script and devices in _run_alone(tmp_path, divided)
    name = _write(tmp_path / "train.py", script)
    code, out, err = commands.launch(2, name, cwd=tmp_path, compiled_as="usual")
    assert code == 0, err
    assert several in out


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (
            0,
            {
                "import jax.numpy": "import jax, jax.numpy",
                "= jdp.value_and_grad": "= jax.value_and_grad",
            },
        ),
        (1, {"size=32": "size=32 + world.process_index"}),
    ],
)
def test_the_first_steps_quote_the_errors_of_both_processes(tmp_path, index, changes):
    script = page_blocks.python("docs/getting_started.md", 0)
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    blocks = [b.text for b in page_blocks.find("text") if b.page == _FIRST_STEPS]
    quoted = " ".join(blocks[index].split()).removesuffix(" ...")
    name = _write(tmp_path / "train.py", script)
    code, _, err = commands.launch(2, name, cwd=tmp_path)
    assert code == 1
    for process in (0, 1):
        assert f"[{process}] {quoted}" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_page_on_replicas_tells_what_a_world_has(tmp_path):
    name = _write(tmp_path / "train.py", page_blocks.python("docs/replicas.md", 0))
    code, out, err = commands.launch(2, name, cwd=tmp_path)
    assert code == 0, err
    page = (harness.ROOT / "docs/replicas.md").read_text()
    (printed,) = re.findall(r"process 1 prints `(.*)`", page)
    assert f"[1] {printed}" in out


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_page_on_replicas_trains_on_a_mesh_with_a_model_axis(tmp_path):
    out = _run_alone(tmp_path, page_blocks.python("docs/replicas.md", 1))
    (loss,) = re.findall(r"replicas: 2, loss: ([\d.]+)", out)
    assert float(loss) < 0.2  # of a sine whose variance is about 0.5


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_page_on_buckets_shows_the_buckets_of_its_step(tmp_path):
    (table,) = [b.text for b in page_blocks.find("text") if b.page == "docs/buckets.md"]
    out = _run_alone(tmp_path, page_blocks.python("docs/buckets.md", 0))
    lines = [line.rstrip() for line in out.rstrip().splitlines()]
    assert lines == table.splitlines()


@pytest.mark.multiprocess
def test_the_example_by_name_of_the_readme_runs(tmp_path):
    name = _write(tmp_path / "train.py", page_blocks.python("README.md", 2))
    code, out, err = commands.launch(2, name, cwd=tmp_path)
    assert code == 0, err
    assert all(f"rank {rank}: the average is 0.5" in out for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_blocks_of_the_page_on_names_make_a_script(tmp_path, num_processes):
    name = _write(tmp_path / "page.py", page_blocks.python("docs/eager.md"))
    code, out, err = commands.launch(num_processes, name, cwd=tmp_path)
    assert code == 0, err
    means = {1: "[1. 2.]", 2: "[1.5 3. ]"}
    for rank in range(num_processes):
        assert f"rank {rank} of {num_processes}: {means[num_processes]}" in out
        assert f"rank {rank} is done" in out


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("page", "most"),
    [
        ("batch_norm", 0.2),  # of a target whose variance is about 0.6
        ("hooks", 0.4),  # of a sine whose variance is about 0.5, as the others'
        ("zero1", 0.05),
        ("local_training", 0.1),
    ],
)
def test_the_example_of_a_page_runs(tmp_path, page, most):
    name = _write(tmp_path / "page.py", page_blocks.python(f"docs/{page}.md", 0))
    code, out, err = commands.launch(2, name, cwd=tmp_path)
    assert code == 0, err
    (loss,) = re.findall(r"replicas: 2, loss: ([\d.]+)", out)
    assert float(loss) < most


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_example_of_the_page_on_types_runs(tmp_path):
    name = _write(tmp_path / "page.py", page_blocks.python("docs/types.md", 0))
    code, out, err = commands.launch(2, name, cwd=tmp_path)
    assert code == 0, err
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 5 and losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_example_of_the_page_on_parameter_servers_runs(tmp_path):
    name = _write(
        tmp_path / "page.py", page_blocks.python("docs/parameter_server.md", 0)
    )
    arguments = ("launch", "--servers", 1, "--workers", 2, tmp_path / name)
    code, out, err = commands.jdp(*arguments)
    assert code == 0, err
    found = re.findall(r"sync\(backup=0\): loss ([\d.]+) at update (\d+)", out)
    assert [number for _, number in found] == ["100", "100"]
    assert all(float(loss) < 0.01 for loss, _ in found)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_server_of_the_page_keeps_checkpoints(tmp_path):
    block = page_blocks.python("docs/parameter_server.md", 1)
    assert "/disk/run1" in block
    name = _write(
        tmp_path / "page.py",
        page_blocks.PRELUDE,
        "from jdp import parameter_server",
        "place = parameter_server.Place.from_environ()",
        "if place.role == 'worker':",
        "    with parameter_server.Worker(params) as worker:",
        "        worker.pull()",
        "        worker.push({'w': np.ones(4, np.float32)})",
        "        print('w is', worker.pull()['w'])",
        "    raise SystemExit",
        "tx = optax.sgd(1.0)",
        block.replace("/disk", str(tmp_path)),
    )
    arguments = ("launch", "--servers", 1, "--workers", 1, tmp_path / name)
    code, out, err = commands.jdp(*arguments)
    assert code == 0, err
    assert "w is [-1. -1. -1. -1.]" in out
    assert list((tmp_path / "run1").iterdir())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_page_on_tracing_compares_two_ranks_that_went_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = _write(tmp_path / "page.py", page_blocks.python("docs/eager_tracing.md", 1))
    _, out, _ = commands.launch(2, name, cwd=tmp_path)
    # One of the two has waited long enough first.
    assert len(re.findall(r"'(loss|metric)' has waited for rank \d for 2 s", out)) == 2
    records = sorted(tmp_path.glob("jdp_flight_*.json"), key=lambda p: p.suffixes)
    code, out, err = commands.jdp("timeline", "diff", *records, cwd=tmp_path)
    assert code == 1, err
    page = "docs/eager_tracing.md"
    (block,) = [b for b in page_blocks.find("console") if b.page == page]
    printed = block.text.splitlines()[-5:]
    for line in printed:
        line = re.escape(line.split(" It failed")[0]).replace(r"2\.0", r"[\d.]+")
        assert re.search(line, out), line


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_page_reduces_within_a_host_and_across(tmp_path):
    name = _write(
        tmp_path / "page.py",
        page_blocks.PRELUDE,
        page_blocks.python("docs/collectives.md", 1),
        "@jdp.data_parallel",
        "def step(params, batch):",
        "    grad_fn = jdp.value_and_grad(",
        "        loss_fn, all_reduce=all_reduce, axis_name=('node', 'data')",
        "    )",
        "    loss, grads = grad_fn(params, batch)",
        "    return grads, {'loss': loss}",
        "grads, _ = step(params, batch)",
        "expected = jax.grad(loss_fn)(params, batch)['w']",
        "np.testing.assert_allclose(grads['w'], expected, rtol=1e-5)",
        "print('equal')",
    )
    code, out, err = commands.launch(2, name, cwd=tmp_path)
    assert code == 0, err
    assert out.count("equal") == 2


@pytest.mark.multiprocess
@pytest.mark.slow
def test_fragments_of_the_pages_run(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "tests.page_blocks"],
        cwd=tmp_path,
        env=commands.environ() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    fragments = [f for page in page_blocks.PYTHON.values() for f in page]
    num_fragments = len(fragments) - fragments.count(page_blocks.SCRIPT)
    assert len(re.findall(r"(?m)^\S+\.md:\d+$", result.stdout)) == num_fragments


def test_every_block_has_a_language_and_every_python_block_is_run():
    languages = {block.language for block in page_blocks.find()}
    assert languages == {
        "python",
        "sh",
        "console",
        "text",
        "yaml",
        "diff",
        "dockerfile",
    }
    for page in page_blocks.PAGES:
        blocks = [block for block in page_blocks.find("python") if block.page == page]
        assert len(blocks) == len(page_blocks.PYTHON.get(page, [])), page


def _lines():
    """The commands of all pages, as (place, words)."""
    for block in page_blocks.find("sh", "console"):
        text = block.text.replace("\\\n", " ")
        for number, line in enumerate(text.splitlines(), block.line):
            if block.language == "console":
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)  # A variable of the command alone.
            if words:
                yield f"{block.page}:{number}", words
    for page in page_blocks.PAGES:
        text = re.sub(r"(?ms)^```.*?^```$", "", (harness.ROOT / page).read_text())
        for command in re.findall(r"`(jdp [a-z][^`]*)`", text):
            words = [word for word in shlex.split(command) if word != "..."]
            yield f"{page}: {command}", words


def _find_command(words):
    """The command of `jdp` that the words name, and its arguments."""
    command = typer.main.get_command(main.app)
    rest = list(words)
    while hasattr(command, "commands") and rest and rest[0] in command.commands:
        command = command.commands[rest.pop(0)]
    return command, rest


def _check_jdp(words):
    command, rest = _find_command(words)
    assert command.name != "main", words
    several = getattr(command, "commands", {}).values()  # `jdp bench --json`
    params = [p for each in (command, *several) for p in each.params]
    options = {o for p in params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    for i, word in enumerate(rest):
        if word.endswith(".py"):
            if word != "train.py":  # the reader's own
                _check_script(harness.ROOT / word, rest[i + 1 :])
            break
        if word.startswith("-"):
            assert word.split("=")[0] in options, f"{word} of {words}"


def _check_script(path, words):
    text = path.read_text()
    for word in words:
        assert not word.startswith("--") or f'"{word}"' in text, (path, word)


def _check_make(words):
    makefile = (harness.ROOT / "Makefile").read_text()
    for target in words:
        if "=" not in target:
            assert re.search(rf"(?m)^{target}:", makefile), target


def _check_environment(words):
    assert words == ["-m", "venv", ".venv", "&&", ".", ".venv/bin/activate"]


def _check_python(words):
    if words[:1] == ["-m"]:
        assert (harness.ROOT / f"{words[1].replace('.', '/')}.py").is_file(), words


def _check_pip(words):
    assert words == ["install", "-e", "."]


def _check_started(words):
    """A launcher of a cluster starts a script of the reader's in Python."""
    assert words[-2:] == ["python", "train.py"], words


def _check_export(words):
    for name in re.findall(r"([A-Z_]+)=", " ".join(words)):
        known = (*environment.VARIABLES, launchers.COORDINATOR_ADDRESS)
        assert name in known, name


def _check_docker(words):
    assert words[0] in ("build", "run"), words
    assert "train" in words or words[-3:] == ["-t", "train", "."]


def _check_pgrep(words):
    assert words[-1].split()[0] == pathlib.Path(user_program.__file__).name


# What is not jdp's is looked at by people.
_CHECKS = {
    "jdp": _check_jdp,
    "make": _check_make,
    "python": _check_python,
    "python3": _check_environment,
    "pip": _check_pip,
    "srun": _check_started,
    "mpirun": _check_started,
    "export": _check_export,
    "docker": _check_docker,
    "pgrep": _check_pgrep,
    "py-spy": lambda words: None,
    "tr": lambda words: None,
    "nft": lambda words: None,
    "(umask": lambda words: None,  # openssl, in a subshell.
}


def test_commands_of_the_pages_exist_with_their_options():
    found = list(_lines())
    assert len(found) > 60
    for place, (program, *words) in found:
        assert program in _CHECKS, place
        _CHECKS[program](words)


def test_shell_of_the_pages_can_be_parsed():
    for block in page_blocks.find("sh"):
        result = subprocess.run(
            ["bash", "-n"], input=block.text, capture_output=True, text=True
        )
        assert result.returncode == 0, (block.page, block.line, result.stderr)


def test_plans_of_the_pages_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(
        f"{page_blocks.PRELUDE}\ninit_params, example_batch = params, batch\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    app = typer.main.get_command(main.app)
    blocks = [text for place, text in _lines() if re.search(r":\d+$", place)]
    plans = [words for words in blocks if words[:2] == ["jdp", "plan"]]
    assert len(plans) == 2
    for words in plans:
        app.main(words[1:], prog_name="jdp", standalone_mode=False)
        assert "halving_doubling" in capsys.readouterr().out


def test_the_key_of_the_page_on_security_is_private(tmp_path):
    (line,) = [
        line
        for block in page_blocks.find("sh")
        for line in block.text.splitlines()
        if line.startswith("(umask")
    ]
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True, timeout=10)
    assert os.stat(tmp_path / "job.key").st_mode & 0o777 == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}\n", (tmp_path / "job.key").read_text())
