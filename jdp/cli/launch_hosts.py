"""`jdp launch -H`: how does one command line become a job on several hosts?"""

import dataclasses
import os
import sys
from typing import Any

import jdp
from jdp.launch import launch as launching
from jdp.launch import ssh_hosts, ssh_starter
from jdp.runtime import addresses, environment, job_key


def make_starter(
    command: launching.Command,
    *,
    hosts: str,
    ssh: str,
    python: str,
    key_file: str,
    **options: Any,
) -> ssh_starter.Starter:
    """Makes what starts `command` on all hosts.

    Args:
      command: not checked here: the script is on the hosts.
      hosts: as `ssh_hosts.parse` reads them.
      ssh: command of ssh.
      python: path of Python there; "": the path of this one.
      key_file: file of the key; "": JDP_JOB_KEY, or else a new key.
      options: fields of `launching.LaunchOptions` that are the same on all hosts.

    Raises:
      ValueError: an option is wrong, or node 0 has no address that others can reach.
    """
    parsed = ssh_hosts.parse(hosts)
    reached = ssh_hosts.SshOptions(command=ssh, python=python or sys.executable)
    key = job_key.read_file(key_file) if key_file else None
    key = key or job_key.from_environ(os.environ) or job_key.make()
    shared = {**options, "coordinator_address": options["coordinator_address"] or ""}
    address = ""
    if not shared["coordinator_address"]:
        found = {ssh_hosts.find_address(reached, host): host for host in parsed}
        address = next(iter(found))
        if addresses.is_loopback(address) and not all(
            map(addresses.is_loopback, found)
        ):
            raise ValueError(
                f"`hosts` begins with {parsed[0].name!r}, whose address {address} the "
                "other hosts cannot reach. Give it by the name that they know, or give "
                "`coordinator`."
            )
    # Checks what all hosts get, before anything starts.
    launching.LaunchOptions(
        num_processes=1,
        **{**options, "coordinator_address": options["coordinator_address"] or None},
    )
    charge = {
        "version": jdp.__version__,
        "folder": os.getcwd(),
        "environ": ssh_hosts.kept_environ(os.environ, environment.VARIABLES),
        "key": key.hex(),
        "address": address,
        "options": shared,
        "command": {
            name: value
            for name, value in dataclasses.asdict(command).items()
            if name != "is_checked"
        },
    }
    return ssh_starter.Starter(parsed, reached, charge)
