"""SSH hosts: which hosts does a job run on, and how is each reached?

Everything here is pure but `find_address`. What a host needs to know, such as the key
of the job, travels on the stdin of `ssh`: command lines can be read by all accounts.
"""

import dataclasses
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_HOST = re.compile(r"((?:[\w.-]+@)?(?:[\w.-]+|\[[0-9a-fA-F:.%\w]+\]))(?::(\d{1,6}))?")
# Variables that a job takes along to all hosts.
_KEPT = ("JAX_", "XLA_", "JDP_", "NCCL_", "GLOO_", "LIBTPU_")
_KEPT_NAMES = ("PYTHONPATH", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONHASHSEED")
_GET_ADDRESS_S = 10.0
# A word of the user's own command comes first, and the first one counts for ssh.
# BatchMode: it never asks for a password. A host that is gone is noticed in 9 s, as on
# the lines between launchers.
_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=3", "-o", "ControlMaster=no"),
    *("-o", "ControlPath=none", "-o", "ServerAliveInterval=3"),
    *("-o", "ServerAliveCountMax=3", "-T", "-x"),
)
# Reads what it needs from stdin, byte by byte: what follows is for the launcher.
_BOOTSTRAP = (
    "import json,os,sys;"
    "c=json.loads(open(0,'rb',0,closefd=False).readline());"
    "os.environ.update(c['environ']);"
    "p=c['environ'].get('PYTHONPATH','');"
    "sys.path[:1]=[x for x in p.split(os.pathsep) if x];"
    "exec(c['start'])"
)
_START = """
try:
    from jdp.launch import ssh_end
except ImportError as error:
    sys.exit(f"jdp cannot be imported by {sys.executable}: {error}")
ssh_end.main(c)
"""


class Host(NamedTuple):
    """A host of a job."""

    name: str  # as ssh takes it, such as user@gpu1.
    num_processes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SshOptions:
    """How hosts are reached.

    Raises:
      ValueError: there is no command, or no path of Python.
    """

    command: str = "ssh"  # in the syntax of a shell, such as "ssh -F config".
    python: str  # path of the interpreter on all hosts.

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"`ssh` must be a command, {error}.") from None
        if not words:
            raise ValueError("`ssh` must be a command, such as 'ssh -F config'.")
        if not self.python:
            raise ValueError("`python` must be the path of Python on the hosts.")


def parse(text: str) -> tuple[Host, ...]:
    """Reads hosts, such as "a:4,b:4".

    Raises:
      ValueError: `text` has another form, or the numbers of processes differ.
    """
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if match is None or match[1].startswith("-") or match[2] == "0":
            raise ValueError(
                f"`hosts` must be host:slots, separated by commas, such as a:4,b:4, "
                f"got {text!r}. Slots are the processes of a host, 1 or more."
            )
        hosts.append(Host(match[1], int(match[2] or 1)))
    if len({host.num_processes for host in hosts}) > 1:
        raise ValueError(
            f"`hosts` must have equal slots: every host runs as many processes as the "
            f"others, got {text!r}."
        )
    return tuple(hosts)


def ssh_arguments(options: SshOptions, host: Host) -> list[str]:
    """Returns the command line that starts the launcher of a host; no secret in it."""
    name = host.name.replace("[", "").replace("]", "")
    remote = f"exec {shlex.quote(options.python)} -u -c {shlex.quote(_BOOTSTRAP)}"
    return [*shlex.split(options.command), *_OPTIONS, "--", name, remote]


def find_address(options: SshOptions, host: Host) -> str:
    """Returns the name or address that ssh connects to, which may follow from a config.

    If the command is not ssh, it is the name of the host without the user.
    """
    plain = host.name.rpartition("@")[2].strip("[]")
    try:
        done = subprocess.run(
            [*shlex.split(options.command), "-G", "--", host.name.strip("[]")],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GET_ADDRESS_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return plain
    found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return found[1] if done.returncode == 0 and found else plain


def kept_environ(
    environ: Mapping[str, str], without: Sequence[str] = ()
) -> dict[str, str]:
    """Returns the variables that go to all hosts; `without` names exceptions."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_KEPT) or name in _KEPT_NAMES) and name not in without
    }


def encode_charge(charge: Mapping[str, Any]) -> bytes:
    """Returns the first line on the stdin of a host."""
    return json.dumps({**charge, "start": _START}).encode() + b"\n"
