"""Sessions: which workers does a server serve, and how does it reach them?"""

import dataclasses
import time
from typing import Any

from jdp.parameter_server import messages
from jdp.parameter_server.messages import Failed
from jdp.parameter_server.shared_memory_lane import SharedMemoryLane
from jdp.parameter_server.sockets import ServerSocket

MOST_SESSIONS = 4096  # as many as a follower remembers.
_FAREWELL_S = 0.5
_TICK_S = 0.1


@dataclasses.dataclass
class WorkerSession:
    """A worker that takes part."""

    route: bytes
    worker: int
    shared_memory: SharedMemoryLane | None


class WorkerSessions:
    """Workers that take part, and routes to others that must hear of the end."""

    def __init__(self, socket: ServerSocket):
        self._socket = socket
        self._of_name: dict[bytes, WorkerSession] = {}
        self._outside: dict[
            bytes, None
        ] = {}  # routes of workers that do not take part.

    def __len__(self) -> int:
        return len(self._of_name)

    def get(self, name: bytes) -> WorkerSession | None:
        """Returns the session of a worker that takes part, if any."""
        return self._of_name.get(name)

    def add(self, name: bytes, session: WorkerSession) -> None:
        """Lets a worker take part.

        Raises:
          MessageError: there are too many workers.
        """
        if name not in self._of_name and len(self._of_name) >= MOST_SESSIONS:
            raise messages.MessageError(f"is one worker more than {MOST_SESSIONS}")
        self._of_name[name] = session
        self._outside.pop(session.route, None)

    def remove(self, name: bytes) -> None:
        """Leaves a worker out, if it takes part."""
        if (session := self._of_name.pop(name, None)) is not None:
            self.note_outside(session.route)

    def clear(self) -> None:
        """Leaves all workers out, until they say hello again."""
        for name in list(self._of_name):
            self.remove(name)

    def note_outside(self, route: bytes) -> None:
        """Remembers the route of a worker that does not take part."""
        self._outside[route] = None
        if len(self._outside) > MOST_SESSIONS:
            del self._outside[next(iter(self._outside))]

    def send(self, session: WorkerSession, message: Any, payload: Any = None) -> None:
        """Sends a message to a worker that takes part."""
        self._socket.send(session.route, messages.encode(message), payload)

    def tell_all(self, message: Any) -> None:
        """Sends a message to all workers, whether or not they take part."""
        routes = [session.route for session in self._of_name.values()]
        for route in dict.fromkeys([*routes, *self._outside]):
            self._socket.send(route, messages.encode(message))

    def tell_failure(self, text: str) -> None:
        """Tells all workers why the server fails, late ones included."""
        self.tell_all(Failed(text))
        # Unread messages are lost when the connection ends.
        deadline_s = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline_s:
            self._socket.poll(_TICK_S)
            for message in self._socket.receive():
                assert isinstance(message.source, bytes)
                if not message.is_server:
                    self._socket.send(message.source, messages.encode(Failed(text)))
