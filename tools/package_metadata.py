"""Package metadata: how does README read on a package index?

Hatchling calls it when it builds. Links of README are relative; on an index they would
lead nowhere, so they become absolute if pyproject.toml has `[project.urls]` with the
address of the source.
"""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\]\((?!https?://|#)(?P<path>[^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Hatchling's hook; it finds the class by this name."""

    def update(self, metadata: dict) -> None:
        """Sets the field `readme`."""
        text = pathlib.Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": make_absolute(text, source) if source else text,
        }


def make_absolute(text: str, source: str) -> str:
    """Makes the links of a page absolute.

    Args:
      text: the page, in Markdown.
      source: address of the repository, such as `https://example.org/jdp`.
    """
    base = f"{source.rstrip('/')}/blob/main/"
    return _LINK.sub(lambda link: f"]({base}{link['path']})", text)
