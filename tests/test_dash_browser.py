"""The app in a real Chromium, on the shipped example run: the steps of a researcher."""

import csv
import io
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from support.app_pages import VISIBLE_DRAWN, choose_option, set_display, wait_until_drawn
from support.full_run import whole_run
from support.shipped_runs import shipped_path
from support.synthetic_runs import synthetic_run

from dashboards.layout import all_pages
from headscope.cli.flags import example_run
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run, short_names
from headscope.runs.summary import heads_of_model

EXAMPLE = example_run()

pytestmark = pytest.mark.browser
expect.set_options(timeout=60_000)  # other tests may run beside these
PATHS = [page.PATH for page in all_pages()]
MODELS = ["base", "yarn", "yarn without factor", "adarope"]
LENGTH = 12288
RUN = EXAMPLE.name
TINY = {"layers": 2, "heads": 4, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
WIDENED_CHARTS = """() => [...document.querySelectorAll("main figure .js-plotly-plot")].flatMap((plot) => {
    const { _fullLayout: { _size: drawn, margin } = {} } = plot;
    return ["l", "r", "t", "b"].filter((side) => drawn && drawn[side] > margin[side] + 1)
        .map((side) => `${plot.closest("figure").textContent.slice(0, 60)}: ${side} ${margin[side]} -> ${drawn[side]}`);
})"""
"""The charts that plotly drew twice, because their margins were too small for the texts of their axes."""


@pytest.fixture
def app(serve: Callable[[Path], str]) -> str:
    return serve(EXAMPLE)


def cell_position(page: Page, layer: int, head: int, layers: int = 30, heads: int = 9) -> tuple[float, float]:
    """Coordinates of the cell of a head in the first chart."""
    box = page.locator(".nsewdrag").first.bounding_box()
    assert box
    return box["x"] + box["width"] * (head + 0.5) / heads, box["y"] + box["height"] * (1 - (layer + 0.5) / layers)


@cache
def read_table(table: str) -> pd.DataFrame:
    return pq.read_table(EXAMPLE / f"{table}.parquet").to_pandas()


def table_rows(table: str, **keys: object) -> pd.DataFrame:
    frame = read_table(table)
    for name, value in keys.items():
        frame = frame[frame[name] == value]
    return frame


def effective_length(model: str, layer: int, head: int) -> float:
    """From the parquet alone: exp of the mean over documents of mean ln ESS2, over rows near the end.

    The weight of a bin is the number of all rows of the document in it, sampled or not.
    """
    rows = table_rows("attention", model=model, layer=layer, head=head, context_length=LENGTH)
    far = rows[rows["visible"] > 0.55 * rows["visible"].max()]
    by_doc = [
        np.average(block["log_ess2"], weights=block["population"]) for _, block in far.groupby("doc", observed=True)
    ]
    return float(np.exp(np.mean(by_doc)))


def retrieval_score(model: str, layer: int, head: int) -> float:
    """From the parquet alone: mean share of the needle that the head copied, over the answered trials."""
    trials = table_rows("needles", model=model, mode="strict")
    trial = ["model", "mode", "needle", "context_length", "depth", "doc", "seed"]
    scores = table_rows("retrieval", model=model, mode="strict", layer=layer, head=head).astype({"doc": "str"})
    merged = scores.merge(trials[trials["success"]].astype({"doc": "str"})[trial], on=trial)
    return float(merged["score"].mean())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has data for every page."""
    folder = tmp_path_factory.mktemp("whole")
    whole_run(folder)
    return folder


@pytest.mark.exhaustive(sample=len(PATHS) // 4)
@pytest.mark.parametrize("path", PATHS)
def test_every_page_fits_and_is_accessible_light_and_dark_wide_and_narrow(
    whole: Path, serve: Callable[[Path], str], browse: Callable[..., Page], path: str
):
    """Each page in both themes and at both widths; every second one in the opposite combination. On a phone it fits."""
    first, second = ("light", "dark") if PATHS.index(path) % 2 else ("dark", "light")
    page = browse(serve(whole) + path, 1440, first)
    check_page(page, path, 1440)
    set_display(page, 800, second)
    page.wait_for_function(VISIBLE_DRAWN)
    check_page(page, path, 800)
    set_display(page, 390, second)
    check_fit(page, 390)


def check_page(page: Page, path: str, width: int) -> None:
    """The page has charts, fits the window, and has no serious accessibility violation."""
    assert page.locator(".dash-graph").count() or path == "/playground"
    assert page.locator("header nav [aria-current=page]").get_attribute("href") == path
    assert page.locator("[data-title*='hare']").count() == 0, "plotly's upload button is back"
    check_fit(page, width)
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    serious = [
        (item["id"], item["nodes"][0]["html"]) for item in violations if item["impact"] in ("serious", "critical")
    ]
    assert serious == []


def check_fit(page: Page, width: int) -> None:
    """The page does not scroll sideways."""
    page.wait_for_function("(width) => document.documentElement.scrollWidth <= width", arg=width)


@pytest.mark.parametrize("path", ["/heads", "/compare", "/retrieval", "/detectors"])
def test_charts_are_drawn_once(app: str, browse: Callable[..., Page], path: str):
    assert browse(app + path, 1440).evaluate(WIDENED_CHARTS) == []


@pytest.mark.parametrize("path", ["/", "/heads", "/head", "/compare"])
def test_the_example_fits_a_narrow_screen_and_is_accessible(app: str, browse: Callable[..., Page], path: str):
    check_page(browse(app + path, 800, "dark"), path, 800)


def test_attention_maps_are_square_on_wide_and_narrow_pages(browse: Callable[..., Page], serve: Callable[[Path], str]):
    app = serve(shipped_path("maps"))
    for width in (1280, 820):
        page = browse(f"{app}/head/18.6", width)
        chart = page.locator("figure", has_text="Attention map of layer 18, head 6").first
        chart.scroll_into_view_if_needed()
        wait_until_drawn(page)
        boxes = [image.bounding_box() for image in chart.locator(".heatmaplayer image").all()]
        assert len(boxes) >= 2
        for box in boxes:
            assert box
            assert abs(box["width"] - box["height"]) <= 2, (width, box)


def test_a_click_on_a_head_opens_its_page_with_the_numbers_of_the_parquet(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=base")
    page.mouse.click(*cell_position(page, 17, 4))
    expect(page.locator("h1")).to_have_text("Layer 17, head 4")
    open_tab(page, "Statistics")
    row = page.locator("tr", has_text=f"effective length at {LENGTH:,}").first.locator("td")
    for model, cell in zip(MODELS, row.all_text_contents(), strict=True):
        value = float(re.match(r"[\d.,]+", cell)[0].replace(",", ""))
        assert value == pytest.approx(effective_length(model, 17, 4), rel=5e-3)
    page.wait_for_url(re.compile(rf"/head/17\.4\?(?=.*model=base)(?=.*run={RUN})"))
    row = page.locator("tr", has_text="retrieval score").first.locator("td")
    for model, cell in zip(MODELS, row.all_text_contents(), strict=True):
        assert float(cell.split(" (")[0]) == pytest.approx(retrieval_score(model, 17, 4), abs=6e-4)


def test_a_cell_of_the_needle_map_opens_its_trials(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/retrieval?models=yarn")
    chart = page.locator("[aria-label='Needle retrieved: yarn']")
    chart.scroll_into_view_if_needed()
    box = chart.locator(".nsewdrag").bounding_box()
    assert box
    trials = table_rows("needles", model="yarn", mode="strict")
    length, depth = trials["context_length"].min(), trials["depth"].max()  # the map's lower left
    page.mouse.click(box["x"] + 8, box["y"] + box["height"] - 8)
    page.wait_for_url(re.compile(rf"/trials\?.*length={length}.*depth={depth:.4f}"))
    wait_until_drawn(page)
    expect(page.locator("main")).to_contain_text(f"Trials at {length:,} tokens, depth {100 * depth:.0f} %")


def test_a_baseline_shows_differences_and_keeps_the_focus(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=adarope")
    page.get_by_label("Baseline").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("option", name="base", exact=True).wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".gtitle").first).to_contain_text("adarope relative to")
    assert "baseline=base" in page.url
    assert page.locator("aside input:focus").count() == 1
    page.mouse.move(*cell_position(page, 3, 2))
    ratio = effective_length("adarope", 3, 2) / effective_length("base", 3, 2)
    expect(page.locator("[data-head-matrix] .hoverlayer").first).to_contain_text(f"× {ratio:.3f}")
    page.locator(".ag-header-cell", has_text="change").wait_for(state="attached")


LASSO_WHILE_A_CHART_IS_DRAWN = """() => {
    const { set_props } = dash_clientside;
    const names = [...document.querySelectorAll("main .dash-graph")].map((graph) => JSON.parse(graph.id));
    const [drawn, selected] = names.filter((name) => name.heads);
    set_props(drawn, { selectedData: null });
    set_props(selected, { selectedData: { points: [{ customdata: [3, 2] }, { customdata: [17, 4] }] } });
}"""
"""What Dash gets from a lasso around two points of one chart at the moment in which another chart appears."""


def test_a_lasso_selects_heads_while_another_chart_is_drawn(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/compare?model=adarope")
    page.evaluate(LASSO_WHILE_A_CHART_IS_DRAWN)
    page.wait_for_url("**heads=3.2_17.4*")


def test_lasso_filters_the_table_and_highlights_heads_in_other_plots(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/compare?model=adarope")
    box = page.locator(".nsewdrag:not(article *)").first.bounding_box()
    assert box
    left, top, right, bottom = 0.02, 0.4, 0.55, 0.98
    page.mouse.move(box["x"] + box["width"] * left, box["y"] + box["height"] * top)
    page.mouse.down()
    for x, y in ((right, top), (right, bottom), (left, bottom), (left, top)):
        page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y, steps=6)
    page.mouse.up()
    page.wait_for_url("**heads=*")
    selected = page.url.split("heads=")[1].split("_")
    assert 1 < len(selected) < 270
    page.get_by_role("link", name="Heads", exact=True).click()
    expect(page.locator("#head-table-count")).to_contain_text(f"270 heads, {len(selected)} selected")
    expect(page.locator("[data-head-matrix] .scatterlayer .point")).to_have_count(2 * len(selected))
    page.get_by_label("Name of this set").fill("outliers")
    page.get_by_role("button", name="Save as a set").click()
    expect(page.locator(".selected-heads tbody th")).to_have_text("outliers")
    with page.expect_download() as download:
        page.get_by_role("button", name="YAML").click()
    study = yaml.safe_load(Path(download.value.path()).read_text())
    heads = [f"L{head.replace('.', 'H')}" for head in selected]
    assert study == {"influence": {"heads": {"selected": heads, "outliers": heads}}}
    page.get_by_role("link", name="Clear selection").click()
    expect(page.locator("#head-table-count")).to_contain_text("270 heads")
    page.keyboard.down("Shift")
    page.mouse.click(*cell_position(page, 17, 4))
    page.keyboard.up("Shift")
    page.wait_for_url("**heads=17.4*")


def top_heads(values: "pd.Series[float]", count: int = 1) -> list[tuple[int, int]]:
    return [(int(layer), int(head)) for layer, head in values.sort_values(ascending=False).index[:count]]


def first_row(page: Page) -> tuple[int, int]:
    """Layer and head of the first row of the table of heads."""
    row = page.locator(".ag-pinned-left-cols-container .ag-row[row-index='0']")
    layer, head = (row.get_attribute("row-id") or "").split(".")
    return int(layer), int(head)


def open_tab(page: Page, name: str) -> None:
    """Open a part of a long page."""
    page.locator("nav.tabs").get_by_role("link", name=name, exact=True).click()
    expect(page.locator("nav.tabs [aria-current]")).to_have_text(name)
    wait_until_drawn(page)


def test_clicks_show_the_numbers_of_the_parquet_tables(app: str, browse: Callable[..., Page]):
    heads = Run.open(EXAMPLE).heads.set_index(["model", "layer", "head"])
    page = browse(app)

    # Which layers' frequencies changed most?
    page.get_by_role("link", name="Compare", exact=True).click()
    open_tab(page, "Position parameters")
    caption = page.locator("figcaption", has_text="Size of the change of frequencies from the checkpoint").first
    positions = table_rows("positions", model="adarope")
    square = (positions["log_theta"].astype(float) - positions["log_theta_base"].astype(float)) ** 2
    order = np.sqrt(square.groupby(positions["layer"]).mean()).sort_values(ascending=False)
    expect(caption).to_contain_text(f"Most changed: layer {order.index[0]} ({order.iloc[0]:.2g})")

    # Which heads are most global, and what does YaRN change about that?
    open_tab(page, f"Effective length at {LENGTH:,}")
    stays = heads.loc["yarn", f"ess2_{LENGTH}"].rank(ascending=False) <= 10
    matching_heads = stays & (heads.loc["base", f"ess2_{LENGTH}"].rank(ascending=False) <= 10)
    expect(page.locator("figcaption", has_text="One line per head")).to_contain_text(
        f"{matching_heads.sum()} of the top 10 heads stay in the top 10 under yarn"
    )

    # Do those that retrieve survive each scheme?
    leading = {model: {*top_heads(heads.loc[model, "retrieval"], 10)} for model in MODELS}
    choose_option(page, "Statistic", "retrieval score")
    caption = page.locator("figcaption", has_text="One line per head").first
    for model in MODELS[1:]:
        stay = len(leading["base"] & leading[model])
        expect(caption).to_contain_text(f"{stay} of the top 10 heads stay in the top 10 under {model}")

    # Which heads are most global?
    choose_option(page, "Statistic", f"effective length at {LENGTH:,}")
    page.get_by_role("link", name="Heads", exact=True).click()
    choose_option(page, "Model", "base")
    expect(page.locator(".introduction")).to_contain_text("base, head by head. From ")
    assert first_row(page) == top_heads(heads.loc["base", f"ess2_{LENGTH}"])[0]

    # Which heads does YaRN change most, as the table sorts them?
    choose_option(page, "Model", "yarn")
    choose_option(page, "Baseline", "base")
    expect(page.locator(".introduction")).to_have_text("yarn against base, head by head.")
    page.locator(".ag-header-cell[col-id=change] .ag-header-cell-label").click()
    page.wait_for_url("**sort=change-desc*")
    ratio = heads.loc["yarn", f"ess2_{LENGTH}"] / heads.loc["base", f"ess2_{LENGTH}"]
    assert first_row(page) == top_heads(ratio)[0]

    # What does L18H6 do in all models?
    page.locator("#go-to-head").fill("l18h6")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Layer 18, head 6")
    open_tab(page, "Statistics")
    for model, cell in zip(
        MODELS, page.locator("tr", has_text="sink mass").first.locator("td").all_text_contents(), strict=True
    ):
        assert float(cell) == pytest.approx(heads.loc[(model, 18, 6), "sink_mass"], abs=6e-4)
    open_tab(page, "In words")
    choose_option(page, "Model", "base")
    expect(page.locator("main")).to_contain_text(f"In base, it copies {100 * retrieval_score('base', 18, 6):.0f} % ")

    # Which heads retrieve, and do they survive each scheme?
    page.get_by_role("link", name="Overview", exact=True).click()
    expect(page.locator("h1")).to_contain_text("4 models")
    wait_until_drawn(page)
    row = page.locator("tr", has=page.locator("th", has_text=re.compile("^retrieval")))
    for model, cell in zip(MODELS, row.locator("td").all_text_contents(), strict=True):
        scores = heads.loc[model, "retrieval"]
        named_heads = " ".join(f"L{layer}H{head}" for layer, head in top_heads(scores, 3))
        assert cell.strip() == f"{(scores > 0.1).sum()} heads {named_heads}"

    # Who carries AdaRoPE's gain, and is it more than noise?
    page.get_by_role("link", name="Causes", exact=True).click()
    page.get_by_role("link", name="Influence", exact=True).click()
    expect(page.locator("#content")).to_contain_text("headscope influence")
    choose_option(page, "Model", "adarope")
    expect(page.locator("h1")).to_have_text("Head influence: adarope")
    rows = table_rows("influence", model="adarope", component="joint", target="init", method="exact")
    mean = rows.astype({"doc": "str"}).groupby(["layer", "kv_group"])["delta_nll"].mean()
    (layer, group), most = mean.idxmax(), mean.max()
    caption = page.locator("figcaption", has_text=re.compile("with the largest influence")).first
    expect(caption).to_contain_text("20 of 90 KV groups")
    expect(caption).to_contain_text(f"L{layer} KV group {group}, {most:+.2g} nats/token")
    expect(caption).to_contain_text("2 documents")


def test_link_is_stable_after_a_newer_run_and_a_stopped_server_shows_a_banner(
    tmp_path: Path, serve: Callable[[Path], str], app_tab: Page
):
    first = synthetic_run(tmp_path, **TINY)
    url = serve(tmp_path)
    page = app_tab.context.new_page()  # whose requests are stopped in the end
    page.goto(f"{url}/heads?stat=growth")
    page.wait_for_url(f"**run={first.name}")
    wait_until_drawn(page)
    link, count = page.url, page.locator("#head-table-count").inner_text()
    newer = synthetic_run(tmp_path, models=("other", "models"), **TINY | {"heads": 6}, seed=1)
    newer.path.rename(tmp_path / "29991231T000000Z-newer-00000000")
    page.goto(link)
    wait_until_drawn(page)
    assert page.locator("#head-table-count").inner_text() == count
    page.get_by_role("link", name="newer, 12-31 00:00").click()
    expect(page.locator("#head-table-count")).to_contain_text("models: 12 heads")
    page.route("**/_dash-update-component**", lambda route: route.abort())
    page.get_by_role("link", name="Compare", exact=True).click()
    expect(page.locator("#banner")).to_contain_text("This page is still “Growth exponent”")
    page.close()


def test_two_runs_with_equal_labels_are_compared(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    runs = [synthetic_run(tmp_path, models=("base",), **TINY, seed=seed) for seed in range(2)]
    page = browse(f"{serve(tmp_path)}/heads?run={runs[0].name}")
    page.get_by_label("Combined runs").first.click()
    page.get_by_role("option").filter(has_not_text=re.compile("^$")).nth(
        1 if runs[0].name > runs[1].name else 0
    ).click()
    page.wait_for_url("**run=*run=*")
    page.get_by_role("link", name="Compare", exact=True).click()
    labels = [f"base · {brief}" for brief in short_names([run.name for run in runs])]
    expect(page.locator(".introduction")).to_contain_text(f"{labels[1]} against {labels[0]}, head by head.")
    lengths = [run.heads["ess2_256"] for run in runs]
    medians = ", ".join(
        f"{label} {statistic('ess2_256').format_number(float(values.median()))}"
        for label, values in zip(labels, lengths, strict=True)
    )
    expect(page.locator("figcaption", has_text="Box: minimum").first).to_contain_text(f"Medians: {medians}.")


def test_a_copied_link_shows_the_same_state_elsewhere(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=yarn&stat=growth&baseline=base&layers=3-20&role=constant")
    count, title = page.locator("#head-table-count").inner_text(), page.locator(".gtitle").first.text_content()
    link = page.url
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("h1")).to_have_text("Runs")
    page = browse(link, reload=True)
    assert page.locator("#head-table-count").inner_text() == count != ""
    assert page.locator(".gtitle").first.text_content() == title
    for name, value in {"Model": "yarn", "Baseline": "base", "Statistic": "growth exponent"}.items():
        assert page.get_by_label(name).first.input_value() == value


def test_csv_download_equals_the_table(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=adarope&baseline=base&stat=cov")
    page.locator(".ag-row").first.wait_for()
    with page.expect_download() as download:
        page.locator("#head-table-csv").click()
    rows = list(csv.reader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8-sig"))))
    table = heads_of_model(Run.open(EXAMPLE).heads, "cov", "adarope", "base").sort_values("cov", ascending=False)
    assert len(rows) - 1 == len(table) == 270
    for cells, (name, expected) in zip(zip(*rows[1:], strict=True), table.items(), strict=True):
        if str(name).endswith("_method"):  # how an effect was measured; empty without a value
            assert [*cells] == [*expected.fillna("").astype(str)]
        else:
            numbers = [float(cell) if cell else np.nan for cell in cells]
            np.testing.assert_allclose(numbers, expected.astype(float), rtol=1e-9, equal_nan=True)


def test_a_chart_saves_its_numbers_and_its_picture(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=yarn&stat=growth")
    with page.expect_download() as download:
        page.locator("figure").first.get_by_role("button", name="CSV").click()
    assert download.value.suggested_filename == "growth-exponent-yarn-example.csv"
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    heads = Run.open(EXAMPLE).heads.set_index(["model", "layer", "head"])["growth"]
    assert len(rows) == 270
    for row in rows:
        head = row["model"], int(row["layer"]), int(row["head"])
        assert float(row["growth exponent"]) == pytest.approx(heads[head], rel=1e-5)
    page = browse(f"{app}/head/17.4?model=base")
    figure = page.locator("figure").first
    with page.expect_download() as download:
        figure.get_by_role("button", name="CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    last = [row for row in rows if row["model"] == "base"][-1]
    deepest = table_rows("attention", model="base", layer=17, head=4)
    top = deepest[deepest["visible"] == deepest["visible"].max()]
    assert float(last["ESS₂ (tokens)"]) == pytest.approx(
        np.exp(np.average(top["log_ess2"], weights=top["rows"])), rel=1e-4
    )
    for kind, magic in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as download:
            figure.get_by_role("button", name=kind).click()
        assert Path(download.value.path()).read_bytes().startswith(magic)


def test_saved_page_works_without_other_files(app: str, browse: Callable[..., Page], tmp_path: Path):
    page = browse(f"{app}/head/17.4")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save page").click()
    file = tmp_path / "page.html"
    shutil.copy(download.value.path(), file)
    alone, requests = page.context.new_page(), []
    alone.on("request", lambda request: requests.append(request.url))
    alone.goto(file.as_uri())
    alone.wait_for_selector("html[data-drawn]", state="attached")
    assert alone.locator("h1").inner_text() == "Layer 17, head 4"
    assert alone.locator(".main-svg").count() >= 4
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    alone.close()


def test_the_keyboard_opens_a_head_from_the_table(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=base")
    page.locator(".ag-row[row-index='2'] [col-id='head']").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Layer 0, head 2")
    page.keyboard.press("ArrowUp")
    expect(page.locator("h1")).to_have_text("Layer 1, head 2")
    page.keyboard.press("ArrowRight")
    expect(page.locator("h1")).to_have_text("Layer 1, head 3")
    page.locator("#go-to-head").fill("L18H6")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Layer 18, head 6")
    page.locator("#go-to-head").blur()
    page.get_by_role("link", name="Heads", exact=True).click()
    wait_until_drawn(page)
    page.locator("[data-head-matrix]").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    expect(page.locator("[data-head-matrix] [aria-live]")).to_contain_text("layer 1, head 1")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Layer 1, head 1")


def test_the_keyboard_alone_reaches_every_head(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    synthetic_run(tmp_path, **TINY)
    page = browse(f"{serve(tmp_path)}/heads", reload=True)
    for _ in range(60):  # past the navigation and the controls
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.headMatrix === 'heads'"):
            break
    announcement = page.locator("[data-head-matrix] [aria-live]")
    reached = []
    for key in ["ArrowRight", *["ArrowRight"] * 3, "ArrowUp", *["ArrowLeft"] * 3]:
        page.keyboard.press(key)
        reached.append(announcement.inner_text().split(":")[0])
    assert {*reached} == {f"layer {layer}, head {head}" for layer in range(2) for head in range(4)}


def test_dark_and_light_follow_the_system_until_the_button_is_pressed(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads", scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.gtitle')).fill"
    grid = "getComputedStyle(document.querySelector('.ag-root-wrapper')).backgroundColor"
    dark = [page.evaluate(script) for script in (paper, ink, grid)]
    assert dark[0] == dark[2] == "rgb(21, 24, 28)"
    page.get_by_role("button", name="Theme").click()
    light = [page.evaluate(script) for script in (paper, ink, grid)]
    assert light[0] == light[2] == "rgb(255, 255, 255)"
    assert light[1] != dark[1]
    page.reload()
    wait_until_drawn(page)
    assert page.evaluate(paper) == light[0], "the choice persists"
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
        page = browse(app + path, reload=True)
        text = page.locator("#content").inner_text()
        assert "Nothing to show" in text, path
        assert "root:" not in text
        assert "Traceback" not in text
        expect(page.get_by_role("link", name="Overview of the newest run")).to_be_visible()
    page.get_by_role("link", name="Overview of the newest run").click()
    expect(page.locator("h1")).to_contain_text("4 models")


def test_invalid_values_in_the_url_are_noted(app: str, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?model=<script>alert(1)</script>&stat=nonsense&layers=x&min=abc&heads=;drop")
    assert page.locator(".notice").count() == 5  # one for each parameter
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
    expect(page.get_by_text(f"{first}: cannot be read")).to_be_visible()
    expect(page.locator("#run-progress")).to_contain_text("waiting-0a1b2c3d")
    expect(page.locator("#run-progress")).to_contain_text("work item stored")
    expect(page.locator("#content")).to_contain_text("--resume")
    page.locator(".ag-row", has_text=third).locator("[col-id='run']").click()
    expect(page.locator("h1")).to_contain_text("2 models: base, <b>evil</b>")
    for broken in (first, second):
        page = browse(f"{url}/heads?run={broken}")
        assert "Nothing to show" in page.locator("#content").inner_text()
    page = browse(f"{url}/heads?run={third}")
    expect(page.locator(".ag-row").first).to_be_visible()


def test_a_new_run_appears_without_a_restart(tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]):
    page = browse(serve(tmp_path))
    assert "headscope demo" in page.locator("#content").inner_text()
    synthetic_run(tmp_path, **TINY)
    page.reload()
    wait_until_drawn(page)
    expect(page.locator("h1")).to_contain_text("2 models")


def test_checkpoints_are_drawn_against_their_steps(
    whole: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    page = browse(f"{serve(whole)}/checkpoints?stat=growth")
    page.keyboard.press("End")  # charts below the first ones are loaded when they come into view
    expect(page.locator(".gtitle", has_text="Growth exponent during training").first).to_be_visible()
