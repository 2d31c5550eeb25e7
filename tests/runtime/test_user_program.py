"""Worker: a program sees what Python itself would show it."""

import os
import subprocess
import sys
import zlib

import jax
import pytest

from jdp.replicas import progress
from jdp.runtime import user_program
from tests import rarely

pytestmark = pytest.mark.multiprocess

REPORT = """
import json, sys
import __main__
spec = __main__.__spec__
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": spec and spec.name,
    "loader": type(__loader__).__name__,
    "doc": __doc__,
    "cached": __cached__,
    "builtins": str(__builtins__),
    "is_main": vars(__main__) is globals(),
    "names": sorted(n for n in globals() if n != "__annotations__"),
}))
"""


def run(arguments, cwd, *, flags=()):
    return subprocess.run(
        [sys.executable, *flags, *arguments],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=20,
    )


def run_worker(kind, target, *arguments, cwd, flags=()):
    return run([user_program.__file__, kind, target, *arguments], cwd, flags=flags)


@pytest.fixture
def tree(tmp_path):
    """A folder of programs that report what they see."""
    for path in ("train.py", "noend", "app/__main__.py", "pkg/__main__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(f'"""Doc."""\n{REPORT}')
    (tmp_path / "pkg/__init__.py").write_text("")
    (tmp_path / "pkg/sub.py").write_text(REPORT)
    (tmp_path / "links").mkdir()
    (tmp_path / "links/linked.py").symlink_to(tmp_path / "train.py")
    return tmp_path


SCRIPTS = ("train.py", "./pkg/sub.py", "links/linked.py", "noend", "app")


@pytest.mark.parametrize(
    "kind, target, flags",
    [
        # -P hides the folder that a module is in.
        *(("module", target, ()) for target in ("pkg", "pkg.sub", "train")),
        *(("script", target, flags) for target in SCRIPTS for flags in ((), ("-P",))),
    ],
)
def test_a_program_sees_what_python_shows_it(tree, kind, target, flags):
    arguments = ["-n", "3", "--", "x"]
    start = [] if kind == "script" else ["-m"]
    expected = run([*start, target, *arguments], tree, flags=flags)
    got = run_worker(kind, target, *arguments, cwd=tree, flags=flags)
    assert expected.returncode == 0, expected.stderr
    assert (got.stdout, got.stderr) == (expected.stdout, "")


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit()",
        "import sys; sys.exit(0)",
        "import sys; sys.exit(3)",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit(256)",
        "import sys; sys.exit('why')",
        "import sys; sys.exit((1, 2))",
        "def f():\n    raise ValueError('no')\n\nf()",
        "try:\n    1 / 0\nexcept ValueError:\n    pass",
        "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(1) from e",
        "x = = 1",
        "import nothing_of_this_name",
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0])\n1 / 0",
        "import sys\nsys.excepthook = lambda *a: sys.exit(5)\n1 / 0",
        "print('half', end=''); 1 / 0",
    ],
)
def test_a_program_ends_as_under_python(tmp_path, program):
    (tmp_path / "program.py").write_text(program)
    expected = run(["program.py"], tmp_path)
    got = run_worker("script", "program.py", cwd=tmp_path)
    assert (got.returncode, got.stdout, got.stderr) == (
        expected.returncode,
        expected.stdout,
        expected.stderr,
    )


@pytest.mark.parametrize(
    "end",
    rarely.cases(["sys.exit(3)", "raise ValueError('no')"], often=("sys.exit(3)",)),
)
def test_open_files_hold_what_was_written_as_under_python(tmp_path, end):
    (tmp_path / "program.py").write_text(
        f"""
import gzip, os, sys
class Odd:
    __class__ = property(lambda self: 1 / 0)
odd = Odd()
text = open("text", "w")
binary = open("binary", "wb")
both = open("both", "w+b")
packed = gzip.open("packed", "wt")
_, full = os.pipe()
full = open(full, "wb", buffering=1 << 20)  # Nothing ever reads it.
full.write(bytes(1 << 19))
closed = open("closed", "w")
closed.close()
for file in (binary, both):
    file.write(b"last")
for file in (text, packed):
    file.write("last")
{end}
"""
    )
    got = run_worker("script", "program.py", cwd=tmp_path)
    assert got.returncode == (3 if "exit" in end else 1)
    for name in ("text", "binary", "both"):
        assert (tmp_path / name).read_text() == "last"
    unpacked = zlib.decompressobj(wbits=31)  # There is no end of a file here.
    assert unpacked.decompress((tmp_path / "packed").read_bytes()) == b"last"


def test_an_exit_code_that_is_too_large_is_255_as_under_python(tmp_path):
    (tmp_path / "program.py").write_text("import sys; sys.exit(10**30)")
    # Some versions of Python also print that it is too large.
    assert run(["program.py"], tmp_path).returncode == 255
    assert run_worker("script", "program.py", cwd=tmp_path).returncode == 255


def test_an_error_in_a_package_around_the_module_shows_no_frame_of_ours(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/__init__.py").write_text("1 / 0\n")
    (tmp_path / "bad/train.py").write_text("")
    got = run_worker("module", "bad.train", cwd=tmp_path)
    assert got.returncode == 1
    assert "ZeroDivisionError" in got.stderr
    assert "worker.py" not in got.stderr


def test_a_broken_excepthook_does_not_hide_the_error(tmp_path):
    program = "import sys\nsys.excepthook = None\n1 / 0\n"
    (tmp_path / "program.py").write_text(program)
    got = run_worker("script", "program.py", cwd=tmp_path)
    assert got.returncode == 1
    assert "Error in sys.excepthook" in got.stderr
    assert "ZeroDivisionError" in got.stderr


@pytest.mark.parametrize(
    "method", ["__eq__", "__bool__", "__str__", "__len__", "__hash__", "__repr__"]
)
def test_an_error_whose_methods_raise_is_the_last_that_is_shown(tmp_path, method):
    """As `==` of a dataclass with arrays does."""
    (tmp_path / "train.py").write_text(
        f"""
class Odd(Exception):
    def {method}(self, *args):
        raise ValueError("ambiguous")
class JaxRuntimeError(Odd):
    pass
try:
    raise JaxRuntimeError(1)
except Odd as error:
    raise Odd(2) from error
"""
    )
    ours = run_worker("script", "train.py", cwd=tmp_path)
    python = run(["train.py"], tmp_path)
    assert (ours.returncode, ours.stderr) == (1, python.stderr)
    assert "direct cause" in ours.stderr


def test_an_exit_with_what_cannot_be_shown_fails(tmp_path):
    (tmp_path / "train.py").write_text(
        """
import atexit, sys
atexit.register(print, "after success")
class Odd:
    def __str__(self):
        raise ValueError("no text")
sys.exit(Odd())
"""
    )
    got = run_worker("script", "train.py", cwd=tmp_path)
    text = "`sys.exit` got an object of class Odd, whose text fails\n"
    assert (got.returncode, got.stdout, got.stderr) == (1, "", text)


@pytest.mark.parametrize("code, shown", [(0, "exit handler\n"), (1, "")])
def test_exit_handlers_run_only_after_success(tmp_path, code, shown):
    (tmp_path / "program.py").write_text(
        "import atexit, sys\n"
        "atexit.register(print, 'exit handler')\n"
        f"sys.exit({code})\n"
    )
    got = run_worker("script", "program.py", cwd=tmp_path)
    assert (got.returncode, got.stdout) == (code, shown)


def test_a_failure_does_not_wait_for_threads(tmp_path):
    (tmp_path / "program.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "1 / 0\n"
    )
    assert run_worker("script", "program.py", cwd=tmp_path).returncode == 1


@pytest.mark.parametrize("kind, target", [("script", "spawn.py"), ("module", "spawn")])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_multiprocessing_finds_the_functions_of_main(tmp_path, kind, target, method):
    (tmp_path / "spawn.py").write_text(
        "import atexit, multiprocessing, sys\n"
        "def square(x):\n"
        "    return x * x\n"
        "def run(x):\n"
        "    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:\n"
        "        print(pool.map(square, [x]), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    run(3)\n"
        "    import threading, time\n"
        "    def late():\n"
        "        time.sleep(0.2)\n"
        "        run(4)\n"
        "    threading.Thread(target=late).start()\n"
    )
    got = run_worker(kind, target, method, cwd=tmp_path)
    assert (got.returncode, got.stdout) == (0, "[9]\n[16]\n"), got.stderr


def test_an_error_is_searched_for_the_process_that_it_follows_from():
    named = progress.blame(RuntimeError("gone"), 3)
    outer = ValueError("epoch failed")
    outer.__cause__ = named
    assert user_program.find_culprit(outer) == 3
    outer.__cause__ = jax.errors.JaxRuntimeError(
        "INTERNAL: RuntimeError: Process 2 has ended; the others cannot go on without"
    )
    assert user_program.find_culprit(outer) == 2
    assert user_program.is_consequence(outer)
    outer.__cause__ = None
    assert user_program.find_culprit(outer) is None
    assert not user_program.is_consequence(outer)


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: [gloo/transport/pair.cc:5] x"), True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect"), True),
        (ValueError("INTERNAL: RuntimeError: Process 2 has ended; the others"), True),
        (ValueError("Process 2 has ended; the others"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (RuntimeError("Connection reset by peer: the database"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (ValueError("boom"), False),
    ],
)
def test_an_error_of_jax_about_a_link_is_a_consequence(error, is_consequence):
    assert user_program.is_consequence(error) == is_consequence


def test_a_script_with_an_absolute_path_runs_where_the_folder_was_deleted(tmp_path):
    (tmp_path / "program.py").write_text("print('ran')\n")
    folder = tmp_path / "gone"
    folder.mkdir()
    run = f"import os, subprocess, sys; os.rmdir({str(folder)!r}); " + (
        f"sys.exit(subprocess.call([sys.executable, {user_program.__file__!r}, "
        f"'script', {str(tmp_path / 'program.py')!r}]))"
    )
    got = subprocess.run(
        [sys.executable, "-c", run], cwd=folder, capture_output=True, text=True
    )
    assert (got.returncode, got.stdout) == (0, "ran\n"), got.stderr


WRITES_ON = """
import os, sys, threading, time
sys.path.insert(0, FOLDER)
import user_program
file = open("lines", "w", buffering=1 << 20)
count = os.open("count", os.O_CREAT | os.O_WRONLY)
read_fd, write_fd = os.pipe()
os.write(write_fd, bytes(1 << 16))  # It is full, and is not read.
unread = os.fdopen(write_fd, "wb")
unread.write(b"x")

def end():
    time.sleep(0.2)
    user_program.flush()
    os._exit(0)

user_program._FLUSH_TIMEOUT_S = 0.5
threading.Thread(target=end).start()
i = 0
while True:
    file.write("line\\n")
    i += 1
    os.pwrite(count, b"%12d" % i, 0)
"""


def test_lines_that_another_thread_writes_during_the_last_flush_are_kept(tmp_path):
    folder = os.path.dirname(user_program.__file__)
    program = WRITES_ON.replace("FOLDER", repr(folder))
    assert run(["-c", program], tmp_path).returncode == 0
    num_written = int((tmp_path / "count").read_text())
    assert num_written > 1000
    num_kept = (tmp_path / "lines").read_text().count("line\n")
    assert num_written <= num_kept <= num_written + 1


TUPLES_BEHIND = """
import sys, threading
sys.path.insert(0, FOLDER)
import user_program
held = [[i] for i in range(200_000)]  # The search takes a few turns of the threads.
lasts = threading.Event()

def search():
    for _ in range(10):
        user_program.flush_files()
    lasts.set()

threading.Thread(target=search).start()
while not lasts.is_set():
    tuple(i for i in range(20_000))
"""


def test_tuples_that_another_thread_makes_during_a_flush_are_made(tmp_path):
    folder = os.path.dirname(user_program.__file__)
    program = TUPLES_BEHIND.replace("FOLDER", repr(folder))
    done = run(["-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
