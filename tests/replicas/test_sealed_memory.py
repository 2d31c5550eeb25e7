"""Sealed memory keeps its size, and nothing else is opened in its place."""

import os
import re

import pytest

from jdp.replicas import control_groups, sealed_memory


@pytest.fixture
def made():
    mapped, fd, offer = sealed_memory.make_memory(8192, label="test")
    yield mapped, fd, offer
    os.close(fd)


def test_what_one_writes_the_other_reads(made):
    mapped, fd, offer = made
    opened = sealed_memory.open_memory(offer, 8192, pid=os.getpid())
    mapped[4096:4099] = b"abc"
    assert opened[4096:4099] == b"abc"
    assert os.fstat(fd).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("size", [0, 4096, 16384])
def test_its_size_is_sealed(made, size):
    with pytest.raises(PermissionError):
        os.ftruncate(made[1], size)


def test_another_offer_than_the_one_made_is_refused(made, monkeypatch):
    offer = made[2]
    for wrong, size, pid in (
        (offer, 8191, None),
        (offer, 1 << 40, None),
        (offer, 8192, 1),
        (offer._replace(token=bytes(16)), 8192, None),
        (offer._replace(path="/etc/passwd"), 8192, None),
        (offer._replace(path=offer.path + "\0"), 8192, None),
        (offer._replace(path=re.sub("[0-9]", "\u0661", offer.path)), 8192, None),
    ):
        with pytest.raises(OSError):
            sealed_memory.open_memory(wrong, size, pid=pid)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # as memory of another user.
    with pytest.raises(OSError, match="not belong to this user alone"):
        sealed_memory.open_memory(offer, 8192)


def test_more_memory_than_is_free_is_refused_before_it_is_taken():
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        sealed_memory.make_memory(1 << 60, label="test")
    assert len(os.listdir("/proc/self/fd")) == num_fds


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("depth", ["", "slice", "slice/job"])
@pytest.mark.parametrize(("cached", "is_enough"), [(900_000, True), (100_000, False)])
def test_files_in_the_memory_of_a_group_give_way(
    tmp_path, monkeypatch, cached, is_enough, version, depth
):
    names = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
    limit, usage = (f"memory.{name}" for name in names)
    controller, stat = ("", "") if version == 2 else ("memory", "total_")
    group = tmp_path / controller / depth
    group.mkdir(parents=True, exist_ok=True)
    groups = f"4:{controller}:/slice/job\n"
    folders = control_groups.find_folders(groups, "memory", tmp_path)
    monkeypatch.setattr(control_groups, "find_folders", lambda *_: folders)
    (group / limit).write_text("1000000\n")
    (group / usage).write_text("950000\n")
    (group / "memory.stat").write_text(f"anon 50000\n{stat}inactive_file {cached}\n")
    if is_enough:
        sealed_memory._check_available(500_000)
    else:
        with pytest.raises(OSError, match="No space left"):
            sealed_memory._check_available(500_000)
    (group / limit).write_text("max\n")
    sealed_memory._check_available(500_000)
