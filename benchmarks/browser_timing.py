"""Loading times of the app in a real browser. Needs Playwright and Debian's Chromium."""

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

from benchmarks.synthetic_run import Sizes, synthetic_run
from headscope.errors import ResourceMissing

CLICK_COUNT = 10
# Waits until the page of that title has drawn its visible charts, then all of them; times are on the page's own clock.
WATCH_SCRIPT = """([title]) => {
  const heading = () => document.querySelector("#content h1")?.textContent;
  const charts = () => [...document.querySelectorAll("main .dash-graph")];
  const isDrawn = (chart) => chart.querySelector(".main-svg");
  const isLoaded = () => (title ? heading() === title : heading());
  const isBelow = (chart) => chart.getBoundingClientRect().top > innerHeight;
  const visibleDrawn = () => isLoaded() && charts().every((chart) => isDrawn(chart) || isBelow(chart));
  const allDrawn = () => {
    dispatchEvent(new Event("beforeprint"));  // draws all charts, as for print
    return !document.querySelector("main .loading") && charts().every(isDrawn);
  };
  const when = (condition, start) => new Promise((resolve) => {
    const check = () => (condition() ? resolve(performance.now() - start) : requestAnimationFrame(check));
    check();
  });
  const watch = async (start) => [await when(visibleDrawn, start), await when(allDrawn, start)];
  const onClick = (event) => { window.loadTimes = watch(event.timeStamp); };
  if (title) addEventListener("click", onClick, { capture: true, once: true });
  else window.loadTimes = watch(0);
}"""
MATRIX_SHAPE_SCRIPT = (
    "() => (({ z }) => [z.length, z[0].length])(document.querySelector('.js-plotly-plot')._fullData[0])"
)
FIRST_PAINT_SCRIPT = (
    "() => performance.timeOrigin + performance.getEntriesByName('first-contentful-paint')[0].startTime"
)
TRANSFER_SIZE_SCRIPT = """() => ["navigation", "resource"].flatMap((kind) => performance.getEntriesByType(kind))
  .reduce((sum, entry) => sum + entry.transferSize, 0)"""


def measure_all(example: Path) -> Iterator[dict[str, Any]]:
    """Loading times on the runs in `example`, and on a synthetic run of 1,024 heads x 64 pairs x 4 models."""
    yield from measure_waits("shipped example", example)
    with tempfile.TemporaryDirectory() as folder:
        sizes = Sizes(layers=32, heads=32, groups=8, pairs=64, lengths=(8192,), docs=2)
        synthetic_run(Path(folder), ("a", "b", "c", "d"), sizes)
        yield from measure_waits("1,024 heads x 64 pairs x 4 models", Path(folder))


def measure_waits(name: str, runs: Path) -> Iterator[dict[str, Any]]:
    """One row per wait: seconds until the visible charts are drawn, seconds until all are, and MB transferred.

    First from the command to the first paint, then the median click that opens a head's page, then each page loaded
    with the app's scripts in the browser's cache.
    """
    with _chromium() as browser, _app_process(runs) as (url, start_time):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.wait_for_selector("h1")
        yield _result_row(name, "command to first paint", page.evaluate(FIRST_PAINT_SCRIPT) / 1000 - start_time)
        paths = page.eval_on_selector_all(
            "nav a", "(links) => [...new Set(links.map((link) => link.getAttribute('href')))]"
        )
        page.goto(f"{url}/heads")
        clicks = [_time_click(page, index) for index in range(CLICK_COUNT)]
        medians = map(statistics.median, zip(*clicks, strict=True))
        yield _result_row(name, f"click to a head's page, median of {CLICK_COUNT}", *medians)
        for path in paths:
            yield _result_row(name, f"load of {path}", *_time_load(page, url + path))


def _result_row(
    run: str, wait: str, visible_seconds: float, total_seconds: float | None = None, megabytes: float | None = None
) -> dict[str, Any]:
    values = {"visible charts (s)": visible_seconds, "all charts (s)": total_seconds, "MB": megabytes}
    return {"run": run, "wait": wait} | {name: value and round(value, 2) for name, value in values.items()}


def _time_load(page: Any, url: str) -> tuple[float, float, float]:
    """Load a page: seconds until its visible charts are drawn, seconds until all are, and compressed MB transferred."""
    page.goto(url, wait_until="commit")
    page.evaluate(WATCH_SCRIPT, [""])
    visible, total = page.evaluate("() => window.loadTimes")
    return visible / 1000, total / 1000, page.evaluate(TRANSFER_SIZE_SCRIPT) / 1e6


def _time_click(page: Any, index: int) -> tuple[float, float]:
    """Click a cell of the matrix, another one for each index, and go back; seconds as in `_time_load`."""
    page.wait_for_selector("main:has(#head-table) .heatmaplayer image")
    layers, heads = page.evaluate(MATRIX_SHAPE_SCRIPT)
    layer, head = index * 7 % layers, index * 5 % heads
    page.evaluate(WATCH_SCRIPT, [f"Layer {layer}, head {head}"])
    box = page.locator(".nsewdrag").first.bounding_box()
    page.mouse.click(
        box["x"] + box["width"] * (head + 0.5) / heads, box["y"] + box["height"] * (1 - (layer + 0.5) / layers)
    )
    visible, total = page.evaluate("() => window.loadTimes")
    page.go_back()
    return visible / 1000, total / 1000


@contextmanager
def _app_process(runs: Path) -> Iterator[tuple[str, float]]:
    """The app in a separate process: its URL, and the time at which it was started."""
    start_time = time.time()
    command = [sys.executable, "-m", "headscope", "dash", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        url = process.stdout.readline().split()[1]
        try:
            yield url, start_time
        finally:
            process.terminate()


@contextmanager
def _chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise ResourceMissing("timing the app needs Playwright: pip install 'headscope[dev]'") from error
    if (executable := shutil.which("chromium")) is None:
        raise ResourceMissing("timing the app needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
