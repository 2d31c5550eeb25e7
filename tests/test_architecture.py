"""The import rules of jdp, as a test. See "Development" in README.md."""

import ast
import pathlib
import subprocess
import sys

import jdp

ROOT = pathlib.Path(jdp.__file__).parent

# A unit (a root module or a package) may import only units in lines above its own.
LAYERS = (
    {"types"},
    {"compat"},
    {"trees"},
    {"backward"},
    {"replicas"},
    {"fingerprints"},
    {"collectives"},
    {"hooks"},
    {"gradients"},
    {"optimizers", "batch_norm"},
    {"step"},
    {"flax_linen", "flax_nnx"},
    {"watch"},
    {"runtime"},
    {"launch", "join", "eager"},
    {"parameter_server", "evaluation", "elastic"},
    {"bench"},
    {"cli"},
)
HOST = {"watch", "runtime", "launch", "join", "eager", "parameter_server", "elastic"}
# A worker pushes through a hook, which the servers run again, and a server asks of a
# program whether an optimizer mixes leaves that lie on several servers.
HOST_MAY_USE = HOST | {
    "compat",
    "types",
    "trees",
    "backward",
    "replicas",
    "collectives",
    "hooks",
}

# Their functions are the bodies of GPU kernels.
KERNELS = {"collectives/pallas/bodies.py"}
# Still too long; both to be emptied.
LONG_MODULES = set()
LONG_FUNCTIONS = set()


def _rank(unit):
    return next(i for i, layer in enumerate(LAYERS) if unit in layer)


def _units():
    for path in sorted(ROOT.rglob("*.py")):
        unit = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if unit != "__init__":
            yield path, unit


def _imported_units(path):
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(level=level) if level > 0:
                raise AssertionError(f"{path}:{node.lineno}: relative import")
            case ast.ImportFrom(module="jdp"):
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(name)) if name.startswith("jdp."):
                yield name.split(".")[1]
            case ast.Import():
                names = (alias.name.split(".") for alias in node.names)
                yield from (n[1] for n in names if n[0] == "jdp" and len(n) > 1)


def test_imports_point_up_the_list():
    for path, unit in _units():
        for target in set(_imported_units(path)) - {unit}:
            assert _rank(target) < _rank(unit), f"{path} imports {target}"
            if unit in HOST:
                assert target in HOST_MAY_USE, f"{path} imports {target}"


def test_every_layer_has_a_module():
    assert {unit for _, unit in _units()} == set().union(*LAYERS)


def test_private_jax_only_in_compat():
    for path, unit in _units():
        if unit != "compat":
            text = path.read_text()
            assert "jax._src" not in text and "jaxlib" not in text, path


def test_no_public_name_shadows_a_module():
    packages = [p.parent for p in ROOT.rglob("__init__.py")]
    for package in packages:
        modules = {p.stem for p in package.glob("*.py")}
        tree = ast.parse((package / "__init__.py").read_text())
        froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        names = {
            a.asname or a.name for n in froms for a in n.names if n.module != "jdp"
        }
        assert not names & modules, f"{package}: {sorted(names & modules)}"


# Attributes that are looked up because foreign objects may lack them.
FOREIGN_ATTRIBUTES = {
    # Leaves of users' trees, and functions and classes of users.
    *("shape", "dtype", "__jax_array__", "__name__", "__iter__", "__getitem__"),
    *("_fields", "_field_defaults", "__dataclass_fields__", "init", "update", "func"),
    "iloc",
    # Parts of jaxprs, whose classes differ between kinds and versions of JAX.
    *("jaxpr", "consts", "val", "eqns", "primitive", "mlir_module_serialized"),
    *("mat", "Inline", "parent_trace"),
    # The interpreter, its modules and its errors.
    *("ps1", "last_value", "strerror", "__module__", "get_code"),
    # Functions that not every system has.
    *("memfd_create", "F_SEAL_SHRINK", "F_SEAL_GROW"),
}
# Modules that look up attributes by computed names: fields of an options class in their
# checks, flags of JAX, options of a socket, an object that a user names, commands.
COMPUTED_ATTRIBUTES = {
    "cli/lazy_group.py",
    "cli/plan.py",
    "eager/coordinator/autotune.py",
    "eager/coordinator/autotune_search.py",
    "eager/options.py",
    "launch/launch.py",
    "parameter_server/launching.py",
    "parameter_server/server.py",
    "parameter_server/worker.py",
    "runtime/cluster.py",
    "runtime/lifeline/star_line.py",
    "runtime/roll_call.py",
}


def test_protocols_have_no_hidden_members():
    """Optional members of jdp's own protocols are fields, not found by `getattr`."""
    hidden = []
    for path, _ in _units():
        place = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"), args=[_, name, *_]
                ):
                    match name:
                        case ast.Constant(value=str(name)):
                            is_known = name in FOREIGN_ATTRIBUTES
                        case _:
                            is_known = place in COMPUTED_ATTRIBUTES
                    if not is_known:
                        hidden.append(f"{place}:{node.lineno}")
    assert hidden == []


def _length(function):
    """Lines of a function, without its docstring."""
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function):
        doc = function.body[0]
        length -= doc.end_lineno - doc.lineno + 1
    return length


def test_modules_and_functions_stay_short():
    long_modules, long_functions, too_long = set(), set(), []
    for path, _ in _units():
        place, text = str(path.relative_to(ROOT)), path.read_text()
        length = len(text.splitlines())
        if length > 400:
            long_modules.add(place)
        if length > 480:
            too_long.append(f"{place}: {length} lines")
        limit = 80 if place in KERNELS else 50
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if _length(node) > limit:
                    long_functions.add(f"{place}:{node.name}")
    assert too_long == []
    # An exception that nothing needs any more would let the next one in.
    assert long_modules == LONG_MODULES
    assert long_functions == LONG_FUNCTIONS


def test_importing_jdp_starts_nothing_and_its_commands_import_no_kernels():
    code = """
import os
class NoReads(dict):
    def __getitem__(self, key):
        assert not str(key).startswith("JDP_"), key
        return super().__getitem__(key)
os.environ["JDP_NUM_PROCESSES"] = "not a number"
import threading, sys
before = threading.active_count()
import jdp
for name in (*jdp.__all__, "collectives", "hooks"):  # Each imports its module.
    getattr(jdp, name)
from jax._src import xla_bridge, distributed
assert not xla_bridge.backends_are_initialized()
assert distributed.global_state.client is None
assert threading.active_count() == before, threading.enumerate()
heavy = {"flax", "torch", "zmq", "sklearn", "typer", "rich", "psutil"}
heavy |= {"jax.experimental.pallas", "pynvml", "scipy.optimize", "bayes_opt"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert "jdp.eager" not in sys.modules and not hasattr(jdp, "eager")
os.environ["JDP_EAGER_FUSION_BYTES"] = "not a number"
from jdp import eager
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert threading.active_count() == before, threading.enumerate()
assert not eager.is_initialized()
assert not hasattr(jdp, "parameter_server")
from jdp import parameter_server
heavy |= {"orbax", "orbax.checkpoint"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert threading.active_count() == before, threading.enumerate()
from jdp.cli import lazy_group, main
def load(entries):
    for name, entry in entries.items():
        entry.load(name)
        if isinstance(entry, lazy_group.Group):
            load(entry.entries)
load(main.ENTRIES)
assert "jdp.bench.kernel" in sys.modules
heavy = {"jax.experimental.pallas", "pynvml", "scipy.optimize", "matplotlib", "zmq"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
