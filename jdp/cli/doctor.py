"""`jdp doctor`: what does this machine have for jdp, and is anything broken?"""

import importlib.metadata
import json
import os
import pathlib
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import typer

from jdp.launch import launch
from jdp.runtime import addresses, environment, freed_memory, job_key

# Packages that are required besides jax, and optional ones, as in pyproject.toml.
REQUIRED = (
    *("numpy", "optax", "msgspec", "psutil", "pyzmq", "rich", "scipy", "typer"),
    "typing_extensions",
)
EXTRAS = {
    "autotune": ("bayesian-optimization",),
    "checkpoints": ("orbax-checkpoint",),
    "examples": (
        *("dm-haiku", "equinox", "flax", "grain", "orbax-checkpoint", "scikit-learn"),
        "tensorboardX",
    ),
    "flax": ("flax",),
    "gpu": ("nvidia-ml-py",),
    "peers": ("torch",),
    "plot": ("matplotlib", "plotext"),
    "prometheus": ("prometheus_client",),
}
_NUM_LAST_LINES = 15
_CACHE_DIR = "JDP_CACHE_DIR"  # of `collectives.measurement_cache`.


class Check(NamedTuple):
    """One property of the machine, and whether it is broken."""

    name: str
    value: str
    is_broken: bool = False


Sections = dict[str, list[Check]]


def doctor(
    num_processes: Annotated[
        int, typer.Option("-n", min=1, help="Number of processes of the test job.")
    ] = 1,
) -> None:
    """Show what this machine has for jdp, and run a test job.

    It shows versions, the host, the environment variables and whether they parse, the
    devices, and the ways in which the eager engine can move data, in order of
    preference. The test job uses that engine. The exit code is 1 if something is
    broken.
    """
    parsed, variables = check_environ(os.environ)
    sections = {
        "versions": find_versions(),
        "extras": find_extras(parsed),
        "host": find_host(),
        "variables": variables,
    }
    _print(sections)
    job = try_job(num_processes, parsed)
    _print(job)
    sections |= job
    num_broken = sum(f.is_broken for found in sections.values() for f in found)
    noun = "thing is" if num_broken == 1 else "things are"
    typer.echo(f"{num_broken} {noun} broken." if num_broken else "Nothing is broken.")
    raise typer.Exit(1 if num_broken else 0)


def find_versions() -> list[Check]:
    """Returns the versions of required packages; a missing package is broken."""
    names = {d.name for d in importlib.metadata.distributions() if d.name}
    jax_names = sorted(n for n in names if re.fullmatch(r"jax(lib)?|jax[-_].+", n))
    found = [
        Check("python", f"{platform.python_version()}, {sys.executable}"),
        Check("jdp", _version("jdp") or "not installed, only on the path"),
    ]
    for name in (*jax_names, *REQUIRED):
        version = _version(name)
        found.append(Check(name, version or "missing", version is None))
    return [*found, _find_zmq()]


def _find_zmq() -> Check:
    try:
        import zmq  # as late as the engine does.
    except ImportError as error:
        return Check("libzmq", f"cannot be loaded: {error}", True)
    version = zmq.zmq_version()
    if not zmq.has("curve"):
        return Check("libzmq", f"{version}, built without CURVE", True)
    return Check("libzmq", f"{version}, with CURVE")


def find_extras(variables: Mapping[str, str]) -> list[Check]:
    """Returns which extras are installed; only an extra in use can be broken.

    Args:
      variables: options of the eager engine.
    """
    from jdp.eager.options import EagerOptions

    needed = {"autotune"} if EagerOptions.from_environ(variables).autotune else set()
    found = []
    for extra, packages in EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        missing = [package for package, version in versions.items() if not version]
        there = [f"{package} {version}" for package, version in versions.items()]
        text = f"without {', '.join(missing)}" if missing else ", ".join(there)
        found.append(Check(extra, text, bool(missing) and extra in needed))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_host() -> list[Check]:
    """Returns facts about the machine."""
    import psutil  # Late: other commands do not need it.

    cpus = len(psutil.Process().cpu_affinity()) if _is_linux() else os.cpu_count()
    memory = psutil.virtual_memory()
    found = [
        Check("system", f"{platform.system()} {platform.release()}"),
        Check("CPUs", f"{cpus} of {os.cpu_count()}, {platform.machine()}"),
        Check("memory", f"{_mib(memory.available)} of {_mib(memory.total)} free"),
        Check("own name", describe_own_name(platform.node())),
    ]
    try:
        shared = os.statvfs("/dev/shm")
    except OSError as error:
        why = f"none: {error.strerror}; processes cannot share memory"
        return [*found, Check("/dev/shm", why)]
    free = shared.f_bavail * shared.f_frsize
    total = shared.f_blocks * shared.f_frsize
    return [*found, Check("/dev/shm", f"{_mib(free)} of {_mib(total)} free")]


def describe_own_name(name: str) -> str:
    """Returns the addresses that the name of this host has here, and advice."""
    advice = (
        "Other hosts cannot reach that. jdp offers them the address at which a process "
        "reaches the coordinator. Programs that look up their own name, as JAX does "
        f"without jdp, need a line in /etc/hosts with an address of {name} that other "
        "hosts can reach."
    )
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"{name}, which has no address here ({error.strerror}). {advice}"
    hosts = list(dict.fromkeys(str(info[4][0]) for info in found))
    text = f"{name}, {', '.join(hosts)}"
    if all(addresses.is_loopback(host) for host in hosts):
        return f"{text}: the loopback interface. {advice}"
    return text


def _is_linux() -> bool:
    return sys.platform == "linux"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20:,} MiB"


def check_environ(environ: Mapping[str, str]) -> tuple[dict[str, str], list[Check]]:
    """Checks the environment variables of jdp.

    Args:
      environ: the variables of this process.

    Returns:
      The options of the eager engine that parse, by variable; and the checks.
    """
    from jdp.eager.options import PREFIX, EagerOptions
    from jdp.parameter_server import keys

    known = {*environment.VARIABLES, environment.JOB_ID, freed_memory.SWITCH}
    known |= {_CACHE_DIR, *keys.VARIABLES, keys.REPORT, keys.DISPLAY_FD}
    mine = {k: v for k, v in environ.items() if k.startswith("JDP_")}
    parsed: dict[str, str] = {}
    found = []
    # In reverse, so that the warning time comes before the shutdown time, which must
    # not be less.
    for variable, text in sorted(mine.items(), reverse=True):
        why = ""
        if variable.startswith(PREFIX):
            try:
                EagerOptions.from_environ(parsed | {variable: text})
                parsed[variable] = text
            except ValueError as error:
                why = str(error)
        elif variable == job_key.VARIABLE:
            text, why = _describe_key(mine)
        elif variable not in known:
            why = "jdp has no such variable."
        found.append(Check(variable, f"{text}{': ' if why else ''}{why}", bool(why)))
    found.reverse()
    try:
        environment.LaunchEnvironment.from_environ(mine)
    except ValueError as error:
        found.append(Check("of `jdp launch`", str(error), True))
    return parsed, found or [Check("JDP_*", "none is set")]


def _describe_key(environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns a text that hides the secret of a job, and why it is invalid, or ""."""
    try:
        job_key.from_environ(environ)
    except ValueError as error:
        return "a secret", str(error)
    return "a secret, which is not shown", ""


def try_job(num_processes: int, variables: Mapping[str, str]) -> Sections:
    """Starts processes that run an eager collective, and returns their findings.

    Args:
      num_processes: number of processes.
      variables: options of the engine.
    """
    noun = "process" if num_processes == 1 else "processes"
    title = f"a job of {num_processes} {noun}"
    base = {k: v for k, v in os.environ.items() if not k.startswith("JDP_")}
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as log:
        exit_code = launch.launch(
            launch.Command(
                kind="module", target="jdp.cli.doctor_worker", arguments=(name,)
            ),
            launch.LaunchOptions(num_processes=num_processes),
            environ={**base, **variables},
            stdout_fd=log.fileno(),
            stderr_fd=log.fileno(),
        )
        if exit_code:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            last = "\n".join(lines[-_NUM_LAST_LINES:])
            return {title: [Check("failed", f"exit code {exit_code}\n{last}", True)]}
        files = [pathlib.Path(name, str(rank)) for rank in range(num_processes)]
        reports: list[Any] = [json.loads(file.read_text()) for file in files]
    devices = dict.fromkeys(f"{r['num_devices']} x {r['device']}" for r in reports)
    first = reports[0]
    job = [
        Check("backend", first["backend"]),
        Check("devices of each", ", ".join(devices)),
        *(Check(f"GPUs: {k}", v) for k, v in first["topology"].items()),
        Check("eager all_reduce", first["outcome"], not first["is_right"]),
    ]
    ways = [
        Check(f"{i}. {name}", f"{takes}: {text}")
        for i, (name, text, takes) in enumerate(first["implementations"], 1)
    ]
    return {title: job, "what its eager operations run on, first choice first": ways}


def _print(sections: Sections) -> None:
    import rich.console
    import rich.table
    import rich.text

    console = rich.console.Console(highlight=False)
    for title, found in sections.items():
        console.print(title, style="bold")
        grid = rich.table.Table.grid(padding=(0, 1))
        grid.add_column(width=1)
        grid.add_column(width=26, overflow="fold")
        grid.add_column(overflow="fold")
        for each in found:
            mark = "!" if each.is_broken else ""
            # Values may contain brackets that are not markup.
            grid.add_row(mark, rich.text.Text(each.name), rich.text.Text(each.value))
        console.print(grid)
