"""Fixtures for tests of the app in a browser: one server and one tab for all of them, and waiting for charts."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from flask import Flask
from playwright.sync_api import Browser, Page, expect
from werkzeug.serving import make_server

from dashboards.app import create_app
from dashboards.run_store import RunStore
from headscope.cli.flags import example_run

expect.set_options(timeout=60_000)  # other processes may run beside the tests
VISIBLE_DRAWN = """() => {
    const isDrawn = (chart) => chart.querySelector(".main-svg") || chart.getBoundingClientRect().top > innerHeight;
    return !document.querySelector("main .loading") && [...document.querySelectorAll(".dash-graph")].every(isDrawn);
}"""
"""Whether all blocks are loaded and every visible chart is drawn."""
PAGE_STATE = """
    const { layout, paths } = dash_stores[0].getState();
    const state = paths.strs["page-state"].reduce((node, key) => node[key], layout).props.data;"""
FOLLOW_LINK = f"""(url) => {{ {PAGE_STATE}
    const {{ pathname, search }} = new URL(url);
    window.previousState = state;
    dash_clientside.set_props("url", {{ pathname, search }}); }}"""
"""Go to a URL like a link of the app, without reloading its scripts."""
STATE_CHANGED = f"() => {{ {PAGE_STATE} return state !== window.previousState; }}"


@pytest.fixture(scope="session")
def app_server() -> Iterator[tuple[Flask, str]]:
    """The app and its URL; `serve` sets the runs that it shows."""
    app = create_app(example_run()).server
    http_server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    yield app, f"http://127.0.0.1:{http_server.server_port}"
    http_server.shutdown()


@pytest.fixture
def serve(app_server: tuple[Flask, str]) -> Callable[[Path], str]:
    """Show the runs of a folder; returns the URL."""

    def show(folder: Path) -> str:
        app, url = app_server
        app.config["RUN_STORE"] = RunStore(folder)
        return url

    return show


@pytest.fixture(scope="module")
def app_tab(chromium: Browser) -> Iterator[Page]:
    """One tab that the tests of a file share, so that the browser loads the app's scripts once.

    It closes with the file: an open page asks its server for news, and what the server then reads of a run that is gone
    would be logged during tests of other files.
    """
    context = chromium.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    context.set_default_timeout(60_000)
    yield context.new_page()
    context.close()


@pytest.fixture
def browse(app_tab: Page) -> Iterator[Callable[..., Page]]:
    """Open a URL in the tab; fails if the page logs an error or requests another host."""
    problems: list[str] = []
    listeners = {
        "console": lambda message: problems.append(message.text) if message.type == "error" else None,
        "pageerror": lambda error: problems.append(str(error)),
        "request": lambda request: problems.append(request.url) if not is_local(request.url) else None,
    }
    for event, listener in listeners.items():
        app_tab.on(event, listener)

    def open_url(url: str, width: int = 1440, scheme: str = "light", reload: bool = False) -> Page:
        set_display(app_tab, width, scheme)
        current = urlsplit(app_tab.url)
        if reload or f"{current.scheme}://{current.netloc}" != url[: url.index("/", 8) if "/" in url[8:] else None]:
            app_tab.goto(url)
        else:
            app_tab.evaluate(FOLLOW_LINK, url)
            app_tab.wait_for_function(STATE_CHANGED)
        wait_until_drawn(app_tab)
        return app_tab

    yield open_url
    for event, listener in listeners.items():
        app_tab.remove_listener(event, listener)
    assert problems == []


def set_display(page: Page, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)


def is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "blob:http://127.0.0.1:"))


def wait_until_drawn(page: Page) -> None:
    """Wait until the page shows its title and every visible chart is drawn."""
    expect(page.locator("#content h1")).to_be_visible(timeout=60_000)
    page.wait_for_function(VISIBLE_DRAWN)


def choose_option(page: Page, control: str, option: str) -> None:
    """Choose an option of the control with this label."""
    page.get_by_label(control, exact=True).first.click()
    page.get_by_role("option", name=option, exact=True).click()
