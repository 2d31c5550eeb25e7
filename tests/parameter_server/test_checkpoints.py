"""Checkpoints that are damaged, missing, half written, or that no disk takes."""

import contextlib
import errno
import json
import logging
import os
import pathlib
import resource
import shutil
import struct
import subprocess

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdp import parameter_server
from jdp.parameter_server import (
    checkpoint_files,
    checkpoints,
    orbax_logs,
    restoring,
    shards,
    updates,
)
from jdp.parameter_server.checkpoints import Checkpoints
from jdp.parameter_server.messages import FollowerStatus, Settled, Version
from jdp.parameter_server.progress import ProgressFile, ServerProgress
from jdp.parameter_server.restoring import NoCheckpointError
from tests import rarely
from tests.parameter_server.jobs import ThreadJob

ARRAYS = [
    np.arange(1000, dtype=np.float32).reshape(10, 100),
    np.asarray(3, np.int32),
    np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
]
SETTLED = {b"session": Settled(4, "applied", Version(1, 20))}


def _made(folder, counts=(20, 40), num_servers=1):
    made = Checkpoints(folder, 0, num_servers)
    for count in counts:
        assert made.save(Version(1, count), ARRAYS, SETTLED)
        made.note(Version(1, count))
    return made


def _files(folder):
    """All that a checkpoint consists of."""
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0x10
    path.write_bytes(data)


def test_what_is_written_is_read(tmp_path):
    _made(tmp_path)
    arrays, settled = Checkpoints(tmp_path, 0, 1).load(40)
    assert settled == SETTLED
    for found, array in zip(arrays, ARRAYS, strict=True):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def test_a_bit_that_is_flipped_anywhere_is_found(tmp_path, caplog):
    folder = tmp_path / "server-0-of-1"
    _made(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    rng = np.random.default_rng(0)
    names = [p.relative_to(copy) for p in _files(copy / "updates-40")]
    assert len(names) >= 3
    for name in names:
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        _flip(folder / name, int(rng.integers(1 << 20)))
        found = Checkpoints(tmp_path, 0, 1)
        if name.name != "manifest":
            assert found.load(40) is None
            path = name.relative_to("updates-40/arrays")
            assert f"file `{path}` does not have the checksum" in caplog.text
        assert found.find_counts() == (20,) and found.load(20) is not None
        assert f"the checkpoint of update 40, `{folder}/updates-40`:" in caplog.text
        assert (folder / "refused-40").is_dir()
        assert not (folder / "updates-40").exists()
        caplog.clear()


def test_another_array_of_the_same_shape_is_refused(tmp_path, caplog, monkeypatch):
    made = _made(tmp_path)
    folder = tmp_path / "server-0-of-1"
    shutil.rmtree(folder / "updates-40/arrays")
    changed = [ARRAYS[0] + np.float32(1), *ARRAYS[1:]]
    checkpoint_files._save(folder / "updates-40/arrays", changed)
    monkeypatch.setattr(checkpoint_files, "_check_files", lambda *_: None)
    assert made.load(40) is None
    assert "array 0, float32[10, 100], does not have the checksum" in caplog.text


@pytest.mark.parametrize(
    "damage,message",
    [
        (lambda p: shutil.rmtree(p / "arrays"), "` is missing"),
        (lambda p: (p / "manifest").unlink(), "it has no manifest: it is part of a"),
        (lambda p: [shutil.rmtree(p), p.mkdir()], "it has no manifest"),
        (lambda p: [shutil.rmtree(p), p.write_bytes(b"x")], "cannot be read: Not a"),
        (
            lambda p: os.truncate(p / "manifest", 40),
            "its manifest does not have the checksum it begins with",
        ),
        (
            lambda p: [os.truncate(f, 0) for f in _files(p / "arrays")],
            "has 0 bytes, and ",
        ),
        (
            lambda p: [f.write_bytes(b"\xff" * 99) for f in _files(p / "arrays")],
            "99 byt",
        ),
        (
            lambda p: [shutil.rmtree(p), shutil.copytree(p.parent / "updates-20", p)],
            "it belongs to update 20",
        ),
    ],
    ids="arrays-gone manifest-gone empty file manifest-cut cut garbage other".split(),
)
def test_a_torn_checkpoint_is_refused_and_the_one_before_is_there(
    tmp_path, caplog, damage, message
):
    _made(tmp_path)
    folder = tmp_path / "server-0-of-1"
    damage(folder / "updates-40")
    found = Checkpoints(tmp_path, 0, 1)
    assert 40 not in found.find_counts() or found.load(40) is None
    assert found.find_counts() == (20,) and found.load(20) is not None
    assert "Server 0 refuses the checkpoint of update 40" in caplog.text
    assert message in caplog.text


def _tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != "lock"
    }


class _Disk:
    """Answers with an error where a file of some name is opened or listed."""

    def __init__(self, monkeypatch, number, name):
        self._number, self._name, self._monkeypatch = number, name, monkeypatch
        for owner, function in ((pathlib.Path, "open"), (os, "scandir")):
            self._patch(owner, function)

    def _patch(self, owner, function):
        real = getattr(owner, function)

        def call(path, *args, **kwargs):
            if isinstance(path, str | os.PathLike) and self._is_sick(os.fspath(path)):
                raise OSError(self._number, os.strerror(self._number), str(path))
            return real(path, *args, **kwargs)

        self._monkeypatch.setattr(owner, function, call)

    def _is_sick(self, path):
        return os.path.basename(path) == self._name


@pytest.mark.parametrize(
    "number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES]
)
@pytest.mark.parametrize("name", ["manifest", "attendance", "arrays", "d", "0.npz"])
def test_a_disk_that_does_not_answer_is_no_damage(tmp_path, monkeypatch, number, name):
    made = _made(tmp_path)
    made.note_attendance(b"someone")
    made.close()
    folder = tmp_path / "server-0-of-1"
    (file, *_) = [p for p in _files(folder / "updates-40") if p.name != "manifest"]
    name = file.name if name == "0.npz" else name
    before = _tree(folder)
    with monkeypatch.context() as patch:
        _Disk(patch, number, name)
        with pytest.raises(RuntimeError, match="(?s)cannot be used: .*once that works"):
            with contextlib.closing(Checkpoints(tmp_path, 0, 1)) as found:
                found.read_attendance()
                found.load(40)
    assert _tree(folder) == before
    found = Checkpoints(tmp_path, 0, 1)
    assert found.find_counts() == (20, 40) and found.load(40) is not None


def test_an_array_that_orbax_cannot_read_now_is_no_damage(tmp_path, monkeypatch):
    _made(tmp_path)

    def fail():
        raise ValueError("Too many open files")

    monkeypatch.setattr(checkpoint_files, "_open", fail)
    found = Checkpoints(tmp_path, 0, 1)
    with pytest.raises(RuntimeError, match="cannot be used: .*Too many open files"):
        found.load(40)
    assert (tmp_path / "server-0-of-1" / "updates-40").is_dir()


@pytest.mark.parametrize("number, age", [(1, "an older"), (3, "a newer")])
def test_a_checkpoint_of_another_format_is_refused_untouched(tmp_path, number, age):
    _made(tmp_path).close()
    folder = tmp_path / "server-0-of-1"
    _flip(folder / "updates-20" / "manifest", 100)  # Not even this is renamed.
    text = json.dumps({"format": number, "other": "fields"}).encode()
    digest = checkpoint_files._digest(text).encode()
    (folder / "updates-40" / "manifest").write_bytes(digest + b"\n" + text)
    (folder / "half-60").mkdir()
    before = _tree(folder)
    with pytest.raises(
        RuntimeError, match=f"updates-40.* format {number}, of {age} jdp"
    ):
        Checkpoints(tmp_path, 0, 1)
    assert _tree(folder) == before


def test_what_was_half_written_is_removed_and_what_is_no_checkpoint_stays(tmp_path):
    _made(tmp_path)
    folder = tmp_path / "server-0-of-1"
    (folder / "half-60/arrays").mkdir(parents=True)
    for name in ("updates-", "updates-x", "updates-060", "updates--1", "notes"):
        (folder / name).mkdir()
    assert Checkpoints(tmp_path, 0, 1).find_counts() == (20, 40)
    names = {p.name for p in folder.iterdir()}
    assert "half-60" not in names
    assert {"updates-", "updates-x", "updates-060", "updates--1", "notes"} < names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4"])
def test_arrays_without_elements_are_written_and_read(tmp_path, dtype):
    made = Checkpoints(tmp_path, 0, 1)
    empty = [np.zeros(s, jnp.dtype(dtype)) for s in ((0,), (0, 5), (2, 0, 3))]
    for count, arrays in enumerate((empty, [*empty, *ARRAYS], []), 1):
        assert made.save(Version(1, count), arrays, SETTLED)
        found, settled = made.load(count)
        assert settled == SETTLED
        assert [x.dtype for x in found] == [x.dtype for x in arrays]
        chex.assert_trees_all_equal(found, arrays)


def test_a_write_without_descriptors_says_one_line_and_leaves_nothing(
    tmp_path, caplog, capfd
):
    made = _made(tmp_path)
    folder = tmp_path / "server-0-of-1"
    num_open = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for free in (0, 2, 8, 30):
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + free, limits[1]))
        try:
            assert not made.save(Version(1, 60 + free), ARRAYS, {})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "cannot write the checkpoint of update 60 to" in line
    assert "Too many open files" in line and not capfd.readouterr().err
    # What could not be removed at once is removed later.
    (folder / "half-7/arrays").mkdir(parents=True)
    assert made.save(Version(1, 100), ARRAYS, {})
    assert not list(folder.glob("half-*"))
    (folder / "half-9").mkdir()
    made.close()
    assert not list(folder.glob("half-*"))


def test_tracebacks_of_a_save_that_fails_are_dropped_and_others_are_not(caplog):
    def save(fails):
        with orbax_logs.quiet_failures():
            for name in ("asyncio", "absl"):
                logging.getLogger(name).error("of a save that fails: %s", fails)
            if fails:
                raise OSError("full")

    logging.getLogger("absl").propagate = True
    save(False)
    assert caplog.text.count("fails: False") == 2
    with pytest.raises(OSError, match="full"):
        save(True)
    assert "fails: True" not in caplog.text
    logging.getLogger("asyncio").error("afterwards")
    assert "afterwards" in caplog.text


def test_a_checkpoint_that_is_half_removed_is_not_seen(tmp_path, monkeypatch):
    made = _made(tmp_path)
    folder = tmp_path / "server-0-of-1"

    def tear(path):
        """As when the process is killed while it removes a folder."""
        shutil.rmtree(path / "arrays", ignore_errors=True)
        (path / "manifest").unlink(missing_ok=True)

    monkeypatch.setattr(checkpoint_files, "remove", tear)
    made.drop_after(20)
    made.close()
    monkeypatch.undo()
    assert (folder / "drop-updates-40").is_dir()
    assert Checkpoints(tmp_path, 0, 1).find_counts() == (20,)
    names = {p.name for p in folder.iterdir()}
    assert names == {"updates-20", "progress", "lock"}


def test_a_folder_is_one_servers_at_a_time(tmp_path):
    made = _made(tmp_path, num_servers=2)
    Checkpoints(tmp_path, 1, 2).close()
    with pytest.raises(RuntimeError, match=f"is used by another .* {os.getpid()}'"):
        Checkpoints(tmp_path, 0, 2)
    made.close()
    Checkpoints(tmp_path, 0, 2).close()


@pytest.mark.parametrize("name", ["lock", "progress", "half-attendance"])
def test_a_link_in_the_folder_is_not_followed(tmp_path, name):
    own = tmp_path / "a file of the user"
    own.write_text("precious")
    folder = tmp_path / "run" / "server-0-of-1"
    folder.mkdir(parents=True)
    (folder / name).symlink_to(own)
    if name.startswith("half-"):
        found = Checkpoints(tmp_path / "run", 0, 1)
        (folder / name).symlink_to(own)  # After it was cleared away.
        found.note_attendance(b"x")
    else:
        with pytest.raises(RuntimeError, match=f"cannot be used: .*{folder / name}"):
            Checkpoints(tmp_path / "run", 0, 1)
    assert own.read_text() == "precious"


def _describe(params, tx):
    device = jax.local_devices()[0]
    plan = shards.plan_shards(params, 1)
    return updates.Updater(params, tx, plan, 0, device).describe()


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_by_name(tmp_path):
    params = {"decoder": np.zeros(3, np.float32), "encoder": np.zeros(3, np.float32)}
    renamed = {"decoder": params["decoder"], "encoder2": params["encoder"]}
    made = Checkpoints(tmp_path, 0, 1)
    made.set_state(_describe(params, optax.sgd(1.0, momentum=0.9)))
    made.save(Version(1, 20), ARRAYS, {})
    made.close()
    found = Checkpoints(tmp_path, 0, 1)
    found.set_state(_describe(params, optax.sgd(0.5, momentum=0.8)))
    for other, tx, text in (
        (renamed, optax.sgd(1.0, momentum=0.9), r"has `.*'encoder'.*has `.*'encoder2'"),
        (params, optax.rmsprop(1.0), r"has `.*\.trace.*has `.*\.nu"),
        (params, optax.sgd(1.0), "this program has"),
    ):
        with pytest.raises(ValueError, match=text):
            found.set_state(_describe(other, tx))


def test_checkpoints_of_different_runs_are_never_one():
    def follow(checkpoints, runs):
        return {1: FollowerStatus(1, b"i", b"", 0, 0, checkpoints, (), False, runs)}

    common = restoring.find_common((5, 10), follow((5, 10), (b"a", b"b")), (b"a", b"a"))
    assert common == 5
    with pytest.raises(NoCheckpointError, match="checkpoints of update 5, 10 are from"):
        restoring.find_common((5, 10), follow((5, 10), (b"b", b"b")), (b"a", b"a"))


def test_the_given_parameters_count_until_all_servers_had_a_checkpoint(tmp_path):
    made = _made(tmp_path / "two", (), num_servers=2)
    assert made.find_counts() == (0,)
    made.save(Version(1, 20), ARRAYS, {})
    assert made.find_counts() == (0, 20)
    made.keep(20)
    assert made.find_counts() == (20,)
    made.close()
    assert Checkpoints(tmp_path / "two", 0, 2).find_counts() == (20,)
    alone = _made(tmp_path / "one", (20,))
    assert alone.find_counts() == (20,)
    alone.close()
    shutil.rmtree(tmp_path / "one/server-0-of-1/updates-20")
    assert Checkpoints(tmp_path / "one", 0, 1).find_counts() == ()


def test_a_checkpoint_that_all_have_is_only_dropped_for_newer_ones():
    superfluous = checkpoints.find_superfluous
    assert superfluous({1, 2, 3, 4, 5}, [1, 2, 3, 4, 5]) == [1, 2]
    assert superfluous({1, 2, 3, 4, 5, 6, 7}, [2]) == [3, 4]
    assert superfluous({1, 2}, []) == []


def test_checkpoints_that_others_lack_do_not_take_the_place_of_those_that_all_have():
    superfluous = checkpoints.find_superfluous
    assert superfluous({3, 6, 9, 12, 15}, [3, 15]) == [6]
    assert superfluous({3, 6, 9, 12, 15, 18}, [3, 9, 18]) == [6]
    # After a restart, any of the earlier ones may be one that all have.
    assert superfluous({3, 6, 9, 12, 15}, [15]) == []


def test_servers_that_go_back_forget_the_checkpoints_after_that():
    commons = []
    for count in (3, 6, 9, 12):
        commons = checkpoints.add_common(commons, count)
    assert commons == [6, 9, 12]
    assert checkpoints.add_common(commons, 9) == [6, 9]
    assert checkpoints.add_common(commons, 3) == [3]
    assert checkpoints.add_common(commons, 0) == []


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 7 + b"\x7f" + b"\xff" * 8, b"", b"x" * 5000, struct.pack("<qq", 3, 9)],
    ids=["garbage", "empty", "long", "an older jdp"],
)
def test_a_damaged_progress_file_is_named_and_epochs_never_go_back(
    tmp_path, caplog, garbage
):
    _made(tmp_path)
    (tmp_path / "server-0-of-1/progress").write_bytes(garbage)
    found = Checkpoints(tmp_path, 0, 1)
    if garbage:
        assert "refuses the file `" in caplog.text and "progress`: its" in caplog.text
        assert found.last > Version(1, 40) and found.last.count == 40
        assert found.find_counts() == (20, 40)
        found.close()
        assert Checkpoints(tmp_path, 0, 1).last == found.last


def test_progress_survives_a_write_that_is_cut_in_the_middle(tmp_path):
    path = tmp_path / "progress"
    file = ProgressFile(path)
    for count in range(1, 6):
        file.write(ServerProgress(Version(1, count), count // 2))
        whole = path.read_bytes()
        for slot in range(2):
            torn = bytearray(whole)
            torn[64 * slot + 9] ^= 0xFF
            (tmp_path / "torn").write_bytes(torn)
            found = ProgressFile(tmp_path / "torn").found.version.count
            assert found in (count, count - 1)
        assert ProgressFile(path).found == ServerProgress(Version(1, count), count // 2)


def test_a_full_disk_is_said_once_and_leaves_nothing(tmp_path, monkeypatch, caplog):
    made = _made(tmp_path)
    real, is_full = checkpoint_files._save, True

    def save(path, arrays):
        real(path, arrays)
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "_save", save)
    for count in (60, 80, 100):
        assert not made.save(Version(1, count), ARRAYS, {})
    folder = tmp_path / "server-0-of-1"
    assert {p.name for p in folder.iterdir()} == {
        "updates-20",
        "updates-40",
        "progress",
        "lock",
    }
    assert caplog.text.count("cannot write the checkpoint of update 60 to") == 1
    assert (
        "No space left on device. The job goes on; the newest checkpoint is `updat"
        in (caplog.text)
    )
    assert "of update 80" not in caplog.text
    is_full = False
    with caplog.at_level(logging.WARNING, "jdp"):
        assert made.save(Version(1, 120), ARRAYS, {})
    assert "writes checkpoints again" in caplog.text
    assert made.find_counts() == (20, 40, 120)
    made.close()
    assert "could not write its last updates" not in caplog.text
    is_full, made = True, Checkpoints(tmp_path, 0, 1)
    assert not made.save(Version(1, 140), ARRAYS, {})
    made.close()
    assert "last updates: the newest checkpoint in" in caplog.text
    assert "server-0-of-1` is `updates-120`." in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_job_goes_on_with_a_disk_that_is_full(tmp_path, caplog):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this host does not let root mount a tmpfs")
    rng = np.random.default_rng(0)
    # Noise, which nothing makes smaller.
    params = {"w": rng.normal(size=30_000).astype(np.float32)}
    try:
        with _job(tmp_path, disk, params, checkpoint_every=2) as job:
            with job.worker() as worker:
                for _ in range(12):
                    worker.push({"w": np.ones(30_000, np.float32)})
                    found = worker.pull()
                assert worker.version == (1, 12)
        assert not job.errors
        names = {p.name for p in (disk / "server-0-of-1").iterdir()}
        assert "progress" in names and not any("half" in n for n in names), names
    finally:
        subprocess.run(["umount", disk], check=True)
    chex.assert_trees_all_close(found["w"], params["w"] - 12, rtol=1e-4, atol=1e-5)
    assert caplog.text.count("cannot write the checkpoint of update") == 1
    others = [r for r in caplog.records if r.name != "jdp"]
    assert not [r for r in others if r.levelno >= logging.WARNING]


PARAMS = {"w": np.zeros((4, 3), np.float32), "b": np.zeros(5, np.float32)}
ONES = {k: x + 1 for k, x in PARAMS.items()}


def _job(tmp_path, disk, params=PARAMS, num_servers=1, **options):
    return ThreadJob(
        tmp_path,
        params,
        optax.sgd(1.0),
        num_servers=num_servers,
        mode=parameter_server.asynchronous(),
        options=parameter_server.ServerOptions(checkpoint_dir=disk, **options),
    )


def _train(tmp_path, num_steps, num_servers=2):
    """Returns the version and the parameters after some steps, from where it is."""
    options = {"num_servers": num_servers, "checkpoint_every": 2}
    with _job(tmp_path, tmp_path / "disk", **options) as job, job.worker() as worker:
        for _ in range(num_steps):
            worker.push(ONES)
            worker.flush()
        return worker.pull(), worker.version


@pytest.mark.parametrize("victims", rarely.cases([[0], [1]], often=([0],)), ids=str)
@pytest.mark.slow
def test_all_servers_go_back_further_where_one_has_a_damaged_checkpoint(
    tmp_path, caplog, victims
):
    _train(tmp_path, 6)
    for server in victims:
        folder = tmp_path / f"disk/server-{server}-of-2/updates-6/arrays"
        for path in _files(folder):
            _flip(path, path.stat().st_size // 2)
    params, version = _train(tmp_path, 1)
    # One step after update 4, in all leaves: those of both servers.
    chex.assert_trees_all_close(params, {k: -5 * x for k, x in ONES.items()})
    assert version[1] == 5 and version[0] > 2
    for server in range(2):
        is_refused = f"Server {server} refuses the checkpoint of up" in caplog.text
        assert is_refused == (server in victims)
        assert f"Server {server} goes on from the checkpoint of update 4" in caplog.text


@pytest.mark.parametrize("is_gone", [False, True])
def test_servers_without_a_common_checkpoint_do_not_begin_anew(
    tmp_path, caplog, is_gone
):
    _train(tmp_path, 6)
    folder = tmp_path / "disk/server-1-of-2"
    if is_gone:  # As a disk that is not mounted.
        shutil.rmtree(folder)
    else:
        for path in folder.glob("updates-*/manifest"):
            _flip(path, 50)
    with _job(tmp_path, tmp_path / "disk", num_servers=2) as job:
        job.threads[0].join(20.0)
    (error,) = job.errors
    assert isinstance(error, NoCheckpointError)
    assert f"server 0 has 2, 4, 6; server 1 has {0 if is_gone else 'none'}." in str(
        error
    )
    names = {p.name for p in (tmp_path / "disk/server-0-of-2").iterdir()}
    assert {"updates-2", "updates-4", "updates-6"} <= names, "nothing may be dropped"
