"""`jdp doctor`: what it shows, and what it says to be broken."""

import importlib.metadata
import os
import pathlib
import platform
import re
import socket
import subprocess
import sys
import tomllib

import pytest
import zmq

from jdp.cli import doctor, main
from jdp.eager import EagerOptions
from tests import harness


def _environ(**environ):
    kept = harness.compile_fast_environ()
    kept = {k: v for k, v in kept.items() if not k.startswith("JDP_")}
    return {**kept, "PYTHONPATH": harness.python_path(), "COLUMNS": "200", **environ}


def _lines(text):
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.fixture
def run(monkeypatch, capsys):
    """The command, in this process."""

    def run(*arguments, **environ):
        monkeypatch.setattr(os, "environ", _environ(**environ))
        with pytest.raises(SystemExit) as caught:
            main.app(("doctor", *arguments))
        return caught.value.code, _lines(capsys.readouterr().out)

    return run


@pytest.mark.multiprocess
def test_it_shows_what_is_here():
    process = subprocess.run(
        [sys.executable, "-m", "jdp.cli.main", "doctor"],
        env=_environ(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (process.returncode, process.stderr) == (0, "")
    lines = _lines(process.stdout)
    assert lines[-1] == "Nothing is broken."
    for package in ("jax", "numpy", "pyzmq"):
        assert f"{package} {importlib.metadata.version(package)}" in lines
    assert f"libzmq {zmq.zmq_version()}, with CURVE" in lines
    assert "JDP_* none is set" in lines
    assert "a job of 1 process" in lines and "eager all_reduce works" in lines
    assert "1. shared memory not here: there is one member" in lines
    assert "5. local copy takes host arrays: for a process set of one process" in lines


@pytest.mark.multiprocess
@pytest.mark.skipif(platform.machine() != "x86_64", reason="shared memory is for x86")
@pytest.mark.slow
def test_two_processes_share_memory_unless_it_is_switched_off(run):
    code, lines = run("-n", "2")
    assert code == 0 and "a job of 2 processes" in lines
    assert "1. shared memory takes host arrays: 16 MiB for each of 2 processes" in lines
    # Variables of a launcher that started this one are not for the job.
    place = {"JDP_NUM_PROCESSES": "5", "JDP_PROCESS_ID": "3"}
    code, lines = run(
        "-n", "2", JDP_EAGER_SHARED_MEMORY_BYTES="0", JDP_EAGER_TIMELINE="x", **place
    )
    assert code == 1 and "1 thing is broken." in lines
    assert "eager all_reduce works" in lines
    why = "switched off by `shared_memory_bytes=0`"
    assert f"1. shared memory not here: {why}" in lines
    assert any(re.match(r"4\. XLA \(gloo\) takes host arrays", line) for line in lines)
    assert not pathlib.Path("x.rank0").exists()


@pytest.mark.multiprocess
def test_a_backend_that_does_not_start_is_broken(run):
    code, lines = run(JAX_PLATFORMS="abacus")
    assert (code, lines[-1]) == (1, "1 thing is broken.")
    assert "! failed exit code 1" in lines
    assert any("abacus" in line for line in lines)


def test_variables_that_do_not_parse_are_broken():
    environ = {
        "JDP_EAGER_FUSON_BYTES": "1",
        "JDP_EAGER_CYCLE_TIME_S": "fast",
        "JDP_EAGER_CACHE_CAPACITY": "-1",
        "JDP_EAGER_STALL_SHUTDOWN_S": "30",
        "JDP_EAGER_STALL_WARNING_S": "10",
        "JDP_PROCES_ID": "0",
        "HOME": "/",
    }
    parsed, found = doctor.check_environ(environ)
    assert parsed.keys() == {"JDP_EAGER_STALL_SHUTDOWN_S", "JDP_EAGER_STALL_WARNING_S"}
    assert EagerOptions.from_environ(parsed).stall_shutdown_s == 30
    broken = {each.name: each.value for each in found if each.is_broken}
    assert set(broken) == set(environ) - set(parsed) - {"HOME"}
    assert "there is no such option" in broken["JDP_EAGER_FUSON_BYTES"]
    assert "must be a number, got 'fast'" in broken["JDP_EAGER_CYCLE_TIME_S"]
    assert "must be at least 0, got -1" in broken["JDP_EAGER_CACHE_CAPACITY"]
    assert broken["JDP_PROCES_ID"] == "0: jdp has no such variable."


@pytest.mark.parametrize(
    "name", ["JDP_CACHE_DIR", "JDP_KEEP_FREED_MEMORY", "JDP_PARAMETER_SERVER_ROLE"]
)
def test_variables_that_other_parts_of_jdp_read_are_known(name):
    _, (only,) = doctor.check_environ({name: "0"})
    assert (only.name, only.is_broken) == (name, False)


def test_a_shutdown_before_the_warning_is_broken():
    parsed, found = doctor.check_environ({"JDP_EAGER_STALL_SHUTDOWN_S": "5"})
    (only,) = found
    assert not parsed and only.is_broken
    assert "`stall_shutdown_s` (5) must be 0 or at least" in only.value


def test_half_a_launcher_is_broken():
    _, found = doctor.check_environ({"JDP_NUM_PROCESSES": "2"})
    (broken,) = [each for each in found if each.is_broken]
    assert "are set in the environment but" in broken.value


def test_a_package_that_is_missing_is_broken(monkeypatch):
    def version(name, real=importlib.metadata.version):
        if name in ("scipy", "bayesian-optimization"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {each.name: each for each in doctor.find_versions()}
    assert found["scipy"].value == "missing" and found["scipy"].is_broken
    assert not found["numpy"].is_broken
    # An extra is, once what it is for is switched on.
    for is_on in ("0", "1"):
        extra, *_ = doctor.find_extras({"JDP_EAGER_AUTOTUNE": is_on})
        assert extra == ("autotune", "without bayesian-optimization", is_on == "1")


def test_a_libzmq_without_curve_is_broken(monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    *_, found = doctor.find_versions()
    assert found.is_broken and found.value.endswith("built without CURVE")


def test_packages_are_those_of_pyproject():
    project = tomllib.loads((harness.ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[>=\[]", each)[0] for each in project["dependencies"]}
    assert {name for name in names if not name.startswith("jax")} == set(
        doctor.REQUIRED
    )
    extras = project["optional-dependencies"]
    # Those are for work on jdp itself.
    assert set(doctor.EXTRAS) == set(extras) - {"docs", "ptx", "test"}
    for extra, packages in doctor.EXTRAS.items():
        names = {re.split(r"[>=\[]", each)[0] for each in extras[extra]}
        assert names - {"jax"} == set(packages)


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (("-n", "0"), "Invalid value for '-n': "),
        (("--processes", "2"), "No such option: --processes"),
    ],
)
def test_a_typo_is_named(arguments, expected, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main.app(("doctor", *arguments))
    assert caught.value.code == 2
    assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("text, is_broken", [("5e" * 32, False), ("secret", True)])
def test_the_secret_of_a_job_is_not_shown(text, is_broken):
    _, (found,) = doctor.check_environ({"JDP_JOB_KEY": text})
    assert found.is_broken == is_broken
    assert text not in found.value.replace("a secret", "")


def _resolve_to(*hosts):
    def getaddrinfo(name, port, **_):
        if not hosts:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, 1, 6, "", (host, 0)) for host in hosts]

    return getaddrinfo


@pytest.mark.parametrize(
    "hosts,expected",
    [
        (["10.0.0.7"], "hosta, 10.0.0.7"),
        (["127.0.1.1", "10.0.0.7"], "hosta, 127.0.1.1, 10.0.0.7"),
        (["127.0.1.1"], "hosta, 127.0.1.1: the loopback interface. Other hosts cannot"),
        ([], "hosta, which has no address here (Name or service not known). Other"),
    ],
)
def test_a_host_whose_own_name_is_a_loopback_address_is_found(
    monkeypatch, hosts, expected
):
    monkeypatch.setattr(socket, "getaddrinfo", _resolve_to(*hosts))
    text = doctor.describe_own_name("hosta")
    assert text.startswith(expected)
    assert ("/etc/hosts" in text) == (expected.endswith(("cannot", "Other")))
