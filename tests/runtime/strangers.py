"""Strangers: whoever else may connect to the hub of a transport."""

import contextlib
import socket
import struct
import threading

import zmq

HTTP = b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"
# How a client of gRPC begins: the preface of HTTP/2, SETTINGS and WINDOW_UPDATE.
GRPC = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    b"\x00\x00\x24\x04\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x03\x00\x00\x00"
    b"\x00\x00\x04\x00\x40\x00\x00\x00\x05\x00\x40\x00\x00\x00\x06\x00\x00\x20\x00\xfe"
    b"\x03\x00\x00\x00\x01\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x3f\x00\x01"
)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + bytes(32)
GREETING_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
# A long frame of 2 ** 62 bytes is declared, and begun.
HUGE = GREETING + b"\x02" + (1 << 62).to_bytes(8, "big") + bytes(1000)
HUGE_COMMAND = GREETING + b"\x06" + (1 << 62).to_bytes(8, "big") + bytes(1000)
OLD = b"\x01\x00" + b"\x08\x00payload"  # ZMTP 1.0: no greeting.
SPEECHES = {
    "nothing": b"",
    "text": b"hello?\n",
    "zeros": bytes(4096),
    "http": HTTP,
    "grpc": GRPC,
    "greeting": GREETING,
    "greeting null": GREETING_NULL,
    "greeting twice": GREETING * 2,
    "huge": HUGE,
    "huge command": HUGE_COMMAND,
    "old": OLD,
}


def dial(endpoint: str, *, timeout_s: float = 2.0) -> socket.socket:
    """Connects a plain socket to an endpoint of ZeroMQ."""
    if endpoint.startswith("ipc://@"):
        line = socket.socket(socket.AF_UNIX)
        try:
            # With a timeout of Python's, it would fail at once while the queue is full.
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            line.connect("\0" + endpoint.removeprefix("ipc://@"))
        except OSError:
            line.close()
            raise
        line.settimeout(timeout_s)
        return line
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)


def speak(endpoint: str, speech: bytes, *, wait_s: float = 0.0) -> bytes:
    """Says `speech`; returns what comes back before the end, or within `wait_s`."""
    with contextlib.suppress(OSError), dial(endpoint) as line:
        line.sendall(speech)
        line.settimeout(wait_s or 0.001)
        heard = bytearray()
        with contextlib.suppress(TimeoutError):
            while data := line.recv(1 << 16):
                heard += data
        return bytes(heard)
    return b""


@contextlib.contextmanager
def fire(endpoint: str, *, num_threads: int = 2):
    """Strangers connect and speak all the time, while the body runs."""
    is_over = threading.Event()

    def run(index: int) -> None:
        context = zmq.Context()
        rounds = 0
        while not is_over.is_set():
            rounds += 1
            speeches = list(SPEECHES.values())
            speak(endpoint, speeches[(rounds + index) % len(speeches)])
            if rounds % 4 == 0:
                client = context.socket(zmq.DEALER)
                client.setsockopt(zmq.LINGER, 0)
                if rounds % 8 == 0:
                    keys = zmq.curve_keypair()
                    client.setsockopt(zmq.CURVE_PUBLICKEY, keys[0])
                    client.setsockopt(zmq.CURVE_SECRETKEY, keys[1])
                    client.setsockopt(zmq.CURVE_SERVERKEY, keys[0])
                client.connect(endpoint)
                client.send(b"let me in")
                is_over.wait(0.001)
                client.close()
        context.term()

    threads = [
        threading.Thread(target=run, args=(i,), name=f"stranger {i}", daemon=True)
        for i in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(10.0)
