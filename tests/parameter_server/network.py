"""Network: two hosts with a link that a test can cut, as namespaces of this machine."""

import contextlib
import subprocess

ADDRESSES = ("10.97.0.1", "10.97.0.2")
_SETUP_TIMEOUT_S = 10.0


class Network:
    """Two network namespaces of a user namespace, with a pair of interfaces.

    Nothing outside of them is touched. A link that is down loses packets without a
    word, as a cable does: no connection ends.
    """

    def __init__(self):
        self._holders = []

    def __enter__(self):
        try:
            self._hold(["unshare", "--map-root-user", "--net"])
            self._hold([*self.enter(0), "unshare", "--net"])
            name = str(self._holders[1].pid)
            self._ip(0, "link", "add", "jdp0", "type", "veth", "peer", "name", "jdp1")
            self._ip(0, "link", "set", "jdp1", "netns", name)
            for host, address in enumerate(ADDRESSES):
                self._ip(host, "address", "add", f"{address}/24", "dev", f"jdp{host}")
                self._ip(host, "link", "set", f"jdp{host}", "up")
                self._ip(host, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        while self._holders:
            holder = self._holders.pop()
            holder.kill()
            holder.communicate()

    def enter(self, host):
        """Returns the words that a command of that host begins with."""
        pid = str(self._holders[host].pid)
        namespaces = ["--user", "--net", "--preserve-credentials"]
        return ["nsenter", "--target", pid, *namespaces, "--"]

    def cut(self):
        self._ip(0, "link", "set", "jdp0", "down")

    def mend(self):
        self._ip(0, "link", "set", "jdp0", "up")

    def _hold(self, command):
        """Keeps a namespace by a process in it, which ends with its stdin."""
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo; read _"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._holders.append(holder)
        if holder.stdout.readline() != b"\n":
            raise OSError(f"{command} failed")

    def _ip(self, host, *arguments):
        subprocess.run(
            [*self.enter(host), "ip", *arguments],
            check=True,
            capture_output=True,
            timeout=_SETUP_TIMEOUT_S,
        )


def is_allowed():
    """Whether this machine lets this user make such hosts."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        with Network():
            return True
    return False
