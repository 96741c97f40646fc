"""The report in Chromium: figures are drawn, there are no errors or requests, and the theme button works."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from support.synthetic_runs import synthetic_run

from headscope import rendering

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("report")
    run = synthetic_run(folder, models=("base", "<script>alert(1)</script>"), layers=2, heads=4, pairs=4)
    return rendering.write_report([run], folder / "report.html").as_uri()


@dataclass
class ReportPage:
    """The drawn report with its errors and network requests."""

    page: Page
    width: int
    scheme: str
    problems: list[str]


@pytest.fixture(scope="module", params=[(800, "light"), (1440, "dark")], ids=["narrow and light", "wide and dark"])
def report_page(request: pytest.FixtureRequest, chromium: Browser, url: str) -> Iterator[ReportPage]:
    """Drawn once for all tests; a test must leave it unchanged."""
    width, scheme = request.param
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else problems.append(request.url)
    )
    page.goto(url)
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    yield ReportPage(page, width, scheme, problems)
    assert problems == []
    page.close()


def test_every_figure_is_drawn_without_errors_and_nothing_overflows(report_page: ReportPage) -> None:
    page = report_page.page
    figure_count = page.locator("[data-figure]").count()
    assert figure_count > 15
    assert page.locator("[data-figure] .cartesianlayer .subplot").count() >= figure_count
    assert page.locator(".heatmaplayer image").first.evaluate("it => it.href.baseVal").startswith("data:image/png")
    assert page.evaluate("document.documentElement.scrollWidth") <= report_page.width
    assert page.locator("[data-title*='hare']").count() == 0, "plotly shows its upload button"
    assert report_page.problems == []


def test_the_theme_follows_the_system_and_the_button_toggles_it(report_page: ReportPage) -> None:
    page = report_page.page
    colours = """() => [getComputedStyle(document.body).backgroundColor,
                     getComputedStyle(document.querySelector('.gtitle')).fill,
                     getComputedStyle(document.querySelector('.xtick text')).fill]"""
    before = page.evaluate(colours)
    assert (before[0] == "rgb(255, 255, 255)") == (report_page.scheme == "light")
    other_theme, first_theme = (
        ("Dark theme", "Light theme") if report_page.scheme == "light" else ("Light theme", "Dark theme")
    )
    page.get_by_role("button", name=other_theme).press("Enter")
    after = page.evaluate(colours)
    assert all(old != new for old, new in zip(before, after, strict=True))
    page.get_by_role("button", name=first_theme).click()
    assert page.evaluate(colours) == before
    assert report_page.problems == []


def test_hover_text_has_layer_head_and_unit(report_page: ReportPage) -> None:
    figure = report_page.page.locator("[data-figure]:has(.heatmaplayer image)").first
    figure.locator(".nsewdrag").first.hover()
    hover_text = figure.locator(".hoverlayer").text_content() or ""
    assert "layer" in hover_text
    assert "tokens" in hover_text
    assert report_page.problems == []


LAYOUT = """() => {
  const words = (text) => text.split(/\\s+/).filter((word) => /\\w/.test(word)).length;
  const counts = {before: 0, unfolded: 0};
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let hasPicture = false;
  while (texts.nextNode()) {
    const parent = texts.currentNode.parentElement;
    hasPicture ||= parent.closest("[data-figure]") !== null;
    if (parent.closest("[data-figure], script, style, noscript") || !parent.checkVisibility()) continue;
    counts.unfolded += words(texts.currentNode.data);
    if (!hasPicture) counts.before += words(texts.currentNode.data);
  }
  const cards = [...document.querySelectorAll(".card")].map((card) => card.getBoundingClientRect());
  return {...counts, top: document.querySelector("[data-figure]").getBoundingClientRect().top,
    columns: new Set(cards.map((card) => card.left)).size, cards: cards.length};
}"""
PRINTED = """() => {
  dispatchEvent(new Event("beforeprint"));
  const boxes = [...document.querySelectorAll("figure")].map((figure) => ({
    breaks: getComputedStyle(figure).breakInside,
    height: figure.getBoundingClientRect().height,
    overflow: figure.querySelector(".main-svg").getBoundingClientRect().right - figure.getBoundingClientRect().right}));
  dispatchEvent(new Event("afterprint"));
  const details = document.querySelector("details.prose > ul, details.prose > h3");
  return {boxes, isProseOpen: details.getBoundingClientRect().height > 0};
}"""
A4_WIDTH, A4_HEIGHT = 687, 1016
"""An A4 page within its margins, in px."""


def test_a_report_like_that_of_the_demo_begins_with_pictures_folds_its_prose_and_prints_whole_charts(
    chromium: Browser, tmp_path: Path
) -> None:
    models = ("base", "yarn", "yarn without factor", "adarope")
    run = synthetic_run(tmp_path, models, layers=4, lengths=(512, 2048), docs=3, pairs=4, probes=("measure",))
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto(rendering.write_report([run], tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    layout = page.evaluate(LAYOUT)
    assert layout["top"] < 500
    assert layout["before"] <= 80
    assert layout["unfolded"] <= 1500
    assert (layout["cards"], layout["columns"]) == (3, 3)
    page.set_viewport_size({"width": A4_WIDTH, "height": A4_HEIGHT})
    page.emulate_media(media="print")
    printed = page.evaluate(PRINTED)
    assert printed["isProseOpen"]
    assert all(box["breaks"] == "avoid" for box in printed["boxes"])
    assert max(box["height"] for box in printed["boxes"]) <= A4_HEIGHT
    assert max(box["overflow"] for box in printed["boxes"]) <= 1
    page.close()


def test_print_has_a_white_background(report_page: ReportPage) -> None:
    page = report_page.page
    assert page.get_by_role("button", name="theme").is_visible()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_role("button", name="theme").is_visible()
    if report_page.scheme == "dark":
        assert len(page.pdf()) > 50_000
    assert report_page.problems == []
    page.emulate_media(media="screen")
