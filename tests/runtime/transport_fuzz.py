"""Fuzz: bytes that nobody should send, at a hub's port and at its parser.

`python -m tests.runtime.transport_fuzz --messages 1000000 --seed 1`
"""

import argparse
import contextlib
import os
import random
import select
import socket
import threading
import time
from concurrent import futures

import zmq

from jdp.replicas.meeting import StoreMeeting
from jdp.runtime.transport import rendezvous, transport
from jdp.runtime.transport.transport import Received
from tests import harness
from tests.runtime import strangers

_PER_CONNECTION = 50  # messages for the parser, for one that goes to the port.


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Changes a few things in `data`."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = bytes((rng.randrange(256),))
            case 1:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del out[at : at + rng.randrange(1, 9)]
            case 3 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case _:
                out[at:] = out[at:] * 2
    return bytes(out[: 1 << 16])


def fuzz_parser(rng: random.Random, num_messages: int) -> None:
    """Whatever comes is a frame that would be written so, or an error."""
    kinds = (transport.DATA, transport.HELLO, transport.GOODBYE)
    for _ in range(num_messages):
        payload = rng.randbytes(rng.randrange(40))
        frame = transport.encode(transport.DATA, payload)
        assert transport.decode(memoryview(frame)) == (transport.DATA, payload)
        frame = mutate(rng, frame) if rng.random() < 0.8 else payload
        try:
            kind, payload = transport.decode(memoryview(frame))
        except transport.FrameError as error:
            assert str(error).startswith("sent ")
            continue
        assert kind in kinds and transport.encode(kind, payload) == frame


def record_handshake(endpoint: str, hub_key: bytes) -> bytes:
    """What a client with a good hub key says first; its own key is not known."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = zmq.Context()
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        public_key, secret_key = zmq.curve_keypair()
        client.setsockopt(zmq.CURVE_PUBLICKEY, public_key)
        client.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        client.setsockopt(zmq.CURVE_SERVERKEY, hub_key)
        client.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        near, _ = server.accept()
        said = bytearray()
        with near, strangers.dial(endpoint) as far:
            while ready := select.select([near, far], [], [], 0.5)[0]:
                for line in ready:
                    data = line.recv(1 << 16)
                    if line is near:
                        said += data
                    (far if line is near else near).sendall(data)
                    if not data:
                        ready.clear()
                if not ready:
                    break
        client.close()
        context.term()
    return bytes(said)


def fuzz_port(
    rng: random.Random, endpoint: str, hub_key: bytes, num_connections: int
) -> None:
    """Connects, and says what begins like a handshake, or not."""
    good = record_handshake(endpoint, hub_key)
    assert len(good) > 264, len(good)  # a greeting of 64 and a HELLO of 200 bytes.
    speeches = [good] * 8 + list(strangers.SPEECHES.values())
    for _ in range(num_connections):
        if rng.random() < 0.1:
            speech = rng.randbytes(rng.randrange(1, 400))
        else:
            speech = mutate(rng, rng.choice(speeches))
        # Some wait for an answer in the middle.
        at = rng.choice((64, 264, len(speech)))
        with contextlib.suppress(OSError), strangers.dial(endpoint) as line:
            line.sendall(speech[:at])
            if rng.random() < 0.2:
                line.settimeout(0.002)
                with contextlib.suppress(TimeoutError):
                    line.recv(1 << 12)
            line.settimeout(2.0)
            line.sendall(speech[at:])


def fuzz(endpoint_kind: str, num_messages: int, seed: int) -> int:
    """Fuzzes while a hub and a spoke talk; returns how many messages those sent."""
    is_over = threading.Event()
    num_echoes = 0

    def run(world):
        nonlocal num_echoes
        options = transport.LinkOptions(max_message_bytes=1 << 16)
        link, _ = rendezvous.open_sockets(world, key="link", options=options)
        if world.process_index == 1:
            while isinstance(event := _next(link), Received):
                link.send(0, event.payload)
            link.close()
            return event
        endpoint = link._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        meeting = StoreMeeting(world.store, "link", 0, 1.0)
        offers = rendezvous._hear_offers(world, meeting, options, [0])
        hub_key = offers[0].public_key
        rng = random.Random(seed)

        def attack() -> str:
            try:
                num_connections = num_messages // _PER_CONNECTION
                fuzz_port(rng, endpoint, hub_key, num_connections)
                fuzz_parser(rng, num_messages)
            finally:
                is_over.set()
            return "done"

        attacker = pool.submit(attack)
        while not is_over.is_set():
            payload = b"%d" % num_echoes * (num_echoes % 50)
            link.send(1, payload)
            event = _next(link)
            assert event == Received(1, payload), event
            num_echoes += 1
        link.close()
        return attacker.result()

    endpoints = {"ipc": _find_name, "tcp": _find_tcp}
    original = rendezvous.find_endpoints
    rendezvous.find_endpoints = endpoints[endpoint_kind]
    try:
        with futures.ThreadPoolExecutor(1, "attacker") as pool:
            done, lost = harness.run_threads(run, 2, join_timeout_s=3600.0)
    finally:
        rendezvous.find_endpoints = original
    assert done == "done", done
    assert lost == transport.Lost(0, transport.describe_closed(0)), lost
    return num_echoes


def _find_name(host: str, folder: str) -> list[str]:
    return ["ipc://@jdp-" + os.urandom(8).hex()]


def _find_tcp(host: str, folder: str) -> list[str]:
    return ["tcp://127.0.0.1:*"]


def _next(link):
    while not (events := link.wait(10.0)):
        pass
    (event,) = events
    return event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for kind in ("ipc", "tcp"):
        start_s = time.monotonic()
        num_echoes = fuzz(kind, args.messages // 2, args.seed)
        seconds = time.monotonic() - start_s
        print(f"{kind}: {seconds:.1f} s, {num_echoes} messages of the job went through")


if __name__ == "__main__":
    main()
