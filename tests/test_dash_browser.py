"""The app in a real Chromium, on the shipped example run: what researchers do, in the order in which they do it."""

import csv
import io
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from flask import Flask
from playwright.sync_api import Browser, Page, expect
from werkzeug.serving import make_server
from whole_run import whole_run

from dashboards.app import create_app
from dashboards.layout import all_pages
from dashboards.run_store import RunStore
from headscope.cli.dash import EXAMPLE
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run, short_names
from headscope.runs.summary import heads_of_model
from headscope.runs.synthetic import synthetic_run

pytestmark = pytest.mark.browser
expect.set_options(timeout=60_000)  # other tests may run beside these
PATHS = [page.PATH for page in all_pages()]
MODELS = ["base", "yarn", "yarn without factor", "adarope"]
LENGTH = 12288
RUN = EXAMPLE.name
TINY = {"layers": 2, "heads": 4, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
IN_VIEW = """() => !document.querySelector("main .waiting") && [...document.querySelectorAll(".dash-graph")].every(
    (chart) => chart.querySelector(".main-svg") || chart.getBoundingClientRect().top > innerHeight)"""
"""Whether the whole page is there and every chart that is seen is drawn; the others wait until they are."""


SHOWN = """
    const { layout, paths } = dash_stores[0].getState();
    const shown = paths.strs.shown.reduce((at, key) => at[key], layout).props.data;"""
GO = f"""(url) => {{ {SHOWN}
    const {{ pathname, search }} = new URL(url);
    window.before = shown;
    dash_clientside.set_props("url", {{ pathname, search }}); }}"""
"""As a link of the app does it: without its scripts being read again."""
GONE = f"() => {{ {SHOWN} return shown !== window.before; }}"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Flask, str]]:
    """The app, and its address; `serve` gives it the runs to show."""
    app = create_app(EXAMPLE).server
    made = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield app, f"http://127.0.0.1:{made.server_port}"
    made.shutdown()


@pytest.fixture
def serve(server: tuple[Flask, str]) -> Callable[[Path], str]:
    """Show the runs of a folder; returns the address."""

    def show(folder: Path) -> str:
        app, url = server
        app.config["LIBRARY"] = RunStore(folder)
        return url

    return show


@pytest.fixture
def app(serve: Callable[[Path], str]) -> str:
    return serve(EXAMPLE)


@pytest.fixture(scope="module")
def tab(chromium: Browser) -> Iterator[Page]:
    """The one tab that the tests share, so that the browser reads the app's scripts once."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    context.set_default_timeout(60_000)
    yield context.new_page()
    context.close()


@pytest.fixture
def browse(tab: Page) -> Iterator[Callable[..., Page]]:
    """Open an address in the tab; at the end it has not complained and asked no other host."""
    noise: list[str] = []
    heed = {
        "console": lambda message: noise.append(message.text) if message.type == "error" else None,
        "pageerror": lambda error: noise.append(str(error)),
        "request": lambda asked: noise.append(asked.url) if not is_home(asked.url) else None,
    }
    for event, listener in heed.items():
        tab.on(event, listener)

    def opened(url: str, width: int = 1440, scheme: str = "light", anew: bool = False) -> Page:
        seen_at(tab, width, scheme)
        here = urlsplit(tab.url)
        if anew or f"{here.scheme}://{here.netloc}" != url[: url.index("/", 8) if "/" in url[8:] else None]:
            tab.goto(url)
        else:
            tab.evaluate(GO, url)
            tab.wait_for_function(GONE)
        drawn(tab)
        return tab

    yield opened
    for event, listener in heed.items():
        tab.remove_listener(event, listener)
    assert noise == []


def seen_at(page: Page, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)


def is_home(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "blob:http://127.0.0.1:"))


def drawn(page: Page) -> None:
    """Wait until the page shows its title and every chart in view is drawn."""
    expect(page.locator("#content h1")).to_be_visible(timeout=60_000)
    page.wait_for_function(IN_VIEW)


def at_cell(page: Page, layer: int, head: int, layers: int = 30, heads: int = 9) -> tuple[float, float]:
    """Where the cell of a head lies in the first chart."""
    box = page.locator(".nsewdrag").first.bounding_box()
    assert box
    return box["x"] + box["width"] * (head + 0.5) / heads, box["y"] + box["height"] * (1 - (layer + 0.5) / layers)


@cache
def read(table: str) -> pd.DataFrame:
    return pq.read_table(EXAMPLE / f"{table}.parquet").to_pandas()


def stored(table: str, **keys: object) -> pd.DataFrame:
    frame = read(table)
    for name, value in keys.items():
        frame = frame[frame[name] == value]
    return frame


def effective_length(model: str, layer: int, head: int) -> float:
    """From the parquet alone: exp of the mean over documents of mean ln ESS2, rows that see over half the context."""
    rows = stored("attention", model=model, layer=layer, head=head, context_length=LENGTH)
    far = rows[rows["visible"] > 0.55 * rows["visible"].max()]
    by_doc = [np.average(block["log_ess2"], weights=block["rows"]) for _, block in far.groupby("doc", observed=True)]
    return float(np.exp(np.mean(by_doc)))


def retrieval_score(model: str, layer: int, head: int) -> float:
    """From the parquet alone: mean share of the needle that the head copied, over the trials that were answered."""
    trials = stored("needles", model=model, mode="strict")
    trial = ["model", "mode", "needle", "context_length", "depth", "doc", "seed"]
    scores = stored("retrieval", model=model, mode="strict", layer=layer, head=head).astype({"doc": "str"})
    both = scores.merge(trials[trials["success"]].astype({"doc": "str"})[trial], on=trial)
    return float(both["score"].mean())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run for every page."""
    folder = tmp_path_factory.mktemp("whole")
    whole_run(folder)
    return folder


@pytest.mark.parametrize("path", PATHS)
def test_every_page_is_drawn_in_silence_fits_and_is_accessible_light_and_dark_wide_and_narrow(
    whole: Path, serve: Callable[[Path], str], browse: Callable[..., Page], path: str
):
    """Each page in both themes and at both widths; every second one the other way round."""
    first, second = ("light", "dark") if PATHS.index(path) % 2 else ("dark", "light")
    page = browse(serve(whole) + path, 1440, first, anew=True)
    judged(page, path, 1440)
    seen_at(page, 800, second)
    page.wait_for_function(IN_VIEW)
    judged(page, path, 800)


def judged(page: Page, path: str, width: int) -> None:
    """The page has charts, lies within the window, and axe has nothing grave to say."""
    assert page.locator(".dash-graph").count() or path in ("/lens", "/trials", "/runs")
    assert page.locator("nav [aria-current=page]").get_attribute("href") == path
    assert page.locator("[data-title*='hare']").count() == 0, "plotly's upload button is back"
    page.wait_for_function("(width) => document.documentElement.scrollWidth <= width", arg=width)
    found = Axe().run(page).response["violations"]
    grave = [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]
    assert grave == []


@pytest.mark.parametrize("path", ["/", "/heads", "/head", "/compare"])
def test_the_example_fits_a_narrow_screen_and_is_accessible_there(app: str, browse: Callable[..., Page], path: str):
    judged(browse(app + path, 800, "dark"), path, 800)


def test_a_click_on_a_head_opens_its_page_with_the_numbers_of_the_parquet(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=base")
    page.mouse.click(*at_cell(page, 17, 4))
    expect(page.locator("h1")).to_have_text("Layer 17, head 4")
    drawn(page)
    row = page.locator("tr", has_text=f"effective length at {LENGTH:,}").first.locator("td")
    for model, cell in zip(MODELS, row.all_text_contents(), strict=True):
        told = float(re.match(r"[\d.,]+", cell)[0].replace(",", ""))
        assert told == pytest.approx(effective_length(model, 17, 4), rel=5e-3)
    page.wait_for_url(f"**/head/17.4?model=base&run={RUN}")
    row = page.locator("tr", has_text="retrieval score").first.locator("td")
    for model, cell in zip(MODELS, row.all_text_contents(), strict=True):
        assert float(cell.split(" (")[0]) == pytest.approx(retrieval_score(model, 17, 4), abs=6e-4)


def test_a_cell_of_the_needle_map_opens_its_trials(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/retrieval?models=yarn")
    chart = page.locator("[aria-label='Needle found: yarn']")
    chart.scroll_into_view_if_needed()
    box = chart.locator(".nsewdrag").bounding_box()
    assert box
    trials = stored("needles", model="yarn", mode="strict")
    length, depth = trials["context_length"].min(), trials["depth"].max()  # the map's lower left
    page.mouse.click(box["x"] + 8, box["y"] + box["height"] - 8)
    page.wait_for_url(re.compile(rf"/trials\?.*length={length}.*depth={depth:.4f}"))
    drawn(page)
    expect(page.locator("main")).to_contain_text(f"Trials of {length:,} tokens, depth {depth:.0%}")


def test_a_pinned_baseline_shows_differences_and_keeps_the_focus(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=adarope")
    page.get_by_label("Pinned baseline").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("option", name="base", exact=True).wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".gtitle").first).to_contain_text("adarope against base")
    assert "base=base" in page.url
    assert page.locator("aside input:focus").count() == 1
    page.mouse.move(*at_cell(page, 3, 2))
    ratio = effective_length("adarope", 3, 2) / effective_length("base", 3, 2)
    expect(page.locator(".hoverlayer")).to_contain_text(f"× {ratio:.3f}")
    page.locator(".ag-header-cell", has_text="change").wait_for(state="attached")


def test_a_lasso_filters_the_grid_and_marks_the_heads_elsewhere(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/compare?model=adarope")
    box = page.locator(".nsewdrag").first.bounding_box()
    assert box
    left, top, right, bottom = 0.02, 0.4, 0.55, 0.98
    page.mouse.move(box["x"] + box["width"] * left, box["y"] + box["height"] * top)
    page.mouse.down()
    for x, y in ((right, top), (right, bottom), (left, bottom), (left, top)):
        page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y, steps=6)
    page.mouse.up()
    page.wait_for_url("**pick=*")
    picked = page.url.split("pick=")[1].split("_")
    assert 1 < len(picked) < 270
    page.get_by_role("link", name="Heads", exact=True).click()
    expect(page.locator("#grid-count")).to_contain_text(f"{len(picked)} heads, picked")
    expect(page.locator(".scatterlayer .point")).to_have_count(2 * len(picked))
    page.get_by_label("Name of this set").fill("outliers")
    page.get_by_role("button", name="Keep as a set").click()
    expect(page.locator(".tray tbody th")).to_have_text("outliers")
    with page.expect_download() as download:
        page.get_by_role("button", name="YAML").click()
    told = yaml.safe_load(Path(download.value.path()).read_text())
    places = [f"L{each.replace('.', 'H')}" for each in picked]
    assert told == {"influence": {"heads": {"picked": places, "outliers": places}}}
    page.get_by_role("link", name="Pick none").click()
    expect(page.locator("#grid-count")).to_contain_text("270 heads")
    page.keyboard.down("Shift")
    page.mouse.click(*at_cell(page, 17, 4))
    page.keyboard.up("Shift")
    page.wait_for_url("**pick=17.4*")


def best(values: "pd.Series[float]", count: int = 1) -> list[tuple[int, int]]:
    return [(int(layer), int(head)) for layer, head in values.sort_values(ascending=False).index[:count]]


def first_row(page: Page) -> tuple[int, int]:
    """Layer and head of the first row of the grid."""
    row = page.locator(".ag-pinned-left-cols-container .ag-row[row-index='0'] [role=gridcell]")
    return int(row.nth(0).inner_text()), int(row.nth(1).inner_text())


def choose(page: Page, control: str, option: str) -> None:
    page.get_by_label(control, exact=True).first.click()
    page.get_by_role("option", name=option, exact=True).click()


def test_questions_are_answered_by_clicks_alone_and_as_the_parquet_has_it(app: str, browse: Callable[..., Page]):
    wide = Run.open(EXAMPLE).heads.set_index(["model", "layer", "head"])
    page = browse(app)

    # Which layers' frequencies changed most?
    page.get_by_role("link", name="Compare", exact=True).click()
    caption = page.locator("figcaption", has_text="How far frequencies moved from the checkpoint").first
    positions = stored("positions", model="adarope")
    square = (positions["log_theta"].astype(float) - positions["log_theta_base"].astype(float)) ** 2
    order = np.sqrt(square.groupby(positions["layer"]).mean()).sort_values(ascending=False)
    expect(caption).to_contain_text(f"Most changed: layer {order.index[0]} ({order.iloc[0]:.2g})")

    # Which heads are most global, and what does YaRN change about that?
    stays = wide.loc["yarn", f"ess2_{LENGTH}"].rank(ascending=False) <= 10
    both = stays & (wide.loc["base", f"ess2_{LENGTH}"].rank(ascending=False) <= 10)
    expect(page.locator("figcaption", has_text="Each line is a head")).to_contain_text(
        f"{both.sum()} of the top 10 heads stay in the top 10 under yarn"
    )

    # Do those that retrieve survive each scheme?
    leading = {model: {*best(wide.loc[model, "retrieval"], 10)} for model in MODELS}
    choose(page, "Statistic", "retrieval score")
    caption = page.locator("figcaption", has_text="Each line is a head").first
    for model in MODELS[1:]:
        stay = len(leading["base"] & leading[model])
        expect(caption).to_contain_text(f"{stay} of the top 10 heads stay in the top 10 under {model}")

    # Which heads are most global?
    choose(page, "Statistic", f"effective length at {LENGTH:,}")
    page.get_by_role("link", name="Heads", exact=True).click()
    choose(page, "Model", "base")
    expect(page.locator(".lead")).to_have_text("base, head by head.")
    header = page.locator(".ag-header-cell", has_text=f"effective length at {LENGTH:,}").locator(
        ".ag-header-cell-label"
    )
    header.click()
    header.click()
    page.wait_for_url(f"**sort=ess2_{LENGTH}-desc*")
    assert first_row(page) == best(wide.loc["base", f"ess2_{LENGTH}"])[0]

    # Which heads does YaRN change most, as the grid sorts them?
    choose(page, "Model", "yarn")
    choose(page, "Pinned baseline", "base")
    expect(page.locator(".lead")).to_have_text("yarn against base, head by head.")
    header = page.locator(".ag-header-cell[col-id=change] .ag-header-cell-label")
    header.click()
    header.click()
    page.wait_for_url("**sort=change-desc*")
    ratio = wide.loc["yarn", f"ess2_{LENGTH}"] / wide.loc["base", f"ess2_{LENGTH}"]
    assert first_row(page) == best(ratio)[0]

    # What does L18H6 do in all models?
    page.locator("#jump").fill("l18h6")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Layer 18, head 6")
    drawn(page)
    for model, cell in zip(
        MODELS, page.locator("tr", has_text="sink mass").first.locator("td").all_text_contents(), strict=True
    ):
        assert float(cell) == pytest.approx(wide.loc[(model, 18, 6), "sink_mass"], abs=6e-4)
    choose(page, "Model", "base")
    expect(page.locator(".answer")).to_contain_text(f"it copies {retrieval_score('base', 18, 6):.2f} of it")

    # Which heads retrieve, and do they survive each scheme?
    page.get_by_role("link", name="Overview", exact=True).click()
    expect(page.locator("h1")).to_contain_text("4 models")
    drawn(page)
    row = page.locator("tr", has=page.locator("th", has_text=re.compile("^retrieval")))
    for model, cell in zip(MODELS, row.locator("td").all_text_contents(), strict=True):
        scores = wide.loc[model, "retrieval"]
        named = " ".join(f"L{layer}H{head}" for layer, head in best(scores, 3))
        assert cell.strip() == f"{(scores > 0.1).sum()} heads {named}"

    # Who carries AdaRoPE's gain, and is it more than noise?
    page.get_by_role("link", name="Influence", exact=True).click()
    expect(page.locator("#content")).to_contain_text("It holds those of adarope.")
    choose(page, "Model", "adarope")
    expect(page.locator("h1")).to_have_text("Head influence: adarope")
    rows = stored("influence", model="adarope", component="joint", target="init", method="exact")
    mean = rows.astype({"doc": "str"}).groupby(["layer", "kv_group"])["delta_nll"].mean()
    (layer, group), most = mean.idxmax(), mean.max()
    caption = page.locator("figcaption", has_text="The units of largest influence").first
    expect(caption).to_contain_text(f"Most: layer {layer}, key group {group}, {most:+.2g} nats/token")
    expect(caption).to_contain_text("So few documents cannot tell any unit from zero.")


def test_a_link_shows_the_same_after_a_newer_run_and_a_server_that_stops_is_told(
    tmp_path: Path, serve: Callable[[Path], str], tab: Page
):
    first = synthetic_run(tmp_path, **TINY)
    url = serve(tmp_path)
    page = tab.context.new_page()  # whose requests are stopped in the end
    page.goto(f"{url}/heads?stat=growth")
    page.wait_for_url(f"**run={first.name}")
    drawn(page)
    link, count = page.url, page.locator("#grid-count").inner_text()
    newer = synthetic_run(tmp_path, models=("other", "models"), **TINY | {"heads": 6}, seed=1)
    newer.path.rename(tmp_path / "29991231T000000Z-newer-00000000")
    page.goto(link)
    drawn(page)
    assert page.locator("#grid-count").inner_text() == count
    page.get_by_role("link", name="newer, 12-31 00:00").click()
    expect(page.locator("#grid-count")).to_contain_text("models: 12 heads")
    page.route("**/_dash-update-component**", lambda route: route.abort())
    page.get_by_role("link", name="Compare", exact=True).click()
    expect(page.locator("#banner")).to_contain_text("What you see is still “Growth exponent”")
    page.close()


def test_two_runs_with_equal_labels_are_compared(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    runs = [synthetic_run(tmp_path, models=("base",), **TINY, seed=seed) for seed in range(2)]
    page = browse(f"{serve(tmp_path)}/heads?run={runs[0].name}")
    page.get_by_label("Runs, read as one").first.click()
    page.get_by_role("option").filter(has_not_text=re.compile("^$")).nth(
        1 if runs[0].name > runs[1].name else 0
    ).click()
    page.wait_for_url("**run=*run=*")
    page.get_by_role("link", name="Compare", exact=True).click()
    labels = [f"base · {brief}" for brief in short_names([run.name for run in runs])]
    expect(page.locator(".lead")).to_contain_text(f"{labels[1]} against {labels[0]}, head by head.")
    wide = [run.heads.set_index(["layer", "head"])["ess2_256"] for run in runs]
    told = ", ".join(
        f"{label} {statistic('ess2_256').format_number(float(each.median()))}"
        for label, each in zip(labels, wide, strict=True)
    )
    expect(page.locator("figcaption", has_text="Box: minimum").first).to_contain_text(f"Medians: {told}.")


def test_a_copied_link_shows_the_same_state_elsewhere(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=yarn&stat=growth&base=base&layers=3-20&role=constant")
    count, title = page.locator("#grid-count").inner_text(), page.locator(".gtitle").first.text_content()
    link = page.url
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("h1")).to_have_text("Runs")
    page = browse(link, anew=True)
    assert page.locator("#grid-count").inner_text() == count != ""
    assert page.locator(".gtitle").first.text_content() == title
    for name, value in {"Model": "yarn", "Pinned baseline": "base", "Statistic": "growth exponent"}.items():
        assert page.get_by_label(name).first.input_value() == value


def test_the_csv_is_the_table(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=adarope&base=base&stat=cov")
    page.locator(".ag-row").first.wait_for()
    with page.expect_download() as download:
        page.locator("#grid-csv").click()
    rows = list(csv.reader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8-sig"))))
    wide = heads_of_model(Run.open(EXAMPLE).heads, "cov", "adarope", "base")
    assert len(rows) - 1 == len(wide) == 270
    for told, expected in zip(rows[1:], wide.to_numpy(), strict=True):
        numbers = [float(cell) if cell else np.nan for cell in told]
        np.testing.assert_allclose(numbers, expected.astype(float), rtol=1e-9, equal_nan=True)


def test_a_chart_saves_its_numbers_and_its_picture(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=yarn&stat=growth")
    with page.expect_download() as download:
        page.locator("figure").first.get_by_role("button", name="CSV").click()
    assert download.value.suggested_filename == "growth-exponent-yarn.csv"
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    wide = Run.open(EXAMPLE).heads.set_index(["model", "layer", "head"])["growth"]
    assert len(rows) == 270
    for row in rows:
        place = row["model"], int(row["layer"]), int(row["head"])
        assert float(row["growth exponent"]) == pytest.approx(wide[place], rel=1e-5)
    page = browse(f"{app}/head/17.4?model=base")
    figure = page.locator("figure").first
    with page.expect_download() as download:
        figure.get_by_role("button", name="CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    last = [row for row in rows if row["model"] == "base"][-1]
    deepest = stored("attention", model="base", layer=17, head=4)
    top = deepest[deepest["visible"] == deepest["visible"].max()]
    assert float(last["ESS₂ (tokens)"]) == pytest.approx(
        np.exp(np.average(top["log_ess2"], weights=top["rows"])), rel=1e-4
    )
    for kind, magic in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as download:
            figure.get_by_role("button", name=kind).click()
        assert Path(download.value.path()).read_bytes().startswith(magic)


def test_a_saved_page_stands_alone(app: str, browse: Callable[..., Page], tmp_path: Path):
    page = browse(f"{app}/head/17.4")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save page").click()
    file = tmp_path / "page.html"
    shutil.copy(download.value.path(), file)
    alone, asked = page.context.new_page(), []
    alone.on("request", lambda request: asked.append(request.url))
    alone.goto(file.as_uri())
    alone.wait_for_selector("html[data-drawn]", state="attached")
    assert alone.locator("h1").inner_text() == "Layer 17, head 4"
    assert alone.locator(".main-svg").count() >= 4
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    alone.close()


def test_the_keyboard_opens_a_head_from_the_grid(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=base")
    page.locator(".ag-row[row-index='2'] [col-id='head']").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Layer 0, head 2")
    page.keyboard.press("ArrowUp")
    expect(page.locator("h1")).to_have_text("Layer 1, head 2")
    page.keyboard.press("ArrowRight")
    expect(page.locator("h1")).to_have_text("Layer 1, head 3")
    page.locator("#jump").fill("L18H6")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Layer 18, head 6")
    page.locator("#jump").blur()
    page.get_by_role("link", name="Heads", exact=True).click()
    drawn(page)
    page.locator("[data-matrix]").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    expect(page.locator("[data-matrix] [aria-live]")).to_contain_text("layer 1, head 1")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Layer 1, head 1")


def test_the_keyboard_alone_reaches_every_head(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    synthetic_run(tmp_path, **TINY)
    page = browse(f"{serve(tmp_path)}/heads", anew=True)
    for _ in range(60):  # past the navigation and the controls
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.matrix === 'heads'"):
            break
    told = page.locator("[data-matrix] [aria-live]")
    reached = []
    for key in ["ArrowRight", *["ArrowRight"] * 3, "ArrowUp", *["ArrowLeft"] * 3]:
        page.keyboard.press(key)
        reached.append(told.inner_text().split(":")[0])
    assert {*reached} == {f"layer {layer}, head {head}" for layer in range(2) for head in range(4)}


def test_dark_and_light_follow_the_system_until_the_button_is_pressed(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads", scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.gtitle')).fill"
    grid = "getComputedStyle(document.querySelector('.ag-root-wrapper')).backgroundColor"
    dark = [page.evaluate(each) for each in (paper, ink, grid)]
    assert dark[0] == dark[2] == "rgb(21, 24, 28)"
    page.get_by_role("button", name="Theme").click()
    light = [page.evaluate(each) for each in (paper, ink, grid)]
    assert light[0] == light[2] == "rgb(255, 255, 255)"
    assert light[1] != dark[1]
    page.reload()
    drawn(page)
    assert page.evaluate(paper) == light[0], "the choice is kept"
    page.evaluate("localStorage.clear()")


HOSTILE = [
    "/../../../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/head/../../etc/passwd",
    "/head/99.99",
    "/head/<script>alert(1)</script>",
    "/head/3.2.1",
    "/nothing/here",
    "/heads?run=../../../../etc",
    "/heads?run=/etc/passwd",
    "/heads?run=%00",
    "/?run=<img src=x onerror=alert(1)>",
]


def test_a_hostile_url_gives_a_friendly_page(app: str, browse: Callable[..., Page]):
    for path in HOSTILE:
        page = browse(app + path, anew=True)
        text = page.locator("#content").inner_text()
        assert "Nothing to show" in text, path
        assert "root:" not in text
        assert "Traceback" not in text
        expect(page.get_by_role("link", name="Overview of the newest run")).to_be_visible()
    page.get_by_role("link", name="Overview of the newest run").click()
    expect(page.locator("h1")).to_contain_text("4 models")


def test_what_a_url_asks_in_vain_is_told(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=<script>alert(1)</script>&stat=nonsense&layers=x&low=abc&pick=;drop")
    assert page.locator(".note").count() == 2
    expect(page.locator(".ag-row").first).to_be_visible()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good run, a torn manifest, a torn table, and one that was interrupted."""
    folder = tmp_path_factory.mktemp("mixed")
    for seed in range(3):
        synthetic_run(folder, models=("base", "<b>evil</b>"), **TINY, seed=seed)
    first, second, _ = sorted(folder.glob("*-synthetic-*"))
    (first / "run.json").write_text("{")
    (second / "attention.parquet").write_bytes(b"PAR1 no more")
    (folder / ".waiting-0a1b2c3d.partial" / "cells" / "base").mkdir(parents=True)
    return folder


def test_a_corrupt_run_is_listed_as_such_and_the_rest_works(
    mixed: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    url = serve(mixed)
    first, second, third = sorted(path.name for path in mixed.glob("*-synthetic-*"))
    page = browse(url)
    expect(page.locator("h1")).to_contain_text("2 models: base, <b>evil</b>")
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("li", has_text=first)).to_contain_text("cannot be read")
    expect(page.locator("li", has_text="waiting-0a1b2c3d")).to_contain_text("--resume")
    page.locator(".ag-row", has_text=third).locator("[col-id='run']").click()
    expect(page.locator("h1")).to_contain_text("2 models: base, <b>evil</b>")
    for broken in (first, second):
        page = browse(f"{url}/heads?run={broken}")
        assert "Nothing to show" in page.locator("#content").inner_text()
    page = browse(f"{url}/heads?run={third}")
    expect(page.locator(".ag-row").first).to_be_visible()


def test_a_new_run_appears_without_a_restart(tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]):
    page = browse(serve(tmp_path))
    assert "no finished run" in page.locator("#content").inner_text()
    synthetic_run(tmp_path, **TINY)
    page.reload()
    drawn(page)
    expect(page.locator("h1")).to_contain_text("2 models")


def test_checkpoints_are_drawn_against_their_steps(
    whole: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    page = browse(f"{serve(whole)}/checkpoints?stat=growth")
    expect(page.locator(".gtitle", has_text="Growth exponent during training").first).to_be_visible()
