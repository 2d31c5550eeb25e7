"""The package says that it has types, wherever it is installed from."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from tests import harness


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
        return {
            "wheel": of_wheel.namelist(),
            "source": [name.removeprefix(top) for name in of_source.getnames()],
        }


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_what_is_shipped_has_the_marker_of_types(names, kind):
    assert "jdp/py.typed" in names[kind]
    assert "jdp/__init__.py" in names[kind] and "jdp_command.py" in names[kind]


def test_a_package_index_is_told_that_jdp_has_types():
    settings = tomllib.loads((harness.ROOT / "pyproject.toml").read_text())
    assert "Typing :: Typed" in settings["project"]["classifiers"]
