import contextlib
import dataclasses
import fcntl
import glob
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
import uuid

import psutil
import pytest

from jdp.launch import guard, guarding, launch, supervisor
from jdp.runtime import environment
from tests import harness, rarely

TIMEOUT_S = 20.0
IGNORE_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
IGNORE_BOTH = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
# Without a flush: what is printed is shown at once.
SLEEP = "print('ready'); import time; time.sleep(60)"
# Of the process alone, with a tracker that ends with it.
SHARED_MEMORY = """
import os
from multiprocessing import shared_memory
name = f"{os.environ['JDP_TEST_MARK']}_{os.environ['JDP_PROCESS_ID']}"
memory = shared_memory.SharedMemory(name, create=True, size=8)
"""


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch):
    """Every process of a test, its guard too, has ended with the test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("JDP_TEST_MARK", mark)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    yield
    left = find_marked(mark)
    for process in left:
        process.kill()
    assert not left


def find_marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("JDP_TEST_MARK") == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [process for process in found if process.pid != os.getpid()]


def find_memory():
    return glob.glob(f"/dev/shm/{os.environ['JDP_TEST_MARK']}_*")


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str
    elapsed_s: float


@pytest.fixture
def job(tmp_path):
    """Launches a program from this process."""

    def run(program, *arguments, num_processes=2, environ=None, **options):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(program))
        start_s = time.monotonic()
        with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
            code = launch.launch(
                launch.Command(kind="script", target=str(script), arguments=arguments),
                launch.LaunchOptions(num_processes=num_processes, **options),
                environ=environ,
                stdout_fd=out.fileno(),
                stderr_fd=err.fileno(),
            )
        return Result(
            code,
            (tmp_path / "out").read_text(errors="surrogateescape"),
            (tmp_path / "err").read_text(errors="surrogateescape"),
            time.monotonic() - start_s,
        )

    return run


@contextlib.contextmanager
def on_interrupt(handler=signal.default_int_handler):
    """What is started meanwhile takes SIGINT like this.

    `nohup` and a shell's `&` have these tests ignore it, and so all that they start. No
    `preexec_fn`, for which Python forks: JAX, once it runs, warns of that.
    """
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def cli(tmp_path):
    """Starts `jdp` as a process of its own, in the folder of the test."""
    started = []

    def start(
        *arguments,
        program=None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        handler=signal.default_int_handler,
        **options,
    ):
        if program is not None:
            (tmp_path / "program.py").write_text(textwrap.dedent(program))
        with on_interrupt(handler):
            process = subprocess.Popen(
                [sys.executable, "-m", "jdp.cli.main", *arguments],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": harness.python_path()},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                **options,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(TIMEOUT_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def read_lines(process, num_lines):
    return [process.stdout.readline() for _ in range(num_lines)]


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.02)


# Options, commands and environments.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_processes": 0}, "`num_processes` must be at least 1, got 0"),
        ({"devices_per_process": 0}, "`devices_per_process` must be at least 1"),
        ({"devices_per_process": 10**6}, "`devices_per_process` must be at most 16384"),
        ({"num_nodes": 0}, "`num_nodes` must be at least 1"),
        ({"node_rank": 1}, "less than `num_nodes`, which is 1, got 1"),
        ({"node_rank": -1}, "`node_rank` must be at least 0"),
        ({"grace_s": -1.0}, "`grace_s` must be a number of seconds, 0 or more"),
        ({"grace_s": float("nan")}, "`grace_s` must be a number of seconds"),
        ({"num_nodes": 2}, "`coordinator` is needed when `num_nodes` is 2"),
        ({"coordinator_address": "host"}, "must be host:port .* got 'host'"),
        ({"coordinator_address": ":1"}, "must be host:port"),
        ({"coordinator_address": "host:"}, "must be host:port"),
        ({"coordinator_address": "host:0"}, "must have a port from 1 to 65535"),
        ({"coordinator_address": "host:65536"}, "must have a port from 1 to"),
        ({"coordinator_address": "http://a:29"}, "must be host:port .* got 'http"),
        ({"coordinator_address": "fe80::1:29"}, r"must be host:port or \[IPv6\]:port"),
    ],
)
def test_options_say_what_is_wrong_with_them(options, message):
    with pytest.raises(ValueError, match=message):
        launch.LaunchOptions(**{"num_processes": 2} | options)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Packages of which none can be imported, only looked for."""
    monkeypatch.chdir(tmp_path)
    for path in (
        "single.py",
        "package/__init__.py",
        "package/train.py",
        "package/inner/__init__.py",
        "package/inner/__main__.py",
        "spaces/deep/train.py",
        "folder/train.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("raise AssertionError('imported')")
    (tmp_path / "dynamic").mkdir()
    (tmp_path / "dynamic/__init__.py").write_text("__path__ = find_path()")


@pytest.mark.parametrize(
    "name",
    [
        "single",
        "package.train",
        "package.inner",
        "spaces.deep.train",
        "dynamic.train",
        "json.tool",
        "this",
        "timeit",
    ],
)
def test_a_module_is_found_without_an_import(modules, name):
    assert launch.Command(kind="module", target=name).target == name


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", "There is no module 'nothing'"),
        ("package.nothing", "There is no module 'package.nothing'"),
        ("single.nothing", "There is no module 'single.nothing'"),
        ("package", "A package needs a `__main__.py`"),
        ("spaces", "A package needs a `__main__.py`"),
        ("json", "A package needs a `__main__.py`"),
        ("", "`-m` takes the dotted name"),
        (".train", "`-m` takes the dotted name"),
        ("package/train.py", "Leave out `-m` to run a script"),
    ],
)
def test_a_module_that_is_missing_is_refused(modules, name, message):
    with pytest.raises(ValueError, match=message):
        launch.Command(kind="module", target=name)


@pytest.mark.parametrize(
    "path, message",
    [
        ("nothing.py", "There is no script 'nothing.py'"),
        ("package.train", "Use `-m package.train`"),
        ("folder", "folder without a `__main__.py`"),
    ],
)
def test_a_script_that_is_missing_is_refused(modules, path, message):
    with pytest.raises(ValueError, match=message):
        launch.Command(kind="script", target=path)


@pytest.mark.parametrize("path", ["single.py", "package/inner"])
def test_a_script_is_found(modules, path):
    assert launch.Command(kind="script", target=path).target == path


def test_processes_are_numbered_over_the_hosts():
    options = launch.LaunchOptions(
        num_processes=3, num_nodes=4, node_rank=2, coordinator_address="a:1"
    )
    places = [launch.place_of(options, i, coordinator_address="a:1") for i in range(3)]
    assert [place.process_id for place in places] == [6, 7, 8]
    assert [place.local_process_id for place in places] == [0, 1, 2]
    assert {place.num_processes for place in places} == {12}
    assert {place.num_local_processes for place in places} == {3}


def test_the_environment_of_an_outer_job_does_not_leak():
    options = launch.LaunchOptions(num_processes=1)
    place = launch.place_of(options, 0, coordinator_address="a:1")
    base = dict.fromkeys(environment.VARIABLES, "outer") | {"KEPT": "1"}
    environ = launch.process_environ(place, "id", base=base)
    assert "outer" not in environ.values()
    assert environment.DEVICES_PER_PROCESS not in environ
    assert (environ["KEPT"], environ[environment.LAUNCH_ID]) == ("1", "id")
    assert environment.LaunchEnvironment.from_environ(environ) == place


# Whole jobs.


@pytest.mark.multiprocess
def test_every_process_gets_its_place_and_its_arguments(job):
    program = """
    import os, sys
    print(os.environ["JDP_PROCESS_ID"], os.environ["JDP_COORDINATOR_ADDRESS"],
          os.environ["JDP_LAUNCH_ID"], os.environ["JDP_DEVICES_PER_PROCESS"],
          sys.argv[1:], sys.stdin.read() == "", os.getsid(0) == os.getpid())
    """
    got = job(program, "--n", "x y", num_processes=3, devices_per_process=2)
    assert (got.code, got.err) == (0, "")
    pattern = r"\[(\d)\] \1 (127\.0\.0\.1:\d+ \w{32}) 2 \['--n', 'x y'\] True True\n"
    assert re.fullmatch(f"(?:{pattern})*".replace(r"\1", r"\d"), got.out)
    rows = re.findall(pattern, got.out)
    assert sorted(row[0] for row in rows) == ["0", "1", "2"]
    assert len({row[1] for row in rows}) == 1


@pytest.mark.multiprocess
def test_stdout_and_stderr_stay_apart(job):
    got = job("import sys; print('out'); print('err', file=sys.stderr)")
    assert sorted(got.out.splitlines()) == ["[0] out", "[1] out"]
    assert sorted(got.err.splitlines()) == ["[0] err", "[1] err"]


@pytest.mark.multiprocess
def test_without_a_terminal_processes_have_none(job):
    got = job("import sys; print(sys.stdout.isatty(), sys.stderr.isatty())")
    assert sorted(got.out.splitlines()) == ["[0] False False", "[1] False False"]


@pytest.mark.multiprocess
def test_nothing_is_lost_when_a_process_ends(job):
    got = job(
        """
        import os
        data = b"".join(b"%d\\n" % i for i in range(50_000)) + b"\\xff end"
        while data:
            data = data[os.write(1, data):]
        os._exit(0)
        """
    )
    for i in range(2):
        start = f"[{i}] "
        own = [line for line in got.out.splitlines() if line.startswith(start)]
        expected = [*map(str, range(50_000)), "\udcff end"]
        assert [line.removeprefix(start) for line in own] == expected


@pytest.mark.multiprocess
def test_a_process_that_ends_with_0_does_not_end_the_others(job):
    got = job(
        """
        import os, time
        if os.environ["JDP_PROCESS_ID"] == "0":
            time.sleep(0.5)
            print("late")
        """
    )
    assert (got.code, got.out) == (0, "[0] late\n")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "failure, code, message",
    [
        ("sys.exit(3)", 3, "process 1 failed with exit code 3"),
        ("raise ValueError('no')", 1, "process 1 failed with exit code 1"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "process 1 was killed by SIGKILL",
        ),
    ],
)
def test_the_first_failure_ends_the_others(job, failure, code, message):
    got = job(
        f"""
        import os, signal, sys, time
        if os.environ["JDP_PROCESS_ID"] == "1":
            for i in range(30):
                print("line", i)
            {failure}
        time.sleep(60)
        """,
        num_processes=3,
    )
    assert got.code == code
    assert got.elapsed_s < 4.0
    title, title_of_tail, *tail = got.err[got.err.index("jdp launch") :].splitlines()
    assert title == f"jdp launch: {message}."
    assert title_of_tail == "jdp launch: its last lines were:"
    assert len(tail) == 20
    assert "[1] line 29" in tail
    assert all(line.startswith("[1] ") for line in tail)
    assert "worker.py" not in got.err


@pytest.mark.multiprocess
def test_the_one_that_failed_first_is_named_also_when_others_follow_at_once(job):
    # Process 0 notices at once, as a peer does when its connection breaks. The child of
    # process 1 keeps its pipes open, so that they do not tell of its end.
    got = job(
        """
        import os, sys
        if os.environ["JDP_PROCESS_ID"] == "1":
            open(sys.argv[0] + ".pid", "w").write(str(os.getpid()) + "\\n")
            import subprocess, time
            subprocess.Popen(["sleep", "60"])
            time.sleep(0.3)
            os._exit(7)
        pid = ""
        while not pid.endswith("\\n"):
            try: pid = open(sys.argv[0] + ".pid").read()
            except FileNotFoundError: pass
        stat = "/proc/" + pid.strip() + "/stat"
        while True:
            try: state = open(stat).read().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError): break
            if state == "Z": break
        import time; time.sleep(0.005)
        os._exit(8)
        """
    )
    assert got.code == 7, got.err


@pytest.mark.multiprocess
@pytest.mark.parametrize("failure", ["raise ValueError('mine')", "sys.exit(1)"])
def test_the_one_that_raised_first_is_named_also_when_it_ends_last(job, failure):
    got = job(
        f"""
        import os, pathlib, sys, time
        mark = pathlib.Path(sys.argv[0] + ".mark")
        class Slow:
            def write(self, text): pass
            def flush(self):
                mark.touch()
                time.sleep(0.3)
        if os.environ["JDP_PROCESS_ID"] == "1":
            sys.stderr = sys.stdout = Slow()  # it takes a while to end.
            {failure}
        while not mark.exists(): pass
        raise ConnectionError("process 1 is gone")
        """
    )
    assert got.code == 1
    assert "jdp launch: process 1 failed with exit code 1." in got.err


@pytest.mark.multiprocess
def test_a_program_that_failed_and_is_aborted_on_its_way_out_failed(job):
    got = job(
        """
        import os, sys
        class Abort:
            def write(self, text): pass
            def flush(self): os.abort()
        if os.environ["JDP_PROCESS_ID"] == "1":
            sys.stdout = Abort()
            sys.exit(7)
        """
    )
    assert got.code == 7
    assert "jdp launch: process 1 failed with exit code 7." in got.err


@pytest.mark.multiprocess
def test_sigkill_follows_when_sigterm_is_ignored(job):
    program = f"""
import os, subprocess, sys, time
if os.environ["JDP_PROCESS_ID"] == "1":
    time.sleep(0.5)
    sys.exit(3)
{SHARED_MEMORY}
# It does not end with its clients, as a tracker does.
code = "import signal, time; signal.signal(15, 1); time.sleep(60)"
code += " # resource_tracker import main"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
{IGNORE_SIGTERM}
"""
    got = job(program, grace_s=0.5)
    assert got.code == 3
    assert 1.0 <= got.elapsed_s < 6.0
    assert not find_memory()


@pytest.mark.multiprocess
def test_sigterm_comes_first(job):
    got = job(
        """
        import os, signal, sys, time
        def handle(*_):
            print("saving")
            sys.exit(0)
        signal.signal(signal.SIGTERM, handle)
        if os.environ["JDP_PROCESS_ID"] == "1":
            time.sleep(0.5)
            sys.exit(3)
        time.sleep(60)
        """
    )
    assert (got.code, got.out) == (3, "[0] saving\n")


GRANDCHILD = """
import os, subprocess, sys
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
if os.environ["JDP_PROCESS_ID"] == "0":
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    print(child.pid, flush=True)
    child.returncode = 0  # No warning that it still runs.
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("code", [0, 3])
def test_what_a_process_leaves_behind_is_ended(job, code):
    got = job(GRANDCHILD + f"    sys.exit({code})", grace_s=0.3)
    assert got.code == code
    assert got.elapsed_s < 8.0
    assert has_ended(int(got.out.removeprefix("[0] ")))


@pytest.mark.multiprocess
def test_what_a_process_leaves_behind_may_end_by_itself_first(job):
    got = job(
        """
        import os, subprocess, time
        code = "trap 'echo saving; exit' TERM; echo ready; while :; do sleep 0.05; done"
        if os.environ["JDP_PROCESS_ID"] == "0":
            subprocess.Popen(["sh", "-c", code]).returncode = 0
            time.sleep(0.5)
        """
    )
    assert (got.code, got.out) == (0, "[0] ready\n[0] saving\n")


@pytest.mark.multiprocess
def test_a_pipe_held_outside_the_job_does_not_hang_the_launcher(job, tmp_path):
    code = f"""
import os, time
while not os.path.exists({str(tmp_path / "pid")!r}):
    time.sleep(0.01)
held = open(f"/proc/{{open({str(tmp_path / "pid")!r}).read()}}/fd/1", "w")
open({str(tmp_path / "held")!r}, "w").close()
time.sleep(60)
"""
    outside = subprocess.Popen([sys.executable, "-c", code])
    try:
        got = job(
            f"""
            import os, time
            if os.environ["JDP_PROCESS_ID"] == "0":
                open({str(tmp_path / "half")!r}, "w").write(str(os.getpid()))
                os.rename({str(tmp_path / "half")!r}, {str(tmp_path / "pid")!r})
                while not os.path.exists({str(tmp_path / "held")!r}):
                    time.sleep(0.01)
            """
        )
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()
    assert got.code == 0
    assert got.elapsed_s < 5.0


@pytest.mark.multiprocess
def test_only_processes_of_the_job_are_killed(job):
    other = subprocess.Popen(
        [sys.executable, "-c", SLEEP],
        env=os.environ | {environment.LAUNCH_ID: "another"},
        stdout=subprocess.DEVNULL,
    )
    try:
        assert job("import sys; sys.exit(3)", grace_s=0.0).code == 3
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.multiprocess
def test_launch_works_outside_the_main_thread_and_restores_signals(job):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(job("print('hello')")), name="launcher"
    )
    thread.start()
    thread.join(TIMEOUT_S)
    assert results[0].code == 0
    old = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    num_fds = psutil.Process().num_fds()
    job("print('hello')")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == old
    assert psutil.Process().num_fds() == num_fds


@pytest.mark.multiprocess
def test_an_error_in_the_launcher_ends_the_processes(job, monkeypatch):
    def fail(self):
        raise ZeroDivisionError

    monkeypatch.setattr(supervisor.Supervisor, "_wait_for_processes", fail)
    with pytest.raises(ZeroDivisionError):
        job(IGNORE_SIGTERM)


@pytest.mark.multiprocess
def test_a_guard_that_cannot_start_is_an_error(job, monkeypatch, tmp_path):
    (tmp_path / "guard.py").write_text("raise SystemExit('no psutil')")
    monkeypatch.setattr(guarding.guard, "__file__", str(tmp_path / "guard.py"))
    with pytest.raises(RuntimeError, match="no process was started.*\n.*no psutil"):
        job("print('never')")
    assert (tmp_path / "out").read_text() == ""


def test_without_a_list_of_processes_there_is_no_job(job, monkeypatch, tmp_path):
    monkeypatch.setattr(guard, "_list_pids", list)
    with pytest.raises(guarding.GuardError, match="`/proc` must be mounted"):
        job("print('never')")
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.multiprocess
def test_a_process_that_never_comes_to_init_is_the_reason(job):
    got = job(
        """
        import os, time
        if os.environ["JDP_PROCESS_ID"] == "1":
            time.sleep(60)
        import jdp
        jdp.init(timeout_s=1.0)
        """,
        environ=os.environ | {"PYTHONPATH": harness.python_path()},
    )
    text = "process 0 failed with exit code 1, because of process 1.\n"
    assert got.code == 1 and text in got.err
    assert "1 of 2 processes did not come in time: 1." in got.err


# The command line.


@pytest.mark.multiprocess
def test_a_launcher_without_descriptors_says_so_in_one_line(tmp_path):
    (tmp_path / "program.py").write_text("import time; time.sleep(60)")
    command = f'"{sys.executable}" -m jdp.cli.main launch -n 12 program.py'
    process = subprocess.run(
        ["sh", "-c", f"ulimit -n 24; exec {command}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": harness.python_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stdout) == (1, "")
    assert re.fullmatch(
        "jdp launch: .* could not be started: Too many open files. Raise .*\n",
        process.stderr,
    )


@pytest.mark.multiprocess
def test_what_follows_the_script_goes_to_the_script(cli):
    process = cli(
        *("launch", "-n", "1", "program.py", "-n", "5", "--help", "--", "-m", "x"),
        program="import sys; print(sys.argv)",
    )
    out, err = process.communicate(timeout=TIMEOUT_S)
    expected = "[0] ['program.py', '-n', '5', '--help', '--', '-m', 'x']\n"
    assert (process.returncode, out, err) == (0, expected, "")


@pytest.mark.multiprocess
def test_a_module_of_the_current_folder_runs(cli):
    process = cli(
        *("launch", "-n", "1", "--grace-s", "1", "-m", "program", "--help"),
        program="import sys; print(__spec__.name, sys.argv[1:])",
    )
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (0, "[0] program ['--help']\n", "")


def test_wrong_command_lines_say_what_to_do(monkeypatch, tmp_path, capsys):
    from jdp.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    for arguments, message in {
        ("-n", "2"): "name a program",
        ("a.py",): "'-n'",
        ("-n", "0", "a.py"): "-n must be at least 1",
        ("-n", "x", "a.py"): "Invalid value for '-n'",
        ("-n", "2", "--nope", "a.py"): "No such option: --nope",
        ("-n", "2", "b.py"): "a path that Python could run",
        ("-n", "2", "-m", "a.b"): "There is no module 'a.b'",
        ("-n", "2", "--nodes", "2", "a.py"): "--coordinator is needed",
        ("-n", "2", "--node-rank", "1", "a.py"): "--node-rank must be",
        ("-n", "2", "--coordinator", "a", "a.py"): "must be host:port",
        ("-n", "2", "--devices-per-process", "0", "a.py"): "must be at least 1",
        ("-n", "2", "--devices-per-process", "99999", "a.py"): "must be at most 16384",
        ("-n", "2", "--grace-s", "-1", "a.py"): "--grace-s must be",
    }.items():
        with pytest.raises(SystemExit) as caught:
            main.app(["launch", *arguments])
        assert caught.value.code == 2, arguments
        assert message in capsys.readouterr().err, arguments


def test_the_version_is_printed(capsys):
    from jdp.cli import main

    with pytest.raises(SystemExit) as caught:
        main.app(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"jdp \S.*\n", capsys.readouterr().out)


@pytest.mark.multiprocess
@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_the_job(cli, signum, code):
    process = cli("launch", "-n", "2", "program.py", program=SLEEP)
    read_lines(process, 2)
    process.send_signal(signum)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code
    assert err.endswith(f"jdp launch: ended by {signum.name}.\n")
    # An interrupt is handed on, for programs that save then.
    assert err.count("KeyboardInterrupt") == 2 * (signum == signal.SIGINT)


@pytest.mark.multiprocess
def test_a_second_interrupt_kills_at_once(cli):
    process = cli(
        *("launch", "-n", "2", "--grace-s", "60", "program.py"), program=IGNORE_BOTH
    )
    read_lines(process, 2)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130


@pytest.mark.multiprocess
def test_nothing_survives_a_launcher_that_is_killed(cli):
    process = cli(
        *("launch", "-n", "2", "program.py"),
        program=f"{GRANDCHILD}\n{SHARED_MEMORY}\n"
        f"print('pid', os.getpid(), flush=True)\n{IGNORE_SIGTERM}",
    )
    pids = [int(pid) for pid in re.findall(r"(\d+)\n", "".join(read_lines(process, 5)))]
    assert len(pids) == 3
    assert not any(map(has_ended, pids))
    assert len(find_memory()) == 2
    process.kill()
    wait_until(lambda: all(map(has_ended, pids)))
    wait_until(lambda: not find_marked(os.environ["JDP_TEST_MARK"]))
    assert not find_memory()


# Ways out of the environment, the session and the tree of the job; each prints its pid.
ESCAPES = {
    # As `setproctitle`, which writes over what others see of the environment.
    "worker without a mark": "os.execve(sys.executable, [sys.executable, '-c', SLEEP],"
    " {'NUMBER': os.environ['JDP_PROCESS_ID']})",
    "child without a mark": "subprocess.Popen([sys.executable, '-c', SLEEP], env={})",
    "daemon": """if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, '-c', SLEEP], {})
    os._exit(0)
os.wait()""",
}


def start_escaped(cli, escape, then, num_processes=1):
    """Starts a launcher; returns it with the pids of what escapes."""
    program = f"""
import os, signal, subprocess, sys, time
SLEEP = "import os, signal, time; signal.signal(15, signal.SIG_IGN);"
SLEEP += "print(os.getpid(), flush=True); time.sleep(60)"
{escape}
{then}
"""
    command = ("launch", "-n", str(num_processes), "--grace-s", "0.5", "program.py")
    process = cli(*command, program=program)
    lines = read_lines(process, num_processes)
    return process, [int(line.split("] ")[1]) for line in lines]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "escape",
    rarely.cases(ESCAPES.values(), often=list(ESCAPES.values())[:1]),
    ids=ESCAPES,
)
def test_what_has_left_environment_and_session_ends_with_a_killed_launcher(cli, escape):
    process, pids = start_escaped(cli, escape, "time.sleep(60)", num_processes=2)
    time.sleep(0.5)  # The guard looks five times a second.
    process.kill()
    wait_until(lambda: all(map(has_ended, pids)))
    wait_until(lambda: not find_marked(os.environ["JDP_TEST_MARK"]))


@pytest.mark.multiprocess
@pytest.mark.parametrize("escape", list(ESCAPES.values())[1:], ids=list(ESCAPES)[1:])
@pytest.mark.parametrize("code", rarely.cases([0, 3], often=(3,)))
def test_what_has_left_environment_and_session_ends_with_its_job(cli, escape, code):
    process, pids = start_escaped(cli, escape, f"time.sleep(0.1); sys.exit({code})")
    assert process.wait(TIMEOUT_S) == code
    assert all(map(has_ended, pids))


@pytest.mark.multiprocess
def test_what_the_launcher_does_not_start_is_left_alone(tmp_path):
    """A child that it has from before, as by `server & exec jdp launch`."""
    (tmp_path / "program.py").write_text("import sys; sys.exit(3)")
    child = "sleep 61 & echo $!; exec"
    command = f'{child} "{sys.executable}" -m jdp.cli.main launch -n 1 program.py'
    with open(tmp_path / "out", "w") as out:
        process = subprocess.run(
            ["sh", "-c", command],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": harness.python_path()},
            stdout=out,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    assert process.returncode == 3
    other = psutil.Process(int((tmp_path / "out").read_text()))
    assert other.status() == psutil.STATUS_SLEEPING
    other.kill()
    other.wait(TIMEOUT_S)


def test_a_process_that_took_over_a_number_is_no_kin():
    ours, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        census = guard.Census(uuid.uuid4().hex, launcher=os.getpid(), adopts=False)
        found = guard.describe(ours.pid)
        census.add(found)
        census.add(guard.Process(other.pid, "0"))
        assert census.find() == [found]
        guard.signal_processes([guard.Process(other.pid, "0")], signal.SIGKILL)
        assert guard.kill_all(census, timeout_s=TIMEOUT_S) == []
        assert ours.wait(TIMEOUT_S) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_session_that_is_over_is_no_longer_of_the_job():
    ours = subprocess.Popen(["sleep", "60"], start_new_session=True)
    census = guard.Census(uuid.uuid4().hex, launcher=os.getpid(), adopts=False)
    census.add(guard.describe(ours.pid))
    assert [each.pid for each in census.find()] == [ours.pid]
    assert census._sessions == {ours.pid}
    census.look()
    assert census._sessions == {ours.pid}
    ours.kill()
    ours.wait()
    census.look()
    assert census._sessions == set()  # Its number may be that of another one soon.


@pytest.mark.multiprocess
@pytest.mark.parametrize("has_own_proc", [True, False])
def test_the_launcher_may_be_the_first_process_of_a_namespace(tmp_path, has_own_proc):
    unshare = ["unshare", "--pid", "--fork", *["--mount-proc"] * has_own_proc]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("namespaces of process numbers need root")
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import subprocess, time
            for _ in range(5):
                subprocess.run(["sh", "-c", "true & exit"])
            time.sleep(1)
            listed = subprocess.run(["ps", "-eo", "stat"], capture_output=True)
            print(listed.stdout.count(b"Z"), "zombies")
            """
        )
    )
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "jdp.cli.main", "launch", "-n", "1"]
        + ["program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": harness.python_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if has_own_proc:
        assert (done.returncode, done.stdout) == (0, "[0] 0 zombies\n")
    else:
        assert done.returncode == 1 and "belong to this process" in done.stderr


@pytest.mark.multiprocess
def test_a_job_inside_a_job_ends_with_the_outer_one(cli, tmp_path):
    (tmp_path / "inner.py").write_text(f"import os; print(os.getpid())\n{SLEEP}")
    process = cli(
        *("launch", "-n", "1", "program.py"),
        program="""
        import sys
        from jdp.launch import launch
        launch.launch(
            launch.Command(kind="script", target="inner.py"),
            launch.LaunchOptions(num_processes=1),
        )
        """,
    )
    first, _ = read_lines(process, 2)
    inner_pid = int(first.removeprefix("[0] [0] "))
    process.kill()
    wait_until(lambda: has_ended(inner_pid))
    wait_until(lambda: not find_marked(os.environ["JDP_TEST_MARK"]))


@pytest.mark.multiprocess
def test_a_reader_that_goes_away_ends_the_job(cli):
    process = cli(
        *("launch", "-n", "2", "program.py"),
        program="import time\nwhile True: print('x'); time.sleep(0.01)",
    )
    read_lines(process, 1)
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGPIPE
    assert process.stderr.read() == "jdp launch: ended by SIGPIPE.\n"


@pytest.mark.multiprocess
def test_a_reader_that_stops_reading_does_not_stop_an_interrupt(cli):
    process = cli(
        *("launch", "-n", "2", "--grace-s", "0.5", "program.py"),
        program="while True: print('x' * 1000)",
    )
    read_lines(process, 1)
    time.sleep(0.5)  # The pipe is full by now.
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130


@pytest.mark.multiprocess
def test_on_a_terminal_processes_have_terminals_and_colors(cli, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    master_fd, slave_fd = os.openpty()
    fcntl.ioctl(slave_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 70, 0, 0))
    process = cli(
        *("launch", "-n", "2", "program.py"),
        program="""
        import os, sys, time
        print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.isatty(),
              os.get_terminal_size(1).columns, os.get_terminal_size(2).columns)
        print("\\x1b[31mred\\x1b[0m", file=sys.stderr)
        if os.environ["JDP_PROCESS_ID"] == "0":
            print("\\r10%", end="")
            time.sleep(0.5)
            print("\\r20%", end="")
            time.sleep(0.5)
        """,
        stdout=slave_fd,
        stderr=slave_fd,
    )
    os.close(slave_fd)
    shown, times = b"", {}
    while True:
        try:
            chunk = os.read(master_fd, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
        for text in (b"10%", b"20%"):
            if text in shown:
                times.setdefault(text, time.monotonic())
    os.close(master_fd)
    assert process.wait(TIMEOUT_S) == 0
    for i, color in enumerate([b"36", b"33"]):
        start = b"\x1b[0;%sm[%d] \x1b[0m" % (color, i)
        assert start + b"True True False 66 66\r\n" in shown
        assert start + b"\x1b[31mred\x1b[0m\r\n" in shown
    assert times[b"20%"] - times[b"10%"] > 0.3
    assert shown.endswith(b"\r\x1b[K\x1b[0;36m[0] \x1b[0m20%\r\n")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "closing",
    rarely.cases(["<&-", ">&-", "2>&-", ">&- 2>&- <&-"], often=(">&- 2>&- <&-",)),
)
def test_closed_descriptors_of_the_launcher_are_no_error(tmp_path, closing):
    (tmp_path / "program.py").write_text(
        "import os; os.write(1, b'x'); open('ran', 'w')"
    )
    command = f'"{sys.executable}" -m jdp.cli.main launch -n 1 program.py {closing}'
    process = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": harness.python_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert (tmp_path / "ran").exists()


@pytest.mark.multiprocess
def test_a_guard_that_is_killed_is_started_again(cli):
    process = cli("launch", "-n", "1", "program.py", program=SLEEP)
    read_lines(process, 1)
    guards = [
        child
        for child in psutil.Process(process.pid).children()
        if "guard.py" in " ".join(child.cmdline())
    ]
    (first,) = guards
    first.kill()
    assert process.stderr.readline() == (
        "jdp launch: the guard was killed by SIGKILL; another one was started.\n"
    )
    process.kill()  # The new one does its work.
    wait_until(lambda: not find_marked(os.environ["JDP_TEST_MARK"]))


@pytest.mark.multiprocess
def test_an_interrupt_that_is_ignored_at_the_start_stays_ignored(cli):
    process = cli(
        *("launch", "-n", "1", "program.py"),
        program="import time\nprint('ready')\ntime.sleep(1)\nprint('done')",
        handler=signal.SIG_IGN,
    )
    read_lines(process, 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (0, "[0] done\n", "")


@pytest.mark.multiprocess
@pytest.mark.parametrize("after_s", [0.1, 0.6])
def test_an_interrupt_while_the_launcher_starts_is_not_lost(tmp_path, after_s):
    (tmp_path / "program.py").write_text("import time; time.sleep(60)")
    command = "import jdp_command; print('on', flush=True); jdp_command.main()"
    with on_interrupt():
        process = subprocess.Popen(
            [sys.executable, "-c", command, "launch", "-n", "1", "program.py"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": harness.python_path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    assert process.stdout.readline() == "on\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert not re.search("^Traceback", out, re.MULTILINE)


# --- The end of process 0, with which JAX's coordination service ends -----------------

SAVES = """
import os, pathlib, signal, sys, time
import jdp
world = jdp.init(timeout_s=60)
own = world.process_index
file = open(f"kept.{own}", "w")
file.write("last line")
def save(*_):
    time.sleep(4.0 * own)
    pathlib.Path(f"saved.{own}").write_text("all")
    if _:
        sys.exit(143)
signal.signal(signal.SIGTERM, save)
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    save()
    raise
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "signum", rarely.cases([signal.SIGINT, signal.SIGTERM], often=(signal.SIGINT,))
)
@pytest.mark.slow
def test_a_save_takes_its_time_though_process_0_has_ended(cli, tmp_path, signum):
    process = cli("launch", "-n", "2", "--grace-s", "8", "program.py", program=SAVES)
    assert all("ready" in line for line in read_lines(process, 2))
    process.send_signal(signum)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signum, err
    for own in range(2):
        assert (tmp_path / f"saved.{own}").read_text() == "all", err
        assert (tmp_path / f"kept.{own}").read_text() == "last line"


FAILS = """
import os, pathlib, sys, time
import jdp
world = jdp.init(timeout_s=60)
own = world.process_index
file = open(f"kept.{own}", "w")
file.write("last line")
pathlib.Path(f"wrote.{own}").touch()
if own == 0:
    while not all(os.path.exists(f"wrote.{i}") for i in range(world.process_count)):
        time.sleep(0.01)
    time.sleep(1.0)
    FAULT
WAIT
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "code", "wait"),
    rarely.cases(
        [
            ("1 / 0", 1, "time.sleep(60)"),
            ("sys.exit(3)", 3, "jdp.replicate(world, {'w': 1.0})"),
        ],
        often=[("1 / 0", 1, "time.sleep(60)")],
    ),
)
def test_files_hold_what_was_written_where_process_0_fails(
    cli, tmp_path, fault, code, wait
):
    program = FAILS.replace("FAULT", fault).replace("WAIT", wait)
    process = cli("launch", "-n", "3", "--grace-s", "3", "program.py", program=program)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, err
    assert f"jdp launch: process 0 failed with exit code {code}." in err
    assert "SIGABRT" not in out + err
    for own in range(3):
        assert (tmp_path / f"kept.{own}").read_text() == "last line"


DIES = """
import os, signal, sys, time
import jdp
world = jdp.init(timeout_s=60)
own = world.process_index
file = open(f"kept.{own}", "w")
file.write("last line")
if own == 1:
    time.sleep(0.5)
    FAULT
print("ready")
time.sleep(60)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "code", "grace_s"),
    rarely.cases(
        [
            ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "1.5"),
            ("os._exit(3)", 3, "1.5"),
            ("1 / 0", 1, "0.5"),
        ],
        often=[("1 / 0", 1, "0.5")],
    ),
)
def test_files_of_processes_in_host_code_outlive_the_launchers_sigkill(
    cli, tmp_path, fault, code, grace_s
):
    """Also the files of process 0, which ends after the others."""
    program = DIES.replace("FAULT", fault)
    start = "launch", "-n", "3", "--grace-s", grace_s
    process = cli(*start, "program.py", program=program)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, err
    assert "jdp launch: process 1 " in err
    assert "SIGABRT" not in out + err
    for own in (0, 2):
        assert (tmp_path / f"kept.{own}").read_text() == "last line", out + err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_files_hold_what_was_written_where_the_launcher_ends_the_job(cli, tmp_path):
    """Nothing in the job handles SIGTERM, and SIGKILL follows."""
    program = DIES.replace("FAULT", "pass")
    start = "launch", "-n", "2", "--grace-s", "1.5"
    process = cli(*start, "program.py", program=program)
    read_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    for own in range(2):
        assert (tmp_path / f"kept.{own}").read_text() == "last line", err


def open_kin():
    kin = guarding.Kin(uuid.uuid4().hex, "", adopts_orphans=False)
    kin.open()
    found = psutil.Process().children()
    (own,) = [each for each in found if "guard.py" in " ".join(each.cmdline())]
    return kin, own


@pytest.mark.multiprocess
def test_a_launcher_waits_little_for_a_guard_that_has_nothing_to_guard():
    kin, own = open_kin()
    own.suspend()
    kin.say_done()
    start_s = time.monotonic()
    kin.close()
    assert time.monotonic() - start_s < 10.0
    assert not own.is_running()


@pytest.mark.multiprocess
def test_no_guard_is_started_once_no_process_is_left():
    kin, own = open_kin()
    own.kill()
    wait_until(lambda: own.status() == psutil.STATUS_ZOMBIE)
    assert kin.check() is None
    assert psutil.Process().children() in ([], [own])
    kin.close()
