"""Every name of a primitive that jdp knows is one of the installed JAX."""

import ast
import importlib
import pathlib
import sys

import jax
import pytest
from jax._src import core, effects
from jax._src.interpreters import ad, batching, mlir

import jdp
from jdp.compat import primitives

ROOT = pathlib.Path(jdp.__file__).parent
# What defines primitives beside what `import jax` imports.
MODULES = (
    "jax.experimental.buffer_callback",
    "jax.experimental.custom_partitioning",
    "jax.experimental.pallas",
    "jax.experimental.pallas.mosaic_gpu",
    "jax.experimental.pallas.tpu",
    "jdp.compat.annotations",
    "jdp.compat.cotangents",
    "jdp.compat.host_collectives",
)
TABLES = {
    name: table
    for name, table in vars(primitives).items()
    if isinstance(table, frozenset | dict) and not name.startswith("_")
}
TABLES.pop("INSIDE_EFFECTS")


@pytest.fixture(scope="module")
def installed():
    for module in MODULES:
        importlib.import_module(module)
    registered = [
        *ad.primitive_jvps,
        *batching.fancy_primitive_batchers,
        *mlir._lowerings,
    ]
    modules = [m for name, m in sys.modules.items() if name.startswith(("jax", "jdp"))]
    held = [x for m in modules for x in vars(m).values()]
    found = {p.name for p in registered + held if isinstance(p, core.Primitive)}
    assert len(found) > 250
    return found


def _is_expected(name):
    """Whether this version of JAX should have a primitive."""
    version = jax.__version_info__[:2]
    return (
        name not in primitives.OF_OTHER_PACKAGES
        and primitives.UNTIL.get(name, version) >= version
        and primitives.SINCE.get(name, version) <= version
    )


def _are_as_declared(names, installed):
    expected = {name for name in names if _is_expected(name)}
    assert not expected - installed, "not in this JAX"
    others = set(names) - expected
    assert not others & installed, "in this JAX too"


@pytest.mark.parametrize("table", TABLES)
def test_the_names_of_a_table_are_those_of_jax(table, installed):
    assert TABLES[table]
    _are_as_declared(TABLES[table], installed)


def test_the_names_of_effects_are_those_of_jax():
    def below(kind):
        return {kind.__name__}.union(*map(below, kind.__subclasses__()))

    for module in MODULES:
        importlib.import_module(module)
    assert primitives.INSIDE_EFFECTS <= below(effects.Effect)


def _compared_names():
    """Texts that code compares with the name of a primitive, by file."""
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if "primitive.name" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare):
                left = ast.unparse(node.left)
                if left == "name" or left.endswith("primitive.name"):
                    yield path, node.comparators[0]


def test_names_in_comparisons_are_those_of_jax(installed):
    names = set()
    for _, right in _compared_names():
        inner = [n.value for n in ast.walk(right) if isinstance(n, ast.Constant)]
        names |= {x for x in inner if isinstance(x, str)}
    assert {"cond", "scan", "while", "shard_map", "scatter-add"} <= names
    _are_as_declared(names, installed)


def test_tables_of_names_stand_in_compat_alone(installed):
    """Elsewhere, a dict from names to functions that treat each is all there is."""
    for path in sorted(ROOT.rglob("*.py")):
        if path == ROOT / "compat" / "primitives.py" or "bench" in path.parts:
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            is_dispatch = False
            if isinstance(node, ast.Set):
                parts = node.elts
            elif isinstance(node, ast.Dict):
                parts = node.keys
                is_dispatch = all(isinstance(v, ast.Attribute) for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [ast.Constant(x) for x in node.value.split()]
            else:
                continue
            texts = [n.value for n in parts if isinstance(n, ast.Constant)]
            known = [x for x in texts if x in installed]
            if len(known) > 3 and is_dispatch and "primitive.name" in text:
                _are_as_declared(texts, installed)
            elif len(known) > 3 and not is_dispatch:
                assert len(known) < len(texts), f"{path}:{node.lineno}: {known}"


def test_rematerialised_calls_are_followed():
    fn = jax.checkpoint(lambda x: x * 2)
    (eqn,) = jax.make_jaxpr(fn)(1.0).eqns
    assert eqn.primitive.name in primitives.CALLS
