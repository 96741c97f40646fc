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

CLICK_COUNT = 10
# Until the page of that title has its charts drawn, those in view, and then every one; the page's own clock tells.
WATCH_SCRIPT = """([title]) => {
  const told = () => document.querySelector("#content h1")?.textContent;
  const charts = () => [...document.querySelectorAll("main figure")];
  const drawn = (chart) => chart.querySelector(".main-svg");
  const there = () => (title ? told() === title : told());
  const below = (chart) => chart.getBoundingClientRect().top > innerHeight;
  const seen = () => there() && charts().every((chart) => drawn(chart) || below(chart));
  const every = () => {
    dispatchEvent(new Event("beforeprint"));  // as for paper, charts do not wait to be seen
    return !document.querySelector("main .waiting") && charts().every(drawn);
  };
  const when = (holds, since) => new Promise((done) => {
    const look = () => (holds() ? done(performance.now() - since) : requestAnimationFrame(look));
    look();
  });
  const watch = async (since) => [await when(seen, since), await when(every, since)];
  if (!title) window.waited = watch(0);
  else addEventListener("click", (event) => { window.waited = watch(event.timeStamp); }, { capture: true, once: true });
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
    """The waits on the runs in `example`, and on a made-up one of 1,024 heads x 64 pairs x 4 models, as they end."""
    yield from measure_waits("shipped example", example)
    with tempfile.TemporaryDirectory() as folder:
        shape = {"layers": 32, "heads": 32, "groups": 8, "pairs": 64}
        synthetic_run(Path(folder), models=("a", "b", "c", "d"), lengths=(8192,), docs=2, **shape)
        yield from measure_waits("1,024 heads x 64 pairs x 4 models", Path(folder))


def measure_waits(name: str, runs: Path) -> Iterator[dict[str, Any]]:
    """One row a wait, in seconds until the charts in view are drawn and until every chart is; the MB that it carries.

    First the app's start to its first paint, then the median click to a head's page, then each page when it is loaded
    with the app's scripts at hand.
    """
    with _chromium() as browser, _app_process(runs) as (url, started):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.wait_for_selector("h1")
        yield _result_row(name, "command to first paint", page.evaluate(FIRST_PAINT_SCRIPT) / 1000 - started)
        paths = page.eval_on_selector_all("nav a", "(links) => links.map((link) => link.getAttribute('href'))")
        page.goto(f"{url}/heads")
        clicks = [_time_click(page, at) for at in range(CLICK_COUNT)]
        yield _result_row(
            name, f"click to a head's page, median of {CLICK_COUNT}", *map(statistics.median, zip(*clicks, strict=True))
        )
        for path in paths:
            yield _result_row(name, f"load of {path}", *_time_load(page, url + path))


def _result_row(
    run: str, wait: str, visible_seconds: float, total_seconds: float | None = None, megabytes: float | None = None
) -> dict[str, Any]:
    told = {"in view (s)": visible_seconds, "every chart (s)": total_seconds, "MB": megabytes}
    return {"run": run, "wait": wait} | {what: value and round(value, 2) for what, value in told.items()}


def _time_load(page: Any, url: str) -> tuple[float, float, float]:
    """Load a page: the seconds until its charts in view and every one are drawn, and the MB that were carried, as they
    were compressed."""
    page.goto(url, wait_until="commit")
    page.evaluate(WATCH_SCRIPT, [""])
    seen, every = page.evaluate("() => window.waited")
    return seen / 1000, every / 1000, page.evaluate(TRANSFER_SIZE_SCRIPT) / 1e6


def _time_click(page: Any, index: int) -> tuple[float, float]:
    """Click on a cell of the matrix, each time another, and come back."""
    page.wait_for_selector("main:has(#grid) .heatmaplayer image")
    layers, heads = page.evaluate(MATRIX_SHAPE_SCRIPT)
    layer, head = index * 7 % layers, index * 5 % heads
    page.evaluate(WATCH_SCRIPT, [f"Layer {layer}, head {head}"])
    box = page.locator(".nsewdrag").first.bounding_box()
    page.mouse.click(
        box["x"] + box["width"] * (head + 0.5) / heads, box["y"] + box["height"] * (1 - (layer + 0.5) / layers)
    )
    seen, every = page.evaluate("() => window.waited")
    page.go_back()
    return seen / 1000, every / 1000


@contextmanager
def _app_process(runs: Path) -> Iterator[tuple[str, float]]:
    """The app in a process of its own: its address, and when the command was given."""
    started = time.time()
    command = [sys.executable, "-m", "headscope.cli.app", "dash", str(runs), "--port", "0"]
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
