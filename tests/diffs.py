"""Diffs: the code blocks of docs that change a script."""

import re

from tests import page_blocks


def apply(diff: str, text: str) -> str:
    """Applies a unified diff, as `patch` does, but only where it fits exactly."""
    old, new, place = text.splitlines(), [], 0
    for line in diff.splitlines():
        if start := re.match(r"@@ -(\d+)", line):
            begin = int(start[1]) - 1
            new += old[place:begin]
            place = begin
            continue
        mark, content = line[:1] or " ", line[1:]
        if mark in " -":
            assert old[place] == content, f"line {place + 1} is {old[place]!r}"
            place += 1
        if mark in " +":
            new.append(content)
    return "\n".join([*new, *old[place:]]) + "\n"


def count_changed(diff: str) -> int:
    """Counts lines that are added, removed or replaced; a replaced one counts once."""
    total, added, removed = 0, 0, 0
    for line in [*diff.splitlines(), " "]:
        if line[:1] in ("+", "-"):
            added += line[0] == "+"
            removed += line[0] == "-"
            continue
        total += max(added, removed)
        added = removed = 0
    return total


def of_page(page: str) -> list[str]:
    """Returns the diffs of a page, in their order."""
    return [block.text for block in page_blocks.find("diff") if block.page == page]
