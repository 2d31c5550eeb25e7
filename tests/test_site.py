"""The site: every page is there, every link leads somewhere, and a browser shows it."""

import functools
import html.parser
import http.server
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import urllib.parse

import pytest

from tests import browser as browsers
from tests import diffs, harness, page_blocks

PACKAGES = (
    "jdp",
    "jdp.batch_norm",
    "jdp.collectives",
    "jdp.collectives.pallas",
    "jdp.eager",
    "jdp.flax_linen",
    "jdp.flax_nnx",
    "jdp.hooks",
    "jdp.parameter_server",
)
# Words that people look for, and the page that answers them.
ANSWERS = {
    "torchrun": "from_torch_ddp",
    "DistributedSampler": "from_torch_ddp",
    "set_epoch": "training_scripts",
    "bucket_cap_mb": "from_torch_ddp",
    "find_unused_parameters": "from_torch_ddp",
    "gradient_as_bucket_view": "from_torch_ddp",
    "static_graph": "from_torch_ddp",
    "no_sync": "micro_batches",
    "ZeroRedundancyOptimizer": "from_torch_ddp",
    "register_comm_hook": "from_torch_ddp",
    "DataLoader": "training_scripts",
    "broadcast_buffers": "from_torch_ddp",
    "SyncBatchNorm": "batch_norm",
    "pmap": "from_pmap",
    "pmean": "from_pmap",
    "unreplicate": "from_pmap",
    "NamedSharding": "from_pmap",
    "shard_map": "from_pmap",
    "FSDP": "faq",
    "tensor parallel": "faq",
    "hvd.init": "from_horovod",
    "DistributedOptimizer": "from_horovod",
    "local_rank": "from_horovod",
    "local_size": "from_horovod",
    "learning-rate scaling": "faq",
    "horovodrun": "from_horovod",
    "dropout": "flax",
    "resume": "training_scripts",
    "checkpoint": "training_scripts",
    "mixed precision": "faq",
    "loss scaling": "faq",
    "shuffle": "training_scripts",
    "debug": "launching",
    "breakpoint": "launching",
    "notebook": "launching",
    "Docker": "launching",
    "Kubernetes": "launching",
    "Slurm": "launching",
    "srun": "launching",
    "mpirun": "launching",
    "TrainState": "flax",
    "nnx.Optimizer": "flax",
    "TensorBoard": "training_scripts",
    "equinox": "training_scripts",
    "haiku": "training_scripts",
    "optax.MultiSteps": "faq",
    "EMA": "training_scripts",
    "NaN": "troubleshooting",
    "out of memory": "troubleshooting",
    "hang": "troubleshooting",
    "timeout": "troubleshooting",
    "NCCL": "troubleshooting",
    "gloo": "troubleshooting",
    "API reference": "faq",
    "gradient accumulation": "micro_batches",
    "validation": "training_scripts",
    "multi-node": "launching",
    "Jupyter": "launching",
    "debugger": "launching",
    "password": "launching",
    "FAQ": "faq",
    "evaluation": "training_scripts",
    "metrics": "training_scripts",
    "reproducible": "faq",
    "fingerprint": "fingerprints",
    "elastic": "faq",
    "preemption": "faq",
}


_CODE = ("code", "pre", "script", "style", "svg", "title")
_BLOCKS = ("p", "li", "td", "th", "h1", "h2", "h3", "h4")
# A list or table that follows a line of text is text, unless a blank line is between.
_MARKUP = re.compile(
    r"^ *([-*+]|\d+\.) |^ *\||^ *#+ |^ *```|^ *!!! |^ *::: |\*\*|`|\]\(", re.M
)


class _Page(html.parser.HTMLParser):
    """Links, sources and ids of a page, and its text without code."""

    def __init__(self, text):
        super().__init__()
        self.links, self.ids, self.text = [], set(), ""
        self._num_open = 0  # elements whose text is not prose.
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        fields = dict(attrs)
        self._num_open += tag in _CODE
        if tag in _BLOCKS:
            self.text += "\n"
        if "id" in fields:
            self.ids.add(fields["id"])
        for name in ("href", "src"):
            if fields.get(name) and tag != "link":
                self.links.append(fields[name])

    def handle_endtag(self, tag):
        self._num_open -= tag in _CODE
        if tag in _CODE:
            self.text += "code"

    def handle_data(self, data):
        if not self._num_open:
            self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. mkdocs is strict: a warning of it or of mkdocstrings fails."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", str(folder)],
        cwd=harness.ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(r"WARNING|ERROR", done.stdout + done.stderr)
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {
        str(path.relative_to(site)): _Page(path.read_text())
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_page_and_to_a_place_on_it(site, pages):
    assert len(pages) > 40
    num_links = 0
    for name, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme in ("https", "http", "mailto", "javascript", "data"):
                continue
            target = (site / name).parent / urllib.parse.unquote(url.path)
            target = target / "index.html" if target.is_dir() else target
            if not url.path:
                target = site / name
            target = pathlib.Path(os.path.normpath(target))
            assert target.is_file(), f"{name}: {link}"
            anchor = urllib.parse.unquote(url.fragment)
            if anchor and target.suffix == ".html":
                other = pages[str(target.relative_to(site))]
                assert anchor in other.ids, f"{name}: {link}"
            num_links += 1
    assert num_links > 1000


@pytest.mark.slow
def test_no_page_shows_markup(pages):
    for name, page in pages.items():
        shown = [
            page.text[max(found.start() - 40, 0) : found.end() + 40]
            for found in _MARKUP.finditer(page.text)
        ]
        assert not shown, f"{name}: {shown}"


@pytest.mark.slow
def test_the_reference_has_every_public_name(pages):
    ids = set().union(
        *(page.ids for name, page in pages.items() if name.startswith("reference/"))
    )
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            assert f"{package}.{name}" in ids


@pytest.mark.slow
def test_the_description_of_a_result_is_not_cut_into_lines(site):
    sections = [
        section
        for path in site.glob("reference/*/index.html")
        for section in re.findall(
            r"section-title\">Returns:</span></p>\s*<ul>(.*?)</ul>",
            path.read_text(),
            re.S,
        )
    ]
    assert len(sections) > 50
    assert all(section.count("<li") == 1 for section in sections)


@pytest.mark.slow
def test_every_type_of_jdp_in_a_signature_leads_to_what_it_stands_for(site):
    for path in site.glob("reference/*/index.html"):
        # Names without a link, but for constants and type variables of one letter.
        left = re.findall(
            r'<span title="(jdp\.[\w.]*\.[A-Z]\w*[a-z]\w*)">', path.read_text()
        )
        assert not left, (
            f"{path.parent.name}: add to docs/reference/type_names.md: {left}"
        )


@pytest.mark.slow
def test_the_reference_has_every_command(site):
    text = (site / "reference/command_line/index.html").read_text()
    for command in ("launch", "plan", "doctor", "bench step", "timeline merge"):
        assert f"jdp {command}" in text


@pytest.mark.parametrize("word", ANSWERS)
def test_a_word_that_people_look_for_is_on_the_page_that_answers_it(word):
    text = (harness.ROOT / f"docs/{ANSWERS[word]}.md").read_text()
    assert word.lower() in text.lower()


@pytest.mark.slow
def test_the_search_index_has_the_words_that_people_look_for(site):
    index = json.loads((site / "search/search_index.json").read_text())
    texts = {}
    for entry in index["docs"]:
        page = entry["location"].split("#")[0].rstrip("/")
        words = re.sub(r"<[^>]*>", "", entry["title"] + " " + entry["text"])
        texts[page] = texts.get(page, "") + words.lower()
    for word, page in ANSWERS.items():
        assert word.lower() in texts[page], f"{word} on {page}"


@pytest.mark.slow
def test_language_models_get_a_list_of_all_pages(site):
    lines = (site / "llms.txt").read_text().splitlines()
    listed = [line for line in lines if line.startswith("- [")]
    urls = [re.search(r"\]\(([^)]*)\)", line)[1] for line in listed]
    nav = (harness.ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert len(urls) == len(re.findall(r"\.md$", nav.split("\n\n")[0], re.M))
    for url in urls:
        assert (site / url / "index.html").is_file(), url
    assert all(re.search(r"\): \S.{10}", line) for line in listed)


def test_the_first_screen_of_the_readme_fits():
    text = (harness.ROOT / "README.md").read_text().split("\n## ")[0]
    assert len(text.splitlines()) <= 60
    for command in ("jdp bench step", "jdp bench train", "make gpu", "make demo"):
        assert command in text


def test_the_diff_of_the_readme_is_the_one_that_is_applied_and_run():
    (first,) = (
        block.text for block in page_blocks.find("diff") if block.page == "README.md"
    )
    full = diffs.of_page("docs/training_scripts.md")[0]
    changed = [line for line in first.splitlines() if line[:1] in ("+", "-")]
    assert len(changed) == 6
    assert changed == [line for line in full.splitlines() if line[:1] in ("+", "-")]


def test_links_of_the_readme_are_absolute_on_a_package_index():
    spec = importlib.util.spec_from_file_location(
        "package_metadata", harness.ROOT / "tools/package_metadata.py"
    )
    metadata = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(metadata)
    text = (harness.ROOT / "README.md").read_text()
    made = metadata.make_absolute(text, "https://example.org/jdp/")
    links = re.findall(r"\]\(([^)]+)\)", made)
    assert len(links) > 20
    for link in links:
        assert link.startswith(("https://", "#")), link
    assert "(https://example.org/jdp/blob/main/docs/errors.md)" in made
    hook = metadata.CustomMetadataHook(str(harness.ROOT), {})
    for urls, expected in (({}, text), ({"Source": "https://example.org/jdp"}, made)):
        fields = {"urls": urls}
        hook.update(fields)
        assert fields["readme"]["text"] == expected


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(_Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, which writes what the console shows."""
    with browsers.opened() as chrome:
        yield chrome


def _wait_for(find):
    deadline_s = time.monotonic() + 30.0
    while not (found := find()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return found


_OVERFLOW = """
return [document.documentElement.scrollWidth, window.innerWidth,
        [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_browser_shows_every_page_on_a_phone_without_an_error(
    browser, address, pages
):
    for width, height in ((390, 844), (1280, 900)):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", metrics | {"mobile": width < 500}
        )
        for name in pages:
            if width > 500 and name.startswith("source/"):
                continue
            browser.get(f"{address}/{name.removesuffix('index.html')}")
            scroll, inner, broken = browser.execute_script(_OVERFLOW)
            assert scroll <= inner + 1, f"{name} is wider than a screen of {width}"
            assert not broken
            errors = [m for m in browser.get_log("browser") if m["level"] == "SEVERE"]
            assert not errors, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("breakpoint", "launching/"),
        ("find_unused_parameters", "from_torch_ddp/"),
        ("horovodrun", "from_horovod/"),
        ("skip_unused", "reference/optimizers/"),
    ],
)
def test_the_search_of_the_site_finds_the_page(browser, address, word, expected):
    browser.get(f"{address}/")
    field = _wait_for(
        lambda: browser.find_elements("css selector", "input.md-search__input")
    )[0]
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys(word)

    def find():
        links = browser.find_elements("css selector", "a.md-search-result__link")
        return [link.get_attribute("href") for link in links]

    assert any(expected in link for link in _wait_for(find))
