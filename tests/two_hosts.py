"""Two hosts on one machine: each has its own network, name, processes and /dev/shm.

For tests of whatever spans hosts; needs root and `ip` of iproute2:

    with two_hosts.make("debian") as hosts:
        outcomes = hosts.launch(["-n", "2", "-m", "tests.two_hosts_program"])

`python -m tests.two_hosts` runs the whole table: `make two-hosts`.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests import harness

# "names": the hosts know themselves and each other by the addresses between them.
# "debian": the own name of a host is 127.0.1.1 there, as Debian and Ubuntu have it.
KINDS = ("names", "debian")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES_6 = ("fd77::1", "fd77::2")
NAMES = ("hosta", "hostb")
PORT = 29500
_LIMIT_S = 300.0  # for a job of the table; a few seconds, unless the machine is busy.
_ON_A_HOST = 'hostname "$0" && mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'


class Outcome(NamedTuple):
    """What became of a command on one host."""

    exit_code: int
    output: str  # stdout and stderr.


@functools.cache
def why_not() -> str:
    """Returns why this machine cannot have two hosts; "" if it can."""
    if not sys.platform.startswith("linux"):
        return "two hosts need network namespaces of Linux"
    if os.geteuid() != 0:
        return "two hosts need root, to make network namespaces"
    for tool in ("ip", "unshare", "mount", "hostname"):
        if shutil.which(tool) is None:
            return f"two hosts need the tool `{tool}`, which is not installed"
    try:
        with make("names") as hosts:
            (first, _) = hosts.run([["true"], ["true"]], timeout_s=30.0)
    except RuntimeError as error:
        return f"two hosts cannot be made here: {error}"
    return "" if first.exit_code == 0 else f"two hosts do not work: {first.output}"


@contextlib.contextmanager
def make(kind: str) -> "Iterator[Hosts]":
    """Makes two hosts, and takes them away with all that runs on them.

    Raises:
      RuntimeError: this machine refuses to; see `why_not`.
    """
    token = secrets.token_hex(3)
    hosts = Hosts((f"jdp-{token}-a", f"jdp-{token}-b"))
    devices = [f"j{token}a", f"j{token}b"]
    try:
        for name in hosts.namespaces:
            _ip("netns", "add", name)
        _ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for i, name in enumerate(hosts.namespaces):
            _ip("link", "set", devices[i], "netns", name)
            inside = ("netns", "exec", name, "ip")
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "addr", "add", f"{ADDRESSES[i]}/24", "dev", devices[i])
            six = f"{ADDRESSES_6[i]}/64"
            _ip(*inside, "addr", "add", six, "dev", devices[i], "nodad")
            _ip(*inside, "link", "set", devices[i], "up")
            folder = pathlib.Path("/etc/netns", name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(_hosts_file(kind, i))
        yield hosts
    finally:
        for name in hosts.namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir("/etc/netns")  # If nothing else is in it.


class Hosts:
    """Two hosts that can reach each other."""

    def __init__(self, namespaces: tuple[str, str]):
        """Use `make`."""
        self.namespaces = namespaces

    def launch(
        self,
        arguments: Sequence[str],
        *,
        coordinator: str = f"{ADDRESSES[0]}:{PORT}",
        timeout_s: float = 110.0,
        environ: dict[str, str] | None = None,
    ) -> list[Outcome]:
        """Runs `jdp launch --nodes 2` with `arguments` on both."""
        meet = ["--nodes", "2", "--coordinator", coordinator]
        commands = [
            [*_JDP, "launch", *meet, "--node-rank", str(rank), *arguments]
            for rank in range(2)
        ]
        return self.run(commands, timeout_s=timeout_s, environ=environ)

    def run(
        self,
        commands: Sequence[Sequence[str]],
        *,
        timeout_s: float,
        environ: dict[str, str] | None = None,
    ) -> list[Outcome]:
        """Runs one command on each; kills with all it has started what takes longer."""
        deadline_s = time.monotonic() + timeout_s
        with contextlib.ExitStack() as stack:
            started = []
            for i, command in enumerate(commands):
                log = stack.enter_context(tempfile.TemporaryFile())
                process = self.start(i, command, stdout=log, environ=environ)
                stack.callback(_end, process)
                started.append((process, log))
            outcomes = []
            for process, log in started:
                try:
                    code = process.wait(max(0.1, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = -1
                    _end(process)
                log.seek(0)
                outcomes.append(Outcome(code, log.read().decode(errors="replace")))
        return outcomes

    def start(
        self,
        index: int,
        command: Sequence[str],
        *,
        stdout: object,
        environ: dict[str, str] | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Starts a command on one host; when the process ends, so does all of it."""
        inside = ["unshare", "-u", "-m", "-p", "-i", "--fork", "--kill-child"]
        start = ["ip", "netns", "exec", self.namespaces[index], *inside]
        shell = ["--mount-proc", "bash", "-c", _ON_A_HOST, NAMES[index]]
        kept = harness.compile_fast_environ()
        kept = {k: v for k, v in kept.items() if not k.startswith("JDP_")}
        return subprocess.Popen(
            [*start, *shell, *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            env={**kept, "PYTHONPATH": harness.python_path(), **(environ or {})},
            cwd=harness.ROOT,
        )


_JDP = (sys.executable, "-m", "jdp.cli.main")


def write_key(folder: str | os.PathLike[str]) -> str:
    """Writes keys for parameter servers, which serve `jdp launch -n` too."""
    from jdp import parameter_server

    path = os.path.join(folder, "job.key")
    parameter_server.make_keys(path)
    return path


def serve_commands(per_host: int, key_file: str) -> list[list[str]]:
    """Commands of a job with a parameter server on the first host, workers on both."""
    program = ["-m", "tests.two_hosts_program"]
    where = ["--address", f"{ADDRESSES[0]}:{PORT + 1}", "--key-file", key_file]
    base = [*_JDP, "launch", *where, "--all-workers", str(2 * per_host)]
    here = ["--workers", str(per_host)]
    return [
        [*base, "--servers", "1", *here, *program],
        [*base, "--servers", "0", *here, "--first", str(per_host), *program],
    ]


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()  # `unshare`, and so the first process of its namespace.
    process.wait()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`ip {' '.join(arguments)}`: {done.stderr.strip()}")


def _hosts_file(kind: str, index: int) -> str:
    known = list(ADDRESSES)
    if kind == "debian":
        known[index] = "127.0.1.1"
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    return "\n".join(
        lines + [f"{a} {n}" for a, n in zip(known, NAMES, strict=True)] + [""]
    )


def main() -> None:
    """Runs everything on both kinds of hosts, 1 and 2 processes each."""
    if why := why_not():
        print(f"two hosts: skipped, {why}")
        return
    failed = 0
    coordinators = (f"{ADDRESSES[0]}:{PORT}", f"{NAMES[0]}:{PORT}")
    coordinators += (f"[{ADDRESSES_6[0]}]:{PORT}",)
    with tempfile.TemporaryDirectory() as folder:
        key_file = write_key(folder)
        for kind, per_host in itertools.product(KINDS, (1, 2)):
            count = ["-n", str(per_host)]
            for coordinator in coordinators:
                arguments = [*count, "-m", "tests.two_hosts_program"]
                with make(kind) as hosts:
                    found = hosts.launch(
                        arguments, coordinator=coordinator, timeout_s=_LIMIT_S
                    )
                failed += _show(f"{kind} {per_host} {coordinator}", found)
            with make(kind) as hosts:
                arguments = [*count, "--key-file", key_file, "examples/digits.py"]
                found = hosts.launch(arguments, timeout_s=_LIMIT_S)
            failed += _show(f"{kind} {per_host} digits with a key", found)
            with make(kind) as hosts:
                commands = serve_commands(per_host, key_file)
                found = hosts.run(commands, timeout_s=_LIMIT_S)
            failed += _show(f"{kind} {per_host} parameter server", found)
    sys.exit(failed > 0)


def _show(what: str, outcomes: Sequence[Outcome]) -> bool:
    has_failed = any(o.exit_code for o in outcomes)
    print(f"{what}: {'FAILED' if has_failed else 'trained'}", flush=True)
    for outcome in outcomes if has_failed else ():
        print(f"  exit {outcome.exit_code}\n{outcome.output}")
    return has_failed


if __name__ == "__main__":
    main()
