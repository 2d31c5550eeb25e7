"""The pages of errors say what the code says.

The first cell of a row holds messages, separated by ";". The fixed words of a message
are the words outside of `...`, names in backticks, quoted text, numbers, single letters
such as n, and remarks in parentheses. Each run of two or more fixed words must be
found, in its order, in one string literal of jdp. A value that the code fills in may
stand for up to three of the words, but for at most two in five words of the run. So a
message cannot be reworded unless its row is. Not checked are runs of one word.
"""

import ast
import functools
import re

import pytest

from tests import harness, test_words

PAGES = ("docs/errors.md", "docs/parameter_server.md")
_HEADS = {"the message begins", "it says", "message"}
_VALUE = re.compile(
    r"\.\.\.|`[^`]*`|(?<!\w)'[^']*'(?!\w)|\"[^\"]*\"|\b[nkmp]\b|(?<![\w.])\d+(?:\.\d+)?(?![\w])"
)
_FILLED_IN = "{}"


def _words(text):
    return re.findall(r"\{\}|[\w<>\[\]/.:'+-]*\w[\w<>\[\]+-]*", text)


@functools.cache
def _messages():
    """Words of every string literal of jdp that is no docstring."""
    found = []
    for path in sorted((harness.ROOT / "jdp").rglob("*.py")):
        tree = ast.parse(path.read_text())
        parents = {id(c): n for n in ast.walk(tree) for c in ast.iter_child_nodes(n)}
        for node in ast.walk(tree):
            text = test_words.literal(node)
            parent = parents.get(id(node))
            if text and not isinstance(parent, ast.Expr | ast.JoinedStr):
                words = _words(re.sub(r"%[sd]|%\.\df", _FILLED_IN, _fixed(text)))
                found.append((frozenset(words), words, f" {' '.join(words)} "))
    return found


def _fixed(text):
    return _VALUE.sub(f" {_FILLED_IN} ", text)


def _rows(page):
    """Line and first cell of each row of a table of messages."""
    is_inside = False
    for number, line in enumerate((harness.ROOT / page).read_text().splitlines(), 1):
        if not line.startswith("|"):
            is_inside = False
            continue
        cell = line.split("|")[1].strip()
        if cell in _HEADS:
            is_inside = True
        elif is_inside and set(cell) - set("-"):
            yield number, cell


def _runs(cell):
    """The runs of fixed words of each message of a cell."""
    text = re.sub(r" ?\([^)]*\)|^jdp: ", "", cell)
    for message in text.split(";"):
        runs = [_words(run) for run in _VALUE.split(message)]
        for run in runs:
            while run and run[0] in ("or", "and"):
                run.pop(0)
            while run and run[-1] in ("or", "and"):
                run.pop()
        yield message.strip(), [run for run in runs if len(run) >= 2]


def _aligns(run, words):
    """Whether the code's words contain the run, {} standing for up to 3 words each."""

    @functools.cache
    def best(i, j):  # most words that are the same, of run[i:] at words[j:]
        if i == len(run):
            return 0
        if j == len(words):
            return -len(run)
        if words[j] == _FILLED_IN:
            return max(best(i + k, j + 1) for k in range(min(3, len(run) - i) + 1))
        return 1 + best(i + 1, j + 1) if run[i] == words[j] else -len(run)

    return max(best(0, j) for j in range(len(words))) >= max(2, 0.6 * len(run))


def _is_said(run):
    as_it_is, needed = f" {' '.join(run)} ", set(run)
    if any(as_it_is in text for _, _, text in _messages()):
        return True  # `_aligns` finds it too, in a hundred times the time.
    return any(
        len(known & needed) >= max(2, 0.6 * len(needed)) and _aligns(run, words)
        for known, words, _ in _messages()
    )


def _find_unsaid(page):
    for number, cell in _rows(page):
        if "(of JAX)" in cell or "(of Python)" in cell:
            continue
        for message, runs in _runs(cell):
            missing = [" ".join(run) for run in runs if not _is_said(tuple(run))]
            if missing:
                yield f"{page}:{number}: {message!r}: {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_every_message_of_a_page_is_in_the_code(page):
    assert len(list(_rows(page))) > 30
    assert list(_find_unsaid(page)) == []


def test_a_message_that_was_reworded_is_missed():
    assert _is_said(
        "must come before anything that makes JAX choose its devices".split()
    )
    assert not _is_said(
        "must come before anything that made JAX choose devices".split()
    )
