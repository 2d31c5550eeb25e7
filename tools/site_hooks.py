"""Site hooks: what does the site show that no page of docs/ holds?

mkdocs calls them (`hooks` in mkdocs.yml): the home page, which is README, the files of
the repository that pages link to, the page of the command line, and `llms.txt`.
"""

import pathlib
import posixpath
import re
import subprocess
import sys
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

_ROOT = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[\w./-]+)(?P<anchor>#[\w-]*)?\)")
_SOURCE = "source"  # folder of the site with files of the repository.
_COMMAND_LINE = "reference/command_line.md"
_nav: list[Any] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages that are not in docs/, and the files that pages link to there."""
    files.append(File.generated(config, "index.md", content=make_home()))
    linked = set()
    for page in files.documentation_pages():
        for link in _LINK.finditer(page.content_string):
            linked |= {path} if (path := _find(page.src_uri, link)) else set()
    for path in sorted(linked):
        files.append(_make_file(path, config))
    files.append(File.generated(config, _COMMAND_LINE, content=describe_command_line()))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Leads links to files outside of docs/ to their place in the site."""
    del config, files

    def lead(link: re.Match[str]) -> str:
        path = _find(page.file.src_uri, link)
        if path is None:
            return link[0]
        place = _place(path) + (link["anchor"] or "")
        return f"]({posixpath.relpath(place, posixpath.dirname(page.file.src_uri))})"

    return _LINK.sub(lead, markdown)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keeps the navigation for `llms.txt`."""
    del config, files
    _nav[:] = nav.items
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Writes `llms.txt` (llmstxt.org): the pages, for language models."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += list(_list_pages(_nav, config.site_url or ""))
    pathlib.Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def make_home() -> str:
    """Returns the home page: README without what is for developers."""
    text = (_ROOT / "README.md").read_text().split("\n## Development\n")[0]
    return re.sub(
        r"\]\((?!https?://|#)([^)\s]+)\)",
        lambda link: f"]({posixpath.relpath(link[1], 'docs')})",
        text + "\n",
    )


def describe_command_line() -> str:
    """Returns the page of the command line, as typer writes it."""
    command = ["-m", "typer", "jdp.cli.main", "utils", "docs", "--name", "jdp"]
    made = subprocess.run(
        [sys.executable, *command, "--title", "Command line"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout


def _find(page: str, link: re.Match[str]) -> str | None:
    """Returns the path in the repository that a page links to; None: it is in docs/."""
    target = posixpath.normpath(
        posixpath.join("docs", posixpath.dirname(page), link["up"], link["path"])
    )
    is_outside = not target.startswith(("docs/", "../"))
    return target if is_outside and (_ROOT / target).is_file() else None


def _place(path: str) -> str:
    """Returns the place of a file of the repository in the sources of the site."""
    return f"{_SOURCE}/{path}" + (".md" if path.endswith(".py") else "")


def _make_file(path: str, config: MkDocsConfig) -> File:
    text = (_ROOT / path).read_text()
    if path.endswith(".py"):
        text = f"# {path}\n```python\n{text.rstrip()}\n```\n"
    if path.endswith(".md"):
        text = _lead_to_pages(text, path)
    made = File.generated(config, _place(path), content=text)
    made.inclusion = made.inclusion.NOT_IN_NAV
    return made


def _lead_to_pages(text: str, path: str) -> str:
    """Leads links of a file outside of docs/ to the pages of the site."""
    folder = posixpath.dirname(path)

    def lead(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["up"], link["path"]))
        if not target.startswith("docs/"):
            return link[0]
        page = target.removeprefix("docs/") + (link["anchor"] or "")
        return f"]({posixpath.relpath(page, posixpath.dirname(_place(path)))})"

    return _LINK.sub(lead, text)


def _list_pages(items: list[Any], site_url: str) -> Any:
    for item in items:
        if isinstance(item, Section):
            yield f"## {item.title}"
            yield from _list_pages(item.children, site_url)
            yield ""
        elif isinstance(item, Page):
            summary = _summarize(item.markdown or "")
            yield f"- [{item.title}]({site_url}{item.url or './'}): {summary}"


def _summarize(markdown: str) -> str:
    """Returns the first sentence of a page."""
    # The title may have its text on the next line.
    for block in re.split(r"\n\s*\n", re.sub(r"(?m)^# .*$", "", markdown, count=1)):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
        if text and text[0] not in "#|!<:-*" and not text.startswith("```"):
            return re.split(r"(?<=[.!?]) ", text.split("```")[0].strip())[0]
    return "reference of public names"
