"""Measurement cache: times of all-reduces that an earlier job measured.

Process 0 keeps them in files, one per kind of job, in the folder of the environment
variable `JDP_CACHE_DIR`, by default `jdp` in `XDG_CACHE_HOME` or `~/.cache`. A kind of
job is the machines, how replicas lie on them, and the versions of JAX and XLA's
backend. A file that is damaged, or cannot be written, is ignored; a folder may be
removed at any time.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable, Collection

import jax
import msgspec

from jdp.collectives.cost_model import Curve, Links
from jdp.replicas import agreement, cores, wire
from jdp.replicas.mesh import World

_logger = logging.getLogger("jdp")
_VERSION = 2  # of the files, and of the algorithms whose times they hold.
_MAX_BYTES = 1 << 20


class Machine(msgspec.Struct, frozen=True):
    """The part of a machine that one process has."""

    host: str
    processor: str
    num_cores: float  # that the process may use.
    devices: list[str]


class StoredTimes(msgspec.Struct, frozen=True):
    """Content of a file."""

    latency_s: float
    bandwidth_bytes_per_s: float
    compute_s_per_byte: float
    measured: tuple[Curve, ...]


def find_or_measure(
    world: World, algorithms: Collection[str], measure: Callable[[], Links]
) -> Links:
    """Returns what is stored for jobs like this one, or measures and stores it.

    Every process calls it, and all get the same result.

    Args:
      world: the replicas.
      algorithms: names of the all-reduces; a file with others is ignored.
      measure: called on every process if nothing is stored; returns the same on all.

    Raises:
      RuntimeError: a process did not take part.
    """
    usable = cores.find_usable()
    own = Machine(
        platform.node(),
        platform.processor() or platform.machine(),
        min(len(usable.ids), usable.quota),
        [device.device_kind for device in world.local_devices],
    )
    paths: list[pathlib.Path] = []

    def decide(bodies: list[bytes]) -> bytes:
        paths.append(_path(world, bodies))
        return _read(paths[0], algorithms)

    topic = "search for stored times of all-reduces"
    found = agreement.meet(world, topic, msgspec.msgpack.encode(own), decide)
    links = _decode(found, algorithms)
    if links is not None:
        return links
    links = measure()
    if paths and links.measured:  # On process 0.
        _write(paths[0], links)
    return links


def _path(world: World, bodies: list[bytes]) -> pathlib.Path:
    """Returns the file for jobs like this one, given the machines of all processes."""
    what = "A machine of a process"
    machines = [wire.decode(body, Machine, what=what) for body in bodies]
    hosts = list(dict.fromkeys(machine.host for machine in machines))
    kinds = [
        (hosts.index(x.host), x.processor, x.num_cores, x.devices) for x in machines
    ]
    backend = world.local_devices[0].client.platform_version
    facts = [_VERSION, jax.__version__, backend, world.mesh.devices.shape, kinds]
    name = hashlib.sha256(msgspec.msgpack.encode(facts)).hexdigest()[:32]
    return _folder() / "all_reduce_times" / f"{name}.msgpack"


def _folder() -> pathlib.Path:
    given = os.environ.get("JDP_CACHE_DIR")
    if given:
        return pathlib.Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "jdp"


def _read(path: pathlib.Path, algorithms: Collection[str]) -> bytes:
    """Returns the content of a file, or nothing unless it is valid."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # It may be a named pipe.
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MAX_BYTES) or b""
    except OSError:
        return b""
    return b"" if _decode(data, algorithms) is None else data


def _decode(data: bytes, algorithms: Collection[str]) -> Links | None:
    try:
        found = wire.decode(data, StoredTimes, what="A file of times of all-reduces")
        links = Links(**msgspec.structs.asdict(found))
    except (ValueError, RuntimeError):
        return None
    are_valid = all(
        curve.is_possible() and curve.algorithm in algorithms
        for curve in links.measured
    )
    return links if links.measured and are_valid else None


def _write(path: pathlib.Path, links: Links) -> None:
    stored = StoredTimes(
        links.latency_s,
        links.bandwidth_bytes_per_s,
        links.compute_s_per_byte,
        links.measured,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, made = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(stored))
            os.replace(made, path)  # A reader finds all of it, or nothing.
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(made)
            raise
    except OSError as error:
        _logger.debug("Times of all-reduces are not stored: %s", error)
