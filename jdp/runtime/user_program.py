"""User program: how does one process of a job run the user's program?

`jdp launch` runs this file by its path: `python -u user_program.py script train.py
args...` or `... module package.train args...`. The program runs as under `python
train.py` or `python -m package.train`, and `__main__` stays the program's module until
the interpreter ends. (`runpy` would restore it before threads and exit handlers end,
and they may start processes that import it.) The file imports neither jdp nor jax.

A program that fails ends with `os._exit`: the exit handler of JAX waits up to 300 s at
a barrier for peers that hang in a collective with the process that failed.
"""

import atexit
import builtins
import contextlib
import gc
import importlib.machinery
import importlib.util
import io
import itertools
import os
import re
import stat
import struct
import sys
import threading
import time
from types import CodeType, ModuleType

_MAX_REASON = 300  # characters.
_CULPRIT_FIRST_S = 1.0
FAILURE_FD = "JDP_FAILURE_FD"
ENDING_FD = "JDP_ENDING_FD"  # At its end once the launcher has begun to end the job.
_FLUSH_TIMEOUT_S = 2.0  # for all pipes and sockets together.
# In C, for types: `isinstance` runs code of ABCs, and of users' classes (`__class__`).
_FILE: type = io.IOBase.__mro__[1]
_TOO_LARGE = 1 << 63  # Python ends with 255 for a code that is not a C long.
# Kind, process id, seconds of the monotonic clock, code, culprit, is_consequence.
RECORD = struct.Struct("<cidii?")
FAILED, BEGAN, JOINED, ENDED, LOST, STAYS = b"f", b"b", b"j", b"e", b"l", b"s"
# The end of a peer breaks collectives and its line; either may be noticed first.
_PEER_IS_HEARD_S = 1.0
_NAMED = re.compile(r"\bProcess (\d{1,9}) has ended; the others")
# JAX's errors about a broken link do not tell why the other side is gone.
_BROKEN = re.compile(
    r"\bGloo |\bgloo/|ncclRemoteError|remote process exited|oordination service"
    r"|UNAVAILABLE:|Connection (?:closed|reset|refused)"
)
_OF_JAX = re.compile(r"Gloo |gloo/|^ValueError: (?:INTERNAL|UNKNOWN|UNAVAILABLE): ")


def main(argv: list[str]) -> None:
    """Runs the program named by `argv`: its kind, its target, its arguments."""
    kind, target, *arguments = argv
    _LauncherPipe.failure_fd, _LauncherPipe.pid = _take_fd(FAILURE_FD), os.getpid()
    _LauncherPipe.ending_fd = _take_fd(ENDING_FD)
    # `import jdp.runtime.user_program` must return this module, which has the pipe.
    sys.modules["jdp.runtime.user_program"] = sys.modules["__main__"]
    program = ModuleType("__main__")
    program.__dict__["__builtins__"] = builtins
    # The interpreter keeps the module of this file alive.
    sys.modules["__main__"] = program
    if os.isatty(0):
        _prepare_prompts()
    try:
        load = _load_module if kind == "module" else _load_script
        exec(load(program, target, arguments), program.__dict__)
        report(ENDED)
        _exit_if_child(0)
    except SystemExit as error:
        code = _exit_code(error)
        _exit_if_child(code)
        report(FAILED if code else ENDED, code)
        if code:
            _tell_others(f"exit code {code}")
        _exit_unless_zero(code)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if os.getpid() != _LauncherPipe.pid:
            _exit_if_child(show_error(error) or code)
        at_s = time.monotonic()
        culprit = find_culprit(error)
        follows = is_consequence(error)
        report(FAILED, code, culprit, at_s=at_s, is_consequence=follows)
        _tell_others(describe_error(error), culprit)
        if (hook_code := show_error(error)) is not None:
            code = hook_code or code  # The others were told already.
            report(FAILED, code, culprit, at_s=at_s, is_consequence=follows)
        if culprit is not None:
            # JAX aborts all when process 0 ends; the culprit gets time to report.
            time.sleep(_CULPRIT_FIRST_S)
        _exit_unless_zero(code)


def _take_fd(name: str) -> int | None:
    """Removes a pipe of the launcher from the environment, and returns it."""
    if (fd := os.environ.pop(name, None)) is None:
        return None
    os.set_inheritable(int(fd), False)
    return int(fd)


def _prepare_prompts() -> None:
    """Makes `input()` use readline, whose mode of the terminal the launcher notices."""
    try:
        readline = importlib.import_module("readline")
        readline.parse_and_bind("set horizontal-scroll-mode on")
    except ImportError:  # Nothing that is typed would come here.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


class _LauncherPipe:
    """Pipes of this process and its launcher; unset without a launcher."""

    failure_fd: int | None = None
    ending_fd: int | None = None
    pid: int = 0  # Forked children do not report for this process.


def has_launcher() -> bool:
    """Returns whether a launcher runs the program of this process, through `main`."""
    return _LauncherPipe.failure_fd is not None


def find_ending_fd() -> int | None:
    """Returns the descriptor that is readable once the launcher ends the job."""
    return _LauncherPipe.ending_fd


def report(
    kind: bytes,
    code: int = 0,
    culprit: int | None = None,
    *,
    at_s: float | None = None,
    is_consequence: bool = False,
) -> None:
    """Reports to the launcher, if there is one.

    Args:
      kind: FAILED: the program has failed now. LOST: `culprit` is gone, and JAX may
        abort this process because of that. BEGAN, JOINED: `jdp.init` begins, returns.
      code: exit code with which the process will end.
      culprit: the process that is the reason, if it is another one.
      at_s: when it happened, on the monotonic clock; None: now.
      is_consequence: whether the only reason is the end of another process.
    """
    process_id = os.environ.get("JDP_PROCESS_ID", "")
    fd = _LauncherPipe.failure_fd
    if fd is None or os.getpid() != _LauncherPipe.pid or not process_id.isdigit():
        return
    own = int(process_id)
    blamed = own if culprit is None else culprit
    at_s = time.monotonic() if at_s is None else at_s
    record = RECORD.pack(kind, own, at_s, code, blamed, is_consequence)
    with contextlib.suppress(OSError):  # The launcher is gone.
        os.write(fd, record)


def describe_error(error: BaseException) -> str:
    """Returns the class and the first line of an error, such as "ValueError: no"."""
    lines = _text_of(error).splitlines() or [""]
    name = type(error).__name__
    return f"{name}: {lines[0]}"[:_MAX_REASON] if lines[0] else name


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # It is the user's class.
        return ""


def find_culprit(error: BaseException) -> int | None:
    """Returns the process that is the reason for `error`, if it is another one.

    An error of jdp may name it. Any other error after the failure or death of another
    process follows from that, such as "connection reset by peer". After an error of
    JAX, the lifeline gets a moment to hear of such a process.
    """
    progress = sys.modules.get("jdp.replicas.progress")
    timeout_s = 0.0
    for cause in _chain(error):
        if progress and (process := progress.culprit_of(cause)) is not None:
            return process
        if _is_of_jax(cause):
            timeout_s = _PEER_IS_HEARD_S
            if named := _NAMED.search(_text_of(cause)):
                return int(named[1])
    lifeline = sys.modules.get("jdp.runtime.lifeline.lifeline")
    if lifeline is None:
        return None
    follows = is_consequence(error)
    return lifeline.find_culprit(timeout_s=timeout_s, is_consequence=follows)


def is_consequence(error: BaseException) -> bool:
    """Returns whether `error` only tells that a link to another process broke.

    Such an error is not the cause if another process reports a reason.
    """
    of_jax = filter(_is_of_jax, _chain(error))
    return any(
        _BROKEN.search(describe_error(e)) or _NAMED.search(_text_of(e)) for e in of_jax
    )


def _is_of_jax(error: BaseException) -> bool:
    if "JaxRuntimeError" in (kind.__name__ for kind in type(error).__mro__):
        return True
    return _OF_JAX.search(describe_error(error)) is not None


def _chain(error: BaseException) -> list[BaseException]:
    """Returns `error`, its causes and its contexts."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    # By identity: the class's `==` may raise, or compare arrays.
    while cause is not None and not any(cause is each for each in found):
        found.append(cause)
        context = None if cause.__suppress_context__ else cause.__context__
        cause = context if cause.__cause__ is None else cause.__cause__
    return found


def _tell_others(reason: str, culprit: int | None = None) -> None:
    """Tells the other processes of the job, if this one has joined it."""
    if (module := sys.modules.get("jdp.runtime.lifeline.lifeline")) is not None:
        module.leave(reason, culprit=culprit)


def _load_script(program: ModuleType, path: str, arguments: list[str]) -> CodeType:
    sys.argv = [path, *arguments]
    if not os.path.isabs(path):  # Else it works even if the folder was deleted.
        path = os.path.join(os.getcwd(), path)
    spec = None
    if not path.endswith(".py"):
        # A folder or a zip file with a `__main__.py`.
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is not None:
        if sys.flags.safe_path:  # Python adds a folder to the path even so.
            sys.path.insert(0, path)
        _set_first_path(path)
        return _adopt(program, spec)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    program.__file__ = path
    program.__loader__ = loader
    program.__dict__["__cached__"] = None
    with io.open_code(path) as file:
        return loader.source_to_code(file.read(), path)


def _load_module(program: ModuleType, name: str, arguments: list[str]) -> CodeType:
    sys.argv = ["-m", *arguments]
    _set_first_path(os.getcwd())
    spec = importlib.util.find_spec(name)  # Imports the packages around it.
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        print(f"{sys.executable}: No module named {name}", file=sys.stderr)
        raise SystemExit(1)
    sys.argv[0] = spec.origin or sys.argv[0]
    return _adopt(program, spec)


def _adopt(program: ModuleType, spec: importlib.machinery.ModuleSpec) -> CodeType:
    """Names `program` as the import system would, and returns its code."""
    program.__spec__ = spec
    program.__loader__ = spec.loader
    program.__package__ = spec.parent
    program.__file__ = spec.origin
    program.__dict__["__cached__"] = spec.cached
    code = getattr(spec.loader, "get_code")(spec.name)  # noqa: B009 (not in the ABC)
    if code is None:
        raise ImportError(f"No code object available for {spec.name}")
    return code


def _set_first_path(path: str) -> None:
    """Puts `path` where Python put the folder of this file."""
    if not sys.flags.safe_path:
        sys.path[0] = path


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return (error.code if -_TOO_LARGE <= error.code < _TOO_LARGE else -1) & 0xFF
    try:
        print(error.code, file=sys.stderr)
    except Exception:  # `__str__` of the user's class; Python ends with 1, silently.
        text = f"an object of class {type(error.code).__name__}, whose text fails"
        print(f"`sys.exit` got {text}", file=sys.stderr)
    return 1


def _exit_if_child(code: int) -> None:
    """Ends a child that the program forked, after its exit handlers.

    As `multiprocessing` does: JAX cannot be shut down without its threads.
    """
    if os.getpid() == _LauncherPipe.pid:
        return
    for end in (vars(threading)["_shutdown"], atexit._run_exitfuncs):  # as Python does.
        with contextlib.suppress(Exception):
            end()
    flush()
    os._exit(code)


def _exit_unless_zero(code: int) -> None:
    """Ends without exit handlers, unless the program succeeded."""
    if code != 0:
        flush()
        if (module := sys.modules.get("jdp.runtime.program_end")) is not None:
            module.stay_while_needed(lambda: report(STAYS))
            flush()
        os._exit(code)


def show(text: str) -> None:
    """Prints a line about the job to stderr, if there is one."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        print(f"jdp: {text}", file=sys.stderr, flush=True)


def flush() -> None:
    """Flushes standard streams and open files; `os._exit` does not.

    From then on, text files write each line at once: other threads may go on.
    """
    flush_files(is_last=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # None, broken or closed.
    # A pipe may never be read, so this gets a deadline.
    thread = threading.Thread(target=flush_files, args=(False,), daemon=True)
    with contextlib.suppress(RuntimeError):  # At its end, Python cannot start a thread.
        thread.start()
        thread.join(_FLUSH_TIMEOUT_S)
    flush_files(is_last=True)


def flush_files(of_disks: bool = True, *, is_last: bool = False) -> None:
    """Flushes open files on disks, or others; `is_last`: text files flush each line."""
    for file in _find_files():
        # A user's class may raise; a file in memory has no descriptor.
        with contextlib.suppress(Exception):
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode) == of_disks:
                file.flush()
                if is_last and isinstance(file, io.TextIOWrapper):
                    file.reconfigure(line_buffering=True)


def _find_files() -> list[io.IOBase]:
    """Returns the file objects of the process.

    All in one call to `list`: no other thread runs while all objects are held. `tuple`
    raises SystemError if its unfinished result is held elsewhere.
    """
    held: list[io.IOBase] = []  # and all others, within the call.
    steps: tuple = (
        map(held.extend, map(gc.get_objects, [None])),
        itertools.compress(held, map(_FILE.__subclasscheck__, map(type, held))),
        map(held.__delitem__, [slice(None)]),
    )
    return list(itertools.chain.from_iterable(steps))[1:-1]


def show_error(error: BaseException) -> int | None:
    """Shows `error` as Python would, without the frames of this file.

    Returns:
      The exit code that the program's `sys.excepthook` asks for, if any.
    """
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and not name.startswith("<frozen "):
            break
        trace = trace.tb_next
    error.__traceback__ = trace
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as hook_error:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(hook_error), hook_error, hook_error.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
