"""The report in a real Chromium: it draws, it is quiet, it stays at home, and its theme follows the button."""

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
    return report.write([run], folder / "report.html").as_uri()


def opened(chromium: Browser, url: str, width: int, scheme: str) -> tuple[Page, list[str]]:
    """The drawn report, and what it complained about or asked for."""
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else noise.append(asked.url))
    page.goto(url)
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    return page, noise


@pytest.mark.parametrize("width", [800, 1440])
def test_every_figure_is_drawn_in_silence_and_nothing_overflows(chromium: Browser, url: str, width: int) -> None:
    page, noise = opened(chromium, url, width, "light")
    places = page.locator("[data-figure]").count()
    assert places > 15
    assert page.locator("[data-figure] .cartesianlayer .subplot").count() >= places
    assert page.locator(".heatmaplayer image").first.evaluate("it => it.href.baseVal").startswith("data:image/png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("[data-title*='hare']").count() == 0, "plotly's upload button is back"
    assert noise == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_the_button_turns_it(chromium: Browser, url: str, scheme: str) -> None:
    page, noise = opened(chromium, url, 1000, scheme)
    look = """() => [getComputedStyle(document.body).backgroundColor,
                     getComputedStyle(document.querySelector('.gtitle')).fill,
                     getComputedStyle(document.querySelector('.xtick text')).fill]"""
    before = page.evaluate(look)
    other = {"light": "Dark theme", "dark": "Light theme"}
    page.get_by_role("button", name=other[scheme]).press("Enter")
    after = page.evaluate(look)
    assert all(old != new for old, new in zip(before, after, strict=True))
    page.get_by_role("button", name={"light": "Light theme", "dark": "Dark theme"}[scheme]).click()
    assert page.evaluate(look) == before
    assert noise == []
    page.close()


def test_hovering_tells_layer_head_and_unit(chromium: Browser, url: str) -> None:
    page, noise = opened(chromium, url, 1440, "light")
    page.locator("[data-figure='0'] .nsewdrag").first.hover()
    told = page.locator("[data-figure='0'] .hoverlayer").text_content() or ""
    assert "layer" in told
    assert "tokens" in told
    assert noise == []
    page.close()


def test_printing_draws_on_white(chromium: Browser, url: str) -> None:
    page, noise = opened(chromium, url, 1000, "dark")
    assert page.get_by_role("button", name="theme").is_visible()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_role("button", name="theme").is_visible()
    assert len(page.pdf()) > 50_000
    assert noise == []
    page.close()
