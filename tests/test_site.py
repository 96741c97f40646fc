"""The documentation site builds without a warning, asks no other host, and explains every statistic and error."""

import os
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import markdown
import pytest
from playwright.sync_api import expect

from headscope import errors, reference
from headscope.reference import api_pages
from headscope.runs.column_metadata import statistics

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAX_PICTURE_BYTES = 60_000


class LoadedResources(HTMLParser):
    """Collects what a page loads: scripts, styles, pictures, frames."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.sources.append(values.get("src") or "")
        if tag == "link" and values.get("rel") != "canonical":
            self.sources.append(values.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Strict: a broken link or anchor, or a page without a place in the navigation, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    return folder


@pytest.mark.slow
def test_site_loads_nothing_from_another_host(site):
    pages = [*site.rglob("*.html")]
    assert len(pages) > 20
    for page in pages:
        parser = LoadedResources()
        parser.feed(page.read_text(encoding="utf-8"))
        assert [source for source in parser.sources if re.match(r"(https?:)?//", source)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.mark.slow
@pytest.mark.browser
def test_a_command_is_copied_without_its_prompt_and_no_other_host_is_asked(site, chromium):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
    page, requested = context.new_page(), []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(f"{address}/start/")
    block = page.locator(".highlight:has(.gp)").first
    block.hover()
    block.locator("button").first.click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.startsWith('headscope run '))")
    page.keyboard.press("/")  # opens the search
    expect(page.locator("input.md-search__input")).to_be_focused()
    page.keyboard.type("effective")
    page.locator(".md-search-result__item").first.wait_for(state="attached")
    assert [url for url in requested if not url.startswith((address, "blob:", "data:"))] == []
    context.close()
    server.shutdown()


@pytest.mark.slow
def test_site_documents_the_python_interface(site):
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("Run.findings", "Run.top_heads", "Run.to_latex", "CapturedLayers.listen", "AttentionRecord.weights"):
        assert f"{name.rpartition('.')[2]}(" in page, name


@pytest.mark.parametrize("name", ["glossary", "measures"])
def test_generated_pages_are_up_to_date(name):
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    fresh = reference.measures_page(page) if name == "measures" else reference.glossary_page()
    assert page == fresh, "run `make docs`"


def test_every_statistic_is_explained_once():
    page = (DOCS / "measures.md").read_text(encoding="utf-8")
    explained = [name for match in reference.COLUMNS_BLOCK.finditer(page) for name in match[2].split()]
    assert sorted(explained) == sorted(statistics()), "add new statistics to a section of docs/measures.md"


def test_every_error_has_a_cause_and_a_remedy():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d) \| [^|]+ \|", page, re.MULTILINE))
    classes = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert rows == {
        name: str(kind.exit_code) for name, kind in classes.items() if issubclass(kind, errors.HeadscopeError)
    }


def test_pictures_are_small():
    pictures = [*(DOCS / "images").glob("read-*")]
    assert len(pictures) >= 6
    assert [path.name for path in pictures if path.stat().st_size > MAX_PICTURE_BYTES] == []


@pytest.mark.parametrize("file", reference.CODE_FILES, ids=lambda file: file.stem)
def test_code_of_pages_is_up_to_date(file):
    page = file.read_text(encoding="utf-8")
    assert page == api_pages.fill_page(page), "run `make docs`"
    assert page.count("```python") >= 2


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_pages_read_well_as_plain_markdown(page):
    """No include, directive or attribute that only the site understands is left as text."""
    rendered = markdown.markdown(page.read_text(encoding="utf-8"), extensions=["fenced_code", "tables"])
    text = re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<!--.*?-->|<code.*?</code>|<pre.*?</pre>", " ", rendered))
    assert re.findall(r"^\s*(?::::.*|--8<--.*|!!! .*|\?\?\? .*|\{[:.#%].*)$|\{: .*?\}", text, re.MULTILINE) == []
    assert len(text.split()) > 30, "a page is more than a stub"
