"""The package says that it has types, wherever it is installed from."""

import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import jdp
from tests import commands, harness, rarely

_SPEC = importlib.util.spec_from_file_location(
    "release_check", harness.ROOT / "tools/release_check.py"
)
release_check = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(release_check)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The files of a wheel and of a source distribution, as they are built."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder],
        cwd=harness.ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as of_wheel, tarfile.open(source) as of_source:
        top = source.name.removesuffix(".tar.gz") + "/"
        (place,) = [n for n in of_wheel.namelist() if n.endswith("/METADATA")]
        return {
            "metadata": email.message_from_bytes(of_wheel.read(place)),
            "wheel": of_wheel.namelist(),
            "source": [name.removeprefix(top) for name in of_source.getnames()],
        }


@pytest.mark.parametrize("kind", rarely.cases(["wheel", "source"], often=("source",)))
def test_what_is_shipped_has_the_marker_of_types(names, kind):
    assert "jdp/py.typed" in names[kind]
    assert "jdp/__init__.py" in names[kind] and "jdp_command.py" in names[kind]


def test_a_wheel_has_the_package_alone_and_a_release_is_refused_otherwise(names):
    assert release_check.check_files(names["wheel"], names["source"]) == []
    strange = [*names["wheel"], "tests/__init__.py"]
    assert release_check.check_files(strange, names["source"]) == [
        "the wheel has tests/__init__.py"
    ]
    bare = [name for name in names["wheel"] if not name.endswith("py.typed")]
    assert release_check.check_files(bare, names["source"]) == [
        "the wheel lacks jdp/py.typed"
    ]


def test_a_wheel_says_what_it_is_and_what_it_needs(names):
    fields = names["metadata"]
    assert fields["Name"] == "jdp" and fields["Version"] == jdp.__version__
    assert fields["Author"] == "jdp developers"
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    assert {"jax", "ddp", "launcher"} <= {*fields["Keywords"].split(",")}
    classifiers = fields.get_all("Classifier")
    assert "Typing :: Typed" in classifiers
    for python in release_check.PYTHONS:
        assert f"Programming Language :: Python :: {python}" in classifiers
    assert f"jax>={release_check.lowest_jax()}" in fields.get_all("Requires-Dist")
    assert fields.get_payload().startswith("# ")  # README, as an index shows it.


def test_a_release_is_tried_with_every_python_and_the_lowest_and_newest_jax():
    tried = release_check.environments()
    for python in ("3.11", "3.12", "3.13"):
        for jax in ("0.10.2", "newest"):
            assert release_check.Environment(python, jax) in tried
    assert {where.kind for where in tried} == {"wheel", "sdist"}


def test_make_builds_and_tries_a_release_in_an_environment_of_its_own():
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "release-check"],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == (
        ".venv-release/bin/python tools/release_check.py"
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_smoke_test_of_a_release_trains():
    code, out, err = commands.launch(2, "tools/release_smoke.py")
    assert code == 0, err
    assert out.count(f"trained with jdp {jdp.__version__}, jax ") == 2


def test_the_number_of_the_version_is_semantic():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|(a|b|rc)\d+)?", jdp.__version__)
    changes = (harness.ROOT / "CHANGELOG.md").read_text()
    assert f"## Unreleased: {jdp.__version__.partition('.dev')[0]}\n" in changes
    assert "semantic versions" in (harness.ROOT / "CONTRIBUTING.md").read_text()


def test_a_package_index_is_told_that_jdp_has_types():
    settings = tomllib.loads((harness.ROOT / "pyproject.toml").read_text())
    assert "Typing :: Typed" in settings["project"]["classifiers"]
