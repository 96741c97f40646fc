"""A bundle is the app as files: every page and head, each link between files, in a browser without a server."""

import base64
import gzip
import json
import re
from collections.abc import Mapping
from concurrent import futures
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pandas as pd
import plotly.graph_objects as go
import pytest
from playwright.sync_api import Browser, Page, expect
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run

from headscope.cli import bundle
from headscope.cli.site_pages import Address, SitePages
from headscope.errors import BadRun, CannotWrite
from headscope.plots import rotary
from headscope.rendering import assembly, similar_heads
from headscope.rendering import static_site as pages
from headscope.rendering.blocks import Chart, Link, Links, RecordTable, TextTable
from headscope.rendering.text import format_cell
from headscope.results.collection import all_results
from headscope.results.words import sentence
from headscope.runs.manifest import write_manifest
from headscope.runs.run import Run
from headscope.study.config import build_study
from headscope.study.runner import run_study

HOSTILE = '</script><b title="x">&amp;'
LAYERS, HEADS = 2, 2
TABLES = ("attention", "nll", "needles", "retrieval", "positions", "scales")
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Parsed(HTMLParser):
    """Where a page leads, its text and its figures; complains about tags that do not nest."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.figures: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        attributes = dict(attrs)
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name, "data:,") != "data:,"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.figures.append("")

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] == "script":
            self.figures[-1] += data
        else:
            self.text += data

    def drawn(self) -> list[dict[str, Any]]:
        return [json.loads(gzip.decompress(base64.b64decode(figure))) for figure in self.figures if figure]

    def titles(self) -> list[str]:
        return [figure["layout"].get("title", {}).get("text", "") for figure in self.drawn()]  # cards have none


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two models of which little was measured, to be drawn quickly."""
    synthetic = synthetic_run(
        tmp_path_factory.mktemp("runs"),
        models=("base", HOSTILE),
        layers=LAYERS,
        heads=HEADS,
        pairs=4,
        lengths=(256,),
        docs=2,
    )
    tables = {name: facts for name, facts in synthetic.manifest["tables"].items() if name in TABLES}
    write_manifest(synthetic.path, {**synthetic.manifest, "tables": tables})
    return Run.open(synthetic.path)


@pytest.fixture(scope="module")
def site(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, written by this process."""
    out: Path = tmp_path_factory.mktemp("bundle") / "deep" / "site"
    bundle.bundle([run.path], out, quiet=True)
    return out


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[str, Parsed]:
    return {file.relative_to(site).as_posix(): Parsed(file) for file in site.rglob("*.html")}


@pytest.mark.slow
def test_every_link_leads_to_a_file_of_the_bundle(site: Path, parsed: dict[str, Parsed]) -> None:
    for name, page in parsed.items():
        assert len(page.links) > 5
        for link in page.links:
            url = urlsplit(link)
            assert not url.scheme, (name, link)
            assert not url.netloc, (name, link)
            target = (site / name).parent / unquote(url.path)
            assert target.is_file(), (name, link)
            assert target.resolve().is_relative_to(site)
    assert not re.search(r"url\(|@import", (site / "site.css").read_text())


@pytest.mark.slow
def test_bundle_has_every_head_page_and_every_page_with_content(run: Run, parsed: dict[str, Parsed]) -> None:
    heads = {f"head/{layer}.{head}.html" for layer in range(LAYERS) for head in range(HEADS)}
    stats = {f"heads/{name}.html" for name in assembly.run_statistics(run)}
    assert heads | stats | {"index.html", "compare.html"} <= parsed.keys()
    for name in stats:
        assert heads <= {link.removeprefix("../") for link in parsed[name].links}
        titles = [title for title in parsed[name].titles() if not title.startswith("Heads by their statistics")]
        assert len(titles) == len(run.models)
    assert "../head/1.1.html" in parsed["head/1.0.html"].links, "next head"
    all_titles = {title for page in parsed.values() for title in page.titles()}
    needles = assembly.collect_chapters(assembly.render_context(run), "needle in a haystack")["Needle in a haystack"]
    assert {chart.figure.layout.title.text for group in needles for chart in group.charts} <= all_titles
    assert not parsed.keys() & {"runs.html", "checkpoints.html", "influence.html", "reads.html"}, "nothing to say"


@pytest.mark.slow
def test_head_page_has_the_apps_charts_for_every_model(run: Run, parsed: dict[str, Parsed]) -> None:
    page = parsed["head/1.1.html"]
    charts = {
        model: [
            part
            for part in (
                *assembly.head_card(run, model, 1, 1),
                *assembly.head_blocks(run, model, 1, 1),
                *similar_heads.components_chart(run, model, (1, 1)),
            )
            if isinstance(part, Chart)
        ]
        for model in run.models
    }
    drawn = [chart.figure.layout.title.text for of_model in charts.values() for chart in of_model]
    assert {*page.titles()} == {*drawn}
    assert len(page.titles()) < len(drawn), "what is the same under all models is there once"
    text = " ".join(page.text.split())
    for model in run.models:
        answer, more = assembly.head_sentences(run, model, 1, 1)
        assert all(" ".join(sentence.split()) in text for sentence in [*answer, *more])
    row = run.heads[(run.heads["layer"] == 1) & (run.heads["head"] == 1)].to_dict("records")[1]
    assert format_cell(row, "ess2_256") in text


def test_bundle_figure_equals_app_figure(run: Run, site: Path, parsed: dict[str, Parsed]) -> None:
    chart = next(part for part in assembly.head_blocks(run, "base", 0, 1) if isinstance(part, Chart))
    title = chart.figure.layout.title.text
    (stored,) = (figure for figure in parsed["head/0.1.html"].drawn() if figure["layout"]["title"]["text"] == title)
    expected = pages.to_json_values(chart.figure.to_plotly_json())
    shared = expected["layout"].pop("template")
    assert stored == json.loads(pages.to_script_json(expected))
    template = re.search(r"^const TEMPLATE = (.*);$", (site / "site.js").read_text(encoding="utf-8"), re.MULTILINE)
    assert template
    assert json.loads(template[1]) == json.loads(pages.to_script_json(shared)), (
        "the template is in the script that all share"
    )


def test_index_lists_every_finding(run: Run, parsed: dict[str, Parsed]) -> None:
    text = " ".join(parsed["index.html"].text.split())
    for result in all_results(run):
        if not result.verdict:
            assert " ".join(sentence(result).split()) in text


@pytest.mark.slow
def test_worker_processes_write_identical_pages(run: Run, site: Path, tmp_path: Path) -> None:
    some = [Address("/head/0.1", is_per_model=True), Address("/head/1.1", is_per_model=True)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MAX_VIEWS_IN_ONE_PROCESS": 0, "VIEWS_PER_BATCH": 1, "MAX_PROCESSES": 1}.items():
            patch.setattr(bundle, name, value)
        parts = [*bundle._write_in_batches([run.path], tmp_path, some)]
    assert parts == [[address] for address in some]
    for address in some:
        assert (tmp_path / address.file).read_bytes() == (site / address.file).read_bytes(), address


def test_a_batch_has_the_fewer_pages_the_more_models_they_show(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [
        Address(f"/head/{layer}.{head}", is_per_model=True) for layer in range(LAYERS) for head in range(HEADS)
    ]
    monkeypatch.setattr(SitePages, "page", lambda self, address: None)
    monkeypatch.setattr(pages, "render_page", lambda *_: "")
    monkeypatch.setattr(bundle, "VIEWS_PER_BATCH", 3 * len(run.models))
    assert [len(part) for part in bundle._write_in_batches([run.path], tmp_path, addresses)] == [3, 1]
    monkeypatch.setattr(bundle, "VIEWS_PER_BATCH", 1)
    assert [len(part) for part in bundle._write_in_batches([run.path], tmp_path, addresses)] == [1, 1, 1, 1]


def test_pages_of_many_models_are_written_by_several_processes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def start(*_: object) -> None:
        raise Started

    addresses = [Address("/head/0.1", is_per_model=True), Address("/head/1.1", is_per_model=True)]
    monkeypatch.setattr(futures, "ProcessPoolExecutor", start)
    monkeypatch.setattr(bundle, "MAX_VIEWS_IN_ONE_PROCESS", 2 * len(run.models) - 1)
    with pytest.raises(Started):
        next(iter(bundle._write_in_batches([run.path], tmp_path, addresses)))


def test_a_run_without_models_is_bundled(tmp_path: Path) -> None:
    run = run_study(build_study({"models": {}, "scaling": {"lengths": [64], "seeds": 2}}), tmp_path / "runs")
    assert run.models == []
    addresses = SitePages(run).addresses()
    written = [page for part in bundle._write_in_batches([run.path], tmp_path, addresses) for page in part]
    assert written == [*addresses]
    assert (tmp_path / "scaling.html").is_file()


@pytest.mark.slow
def test_default_models_share_their_charts_and_every_other_model_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [f"model {number}" for number in range(16)]  # two others between default ones
    many = synthetic_run(tmp_path, models, probes=("measure",), layers=1, heads=2, pairs=2, lengths=(256,), docs=1)
    prepared: list[int] = []
    drawn: list[int] = []

    def prepare(rows: pd.DataFrame, layer: int, head: int) -> Mapping[str, Any]:
        prepared.append(rows["model"].nunique())
        return rotary.pair_usage(rows, layer, head)

    def draw(usage: Mapping[str, Any], styles: Mapping[str, Any], layer: int, head: int) -> go.Figure:
        drawn.append(len(styles))
        return rotary.draw_spectrum(usage, styles, layer, head)

    monkeypatch.setattr(rotary, "SPECTRUM", replace(rotary.SPECTRUM, prepare=prepare, draw=draw))
    page = SitePages(many).page(Address("/head/0.1", is_per_model=True))
    assert [*page.content_by_model] == models
    assert drawn == [6, *[7] * 10]
    assert prepared == [16], "the data of all views are computed at once"


@pytest.mark.slow
def test_a_head_page_of_a_bundle_shows_what_the_page_of_each_model_shows(tmp_path: Path) -> None:
    models = [f"model {number}" for number in range(9)]
    run = synthetic_run(tmp_path, models, probes=("measure",), layers=2, heads=2, pairs=4, lengths=(64, 256), docs=3)
    contents = SitePages(run).page(Address("/head/1.0", is_per_model=True)).content_by_model
    opened = Run.open(run.path)  # which computes the data of a view at a time
    for model in models:
        alone = [chart for chart in assembly.head_card(opened, model, 1, 0) if isinstance(chart, Chart)]
        alone += [chart for chart in assembly.head_blocks(opened, model, 1, 0) if isinstance(chart, Chart)]
        blocks = [block for block in contents[model].sections["Behaviour"] if isinstance(block, Chart)]
        together = [block.figure for block in blocks]
        assert len(together) >= 4
        assert [pages.figure_values(chart.figure) for chart in alone] == [*map(pages.figure_values, together)]


def test_only_a_bundle_is_replaced_and_failures_leave_no_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "site"
    monkeypatch.setattr(SitePages, "addresses", lambda self: [Address("/"), Address("/head/1.1")])
    monkeypatch.setattr(SitePages, "page", lambda self, address: None)
    monkeypatch.setattr(pages, "render_page", lambda *_: "first")
    bundle.bundle([run.path], out, quiet=True)
    printed = capsys.readouterr().out
    assert_names(printed, out / "index.html", "2 pages")
    assert re.search(r"\b4\.\d+ MB\b", printed)
    (out / "old.html").write_text("old")
    monkeypatch.setattr(pages, "render_page", lambda *_: "second")
    bundle.bundle([run.path], out, quiet=True)
    assert not (out / "old.html").exists()
    assert (out / "head" / "1.1.html").read_text() == "second"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for existing_path in ("mine", "file", "file/site"):
        with refuses(CannotWrite, tmp_path / existing_path, "--out"):
            bundle.bundle([run.path], tmp_path / existing_path, quiet=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "mine"

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pages, "render_page", full)
    with refuses(CannotWrite, out, "No space left on device"):
        bundle.bundle([run.path], out, quiet=True)
    with pytest.raises(BadRun):
        bundle.bundle([tmp_path / "mine"], tmp_path / "new", quiet=True)
    assert (out / "index.html").read_text() == "second", "the bundle before is untouched"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine", "site"]


# In the browser, from the disk -------------------------------------------------------------------------------------


@pytest.mark.browser
def test_every_head_is_reachable_without_a_server(run: Run, site: Path, chromium: Browser) -> None:
    page: Page = chromium.new_page(viewport={"width": 1200, "height": 900})
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else noise.append(request.url)
    )

    def drawn() -> None:
        page.wait_for_selector("[data-figure]:visible[data-drawn]", state="attached", timeout=60_000)

    page.goto((site / "index.html").as_uri())
    drawn()
    page.get_by_role("navigation").get_by_role("link", name="Heads").click()
    drawn()
    title = page.locator("[data-figure]:visible .gtitle").first
    assert HOSTILE in title.text_content(), "the last model, as in the app"
    page.get_by_label("Model", exact=True).select_option("base")
    drawn()
    expect(title).to_contain_text("base")
    page.get_by_label("Statistic", exact=True).select_option(label="growth exponent")
    page.wait_for_url("**/heads/growth.html#model=base")
    drawn()
    page.get_by_role("button", name="growth exponent").click()
    values = run.heads[run.heads["model"] == "base"].sort_values("growth", ascending=False)
    first = page.locator("table.sortable:visible tbody tr").first
    assert first.locator("td").first.inner_text() == "L{layer}H{head}".format(**values.iloc[0])
    box = page.locator("[data-figure]:visible .nsewdrag").first.bounding_box()  # its upper left is in the last layer
    page.mouse.click(box["x"] + box["width"] * 0.5 / HEADS, box["y"] + box["height"] * 0.25)
    page.wait_for_url(f"**/head/{LAYERS - 1}.0.html#model=base")
    drawn()
    page.get_by_role("link", name="Next head").click()
    page.wait_for_url(f"**/head/{LAYERS - 1}.1.html#model=base")
    page.get_by_label("Go to a head").fill("L0H1")
    page.keyboard.press("Enter")
    page.wait_for_url("**/head/0.1.html#model=base")
    assert page.locator("h1").inner_text() == "Layer 0, head 1"
    drawn()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    page.get_by_role("button", name="theme").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert noise == []
    page.close()


def test_records_without_targets_are_text_with_zeros_and_empty_cells() -> None:
    records = RecordTable("trials", [{"name": "a", "score": 0, "note": None, "href": "/trials?trial=a"}])
    plain = pages.static_block(records, lambda link: Link(link.text, ""))
    linked = pages.static_block(records, lambda link: link)
    assert isinstance(plain, TextTable)
    assert isinstance(linked, TextTable)
    assert plain.rows == [["a", "0", ""]]
    assert linked.rows == [[Link("a", "/trials?trial=a"), "0", ""]]
    assert pages.static_block(Links([Link("all", "/")]), lambda link: Link(link.text, "")) is None
