"""Words: the texts of jdp keep to the rules of its style that a program can check.

`python -m tests.test_words [RULE [ROOM]]` lists all findings, with file and line.
"""

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests import harness

_MODULES = sorted((harness.ROOT / "jdp").rglob("*.py"))
_SCRIPTS = sorted(
    path
    for room in ("examples", "benchmarks")
    for path in harness.ROOT.glob(f"{room}/*.py")
)
_PAGES = [
    *(harness.ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((harness.ROOT / "docs").glob("*.md")),
]
_PER = (
    "step|dtype|bucket|leaf|feature|sample|replica|process|second|byte|chunk|row|"
    "element|round|iteration|host|node|parameter|layer|worker|server|request"
)


class Rule(NamedTuple):
    """A pattern that no text has, and what to write instead."""

    pattern: str
    instead: str
    in_pages: bool = True
    in_code: bool = False  # also within backticks.


# The terms are those of docs/terms.md.
RULES = {
    "beginning": Rule(
        r"\A\s*(What|Of|Who|Whom|Whose|That of|Those)\b",
        "a text that begins with a noun or a verb",
        in_pages=False,
    ),
    "argument": Rule(
        r"(?m)^\s+\w+(, \w+)*: (of|what|who|whom|whose|that|those)\b",
        "a description of an argument that begins with a noun or a verb",
        in_pages=False,
        in_code=True,
    ),
    "people": Rule(
        r"(?i)\b(nobody|whoever|everybody)\b", "a process, a replica, a rank"
    ),
    "more people": Rule(
        r"(?i)\b(whom|everyone|anybody|somebody|someone)\b",
        "a process, a replica, a rank",
    ),
    "who": Rule(r"(?<!user )(?<!users )(?<!stranger )\b[Ww]ho\b", "which process"),
    "node": Rule(
        r"(?<!across )(?<!between )(?<!within a )(?<!within each )(?<!within one )"
        r"(?<![-\"'])\b[Nn]odes?\b(?! (\d|k\b|\{\}|%d|axis))",
        "host",
    ),
    "worker": Rule(r"(?<!--)\b[Ww]orkers?\b", "process"),
    "goes by": Rule(r"\bgo(es)? by\b", "uses, follows, is passed by"),
    "is none": Rule(r"(?<![Tt]here )\b(is|are) none\b", "is not an X; there is no X"),
    "is no": Rule(
        r"(?<![Tt]here )(?<![Tt]hey )\b(is|are) no "
        r"(?!(longer|more|less|larger|smaller|slower|faster|later|earlier|other)\b)",
        "is not an X",
    ),
    "by itself": Rule(
        r"\bby (itself|themselves)\b", "alone; automatically; separately"
    ),
    "that of": Rule(r"\b([Tt]hat|[Tt]hose) of\b", "the noun, again"),
    "one that": Rule(r"\b[Oo]nes? that\b", "the noun, again"),
    "known of": Rule(r"\bknown of\b", "known about; or name it"),
    "may not": Rule(r"\bmay not\b", "must not; might not"),
    "per": Rule(
        r"\b(one [a-z]+|numbers?|bytes|bits|[num]s|MB|[Ss]econds?|rounds?|samples|"
        rf"collectives|messages) an? ({_PER})\b(?! (sends?|can|holds?|that|set))",
        "per",
    ),
}

# Where a word is the right one: by rule, a path's beginning and the reason.
EXCEPTIONS = {
    "node": {
        "jdp/cli/plan": "the options of the cost model: --nodes, --devices-per-node",
        "jdp/collectives/cost_model.py": "`Node` and `node=` of `predict`",
        "jdp/collectives/hierarchical.py": "the axis is named 'node'",
        "jdp/collectives/shared_memory/": "the axis is named 'node'",
        "jdp/optimizers/local_sgd.py": "the axis is named 'node'",
        "jdp/replicas/mesh.py": "the axis is named 'node'; `num_nodes`",
        "jdp/runtime/cluster.py": "`num_nodes` of `jdp.init`",
        "jdp/eager/execution/hierarchical.py": "the axis is named 'node'",
        "jdp/join/batch_spec.py": "the nodes of a tree of JAX",
        "jdp/step/": "the nodes of a tree of JAX",
        "jdp/evaluation/": "the nodes of a tree of JAX",
        "jdp/gradients/metric_objects.py": "the nodes of a tree of JAX",
        "docs/": "options and messages, each page for its own",
        "README.md": "the axis is named 'node'",
    },
    "worker": {
        "jdp/parameter_server/": "servers and workers",
        "jdp/bench/parameter_server": "servers and workers",
        "jdp/cli/launch": "servers and workers",
        "jdp/cli/main": "servers and workers",
        "docs/": "servers and workers",
        "README.md": "servers and workers",
        "examples/parameter_server.py": "servers and workers",
    },
}

# By rule, the rooms that still have findings; to be emptied.
UNFINISHED: dict[str, str] = {}


def _docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            if text := ast.get_docstring(node):
                yield f"{path.name}: {text.splitlines()[0]}"


def literal(node) -> str | None:
    """The text of a literal; an f-string's has {} for values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "{}" for part in node.values)
    return None


def _texts_of_module(source) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if id(node) not in parts and " " in (text := literal(node) or ""):
            yield node.lineno, text
    lines = [
        (token.start[0], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    last = -1
    for number, line in lines:  # lines that follow each other are one comment.
        # Only the first one has a beginning.
        yield number, line if number != last + 1 else f"... {line}"
        last = number


@functools.cache
def _texts(path) -> list[tuple[int, str]]:
    source = path.read_text()
    if path.suffix == ".py":
        return list(_texts_of_module(source))
    return list(enumerate(source.splitlines(), 1))


def _room(path) -> str:
    parts = path.relative_to(harness.ROOT).parts
    if parts[0] == "jdp":
        return parts[1].removesuffix(".py")
    return parts[0] if path.suffix == ".py" else "/".join(parts)


def find(name) -> Iterator[tuple[str, str]]:
    """Yields room and place of each text that breaks the rule `name`."""
    rule = RULES[name]
    for path in (*_MODULES, *_SCRIPTS, *(_PAGES if rule.in_pages else ())):
        place = str(path.relative_to(harness.ROOT))
        if any(map(place.startswith, EXCEPTIONS.get(name, ()))):
            continue
        for number, text in _texts(path):
            if not re.search(rule.pattern, text):
                continue
            if not rule.in_code:
                text = re.sub(r"`[^`]*`", "`_`", text)
            for match in re.finditer(rule.pattern, text):
                around = text[max(0, match.start() - 30) : match.end() + 30]
                yield _room(path), f"{place}:{number}: {' '.join(around.split())}"


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = [text for path in _MODULES for text in _docstrings(path)]
    assert len(found) > 1000
    assert [t for t in found if re.search(r": (What|Of|Who)\b", t)] == []


@pytest.mark.parametrize("name", RULES)
def test_texts_keep_the_rule(name):
    unfinished = UNFINISHED.get(name, "").split()
    found = [text for room, text in find(name) if room not in unfinished]
    assert found == [], f"Say: {RULES[name].instead}."


def test_every_unfinished_rule_is_a_rule():
    assert UNFINISHED.keys() <= RULES.keys() and EXCEPTIONS.keys() <= RULES.keys()


if __name__ == "__main__":
    asked = [name for name in sys.argv[1:2] or RULES]
    for each in asked:
        hits = [t for room, t in find(each) if room in (sys.argv[2:3] or [room])]
        print(f"{each}: {len(hits)}", *hits, sep="\n  ")
