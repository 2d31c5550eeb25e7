"""Measured times are kept on disk, for jobs of the same kind."""

import os

import pytest

from jdp.collectives import Curve, Links, measurement_cache
from jdp.replicas import cores
from tests import harness

LINKS = Links(1e-5, 1e9, 2e-10, measured=(Curve("psum", 2, ((1 << 10, 1e-4),)),))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JDP_CACHE_DIR", str(tmp_path))
    return tmp_path


def _find(links=LINKS, world=None, algorithms=("psum", "ring")):
    """What is found, and whether it was measured."""
    calls = []
    found = measurement_cache.find_or_measure(
        world or harness.local_world(2), algorithms, lambda: calls.append(1) or links
    )
    return found, bool(calls)


def _files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_next_job_of_a_kind_measures_nothing(folder):
    assert _find() == (LINKS, True)
    assert _find(links=None) == (LINKS, False)
    assert len(_files(folder)) == 1


def test_another_kind_of_job_measures(folder, monkeypatch):
    _find()
    assert _find(world=harness.local_world(3))[1]
    with monkeypatch.context() as patch:
        patch.setattr(measurement_cache, "_VERSION", 0)
        assert _find()[1]
    pinned = cores.UsableCores((0,), 0.5)
    monkeypatch.setattr(cores, "find_usable", lambda: pinned)
    assert _find()[1]
    assert len(_files(folder)) == 4


def test_times_of_an_algorithm_that_is_not_here_are_measured_anew(folder):
    _find()
    assert _find(algorithms=("ring",))[1]


@pytest.mark.parametrize("damage", ["empty", "torn", "noise", "times", "names"])
def test_a_damaged_file_is_measured_anew(folder, damage):
    _find()
    (path,) = _files(folder)
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "torn": data[:-3],
            "noise": os.urandom(100),
            "times": data.replace(b"\x3f\x1a\x36\xe2\xeb\x1c\x43\x2d", b"\xff" * 8),
            "names": data.replace(b"measured", b"mesaured"),
        }[damage]
    )
    assert path.read_bytes() != data
    assert _find() == (LINKS, True)
    assert path.read_bytes() == data


def test_nothing_is_stored_where_nothing_was_measured_or_can_be(folder, monkeypatch):
    nothing = Links(0.0, 1e9)
    assert _find(nothing) == (nothing, True)
    assert _files(folder) == []
    (folder / "file").write_text("")
    monkeypatch.setenv("JDP_CACHE_DIR", str(folder / "file"))
    assert _find() == (LINKS, True)


def test_the_folder_is_the_users_cache_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("JDP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _find()
    (path,) = _files(tmp_path)
    assert path.parent == tmp_path / "jdp" / "all_reduce_times"
