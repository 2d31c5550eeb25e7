"""Every example runs, as a user would start it."""

import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

from tests import commands, harness, rarely

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_digits_trains_to_97_percent_on_equal_replicas(tmp_path):
    plot = tmp_path / "loss.png"
    words = ("launch", "-n", 2, "examples/digits.py", "--plot", plot)
    code, out, err = commands.jdp(*words)
    assert code == 0, err
    assert plot.read_bytes().startswith(b"\x89PNG")
    (final,) = re.findall(r"replicas: 2, bitwise equal; test accuracy: (.*)%", out)
    assert float(final) > 97.0
    epochs = re.findall(
        r"\[0\] epoch +\d+  loss [\d.]+ +\d+ images/s  test accuracy [\d.]+%", out
    )
    assert len(epochs) == 25
    # The progress bar and all else is the main process' alone.
    assert not [s for s in out.splitlines() if s.startswith("[1]") and "Gloo" not in s]
    assert re.search(r"\[0\] training .*100%", out)


@pytest.mark.slow
def test_digits_names_a_batch_size_that_does_not_divide():
    code, _, err = commands.launch(2, "examples/digits.py", "--batch-size", 63)
    assert code == 1
    assert "multiple of the number of replicas, 2, from 1 to 1500; got 63" in err


@pytest.mark.slow
@pytest.mark.parametrize("name, at_least", [("nnx", 95), ("linen", 95)])
def test_flax_scripts_learn_on_two_processes(name, at_least):
    code, out, err = commands.launch(2, f"examples/flax_{name}_digits.py")
    assert code == 0, err
    found = re.findall(r"\[(\d)\] epoch 9: .* test loss [\d.]+, accuracy (.*)%", out)
    assert {process for process, _ in found} == {"0", "1"}
    assert len({accuracy for _, accuracy in found}) == 1
    assert float(found[0][1]) > at_least


def test_digits_names_a_typo():
    code, _, err = commands.launch(1, "examples/digits.py", "--epoch", "x")
    assert code == 2
    assert "argument --epochs: invalid int value: 'x'" in err


@pytest.mark.slow
def test_power_sgd_sends_a_quarter():
    options = ("--hooks", "power_sgd", "--epochs", 2)
    code, out, err = commands.launch(2, "examples/power_sgd.py", *options)
    assert code == 0, err
    (row,) = re.findall(r"power_sgd +([\d,]+) bytes per step  test .* ([\d.]+)%", out)
    assert int(row[0].replace(",", "")) < 0.25 * 24_364  # of float32 gradients and loss
    assert float(row[1]) > 80


@pytest.mark.slow
def test_zero1_goes_on_with_another_number_of_replicas(tmp_path):
    options = ("--steps", 40, "--checkpoint", tmp_path)
    held = []
    for n, begin in ((2, 0), (1, 40)):
        code, out, err = commands.launch(n, "examples/zero1.py", *options)
        assert code == 0, err
        (found,) = re.findall(r"step (\d+): a replica holds ([\d,]+) bytes", out)
        assert int(found[0]) == begin
        held.append(int(found[1].replace(",", "")))
        (done,) = re.findall(
            rf"step {begin + 40}, replicas: {n}, .* accuracy ([\d.]+)%", out
        )
        assert float(done) > 75
    assert held[1] == pytest.approx(2 * held[0], rel=0.01)


@pytest.mark.slow
def test_diloco_learns_beside_plain_training():
    # 3 replicas: they do not divide the held-out samples.
    options = ["--steps", 60, "--period", 20, "--batch-size", 513]
    code, out, err = commands.launch(3, "examples/diloco.py", *options)
    assert code == 0, err
    losses = [float(x) for x in re.findall(r"held-out loss ([\d.]+)", out)]
    assert len(losses) == 2 and max(losses) < 4.0  # log 128 is 4.85
    assert re.search(r"training's by [-+\d.]+%, with [\d.]+ of its bytes", out)


def _newest(path, *version):
    result = subprocess.run(
        [harness.ROOT / "tools/newest-python", *version],
        env={
            "PATH": f"{path}:/usr/bin:/bin",
            "HOME": str(path),
            "PYENV_ROOT": str(path),
        },
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout.strip()


def test_the_newest_python_is_one_that_runs(tmp_path):
    def install(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    install("python3", "echo 3 11")
    install("python3.14", "echo 'pyenv: python3.14: command not found' >&2; exit 127")
    assert _newest(tmp_path, "3", "12") == (1, "")
    install("python3.12", "echo 3 12")
    assert _newest(tmp_path, "3", "12") == (0, "python3.12")
    (tmp_path / "versions/3.13.0/bin").mkdir(parents=True)
    install("versions/3.13.0/bin/python3", "echo 3 13")
    code, found = _newest(tmp_path, "3", "12")
    assert (code, found) == (0, str(tmp_path / "versions/3.13.0/bin/python3"))
    install("python3.14", "echo 3 9")  # as numbers, not as text
    assert _newest(tmp_path, "3", "12")[1] == found


@pytest.mark.slow
def test_unused_branch_counts_the_steps_of_each_head():
    code, out, err = commands.launch(2, "examples/unused_branch.py", "--steps", 400)
    assert code == 0, err
    lines = re.findall(
        r"(\w+): used in (\d+) of 400 steps, Adam counts (\d+); test accuracy (.*)%",
        out,
    )
    assert [line[0] for line in lines] == ["digit", "parity"]
    for _, used, counted, accuracy in lines:
        assert used == counted
        assert 0 < int(used) < 400
        assert float(accuracy) > 88
    # Drawn with 0.75 and 0.25 by two replicas: 1 - 0.25**2 and 1 - 0.75**2 of 400.
    expected = np.array([375, 175])
    deviations = np.sqrt(expected * (400 - expected) / 400)
    found = np.array([int(line[1]) for line in lines])
    assert np.all(abs(found - expected) < 5 * deviations)


@pytest.mark.slow
def test_accumulation_takes_the_step_of_the_whole_batch_in_less_memory():
    code, out, err = commands.launch(2, "examples/accumulation.py")
    assert code == 0, err
    memory = dict(re.findall(r"([\w-]+ ?\w*): ([\d.]+) MB of temporary memory", out))
    assert float(memory["micro-batches"]) < float(memory["whole batch"])
    # Adam's first step is 3e-3 a weight, whatever the size of the gradient.
    (difference,) = re.findall(r"one step differs by (.*) at most", out)
    assert float(difference) < 3e-5
    (accuracy,) = re.findall(r"test accuracy (.*)%", out)
    assert float(accuracy) > 95


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 3])
def test_uneven_inputs_are_those_of_one_process(num_processes):
    epochs = {2: 6, 3: 10}[num_processes]
    code, out, err = commands.launch(
        num_processes, "examples/uneven_inputs.py", "--epochs", epochs
    )
    assert code == 0, err
    rows = re.findall(r"(\w+) +: +(\d+) samples .* ([\d.]+)%, .* off by (\S+)", out)
    found = {name: (int(n), float(a), float(off)) for name, n, a, off in rows}
    assert list(found) == ["process", "join", "drop", "pad"]
    num_samples, accuracy, off = found["join"]
    assert (num_samples, accuracy) == (1500, found["process"][1]) and accuracy > 95
    # A thousand steps of sums of up to a hundred terms, in another order.
    assert off < 1e-4 < 0.1 < min(found["drop"][2], found["pad"][2])
    assert found["drop"][0] < 1500 < found["pad"][0]


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 3])
def test_eager_trains_by_name_with_uneven_data(num_processes):
    code, out, err = commands.launch(num_processes, "examples/eager.py", "--epochs", 4)
    assert code == 0, err
    last = re.findall(r"\[0\] epoch \d: loss [\d.]+, the last was rank (\d)", out)
    # The one with the most data.
    assert last == [str(num_processes - 1)] * 4
    (accuracy,) = re.findall(r"\[0\] test accuracy ([\d.]+)%", out)
    assert float(accuracy) > 90
    right = dict(re.findall(r"ranks \[([\d, ]+)\] have (\d+) right", out))
    heard = re.findall(r"rank (\d) heard: Mismatched all_reduce shapes of 'mist", out)
    if num_processes == 1:
        assert not right and not heard
    else:
        assert set(right) == {"0, 2", "1"} and set(heard) == {"0", "1", "2"}
        total = sum(map(int, right.values()))
        assert float(accuracy) == pytest.approx(100 * total / 297, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_compiled_step_runs_among_names(num_processes):
    options = ("--steps", 60)
    code, out, err = commands.launch(
        num_processes, "examples/mixed_eager_and_jit.py", *options
    )
    assert code == 0, err
    ((total, counts),) = re.findall(r"labels of (\d+) samples: \[(.*)\]", out)
    assert int(total) == sum(map(int, counts.split(","))) == 60 * 32 * num_processes
    assert "1.000 at most" in out  # of pixels, the brightest.
    (loss,) = re.findall(rf"replicas: {num_processes}, loss: ([\d.]+)", out)
    assert float(loss) < 1.0 < np.log(10)


@pytest.mark.slow
def test_parameter_servers_train_with_a_slow_worker():
    options = ("--mode", "bounded", "--epochs", 4, "--slow-s", 0.001)
    roles = ("--servers", 2, "--workers", 2, "--json")
    path = "examples/parameter_server.py"
    code, out, err = commands.jdp("launch", *roles, path, *options)
    assert code == 0, err
    (accuracy,) = re.findall(r"bounded\(staleness=4\): test accuracy ([\d.]+)%", out)
    assert float(accuracy) > 90
    found = re.findall(r"worker \d: (\d+) steps .*'applied': (\d+)", out)
    assert found == [("184", "184")] * 2
    assert '"updates": 368, ' in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "example,arguments,message",
    [
        ("uneven_inputs", ("--batch-size", 9999), "--batch-size must be a multiple"),
        ("accumulation", ("--micro-batches", 9999), "--micro-batches must be from 1"),
    ],
)
def test_examples_name_an_option_that_does_not_fit_the_job(example, arguments, message):
    code, _, err = commands.launch(1, f"examples/{example}.py", *arguments)
    assert code == 1
    assert message in err


@pytest.mark.parametrize(
    "example,arguments,message",
    [
        ("eager", "--batch-size 0", "--batch-size must be from 1 to 100"),
        ("eager", "--epoks 2", "unrecognized arguments: --epoks"),
        ("mixed_eager_and_jit", "--steps 0", "--steps must be at least 1"),
        ("mixed_eager_and_jit", "--batch-size x", "invalid int value: 'x'"),
        ("uneven_inputs", "--skew 0", "--skew must be above 0"),
        ("uneven_inputs", "--skwe 2", "unrecognized arguments: --skwe"),
        ("unused_branch", "--steps 0", "--steps must be at least 1"),
        ("unused_branch", "--share-of-parity 2", "--share-of-parity must be from"),
        ("unused_branch", "--stpes 2", "unrecognized arguments: --stpes"),
        ("accumulation", "--epochs x", "invalid int value: 'x'"),
        ("parameter_server", "--mode fast", "argument --mode: invalid choice: 'fast'"),
        ("parameter_server", "--slow-s 11", "--slow-s must be from 0 to 10"),
    ],
)
def test_examples_name_a_bad_option(example, arguments, message, monkeypatch, capsys):
    # Refused before there is a job; what becomes of exit codes is shown above.
    path = str(harness.ROOT / f"examples/{example}.py")
    monkeypatch.setattr(sys, "argv", [path, *arguments.split()])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(path, run_name="__main__")
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_accumulation_names_a_batch_size_that_does_not_divide():
    code, _, err = commands.launch(2, "examples/accumulation.py", "--batch-size", 7)
    assert code == 1
    assert "--batch-size must be a multiple of the number of replicas, 2" in err


@pytest.mark.slow
def test_all_reduces_reach_the_same_loss():
    options = ("--steps", 5, "--width", 64, "--explain")
    code, out, err = commands.launch(2, "examples/all_reduces.py", *options)
    assert code == 0, err
    assert "does not take the custom all-reduce: it runs on GPUs" in out
    found = dict(re.findall(r"\[0\] ([\w-]+) +loss ([\d.]+) +[\d.]+ ms per step", out))
    adasum = found.pop("adasum")
    names = {"psum", "auto", "ring", "halving-doubling", "butterfly", "tree"}
    assert set(found) == names
    assert len(set(found.values())) == 1 and adasum != found["psum"]


@pytest.mark.parametrize(
    "name", rarely.cases(["eager", "mixed_eager_and_jit"], often=("eager",))
)
def test_a_negative_seed_is_named(name):
    code, _, err = commands.launch(1, f"examples/{name}.py", "--seed", -1)
    assert code == 2
    assert "--seed must be at least 0" in err
