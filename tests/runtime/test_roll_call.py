"""The roll call as a pure protocol, and over real sockets in threads."""

import contextlib
import socket
import threading
import time

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from jdp.runtime import roll_call

HELLO = roll_call.make_hello(0, 3, node="a")


def _hello(process_id, **changes):
    fresh = {"process_id": process_id, "instance": f"i{process_id}", **changes}
    return msgspec.structs.replace(HELLO, **fresh)


def _roll(*hellos):
    roll = roll_call.open_roll(_hello(0), deadline_s=10.0)
    for hello in hellos:
        roll = roll_call.receive(roll, hello)
    return roll


@hypothesis.given(st.permutations([1, 2, 3, 1, 2, 3]))
def test_every_order_of_arrival_ends_with_the_nodes_by_process(order):
    roll = roll_call.open_roll(_hello(0, num_processes=4), deadline_s=10.0)
    for k, process_id in enumerate(order):
        node = "ab"[process_id // 2]
        hello = _hello(process_id, num_processes=4, node=node)
        roll = roll_call.receive(roll, hello)
        verdict = roll_call.judge(roll, now_s=0.0)
        is_complete = len({*order[: k + 1]}) == 3
        assert (verdict is not None) == is_complete
    assert verdict == roll_call.Verdict(nodes=["a", "a", "b", "b"])


def test_missing_processes_are_named_at_the_deadline():
    roll = _roll(_hello(2))
    assert roll_call.judge(roll, now_s=9.9) is None
    verdict = roll_call.judge(roll, now_s=10.0)
    assert "1 of 3 processes did not come in time: 1." in verdict.error


def test_many_missing_processes_are_cut_short():
    roll = roll_call.open_roll(_hello(0, num_processes=100), deadline_s=0.0)
    error = roll_call.judge(roll, now_s=1.0).error
    assert "99 of 100" in error and "10, ..." in error


@pytest.mark.parametrize(
    "hello,expected",
    [
        (_hello(1, num_processes=2), "`num_processes` is 3 in process 0 .* and 2 in"),
        (_hello(3), "`process_id` must be below 3, got 3"),
        (_hello(0, instance="other"), "`process_id=0` was given twice"),
        (_hello(1, jax_version="0.0.1"), r"and 0.0.1 in process 1 .* same version"),
    ],
)
def test_a_process_that_does_not_fit_is_an_error_for_all(hello, expected):
    roll = _roll(hello, _hello(2))
    error = roll_call.judge(roll, now_s=0.0).error
    assert error is not None
    pytest.raises(RuntimeError, _raise, error).match(expected)


def _raise(text):
    raise RuntimeError(text)


def test_the_first_error_stays():
    roll = _roll(_hello(3), _hello(1, num_processes=9))
    assert "got 3" in roll_call.judge(roll, now_s=0.0).error


def _address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def _call(hellos, address, timeout_s=5.0):
    results = [None] * len(hellos)

    def run(i):
        try:
            results[i] = roll_call.call_roll(hellos[i], address, timeout_s=timeout_s)
        except RuntimeError as error:
            results[i] = str(error)

    threads = [
        threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(hellos))
    ]
    # Process 0 comes last: the others must find it whenever it appears.
    for thread in threads[::-1]:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(timeout=20.0)
        assert not thread.is_alive()
    return results


def _hellos(*process_ids, num_processes=3):
    return [roll_call.make_hello(i, num_processes, node=f"n{i}") for i in process_ids]


def test_processes_meet_over_a_socket_and_leave_the_port_free():
    address = _address()
    assert _call(_hellos(0, 1, 2), address) == [["n0", "n1", "n2"]] * 3
    assert _call(_hellos(0, 1, 2), address) == [["n0", "n1", "n2"]] * 3


def test_the_port_is_free_before_anybody_hears_the_verdict(monkeypatch):
    # `jax.distributed` begins at the same address as soon as it does.
    address = _address()
    tell = roll_call._tell
    refused = []

    def tell_and_try(line, verdict):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])))
        refused.append(True)
        tell(line, verdict)

    monkeypatch.setattr(roll_call, "_tell", tell_and_try)
    assert _call(_hellos(0, 1, 2), address) == [["n0", "n1", "n2"]] * 3
    assert refused == [True, True]


def test_a_doubled_id_is_told_to_all():
    for text in _call(_hellos(0, 1, 1), _address()):
        assert "`process_id=1` was given twice" in text


def test_without_the_coordinator_the_wait_is_bounded_and_says_where():
    address = _address()
    start_s = time.monotonic()
    (text,) = _call(_hellos(1), address, timeout_s=0.5)
    assert time.monotonic() - start_s < 3.0
    assert f"no answer from the coordinator at '{address}' within 0.5 s" in text
    assert "Connection refused" in text


def test_a_taken_port_is_named():
    address = _address()
    with socket.create_server(("127.0.0.1", int(address.rsplit(":", 1)[1]))):
        (text,) = _call(_hellos(0), address)
    assert f"cannot listen at the coordinator address '{address}'" in text


def test_another_program_at_the_address_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def answer():
            line, _ = server.accept()
            with line:
                line.recv(100)
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        hello = roll_call.make_hello(1, 2, node=None)
        with pytest.raises(RuntimeError, match="no answer .* within 1 s"):
            roll_call.call_roll(hello, address, timeout_s=1.0)
        thread.join(timeout=5.0)


def test_an_address_that_does_not_exist_is_named():
    (text,) = _call(_hellos(1), "no-such-host.invalid:1", timeout_s=0.5)
    assert "no answer from the coordinator at 'no-such-host.invalid:1'" in text


def _strangers():
    """What port scanners, other protocols and old versions send."""
    old = msgspec.structs.replace(HELLO, protocol="jdp-roll-call-0", process_id=1)
    yield b""
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    yield bytes(100_000)
    yield b"{}\n"
    yield b"\xff\xff\xff\n"
    yield msgspec.json.encode(old) + b"\n"


def test_strangers_are_dropped_and_the_roll_call_goes_on():
    address = _address()
    connected = []

    def speak():
        for data in _strangers():
            for _ in range(100):
                try:
                    line = socket.create_connection(
                        ("127.0.0.1", int(address.rsplit(":", 1)[1])), timeout=1.0
                    )
                    break
                except OSError:
                    time.sleep(0.02)
            connected.append(line)
            with contextlib.suppress(OSError):
                line.sendall(data)

    # One that says nothing at all, and all the others, before the last process comes.
    hellos = _hellos(0, 1, 2)
    results = [None] * 3

    def run(i):
        results[i] = roll_call.call_roll(hellos[i], address, timeout_s=20.0)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(3)]
    threads[0].start()
    speak()
    threads[1].start()
    threads[2].start()
    for thread in threads:
        thread.join(timeout=20.0)
    for line in connected:
        line.close()
    assert len(connected) == 7
    assert results == [["n0", "n1", "n2"]] * 3


def test_a_hello_may_come_in_pieces():
    address = _address()
    hello = msgspec.json.encode(_hellos(1, num_processes=2)[0]) + b"\n"
    answers = []

    def attend():
        for _ in range(100):
            try:
                line = socket.create_connection(
                    ("127.0.0.1", int(address.rsplit(":", 1)[1])), timeout=5.0
                )
                break
            except OSError:
                time.sleep(0.02)
        with line:
            for i in range(0, len(hello), 40):
                line.sendall(hello[i : i + 40])
                time.sleep(0.01)
            answers.append(line.makefile("rb").readline())

    thread = threading.Thread(target=attend, daemon=True)
    thread.start()
    own = roll_call.make_hello(0, 2, node="n0")
    assert roll_call.call_roll(own, address, timeout_s=10.0) == ["n0", "n1"]
    thread.join(timeout=5.0)
    assert msgspec.json.decode(answers[0]) == {"error": None, "nodes": ["n0", "n1"]}
