"""Proxy: a link between a worker and a server that a test can cut."""

import contextlib
import select
import socket
import threading


class Proxy:
    """Listens, and carries what comes to an address and back, until it is cut."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs = {}
        self._is_cut = self._is_over = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def cut(self):
        """Ends all connections, and refuses new ones."""
        self._is_cut = True

    def mend(self):
        self._is_cut = False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._is_over = True
        self._thread.join(5.0)

    def _run(self):
        while not self._is_over:
            ends = [self._listener, *self._pairs]
            for end in select.select(ends, [], [], 0.02)[0]:
                if end is self._listener:
                    self._accept()
                elif end in self._pairs:
                    self._carry(end)
            if self._is_cut:
                self._drop_all()
        self._drop_all()
        self._listener.close()

    def _accept(self):
        end, _ = self._listener.accept()
        if self._is_cut:
            end.close()
            return
        other = socket.create_connection(self._target)
        self._pairs |= {end: other, other: end}

    def _carry(self, end):
        data = b""
        with contextlib.suppress(OSError):
            data = end.recv(1 << 16)
        if data:
            with contextlib.suppress(OSError):
                self._pairs[end].sendall(data)
        else:
            other = self._pairs.pop(end)
            self._pairs.pop(other)
            end.close()
            other.close()

    def _drop_all(self):
        while self._pairs:
            end, other = self._pairs.popitem()
            self._pairs.pop(other, None)
            end.close()
            other.close()
