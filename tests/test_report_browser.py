"""The report in a real Chromium: it draws, it is quiet, it stays at home, and its theme follows the button."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from headscope import report
from headscope.runs.synthetic import synthetic_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("report")
    run = synthetic_run(folder, models=("base", "yarn", "<script>alert(1)</script>"))
    return report.write_report([run], folder / "report.html").as_uri()


@dataclass
class Opened:
    """The drawn report, and what it complained about or asked for."""

    page: Page
    width: int
    scheme: str
    noise: list[str]


@pytest.fixture(scope="module", params=[(800, "light"), (1440, "dark")], ids=["narrow and light", "wide and dark"])
def opened(request: pytest.FixtureRequest, chromium: Browser, url: str) -> Iterator[Opened]:
    """Drawn once for all tests; each leaves it as it found it."""
    width, scheme = request.param
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else noise.append(asked.url))
    page.goto(url)
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    yield Opened(page, width, scheme, noise)
    assert noise == []
    page.close()


def test_every_figure_is_drawn_in_silence_and_nothing_overflows(opened: Opened) -> None:
    page = opened.page
    places = page.locator("[data-figure]").count()
    assert places > 15
    assert page.locator("[data-figure] .cartesianlayer .subplot").count() >= places
    assert page.locator(".heatmaplayer image").first.evaluate("it => it.href.baseVal").startswith("data:image/png")
    assert page.evaluate("document.documentElement.scrollWidth") <= opened.width
    assert page.locator("[data-title*='hare']").count() == 0, "plotly's upload button is back"
    assert opened.noise == []


def test_the_theme_follows_the_system_and_the_button_turns_it(opened: Opened) -> None:
    page = opened.page
    look = """() => [getComputedStyle(document.body).backgroundColor,
                     getComputedStyle(document.querySelector('.gtitle')).fill,
                     getComputedStyle(document.querySelector('.xtick text')).fill]"""
    before = page.evaluate(look)
    assert (before[0] == "rgb(255, 255, 255)") == (opened.scheme == "light")
    other, back = ("Dark theme", "Light theme") if opened.scheme == "light" else ("Light theme", "Dark theme")
    page.get_by_role("button", name=other).press("Enter")
    after = page.evaluate(look)
    assert all(old != new for old, new in zip(before, after, strict=True))
    page.get_by_role("button", name=back).click()
    assert page.evaluate(look) == before
    assert opened.noise == []


def test_hovering_tells_layer_head_and_unit(opened: Opened) -> None:
    opened.page.locator("[data-figure='0'] .nsewdrag").first.hover()
    told = opened.page.locator("[data-figure='0'] .hoverlayer").text_content() or ""
    assert "layer" in told
    assert "tokens" in told
    assert opened.noise == []


def test_printing_draws_on_white(opened: Opened) -> None:
    page = opened.page
    assert page.get_by_role("button", name="theme").is_visible()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_role("button", name="theme").is_visible()
    if opened.scheme == "dark":
        assert len(page.pdf()) > 50_000
    assert opened.noise == []
    page.emulate_media(media="estimate")
