"""`jdp launch --log-dir`: a file with the output of each process."""

import errno
import os
import pty

import pytest
import typer.testing
from hypothesis import given
from hypothesis import strategies as st

from jdp.cli import main
from jdp.launch import launch, logs, output
from jdp.parameter_server import launching
from tests import commands

PROGRAM = """
import os, sys, time
i = os.environ["JDP_PROCESS_ID"]
print("\\x1b[31mred\\x1b[0m of", i)
for k in range(3):
    print(f"\\r{k} of 2", end="", flush=True)
print("\\n" + "a" * 3000, end="", flush=True)
time.sleep(1.1)  # An unfinished line is shown meanwhile.
print("b")
print("in between", file=sys.stderr)
print("no end of line", end="")
"""


def _lines(path):
    return path.read_text().splitlines()


@pytest.mark.multiprocess
def test_each_process_has_a_file_with_all_its_lines(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ("-n", 2, "--log-dir", "logs/of job")
    code, out, err = commands.jdp("launch", *options, "program.py", cwd=tmp_path)
    assert code == 0, err
    assert "[1] \x1b[31mred\x1b[0m of 1\n" in out and "[0] in between\n" in err
    for i in range(2):
        assert _lines(tmp_path / f"logs/of job/process_{i}.log") == [
            f"red of {i}",
            "2 of 2",
            "a" * 3000 + "b",
            "in between",
            "no end of line",
        ]


@pytest.mark.multiprocess
def test_servers_and_workers_have_files_of_their_own(tmp_path):
    (tmp_path / "program.py").write_text(
        "from jdp.parameter_server import Place\n"
        "place = Place.from_environ()\n"
        "print(place.role, place.index)\n"
    )
    command = launch.Command(kind="script", target=str(tmp_path / "program.py"))
    options = launching.RoleOptions(
        num_servers=1, num_workers=2, log_dir=str(tmp_path / "logs")
    )
    with open(tmp_path / "out", "w") as out:
        code = launching.launch_roles(
            command,
            options,
            environ=commands.environ(),
            stdout_fd=out.fileno(),
            stderr_fd=out.fileno(),
        )
    assert code == 0
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["server_0.log", "worker_0.log", "worker_1.log"]
    assert _lines(tmp_path / "logs/worker_1.log") == ["worker 1"]


class Job:
    """A forwarder with logs, whose only process is the test."""

    def __init__(self, folder, out_fd):
        self.logs = logs.LogFiles(str(folder), {0: "a"})
        self.forwarder = output.Forwarder(
            num_processes=1, stdout_fd=out_fd, stderr_fd=out_fd, logs=self.logs
        )
        self.fds = self.forwarder.open_streams(0)

    def write(self, chunk, stream=0):
        os.write(self.fds[stream], chunk)
        while self.forwarder.pump(timeout_s=0.0):
            pass

    def end(self):
        for fd in self.fds:
            os.close(fd)
        while self.forwarder.is_open:
            self.forwarder.pump(timeout_s=1.0)
        self.forwarder.close()


def test_a_log_of_a_terminal_has_plain_lines(tmp_path):
    master_fd, slave_fd = pty.openpty()
    job = Job(tmp_path, slave_fd)
    job.write(b"\x1b[1mbold\x1b[0m\n\rstep 1\rstep 2\x1b[K\r\nlast")
    job.end()
    os.close(slave_fd)
    os.close(master_fd)
    assert (tmp_path / "a.log").read_bytes() == b"bold\nstep 2\nlast\n"


def test_lines_of_both_outputs_stay_whole(tmp_path):
    with open(tmp_path / "out", "w") as out:
        job = Job(tmp_path, out.fileno())
        job.write(b"one ")
        job.write(b"other\n", stream=1)
        job.write(b"line\n\n")
        job.end()
    assert (tmp_path / "a.log").read_bytes() == b"other\none line\n\n"


@given(st.lists(st.binary(max_size=8)))
def test_how_output_is_read_makes_no_difference(tmp_path_factory, chunks):
    folder = tmp_path_factory.mktemp("logs")
    found = logs.LogFiles(str(folder), {0: "whole", 1: "parts"})
    found.take(0, 5, b"".join(chunks))
    for chunk in chunks:
        found.take(1, 5, chunk)
    for i in range(2):
        found.end(i, 5)
    found.close()
    whole = (folder / "whole.log").read_bytes()
    assert whole == (folder / "parts.log").read_bytes()
    text = b"".join(chunks)
    if not {b"\r", b"\x1b"} & {bytes([c]) for c in text}:
        assert whole == text + (b"\n" if text and not text.endswith(b"\n") else b"")


def test_an_endless_line_does_not_fill_the_memory(tmp_path):
    found = logs.LogFiles(str(tmp_path), {0: "bar", 1: "text"})
    for i in range(30):
        found.take(0, 5, b"\r%d" % i + b"." * 9999)
        found.take(1, 5, b"x" * 9999)
        assert sum(map(len, found._unfinished.values())) < 3 * (1 << 16)
    found.end(0, 5)
    found.end(1, 5)
    found.close()
    assert (tmp_path / "bar.log").read_bytes() == b"29" + b"." * 9999 + b"\n"
    assert (tmp_path / "text.log").read_bytes().replace(b"\n", b"") == b"x" * 299_970


def test_a_full_disk_is_told_once_and_the_job_goes_on(tmp_path, monkeypatch):
    with open(tmp_path / "out", "w+") as out:
        job = Job(tmp_path, out.fileno())
        log_fd, write = job.logs._fds[0], os.write

        def fail(fd, data):
            if fd == log_fd:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)
            job.write(b"lost\n")
            job.write(b"lost, too\n")
        job.write(b"kept\n")
        job.end()
        text = (tmp_path / "out").read_text()
    assert text.count("jdp launch: the logs cannot be written (No space left") == 1
    assert "[0] lost, too\n" in text
    assert (tmp_path / "a.log").read_text() == "kept\n"


def test_files_of_an_earlier_run_are_replaced(tmp_path):
    (tmp_path / "a.log").write_text("old")
    logs.LogFiles(str(tmp_path), {0: "a"}).close()
    assert (tmp_path / "a.log").read_text() == ""


def test_names_sort_by_number():
    names = [*logs.name_processes(range(8, 12), 12).values()]
    assert names == ["process_08", "process_09", "process_10", "process_11"]
    assert names == sorted(names)


def test_a_folder_that_cannot_be_made_is_named_as_it_was_typed(tmp_path):
    (tmp_path / "a.py").write_text("")
    runner = typer.testing.CliRunner(env={"COLUMNS": "200"})
    path = str(tmp_path / "a.py")
    options = ["launch", "-n", "1", "--log-dir", path]
    found = runner.invoke(main.app, [*options, path])
    assert found.exit_code == 1
    assert f"--log-dir {path!r} cannot be written: File exists" in found.stderr
