"""Words: the texts of jdp keep to the rules of its style that a program can check."""

import ast
import re

from tests import harness

_MODULES = sorted((harness.ROOT / "jdp").rglob("*.py"))
_PAGES = [harness.ROOT / "README.md", *sorted((harness.ROOT / "docs").glob("*.md"))]
_PEOPLE = re.compile(r"\b(nobody|whoever|everybody)\b", re.IGNORECASE)


def _docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            if text := ast.get_docstring(node):
                yield f"{path.name}: {text.splitlines()[0]}"


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = [text for path in _MODULES for text in _docstrings(path)]
    assert len(found) > 1000
    assert [t for t in found if re.search(r": (What|Of|Who)\b", t)] == []


def test_processes_are_not_people():
    found = [
        f"{path.name}: {word}"
        for path in [*_MODULES, *_PAGES]
        for word in _PEOPLE.findall(path.read_text())
    ]
    assert found == []
