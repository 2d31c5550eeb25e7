"""The roll call over real sockets, in threads."""

import contextlib
import errno
import select
import socket
import threading
import time

import pytest

from jdp.runtime import (
    addresses,
    job_key,
    roll_call,
    roll_call_server,
)
from jdp.runtime.roll_call_sockets import call_roll
from tests import rarely

KEY = job_key.make()


def _address(host="127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return addresses.join(host, server.getsockname()[1])


def _port(address):
    return addresses.split(address)[1]


def _call(hellos, address, timeout_s=5.0, keys=None):
    """Returns what each finds: a `Meeting`, or the text of its error."""
    results = [None] * len(hellos)
    keys = keys or [KEY] * len(hellos)

    def run(i):
        try:
            results[i] = call_roll(hellos[i], address, timeout_s=timeout_s, key=keys[i])
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
    sessions = set()
    for keys in ([KEY] * 3, [KEY] * 3, [None] * 3):
        found = _call(_hellos(0, 1, 2), address, keys=keys)
        assert [meeting.nodes for meeting in found] == [["n0", "n1", "n2"]] * 3
        assert {m.host for m in found} == {m.own_host for m in found} == {"127.0.0.1"}
        assert [m.bind_host for m in found] == ["127.0.0.1", "", ""]
        sessions |= {meeting.session_key for meeting in found}
    assert len(sessions) == 3  # one a run, the same on all its processes.


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_coordinators_may_have_ipv6_addresses_or_names(host):
    address = addresses.join(
        host, _port(_address("::1" if host == "::1" else "127.0.0.1"))
    )
    found = _call(_hellos(0, 1, 2), address)
    expected = "::1" if host == "::1" else "127.0.0.1"
    assert [(m.host, m.own_host) for m in found] == [(expected, expected)] * 3
    assert [m.bind_host for m in found] == [expected, "", ""]


def test_the_port_is_free_before_anybody_hears_the_verdict(monkeypatch):
    # `jax.distributed` begins at the same address as soon as it does.
    address = _address()
    tell = roll_call_server.RollCallServer._tell
    refused = []

    def try_and_tell(self, verdict):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", _port(address)))
        refused.append(True)
        tell(self, verdict)

    monkeypatch.setattr(roll_call_server.RollCallServer, "_tell", try_and_tell)
    found = _call(_hellos(0, 1, 2), address)
    assert [meeting.nodes for meeting in found] == [["n0", "n1", "n2"]] * 3
    assert refused == [True]


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
    with socket.create_server(("127.0.0.1", _port(address))):
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
            call_roll(hello, address, timeout_s=1.0)
        thread.join(timeout=5.0)


def test_an_address_that_does_not_exist_is_named():
    (text,) = _call(_hellos(1), "no-such-host.invalid:1", timeout_s=0.5)
    assert "no answer from the coordinator at 'no-such-host.invalid:1'" in text


# --- Strangers -----------------------------------------------------------------


def _dial(address):
    """Connects to process 0 as soon as it listens."""
    for _ in range(200):
        try:
            return socket.create_connection(addresses.split(address), timeout=5.0)
        except OSError:
            time.sleep(0.02)
    raise AssertionError("nobody listens")


def _valid_line(challenge, process_id=1, key=None):
    hello = roll_call.make_hello(process_id, 3, node="stranger")
    return roll_call.encode_hello(hello, challenge, key)


def _hear_challenge(line):
    said = line.makefile("rb").readline()
    return roll_call.decode_challenge(said)


SPEECHES = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    bytes(100_000),
    b"{}\n",
    b"\xff\xff\xff\n",
    b'{"protocol":"\xff\xfe"}\n',
    b'{"x":' + b"[" * 7000 + b"]" * 7000 + b"}\n",
]


@contextlib.contextmanager
def _started(process_ids, address, key, timeout_s=20.0):
    """Calls the roll in threads; yields their results, complete after the body."""
    results = {}

    def run(hello):
        try:
            found = call_roll(hello, address, timeout_s=timeout_s, key=key)
            results[hello.process_id] = found.nodes
        except RuntimeError as error:
            results[hello.process_id] = str(error)

    threads = [
        threading.Thread(target=run, args=(hello,), daemon=True)
        for hello in _hellos(*process_ids)
    ]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(timeout=30.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
def test_strangers_are_dropped_and_the_roll_call_goes_on(key, caplog):
    address = _address()
    nodes = ["n0", "n1", "n2"]
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(_started([0], address, key))
        for speech in SPEECHES:
            line = stack.enter_context(_dial(address))
            with contextlib.suppress(OSError):
                line.sendall(speech)
        rest = stack.enter_context(_started([1, 2], address, key))
    assert found | rest == dict.fromkeys(range(3), nodes)
    dropped = [r for r in caplog.messages if "Dropped a connection" in r]
    assert len(dropped) == 1 and "from 127.0.0.1" in dropped[0]


def test_a_valid_line_without_the_key_takes_no_place():
    address = _address()
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(_started([0], address, KEY))
        for theirs in (None, job_key.make()):
            line = stack.enter_context(_dial(address))
            line.sendall(_valid_line(_hear_challenge(line), key=theirs))
            assert line.recv(1) == b""
        # What a process has said on another connection proves nothing on this one.
        lines = [stack.enter_context(_dial(address)) for _ in range(2)]
        challenges = [_hear_challenge(line) for line in lines]
        lines[1].sendall(_valid_line(challenges[0], key=KEY))
        assert lines[1].recv(1) == b""
        rest = stack.enter_context(_started([1, 2], address, KEY))
    assert found | rest == dict.fromkeys(range(3), ["n0", "n1", "n2"])


@pytest.mark.parametrize(
    "keys,expected",
    [
        ([KEY, None], "takes only processes with the key of its job; this one has no"),
        pytest.param(
            [None, KEY],
            "has no key of a job, and this process has one",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [KEY, job_key.make()],
            "has another key of a job than this process",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_processes_of_different_keys_are_named_on_both_sides(keys, expected):
    hellos = _hellos(0, 1, num_processes=2)
    first, second = _call(hellos, _address(), timeout_s=1.5, keys=keys)
    assert "1 of 2 processes did not come in time: 1." in first
    assert "connections were refused" in first and "127.0.0.1" in first
    assert expected in second


def test_a_coordinator_without_the_key_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def pretend():
            with contextlib.suppress(OSError):
                while True:
                    line, _ = server.accept()
                    with line:
                        real = roll_call.make_challenge(KEY, address)
                        line.sendall(roll_call.encode_challenge(real))
                        line.recv(4096)
                        verdict = roll_call.RollCallVerdict(error="Go home.")
                        args = verdict, real, "0" * 32, None
                        line.sendall(roll_call.encode_verdict(*args))

        threading.Thread(target=pretend, daemon=True).start()
        (text,) = _call(_hellos(1), address, timeout_s=1.0)
        server.shutdown(socket.SHUT_RDWR)
    assert "does not prove the key of this job" in text and "Go home" not in text


def _drip(line, data):
    with contextlib.suppress(OSError):
        for byte in data:
            line.sendall(bytes((byte,)))
            time.sleep(0.05)


def test_a_coordinator_that_drips_does_not_outlast_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def run():
            line, _ = server.accept()
            with line:
                _drip(line, b"x" * 900)

        threading.Thread(target=run, daemon=True).start()
        start_s = time.monotonic()
        (text,) = _call(_hellos(1), address, timeout_s=1.0)
        assert time.monotonic() - start_s < 4.0
    assert "within 1 s: it did not answer" in text


def test_guests_that_drip_or_are_silent_are_dropped(monkeypatch):
    monkeypatch.setattr(roll_call_server, "_HELLO_TIMEOUT_S", 0.5)
    address = _address()
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(_started([0], address, KEY))
        silent, dripping = (stack.enter_context(_dial(address)) for _ in range(2))
        thread = threading.Thread(target=_drip, args=(dripping, b"x" * 600))
        thread.start()
        _hear_challenge(silent)
        assert silent.recv(1) == b""
        thread.join(timeout=20.0)
        rest = stack.enter_context(_started([1, 2], address, KEY))
    assert found | rest == dict.fromkeys(range(3), ["n0", "n1", "n2"])


def test_too_many_guests_push_out_the_oldest(monkeypatch):
    monkeypatch.setattr(roll_call_server, "_MOST_GUESTS", 2)
    address = _address()
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(_started([0], address, KEY))
        for _ in range(30):
            stack.enter_context(_dial(address))
        rest = stack.enter_context(_started([1, 2], address, KEY))
    assert found | rest == dict.fromkeys(range(3), ["n0", "n1", "n2"])


class _Full:
    """A listening socket for which there are no descriptors for a while."""

    def __init__(self, server, num_failures):
        self._server = server
        self.left = num_failures
        self.tried_s = []

    def __getattr__(self, name):
        return getattr(self._server, name)

    def accept(self):
        self.tried_s.append(time.monotonic())
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._server.accept()


def test_without_descriptors_the_loop_waits_and_says_so_once(monkeypatch, caplog):
    full = []
    listen = roll_call_server.listen

    def listen_full(address):
        full.append(_Full(listen(address), 5))
        return full[0]

    monkeypatch.setattr(roll_call_server, "listen", listen_full)
    found = _call(_hellos(0, 1, 2), _address(), timeout_s=20.0)
    assert [meeting.nodes for meeting in found] == [["n0", "n1", "n2"]] * 3
    (server,) = full
    assert server.tried_s[5] - server.tried_s[0] >= 0.4  # It did not spin.
    said = [r for r in caplog.messages if "no descriptors left" in r]
    assert len(said) == 1 and "`ulimit -n`" in said[0]


def test_a_hello_may_come_in_pieces():
    address = _address()
    with _started([0], address, KEY) as found, _dial(address) as line:
        challenge = _hear_challenge(line)
        with _started([2], address, KEY):
            said = _valid_line(challenge, key=KEY)
            for i in range(0, len(said), 40):
                line.sendall(said[i : i + 40])
                time.sleep(0.01)
            assert b"stranger" in line.makefile("rb").readline()
    assert found[0] == ["n0", "stranger", "n2"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_process_whose_connection_broke_may_come_again(is_restarted):
    address = _address()
    hello = roll_call.make_hello(1, 3, node="n1")
    with _started([0], address, KEY) as found:
        with _dial(address) as line:
            challenge = _hear_challenge(line)
            line.sendall(roll_call.encode_hello(hello, challenge, KEY))
        with _started([2], address, KEY):
            time.sleep(0.1)
            meeting = call_roll(hello, address, timeout_s=20.0, key=KEY)
    assert found[0] == meeting.nodes == ["n0", "n1", "n2"]


class _Relay:
    """A stranger without the key, who copies bytes from one address to another."""

    def __init__(self, to, changes=()):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._to = addresses.split(to)
        self._changes = changes
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                threading.Thread(target=self._pass, args=[caller], daemon=True).start()

    def _pass(self, caller):
        with caller, contextlib.suppress(OSError):
            with socket.create_connection(self._to, timeout=5.0) as host:
                ends = [caller, host]
                while True:
                    for end in select.select(ends, [], [], 5.0)[0]:
                        data = end.recv(65536)
                        if not data:
                            return
                        for old, new in self._changes:
                            data = data.replace(old, new)
                        ends[end is caller].sendall(data)

    def close(self):
        self._server.close()


@pytest.mark.parametrize("is_renamed", rarely.cases([False, True], often=(True,)))
def test_a_process_of_one_job_is_not_led_into_another_one_with_its_key(is_renamed):
    theirs = _address()
    relay = _Relay(theirs)
    if is_renamed:  # The stranger also gives the other job the name of this one.
        relay._changes = [(theirs.encode(), relay.address.encode())]
    with _started([0], theirs, KEY, timeout_s=3.0) as found:
        (text,) = _call(_hellos(1), relay.address, timeout_s=1.5)
    if not is_renamed:
        assert f"it is of the job '{theirs}'" in text and relay.address in text
    assert "3 processes did not come" in found[0] or "prove the key" in found[0]
    relay.close()
    assert "had no answer from the coordinator" in text


def test_a_job_id_tells_apart_jobs_at_one_address(monkeypatch):
    address = _address()
    monkeypatch.setenv("JDP_JOB_ID", "first")
    with _started([0], address, KEY, timeout_s=3.0) as found:
        with _dial(address):
            monkeypatch.setenv("JDP_JOB_ID", "second")
        (text,) = _call(_hellos(1), address, timeout_s=1.5)
    assert f"of the job '{address} first'" in text and f"'{address} second'" in text
    assert "prove the key of this job" in found[0]


def test_a_coordinator_whose_name_has_no_address_opens_no_port(monkeypatch):
    monkeypatch.setattr(roll_call_server, "_RESOLVE_S", 0.0)
    with pytest.raises(RuntimeError, match="the name 'no.such.invalid' has no address"):
        roll_call_server.listen("no.such.invalid:29500")
