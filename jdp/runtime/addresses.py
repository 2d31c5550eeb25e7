"""Addresses: how are hosts and ports written, and which of them is this machine?"""

from collections.abc import Sequence

_MAPPED = "::ffff:"  # prefix of an IPv4 address on an IPv6 socket.


def split(address: str) -> tuple[str, int]:
    """Splits "host:port" into the host, without brackets, and the port.

    Raises:
      ValueError: `address` has another form, such as IPv6 without brackets.
    """
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    inner = host[1:-1] if is_bracketed else host
    is_right = bool(inner) and (is_bracketed or ":" not in inner)
    if not is_right or not port.isascii() or not port.isdigit() or len(port) > 5:
        raise ValueError(f"must be host:port or [IPv6]:port, got {address!r}")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"must have a port from 1 to 65535, got {address!r}")
    return inner, int(port)


def join(host: str, port: int) -> str:
    """Inverts `split`."""
    return f"{bracket(host)}:{port}"


def bracket(host: str) -> str:
    """Returns `host` as it is written before a port."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Returns whether `host` names this machine only."""
    host = unmap(host.strip("[]"))
    return host in ("localhost", "::1") or host.startswith("127.")


def unmap(host: str) -> str:
    """Returns an IPv4-mapped IPv6 address as IPv4, any other address unchanged."""
    inner = host.removeprefix(_MAPPED)
    return inner if "." in inner else host


def choose_host(reached: Sequence[str]) -> tuple[str, bool]:
    """Chooses the address of process 0 that its peers on other hosts can reach; pure.

    Args:
      reached: for each process that connected, the numeric address of this host that
        it connected to. Processes on this host may have used the loopback interface.

    Returns:
      The address, and whether it serves all processes: each connected to it, or is on
      this host.
    """
    outer = list(dict.fromkeys(host for host in reached if not is_loopback(host)))
    inner = list(dict.fromkeys(host for host in reached if is_loopback(host)))
    if not outer:
        return (inner[0] if inner else "127.0.0.1"), len(inner) < 2
    return outer[0], len(outer) == 1
