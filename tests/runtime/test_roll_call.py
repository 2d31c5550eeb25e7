"""The roll call as a pure protocol, and over real sockets in threads."""

import socket
import threading
import time

import hypothesis
import msgspec
import pytest
import zmq
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


def test_a_doubled_id_is_told_to_all():
    for text in _call(_hellos(0, 1, 1), _address()):
        assert "`process_id=1` was given twice" in text


def test_without_the_coordinator_the_wait_is_bounded_and_says_where():
    address = _address()
    start_s = time.monotonic()
    (text,) = _call(_hellos(1), address, timeout_s=0.5)
    assert time.monotonic() - start_s < 3.0
    assert f"no answer from the coordinator at '{address}' within 0 s" in text or (
        f"no answer from the coordinator at '{address}' within 1 s" in text
    )


def test_a_taken_port_is_named():
    address = _address()
    with socket.create_server(("127.0.0.1", int(address.rsplit(":", 1)[1]))):
        (text,) = _call(_hellos(0), address)
    assert f"cannot listen at the coordinator address '{address}'" in text


def test_an_address_that_cannot_be_used_is_named():
    (text,) = _call(_hellos(1), "no such host:1")
    assert "'no such host:1' cannot be used" in text


def test_garbage_and_strangers_are_dropped():
    address = _address()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(f"tcp://{address}")
    old = msgspec.structs.replace(HELLO, protocol="jdp-roll-call-0", process_id=1)
    for frame in (b"", b"\xff\x00garbage", msgspec.msgpack.encode(old)):
        stranger.send(frame)
    raw = threading.Thread(target=_send_raw, args=(address,), daemon=True)
    raw.start()
    try:
        assert _call(_hellos(0, 1, 2), address) == [["n0", "n1", "n2"]] * 3
    finally:
        stranger.close()
        context.term()
        raw.join(timeout=10.0)


def _send_raw(address):
    """Speaks HTTP to the coordinator, as a port scanner might."""
    host, port = address.rsplit(":", 1)
    for _ in range(50):
        try:
            with socket.create_connection((host, int(port)), timeout=1.0) as line:
                line.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100_000))
                return
        except OSError:
            time.sleep(0.05)
