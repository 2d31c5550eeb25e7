import os

import pytest

from jdp import parameter_server
from jdp.launch import launch
from jdp.runtime import environment, job_key

KEY = job_key.make()


@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 100])
def test_verify_inverts_sign(body):
    signed = job_key.sign(KEY, "a use", body)
    assert job_key.verify(KEY, "a use", signed) == body


def test_another_key_another_use_and_every_flipped_bit_are_refused():
    signed = job_key.sign(KEY, "a use", b"body")
    wrong = [(job_key.make(), "a use", signed), (KEY, "a us", b"e" + signed)]
    wrong += [(KEY, "another use", signed), (KEY, "a use", b""), (KEY, "", signed)]
    for bit in range(8 * len(signed)):
        torn = bytearray(signed)
        torn[bit // 8] ^= 1 << bit % 8
        wrong.append((KEY, "a use", bytes(torn)))
    wrong += [(KEY, "a use", signed[:n]) for n in range(len(signed))]
    for key, context, what in wrong:
        with pytest.raises(job_key.WrongKey, match="not signed with the key of this"):
            job_key.verify(key, context, what)


def test_the_end_of_a_context_is_not_the_start_of_a_body():
    signed = job_key.sign(KEY, "ab", b"c")
    moved = signed[: job_key.CODE_BYTES] + b"bc"
    with pytest.raises(job_key.WrongKey):
        job_key.verify(KEY, "a", moved)


def test_derived_keys_differ_by_use():
    keys = {job_key.derive(KEY, use) for use in ("a", "b")} | {KEY}
    assert len(keys) == 3 and all(len(k) == job_key.KEY_BYTES for k in keys)


def test_from_environ_inverts_to_environ():
    assert job_key.from_environ(job_key.to_environ(KEY)) == KEY
    assert job_key.from_environ({}) is None


@pytest.mark.parametrize("text", ["", "ab", "g" * 64, "ab" * 33])
def test_a_variable_that_is_no_key_is_refused_and_not_shown(text):
    with pytest.raises(ValueError, match="must be 64 hexadecimal digits") as caught:
        job_key.from_environ({job_key.VARIABLE: text})
    assert not text or text not in str(caught.value)


def _write(path, content, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_copies_of_a_file_give_the_same_key_whatever_ends_them(tmp_path):
    a = job_key.read_file(_write(tmp_path / "a", b"5e" * 32))
    b = job_key.read_file(_write(tmp_path / "b", b"5e" * 32 + b"\n"))
    c = job_key.read_file(_write(tmp_path / "c", b"5f" * 32))
    assert a == b != c and len(a) == job_key.KEY_BYTES


def test_the_file_of_parameter_servers_serves_too(tmp_path):
    parameter_server.make_keys(tmp_path / "keys")
    assert len(job_key.read_file(str(tmp_path / "keys"))) == job_key.KEY_BYTES


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_file_that_others_can_touch_is_refused(tmp_path, mode):
    path = _write(tmp_path / "key", b"x" * 40, mode)
    with pytest.raises(ValueError, match=rf"`chmod 600 {path}`"):
        job_key.read_file(path)


def test_files_that_are_no_key_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path, why in [
        (_write(tmp_path / "short", b" " * 50 + b"x" * 31), "from 32 to 65536 .* 31"),
        (_write(tmp_path / "long", b"x" * 70000), "from 32 to 65536"),
        (str(tmp_path / "none"), "cannot be read: No such file"),
        (str(tmp_path), "cannot be read|must be a regular file"),
        (str(tmp_path / "fifo"), "must be a regular file"),
    ]:
        with pytest.raises(ValueError, match=why):
            job_key.read_file(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path):
    path = _write(tmp_path / "key", b"x" * 40)
    os.chown(path, 12345, 12345)
    with pytest.raises(ValueError, match="number 0; it is of number 12345"):
        job_key.read_file(path)


def test_one_host_gets_a_new_key_and_several_the_given_one():
    one = launch.LaunchOptions(num_processes=2)
    outer = job_key.to_environ(KEY)
    assert len({launch.find_key(one, outer), launch.find_key(one, outer), KEY}) == 3
    several = {"num_processes": 1, "num_nodes": 2, "coordinator_address": "a:1"}
    assert launch.find_key(launch.LaunchOptions(**several), {}) is None
    assert launch.find_key(launch.LaunchOptions(**several), outer) == KEY
    mine = launch.LaunchOptions(**several, key=b"m" * 32)
    assert launch.find_key(mine, outer) == b"m" * 32
    assert "mmm" not in repr(mine)
    place = launch.place_of(mine, 0, coordinator_address="a:1")
    assert job_key.VARIABLE not in launch.process_environ(place, "id", base=outer)
    environ = launch.process_environ(place, "id", base=outer, key=b"m" * 32)
    assert job_key.from_environ(environ) == b"m" * 32
    assert environment.JOB_KEY == job_key.VARIABLE
