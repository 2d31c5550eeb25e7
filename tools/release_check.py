"""Release check: does what would be published install, launch and train?

Builds the sdist and, from it, the wheel; checks their metadata and files; installs the
wheel into clean environments, and trains in each with two processes. Run it with
`make release-check`; it needs a network, and Pythons as of pyenv or on PATH.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
MARKERS = ("jdp/__init__.py", "jdp/py.typed", "jdp_command.py")
# The only other places of a wheel; tests, docs and tools stay out.
_OF_WHEEL = re.compile(r"jdp/|jdp_command\.py$|jdp-[^/]+\.dist-info/")
_LIMIT_S = 900.0


class Environment(NamedTuple):
    """A clean environment in which the release is tried."""

    python: str  # such as 3.11.
    jax: str  # a version, or "newest".
    kind: str = "wheel"  # or "sdist".


def lowest_jax() -> str:
    """Returns the lowest jax that pyproject.toml allows."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (text,) = [
        each for each in settings["project"]["dependencies"] if each.startswith("jax>")
    ]
    return text.removeprefix("jax>=")


def environments() -> list[Environment]:
    """Returns every Python with the lowest and the newest jax, and one sdist."""
    jaxes = (lowest_jax(), "newest")
    table = [Environment(python, jax) for python in PYTHONS for jax in jaxes]
    return [*table, Environment(PYTHONS[-1], "newest", "sdist")]


def find_python(version: str) -> str | None:
    """Returns a Python of this version that runs here and can make environments."""
    root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python3"))
    for candidate in (*map(str, reversed(found)), f"python{version}"):
        check = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run(
                [candidate, "-c", check], capture_output=True, text=True, timeout=60
            )
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def check_files(wheel: list[str], sdist: list[str]) -> list[str]:
    """Returns what is wrong with the files of a wheel and an sdist."""
    wrong = [f"the wheel lacks {name}" for name in MARKERS if name not in wheel]
    wrong += [f"the sdist lacks {name}" for name in MARKERS if name not in sdist]
    if "LICENSE" not in sdist or not any(n.endswith("/LICENSE") for n in wheel):
        wrong.append("the license is missing")
    strange = [name for name in wheel if not _OF_WHEEL.match(name)]
    return wrong + [f"the wheel has {name}" for name in strange]


def names_of(wheel: pathlib.Path, sdist: pathlib.Path) -> tuple[list[str], list[str]]:
    """Returns the files of a wheel, and of an sdist without its top folder."""
    top = sdist.name.removesuffix(".tar.gz") + "/"
    with zipfile.ZipFile(wheel) as of_wheel, tarfile.open(sdist) as of_sdist:
        names = [name.removeprefix(top) for name in of_sdist.getnames()]
        return of_wheel.namelist(), names


def build(folder: pathlib.Path, tools: pathlib.Path) -> dict[str, pathlib.Path]:
    """Builds and checks both; returns their paths, by kind."""
    _run([tools, "-m", "build", "--outdir", folder, ROOT])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    _run([tools, "-m", "twine", "check", "--strict", wheel, sdist])
    if wrong := check_files(*names_of(wheel, sdist)):
        sys.exit("release-check: " + "; ".join(wrong))
    return {"wheel": wheel, "sdist": sdist}


def try_in(python: str, where: Environment, release: pathlib.Path) -> str:
    """Installs and launches in a new environment; returns the last words."""
    with tempfile.TemporaryDirectory(prefix="jdp-release-") as name:
        folder = pathlib.Path(name)
        _run([python, "-m", "venv", folder / "venv"])
        binaries = folder / "venv/bin"
        wanted = [str(release)]
        if where.jax != "newest":
            wanted += [f"jax=={where.jax}", f"jaxlib=={where.jax}"]
        pip = [binaries / "python", "-m", "pip"]
        pip += ["--quiet", "--disable-pip-version-check"]
        _run([*pip, "install", *wanted])
        _run([*pip, "check"])
        shutil.copy(ROOT / "tools/release_smoke.py", folder / "train.py")
        _run([binaries / "jdp", "--version"], cwd=folder)
        out = _run([binaries / "jdp", "launch", "-n", "2", "train.py"], cwd=folder)
        trained = [line for line in out.splitlines() if "trained" in line]
        if len(trained) != 2:
            sys.exit(f"release-check: {where} did not train:\n{out}")
        return trained[0]


def _run(command: list[object], *, cwd: pathlib.Path = ROOT) -> str:
    """Runs a command apart from this checkout; ends the program if it fails."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode != 0:
        words = " ".join(map(str, command))
        sys.exit(
            f"release-check: `{words}` ended with {done.returncode}:\n{done.stdout}"
        )
    return done.stdout


def main() -> None:
    """Builds in --tools, tries all environments, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=ROOT / "dist", type=pathlib.Path)
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    releases = build(out, pathlib.Path(sys.executable))
    print(f"release-check: {', '.join(path.name for path in releases.values())}: built")
    missing = 0
    for where in environments():
        what = f"{where.kind}, Python {where.python}, jax {where.jax}"
        python = find_python(where.python)
        if python is None:
            missing += 1
            print(f"release-check: {what}: no such Python here", flush=True)
            continue
        said = try_in(python, where, releases[where.kind])
        print(f"release-check: {what}: {said}", flush=True)
    if missing:
        sys.exit(f"release-check: {missing} environments could not be tried")


if __name__ == "__main__":
    main()
