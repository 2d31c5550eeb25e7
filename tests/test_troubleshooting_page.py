"""docs/troubleshooting.md: what it quotes of jdp is what jdp says."""

import re

from tests import page_blocks, test_errors_page

PAGE = "docs/troubleshooting.md"
# Their words are not jdp's but gloo's or the system's.
_OURS = re.compile(r"(?m)^(?:\[\d\] )?(?:jdp(?: launch)?:|\w+Error:) (.*)$")
_OTHERS = ("Gloo all-reduce",)
_OF_THE_SYSTEM = re.compile(r"Address already in use \(.*\)|Connection refused")


def _quoted():
    for block in page_blocks.find("text"):
        if block.page == PAGE:
            for match in _OURS.finditer(block.text):
                if not any(words in match[1] for words in _OTHERS):
                    line = match[1].removeprefix("INTERNAL: RuntimeError: ")
                    yield _OF_THE_SYSTEM.sub("...", line)


def test_quoted_messages_are_in_the_code():
    quoted = list(_quoted())
    assert len(quoted) > 10
    unsaid = []
    for line in quoted:
        for sentence in re.split(r"(?<=\w)[.:;?] ", line):
            for run in test_errors_page._VALUE.split(sentence):
                words = test_errors_page._words(run)
                if len(words) > 2 and not test_errors_page._is_said(tuple(words)):
                    unsaid.append(" ".join(words))
    assert unsaid == []


def test_a_message_that_jdp_does_not_say_is_found():
    words = "jdp has lost the gradients of all processes".split()
    assert not test_errors_page._is_said(tuple(words))
