"""How long the app lets a user wait, as a real browser sees it. Needs Playwright and Debian's Chromium."""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headscope.errors import Missing
from headscope.runs.synthetic import synthetic_run

CLICKS = 9
# From the click until the new head's page has every chart in view drawn; the page's own clock tells.
WATCH = """(title) => {
  window.waited = new Promise((done) => addEventListener("click", (event) => {
    const look = () => document.querySelector("h1")?.textContent === title
      && ![...document.querySelectorAll(".dash-graph")].some((graph) =>
        !graph.querySelector(".main-svg") && graph.getBoundingClientRect().top < innerHeight)
      && document.querySelector(".dash-graph")
      ? done(performance.now() - event.timeStamp) : requestAnimationFrame(look);
    look();
  }, { capture: true, once: true }));
}"""
SHAPE = "() => (({ z }) => [z.length, z[0].length])(document.querySelector('.js-plotly-plot')._fullData[0])"
PAINTED = "() => performance.timeOrigin + performance.getEntriesByName('first-contentful-paint')[0].startTime"


def compare(example: Path) -> list[dict[str, Any]]:
    """The waits on the runs in `example`, and on a made-up run of 1,024 heads x 64 pairs x 4 models."""
    with tempfile.TemporaryDirectory() as folder:
        shape = {"layers": 32, "heads": 32, "groups": 8, "pairs": 64}
        synthetic_run(Path(folder), models=("a", "b", "c", "d"), lengths=(8192,), docs=2, **shape)
        return waits("shipped example", example) + waits("1,024 heads x 64 pairs x 4 models", Path(folder))


def waits(name: str, runs: Path) -> list[dict[str, Any]]:
    """One row per wait, in seconds: the app's start to its first paint, and the median click to a head's drawn page."""
    with _chromium() as browser, _serving(runs) as (url, started):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.wait_for_selector("h1")
        first = page.evaluate(PAINTED) / 1000 - started
        page.goto(f"{url}/heads")
        seconds = [_click(page, at) for at in range(CLICKS)]
    clicks = f"click to a head's drawn page, median of {CLICKS}"
    return [
        {"run": name, "wait": "command to first paint", "seconds": round(first, 2)},
        {"run": name, "wait": clicks, "seconds": round(statistics.median(seconds), 2)},
    ]


def _click(page: Any, at: int) -> float:
    """Click on a cell of the matrix, each time another, and come back."""
    page.wait_for_selector("main:has(#grid) .heatmaplayer image")
    layers, heads = page.evaluate(SHAPE)
    layer, head = at * 7 % layers, at * 5 % heads
    page.evaluate(WATCH, f"Layer {layer}, head {head}")
    box = page.locator(".nsewdrag").first.bounding_box()
    page.mouse.click(
        box["x"] + box["width"] * (head + 0.5) / heads, box["y"] + box["height"] * (1 - (layer + 0.5) / layers)
    )
    waited: float = page.evaluate("() => window.waited") / 1000
    page.go_back()
    return waited


@contextmanager
def _serving(runs: Path) -> Iterator[tuple[str, float]]:
    """The app in a process of its own: its address, and when the command was given."""
    started = time.time()
    command = [sys.executable, "-m", "headscope.cli", "dash", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        url = process.stdout.readline().split()[1]
        try:
            yield url, started
        finally:
            process.terminate()


@contextmanager
def _chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise Missing("timing the dashboard needs Playwright: pip install 'headscope[dev]'") from error
    if (found := shutil.which("chromium")) is None:
        raise Missing("timing the dashboard needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
