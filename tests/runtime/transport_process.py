"""One process of a star, for tests that stop and kill it.

`python -m tests.runtime.transport_process FOLDER RANK NUM HEARTBEAT_S` talks until the
file FOLDER/stop is there, or the hub is lost. It prints what it loses, and when.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

from jdp.replicas.mesh import World
from jdp.runtime.transport import transport
from jdp.runtime.transport.transport import Lost


class FileStore:
    """As much of a `jdp.types.Store` as a meeting needs, in a folder."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def set(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        path = self._folder / key.replace("/", ".")
        half = path.with_suffix(f".{os.getpid()}")
        half.write_bytes(value)
        half.rename(path)

    def get(self, key: str, *, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        while (value := self.try_get(key)) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(key)
            time.sleep(0.01)
        return value

    def try_get(self, key: str) -> bytes | None:
        path = self._folder / key.replace("/", ".")
        return path.read_bytes() if path.exists() else None

    def list_directory(self, directory: str) -> dict[str, bytes]:
        prefix = directory.replace("/", ".") + "."
        paths = [path.name for path in self._folder.glob(f"{prefix}[0-9]")]
        found = {name.removeprefix(prefix): self.try_get(name) for name in paths}
        return {name: value for name, value in found.items() if value is not None}


def make_world(folder: str, rank: int, num: int) -> World:
    unused: Any = None
    store: Any = FileStore(pathlib.Path(folder))
    return World(unused, "data", rank, num, 20.0, store)


def main() -> None:
    folder, rank, num, heartbeat_s = sys.argv[1:]
    world = make_world(folder, int(rank), int(num))
    options = transport.LinkOptions(heartbeat_timeout_s=float(heartbeat_s))
    link = transport.open_link(world, key="link", options=options)
    say(event="open", pid=os.getpid())
    alive = set(range(1, int(num))) if world.process_index == 0 else {0}
    num_received = 0
    while alive and not pathlib.Path(folder, "stop").exists():
        if world.process_index == 0:
            for peer in alive:
                link.send(peer, b"tick")
        for event in link.wait(0.05):
            if isinstance(event, Lost):
                say(event="lost", peer=event.peer, why=event.why)
                alive.discard(event.peer)
            else:
                num_received += 1
                if world.process_index:
                    link.send(0, event.payload)
    say(event="end", num_received=num_received)
    link.close()


def say(**fields: Any) -> None:
    # This clock is one for all processes of a machine.
    print(json.dumps({"at_s": time.monotonic(), **fields}), flush=True)


if __name__ == "__main__":
    main()
