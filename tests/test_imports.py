"""What an import brings along, in modules: times depend on the machine."""

import ast
import resource
import signal
import subprocess
import sys

import pytest

import jdp
from jdp.cli import lazy_group, main
from tests import commands, harness, rarely


def _run(code):
    """Runs Python code in a new process; returns what it prints."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=commands.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def _assigned(tree, name):
    (node,) = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return ast.literal_eval(node.value)


def test_checkers_and_programs_find_the_same_names_in_the_same_modules():
    tree = ast.parse((harness.ROOT / "jdp/__init__.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"
    by_module = {
        node.module: [alias.name for alias in node.names] for node in guarded.body
    }
    packages = [
        alias.asname
        for node in guarded.body
        for alias in node.names
        if node.module == "jdp"
    ]
    del by_module["jdp"]
    found = {k: v.split() for k, v in _assigned(tree, "_NAMES").items()}
    assert found == by_module
    assert sorted(sum(found.values(), [])) == jdp.__all__
    assert packages == [*_assigned(tree, "_PACKAGES")]
    assert packages == ["collectives", "hooks", "watch"]


def test_jdp_adds_next_to_nothing_to_jax():
    out = _run(
        "import time, sys, jax; before = set(sys.modules); start = time.process_time()"
        "; import jdp; end = time.process_time()"
        "; print(*sorted(set(sys.modules) - before), end - start)"
    )
    *modules, seconds = out.split()
    assert modules == ["jdp", "jdp.runtime", "jdp.runtime.last_handler"]
    assert float(seconds) < 0.15  # 0.001


def test_a_step_needs_neither_optax_nor_the_rest_of_jdp():
    out = _run(
        "import sys, jdp; jdp.init, jdp.data_parallel, jdp.value_and_grad"
        "; jdp.replicate, jdp.check_replicas, jdp.average; print(*sys.modules)"
    )
    modules = out.split()
    others = "optax flax zmq rich typer psutil scipy.optimize jax.experimental.pallas"
    assert not {*others.split(), "jdp.join", "jdp.eager", "jdp.launch"} & {*modules}
    loaded = {m for m in modules if m.startswith("jdp.optimizers.")}
    assert loaded == {"jdp.optimizers.outer_transforms"}
    out = _run("import sys, jdp; jdp.zero1; print('optax' in sys.modules)")
    assert out == "True\n"


def test_a_name_can_be_used_first_while_jax_traces():
    _run(
        "import jax, jdp\n"
        "with jax.checking_leaks():\n"
        "    mean = jax.vmap(lambda x: jdp.average(x), axis_name='data')\n"
        "    assert (jax.jit(mean)(jax.numpy.arange(4.0)) == 1.5).all()\n"
        "assert (mean(jax.numpy.arange(4.0)) == 1.5).all()"
    )


@pytest.mark.parametrize(
    ("first", "then"),
    rarely.cases(
        [
            ("import jax, jdp", "jdp.init"),
            ("import jdp; jdp.init", ""),
            ("import jdp", ""),
        ],
        often=[("import jdp", "")],
    ),
    ids=["after jax", "after a use", "before jax"],
)
def test_exit_handlers_run_in_the_order_program_jdp_jax(first, then):
    is_reserved = first != "import jdp"  # Without JAX, the first use reserves.
    register = "atexit.register(print, 'program')"
    out = _run(
        f"import atexit; {first}\n"
        f"{register if is_reserved else 'jdp.init'}\n"
        f"{then if is_reserved else register}\n"
        "from jax._src import distributed\n"
        "from jdp.runtime import program_end\n"
        "program_end._ProgramEnd.is_prepared = True\n"
        "program_end.lifeline.wait_at_end = lambda put: print('jdp')\n"
        "distributed.shutdown = lambda: print('jax')"
    )
    assert out.split() == ["program", "jdp", "jax"]


def test_a_module_that_is_not_imported_and_a_typo_are_told_apart():
    assert "zero1" in dir(jdp) and "hooks" in dir(jdp)
    out = _run(
        "import jdp\n"
        "for name in ('eager', 'zero2'):\n"
        "    try:\n"
        "        getattr(jdp, name)\n"
        "    except AttributeError as error:\n"
        "        print(error)"
    )
    assert out.splitlines() == [
        "module 'jdp' has no attribute 'eager'. Import it: `from jdp import eager`.",
        "module 'jdp' has no attribute 'zero2'",
    ]


def _commands(entries, *before):
    for name, entry in entries.items():
        if isinstance(entry, lazy_group.Group):
            yield from _commands(entry.entries, *before, name)
        else:
            yield (*before, name), entry


@pytest.mark.parametrize(
    ("words", "entry"),
    [pytest.param(*found, id=" ".join(found[0])) for found in _commands(main.ENTRIES)],
)
def test_help_says_of_a_command_what_the_command_says(words, entry):
    command = entry.load(words[-1])
    assert command.help.splitlines()[0] == entry.help
    assert command.name == words[-1]


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["bench", "--help"], ["launch", "--help"], ["lanch"]],
    ids=" ".join,
)
def test_help_and_mistakes_import_no_jax(words):
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    out = _run(
        f"import sys; sys.argv = ['jdp', *{words}]\n"
        "import jdp_command\n"
        "try:\n"
        "    jdp_command.main()\n"
        "except SystemExit:\n"
        "    print(*sys.modules)"
    )
    after_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    modules = out.splitlines()[-1].split()
    assert not {"jax", "numpy", "optax", "zmq"} & {*modules}
    assert "jdp.cli.main" in modules and "jdp.cli.plan" not in modules
    assert after_s - before_s < 2.0  # 0.15 s, of which typer takes half.


def test_an_interrupt_while_a_command_is_imported_ends_it_as_any_program():
    code = """
import importlib.abc, signal, sys
import jdp_command
seen = {}
class Spy(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("jax", "jdp.cli.plan"):
            seen[name] = signal.getsignal(signal.SIGINT)
sys.meta_path.insert(0, Spy())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["jdp", "plan", "--help"]
try:
    jdp_command.main()
except SystemExit:
    seen["then"] = signal.getsignal(signal.SIGINT)
print(*(f"{name}={handler}" for name, handler in seen.items()))
"""
    found = _run(code).splitlines()[-1]
    default = f"{signal.Handlers.SIG_DFL!s}"
    assert f"jdp.cli.plan={default} jax={default} then=<built-in" in found
