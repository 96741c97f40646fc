"""Seventeen questions of a researcher, answered from the overview by clicks alone; the later ones in at most six.

Each answer is checked against parquet; the pattern on a typed prompt against eager attention.
"""

import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect
from support.playground_page import waiting_for_results
from support.refusals import assert_names
from werkzeug.serving import make_server

import headscope as hs
from dashboards.app import create_app
from headscope.cli.flags import EXAMPLES, example_run
from headscope.positions.model import Model
from headscope.rendering.comparison import comparison_tables
from headscope.results.comparison import compare, in_order_of_time
from headscope.runs.run import Run

EXAMPLE = example_run()

pytestmark = [pytest.mark.browser, pytest.mark.model]
CAUSES = next(EXAMPLES.glob("*-causes-*"))
BUDGET = next(EXAMPLES.glob("*-budget-*"))
TRAINING = next(EXAMPLES.glob("*-from-scratch-db1adcec"))
MODELS = ["base", "yarn", "yarn without factor", "adarope"]
LENGTH = 12288
PROMPT = "The cat sat on the mat. The cat"
HEAD_KEYS = ["model", "layer", "head"]
CURVES = """(figure) => figure.querySelector(".js-plotly-plot")._fullData.map(
    ({ name, meta, yaxis, x, y }) => ({ name, model: meta, yaxis, x: Array.from(x ?? []), y: Array.from(y ?? []) }))"""
"""Name, axis and points of the curves of a chart."""


COUNT_CLICKS = """() => {
    window.clicks = 0;
    for (const event of ["click", "change"]) document.addEventListener(event, ({ isTrusted, target }) => {
        if (event === "click" ? isTrusted && target.tagName !== "SELECT" : target.tagName === "SELECT") clicks++;
    }, true);
}"""


@pytest.fixture(scope="module")
def needle_run(tmp_path_factory: pytest.TempPathFactory, smollm2: Model) -> Run:
    """One needle of SmolLM2 at 256 tokens, in a folder that also has the shipped runs."""
    folder = tmp_path_factory.mktemp("runs")
    for path in EXAMPLES.glob("*/run.json"):
        (folder / path.parent.name).symlink_to(path.parent)
    models = {"base": smollm2}
    return hs.needle(models, out=folder, quiet=True, lengths=[256], depths=1, needles=1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tab(chromium: Browser, needle_run: Run) -> Iterator[tuple[Page, str]]:
    """One tab on these runs, and the URL of the app, whose playground has the base model."""
    example = needle_run.path.parent / EXAMPLE.name
    server = make_server("127.0.0.1", 0, create_app(example, {"base": "smollm2-135m"}).server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = chromium.new_context(
        viewport={"width": 1440, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(60_000)
    page, url = context.new_page(), f"http://127.0.0.1:{server.server_port}/"
    page.goto(url)
    page.evaluate(COUNT_CLICKS)
    yield page, url
    context.close()
    server.shutdown()


@pytest.fixture
def page(tab: tuple[Page, str]) -> Iterator[Page]:
    """The tab on the overview of the example; fails if the page logs an error or requests another host."""
    page, url = tab
    problems: list[str] = []
    listeners: dict[str, Callable[..., None]] = {
        "console": lambda message: problems.append(message.text) if message.type == "error" else None,
        "pageerror": lambda error: problems.append(str(error)),
        "request": lambda request: (
            None if request.url.startswith((url, "data:", "blob:")) else problems.append(request.url)
        ),
    }
    for event, listener in listeners.items():
        page.on(event, listener)  # type: ignore[call-overload]
    if page.locator("h1").inner_text() != "4 models: base, yarn, yarn without factor, adarope":
        page.evaluate(
            "([pathname, search]) => dash_clientside.set_props('url', { pathname, search })",
            ["/", f"?run={EXAMPLE.name}"],
        )
    expect(page.locator("h1")).to_contain_text("4 models")
    page.evaluate("window.clicks = 0")
    yield page
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert problems == []


@cache
def read_table(folder: Path, table: str) -> pd.DataFrame:
    return pd.read_parquet(folder / f"{table}.parquet")


def effective_lengths() -> "pd.Series[float]":
    """Of every head: exp of the mean over documents of mean ln ESS2, over rows near the end.

    The weight of a bin is the number of all rows of the document in it, sampled or not.
    """
    rows = read_table(EXAMPLE, "attention")
    rows = rows[(rows["context_length"] == LENGTH) & (rows["visible"] > 0.55 * rows["visible"].max())]
    weighted = rows.assign(sum=rows["log_ess2"] * rows["population"])
    by_doc = weighted.groupby([*HEAD_KEYS, "doc"], observed=True)[["sum", "population"]].sum()
    return np.exp((by_doc["sum"] / by_doc["population"]).groupby(HEAD_KEYS, observed=True).mean())


def scores_over_trials() -> "pd.Series[float]":
    """Of every head: mean share of the needle that it copied, over the answered trials."""
    trial = ["model", "mode", "needle", "context_length", "depth", "doc", "seed"]
    needles = read_table(EXAMPLE, "needles")
    answered = needles[needles["success"] & (needles["mode"] == "strict")][trial]
    scores = read_table(EXAMPLE, "retrieval").merge(answered, on=trial)
    return scores.groupby(HEAD_KEYS, observed=True)["score"].mean()


def detector_scores(folder: Path, kind: str) -> "pd.Series[float]":
    rows = read_table(folder, "detectors")
    rows = rows[(rows["kind"] == kind) & (rows["context_length"] == rows["context_length"].max())]
    return rows.groupby(HEAD_KEYS, observed=True)["score"].mean()


def card(page: Page, question: str) -> str:
    """The sentence on a card of the overview, whose link is then followed."""
    article = page.locator("article.card", has_text=question)
    text = article.locator("p").inner_text()
    article.get_by_role("link").click()
    return text


def open_run(page: Page, folder: Path) -> None:
    page.get_by_role("link", name="Runs", exact=True).click()
    page.locator(".ag-row", has_text=folder.name).locator("[col-id='run']").click()
    page.wait_for_url(re.compile(rf"/\?run={folder.name}"))
    expect(page.locator("article.card").first).to_be_visible()


def open_head(page: Page, layer: int, head: int) -> None:
    """Click the head's cell in the matrix of all heads."""
    page.get_by_role("link", name="Heads", exact=True).click()
    matrix = page.locator("[data-head-matrix] .nsewdrag").first
    expect(page.locator("[data-head-matrix] .heatmaplayer image").first).to_be_visible()
    box = matrix.bounding_box()
    assert box
    page.mouse.click(box["x"] + box["width"] * (head + 0.5) / 9, box["y"] + box["height"] * (1 - (layer + 0.5) / 30))
    expect(page.locator("h1")).to_have_text(f"Layer {layer}, head {head}")


def open_tab(page: Page, name: str) -> None:
    """Open a part of a long page."""
    page.locator("nav.tabs").get_by_role("link", name=name, exact=True).click()
    expect(page.locator("nav.tabs [aria-current]")).to_have_text(name)


def assert_few_clicks(page: Page) -> None:
    assert 0 < page.evaluate("window.clicks") <= 6


def figure_titled(page: Page, title: str) -> Locator:
    """The chart of that title, scrolled into view and drawn."""
    expect(page.locator("main .loading")).to_have_count(0)
    figure = page.locator("figure", has=page.locator(f"[aria-label^='{title}']")).first
    figure.scroll_into_view_if_needed()
    expect(figure.locator(".main-svg").first).to_be_visible()
    return figure


def test_which_head_retrieves_best_and_does_it_survive(page: Page):
    scores = scores_over_trials()
    (layer, head), best = scores["base"].idxmax(), scores["base"].max()
    text = card(page, "Which heads are retrieval heads?")
    count = int((scores["base"] > 0.1).sum())
    assert_names(text, f"{count} in base", "270 heads", f"L{layer}H{head} ({best:.2f})")
    top = scores["base"].nlargest(6).index
    for model in MODELS[1:]:
        assert f"{int((scores[model].loc[top] > 0.1).sum())} in {model}" in text
    expect(page.locator(".notice", has_text="heads shown")).to_contain_text(f"{count} of 270")


def test_which_tokens_a_head_attends_to_at_an_answer(page: Page, needle_run: Run):
    step = 4
    keys = needle_run.needle_keys.query(f"mode == 'strict' and step == {step} and layer == 16 and head == 0")
    open_run(page, needle_run.path)
    for name in ("Tasks", "Trials"):
        page.get_by_role("link", name=name, exact=True).click()
    answer = page.locator("table", has_text="copied by")
    answer.locator("tbody tr").nth(step).locator("td").nth(1).get_by_role("link").click()
    expect(page.locator("select[aria-label='Layer'] option[value*='step=5']").first).to_be_attached()
    page.locator("select[aria-label='Layer']").select_option(label="16")
    expect(page.locator("select[aria-label='Head'] option[value*='layer=16']").first).to_be_attached()
    page.locator("select[aria-label='Head']").select_option(label="0")
    caption = page.locator("caption", has_text="L16H0")
    expect(caption).to_contain_text(f"{keys['weight'].max():.2f}")
    tokens = page.locator("table", has=caption).locator("[title^='token ']")
    key_titles = {title for token in tokens.all() if "weight" in (title := token.get_attribute("title") or "")}
    assert key_titles == {f"token {row.key:,}: weight {row.weight:.3f}" for row in keys.itertuples()}
    assert key_titles


def test_which_effective_lengths_change_most(page: Page):
    lengths = effective_lengths()
    ratio = lengths["adarope"] / lengths["base"]
    text = card(page, "Which heads change most")
    for (layer, head), word in ((ratio.idxmax(), "highest"), (ratio.idxmin(), "lowest")):
        match = re.search(rf"{word} in L{layer}H{head} \(([\d.]+)\)", text)
        assert match, text
        assert float(match[1]) == pytest.approx(ratio[layer, head], rel=1e-2)
    expect(page.locator("h1")).to_contain_text("Effective length")


def test_which_heads_are_induction_heads(page: Page):
    scores = detector_scores(EXAMPLE, "induction")
    (layer, head), count = scores["base"].idxmax(), int((scores["base"] > 0.5).sum())
    text = card(page, "Which heads are induction heads")
    assert_names(text, f"{count} in base", "270 heads", f"L{layer}H{head} ({scores['base'].max():.2f})")
    rows = page.locator(".ag-pinned-left-cols-container .ag-row")
    expect(rows).to_have_count(count)
    pinned_heads = {tuple(map(int, (row.get_attribute("row-id") or "").split("."))) for row in rows.all()}
    assert pinned_heads == {*scores["base"][scores["base"] > 0.5].index}


def test_what_ablating_the_top_retrieval_heads_costs(page: Page):
    trials = read_table(CAUSES, "needle_ablation").query("model == 'base' and mode == 'strict'")
    top = trials[trials["draw"] == 0]["success"].mean()
    random = trials[trials["draw"] > 0]["success"].mean()
    open_run(page, CAUSES)
    page.get_by_role("link", name="Tasks", exact=True).click()
    open_tab(page, "Ablation of retrieval heads")
    figure = figure_titled(page, "Needle retrieved under zero ablation of heads")
    last = {curve["name"]: curve["y"][-1] for curve in figure.evaluate(CURVES) if curve["model"] == "base"}
    assert last["top heads"] == pytest.approx(top)
    assert last["random heads of the same layers"] == pytest.approx(random)


def test_which_rotary_pairs_a_head_uses(page: Page):
    open_head(page, 5, 3)
    pairs = read_table(EXAMPLE, "pairs").query("model == 'base' and layer == 5 and head == 3")
    usage = pairs.groupby("pair")["mean_abs"].mean()
    figure = figure_titled(page, "Rotary spectrum of layer 5, head 3")
    curves = [curve["y"] for curve in figure.evaluate(CURVES) if curve["name"] == "base"]
    assert any(len(y) == len(usage) and np.allclose(y, usage, rtol=1e-4) for y in curves)


def test_a_set_of_retrieval_heads_with_long_attention_is_saved_and_shared(page: Page):
    lengths, scores = effective_lengths()["base"], scores_over_trials()["base"]
    expected = {f"{layer}.{head}" for layer, head in scores[(scores > 0.1) & (lengths > 5)].index}
    page.get_by_role("link", name="Heads", exact=True).click()
    for control, option in (("Model", re.compile("^base$")), ("Role", re.compile("^retrieval:"))):
        page.get_by_label(control, exact=True).first.click()
        page.get_by_role("option", name=option).click()
    expect(page.locator(".notice", has_text="heads shown")).to_be_visible()
    page.get_by_label("Minimum value").fill("5")
    expect(page.locator(".notice", has_text="heads shown")).to_contain_text(f"{len(expected)} of 270")
    page.get_by_role("link", name="Select these heads").click()
    page.get_by_label("Name of this set").fill("far retrieval")
    page.get_by_role("button", name="Save as a set").click()
    expect(page.locator(".selected-heads tbody th")).to_have_text("far retrieval")
    page.get_by_role("button", name="Copy link").click()
    shared = page.context.new_page()
    shared.goto(page.evaluate("navigator.clipboard.readText()"))
    expect(shared.locator(".selected-heads tbody th")).to_have_text("far retrieval")
    chips = shared.locator(".head-chip a:not(.remove-link)")
    assert {name.removeprefix("L").replace("H", ".") for name in chips.all_inner_texts()} == expected
    shared.close()


def test_at_which_layer_and_step_roles_appear(page: Page):
    scores = detector_scores(TRAINING, "previous").unstack(["layer", "head"])
    scores = scores[scores.index.str.startswith("rope-s0/")]
    scores.index = scores.index.str.rpartition("-").get_level_values(2).astype(int)
    has_role = scores.sort_index() > 0.5
    steps = list(has_role.index)
    first = has_role.index[has_role.any(axis=1)][0]
    open_run(page, TRAINING)
    page.get_by_role("link", name="Training", exact=True).click()
    figure = figure_titled(page, "Heads with each role by layer")
    box = figure.locator(".slider-rail-rect").bounding_box()
    assert box
    for step in (first, steps[steps.index(first) - 1]):
        place = steps.index(step) / (len(steps) - 1)
        page.mouse.click(box["x"] + 2 + (box["width"] - 4) * place, box["y"] + box["height"] / 2)
        expect(figure.locator(".slider-group")).to_contain_text(f"step {step:,}")
        by_layer = figure.evaluate(
            """(figure) => { const { x, y, z } = figure.querySelector(".js-plotly-plot")._fullData.find(
                ({ name, visible }) => name.startsWith("rope-s0") && visible === true);
            const column = Array.from(x).indexOf("previous-token");
            return Array.from(y).map((layer, index) => [layer, Array.from(z[index])[column]]); }"""
        )
        assert dict(by_layer) == has_role.loc[step].groupby(level="layer").sum().to_dict()


def test_which_heads_are_like_a_head(page: Page):
    page.locator("td").get_by_role("link", name="L18H6", exact=True).first.click()
    expect(page.locator("h1")).to_have_text("Layer 18, head 6")
    open_tab(page, "Heads like this one")
    table = page.locator("table", has_text="By attention: total variation")
    expect(table).to_be_visible()
    keys = read_table(EXAMPLE, "top_keys")
    own = keys.query("model == 'base' and layer == 18 and head == 6")
    rows = table.locator("tbody tr").all()
    assert {row.locator("th, td").first.inner_text() for row in rows} == {*MODELS}
    for row in rows:
        model, nearest = row.locator("th, td").first.inner_text(), row.get_by_role("link").first.inner_text()
        match = re.match(r"L(\d+)H(\d+)\D+([\d.]+)$", nearest)
        assert match, nearest
        other = keys.query(f"model == '{model}' and layer == {match[1]} and head == {match[2]}")
        assert float(match[3]) == pytest.approx(total_variation(own, other), abs=2e-3)


def total_variation(*heads: pd.DataFrame) -> float:
    """Mean over documents and rows of half the sum of differences; the weight outside the top keys is one class."""
    weights = [rows.set_index(["doc", "query", "key"])["weight"] for rows in heads]
    difference = pd.concat(weights, axis=1, keys=[0, 1]).fillna(0.0).pipe(lambda both: both[0] - both[1])
    by_row = difference.groupby(level=["doc", "query"], observed=True)
    distances = (difference.abs().groupby(level=["doc", "query"], observed=True).sum() + by_row.sum().abs()) / 2
    return float(distances.groupby("doc", observed=True).mean().mean())


def test_the_pattern_of_a_head_on_a_typed_prompt(page: Page, smollm2: Model):
    run_prompt(page)
    page.locator("#playground-layer").click()
    page.get_by_role("option", name="5", exact=True).click()
    expect(page.locator("#playground-layer")).to_have_value("5")
    page.locator("#attention-heads button").nth(3).click()
    expect(page.locator("#attention-title")).to_contain_text("L5H3: base")
    page.locator("#playground-tokens .token").last.click()
    readout = page.locator("#attention-readout")
    expect(readout).to_contain_text("locked")
    ids = smollm2.tokenizer(PROMPT, return_tensors="pt").input_ids
    before = smollm2.module.config._attn_implementation
    smollm2.module.set_attn_implementation("eager")
    with torch.no_grad():
        weights = smollm2.module(ids, output_attentions=True).attentions[5][0]
    smollm2.module.set_attn_implementation(before)
    last = weights[3, -1]
    assert f"({int(last.argmax())}) {last.max():.3f}" in readout.inner_text()


def run_prompt(page: Page) -> None:
    """Run the prompt in the playground: type it, unless an earlier test has, and the page runs it when it opens."""
    with waiting_for_results(page, PROMPT):
        page.get_by_role("link", name="Prompts", exact=True).click()
        page.get_by_role("link", name="Playground", exact=True).click()
        if page.locator("#playground-prompt").input_value() != PROMPT:
            page.locator("#playground-prompt").fill(PROMPT)
            page.locator("#playground-run").click()
    expect(page.locator("#playground-tokens .token")).to_have_count(9)
    expect(page.locator("#attention-title")).to_contain_text("base")


def test_what_a_head_attends_to_at_the_answer_of_a_needle(page: Page):
    page.locator("td").get_by_role("link", name="L18H6", exact=True).first.click()
    expect(page.locator("h1")).to_have_text("Layer 18, head 6")
    open_tab(page, "At the needle's answer")
    trial = page.locator("select[aria-label=Trial]")
    expect(trial).to_be_visible()
    option = trial.locator("option", has_text="1,024 tokens").first.inner_text()
    trial.select_option(option)
    page.wait_for_url("**trial=*")
    steps = page.locator("select[aria-label='Answer token']")
    expect(steps.locator("option[value*='trial='][value*='step=2']")).to_be_attached()
    steps.select_option(index=1)
    page.wait_for_url("**step=2*")
    expect(page.locator("caption")).to_contain_text("L18H6")
    tokens = page.locator("[title^='token ']").evaluate_all("(tokens) => tokens.map((token) => token.title)")
    needle, keys = option.split(",")[0], read_table(EXAMPLE, "needle_keys")
    rows = keys.query("layer == 18 and head == 6 and context_length == 1024 and step == 1")
    rows = rows[rows["needle"] == needle]
    assert {title for title in tokens if "weight" in title} in [
        {f"token {row.key:,}: weight {row.weight:.3f}" for row in one.itertuples()}
        for _, one in rows.groupby(["model", "mode", "depth", "doc", "seed"], observed=True)
    ]
    assert_few_clicks(page)


def test_which_heads_attend_from_the_last_token_to_a_name(page: Page, smollm2: Model):
    run_prompt(page)
    tokens = page.locator("#playground-tokens .token")
    tokens.last.click()
    expect(page.locator("#attention-readout")).to_contain_text("locked")
    tokens.nth(1).click()
    figure = page.locator("#playground-all-heads [aria-label^='Attention weight from']").first
    expect(figure.locator(".heatmaplayer image")).to_be_attached()
    shown = figure.evaluate(
        "(figure) => Array.from(figure.querySelector('.js-plotly-plot')._fullData[0].z, (row) => [...row])"
    )
    ids = smollm2.tokenizer(PROMPT, return_tensors="pt").input_ids
    before = smollm2.module.config._attn_implementation
    smollm2.module.set_attn_implementation("eager")
    with torch.no_grad():
        layers = smollm2.module(ids, output_attentions=True).attentions
    smollm2.module.set_attn_implementation(before)
    np.testing.assert_allclose(shown, [weights[0, :, -1, 1] for weights in layers], atol=2e-3)
    assert_few_clicks(page)


def test_a_link_to_the_playground_keeps_prompt_and_view(page: Page):
    run_prompt(page)
    page.wait_for_function("location.search.includes('playground=')")
    title = page.locator("#attention-title").inner_text()
    page.get_by_role("button", name="Copy link").click()
    assert_few_clicks(page)
    shared = page.context.new_page()
    shared.goto(page.evaluate("navigator.clipboard.readText()"))
    expect(shared.locator("#playground-prompt")).to_have_value(PROMPT)
    expect(shared.locator("#attention-title")).to_have_text(title)
    shared.close()


def test_which_kv_groups_can_stream_and_what_it_costs(page: Page):
    ranks = read_table(BUDGET, "budget_orders").query("model == 'base' and order == 'far-mass' and rank < 22")
    halves = [{*half[["layer", "kv_group"]].itertuples(index=False, name=None)} for _, half in ranks.groupby("half")]
    loss = read_table(BUDGET, "budget").query("model == 'base' and context_length == 8192")
    loss = loss[(loss["order"] == "every") & (loss["share"] == 0) | (loss["order"] == "far-mass")]
    loss = loss.assign(sum=loss["nll"] * loss["tokens"])
    sums = loss.groupby(["share", "doc"], observed=True)[["sum", "tokens"]].sum()
    mean = (sums["sum"] / sums["tokens"]).groupby("share").mean()
    share = min(mean.index, key=lambda value: abs(value - 22 / 90))
    open_run(page, BUDGET)
    page.get_by_role("link", name="Causes", exact=True).click()
    page.get_by_role("link", name="Budget", exact=True).click()
    open_tab(page, "KV groups that can stream")
    cells = page.locator("tbody tr", has_text="base").locator("th, td").all_inner_texts()
    assert [name.strip() for name in cells[5].split(",")] == [f"L{a}G{b}" for a, b in sorted(halves[0] & halves[1])]
    assert float(cells[4].split()[0]) == pytest.approx(mean[share] - mean[0], abs=6e-4)
    assert_few_clicks(page)


def test_how_the_scores_of_a_head_develop_over_training(page: Page):
    open_run(page, TRAINING)
    page.get_by_role("link", name="Head", exact=True).click()
    open_tab(page, "During training")
    layer, head = map(int, re.findall(r"\d+", page.locator("h1").inner_text()))
    scores = detector_scores(TRAINING, "previous").unstack("model").loc[(layer, head)]
    scores = scores[scores.index.str.startswith("rope-s0/")]
    scores.index = scores.index.str.rpartition("-").get_level_values(2).astype(int)
    figure = figure_titled(page, f"Layer {layer}, head {head} during training")
    curves = [curve["y"] for curve in figure.evaluate(CURVES) if curve["name"] == "rope-s0"]
    assert any(len(y) == len(scores) and np.allclose(y, scores.sort_index(), atol=1e-5) for y in curves)
    assert_few_clicks(page)


def test_the_csv_of_a_filtered_table_holds_the_filtered_heads(page: Page):
    scores = scores_over_trials()["base"]
    page.get_by_role("link", name="Heads", exact=True).click()
    for control, option in (("Model", re.compile("^base$")), ("Role", re.compile("^retrieval:"))):
        page.get_by_label(control, exact=True).first.click()
        page.get_by_role("option", name=option).click()
    expect(page.locator(".notice", has_text="heads shown")).to_be_visible()
    with page.expect_download() as download:
        page.locator("#head-table-csv").click()
    rows = pd.read_csv(download.value.path(), encoding="utf-8-sig")
    assert {*rows[["layer", "head"]].itertuples(index=False, name=None)} == {*scores[scores > 0.1].index}
    assert_few_clicks(page)


def test_what_changed_between_two_runs(page: Page):
    """The combination of two runs lists the results that changed, as `headscope compare` does."""
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("h1")).to_have_text("Runs")  # else the list closes when the page arrives
    page.get_by_label("Combined runs").first.click()
    page.get_by_role("option", name=re.compile("^causes,")).click()
    page.wait_for_url("**run=*run=*")
    heading = page.locator("h2", has_text=re.compile("^Changes from "))
    expect(heading).to_be_visible(timeout=180_000)  # every result of both runs is computed first
    earlier, later = in_order_of_time(Run.open(folder) for folder in (EXAMPLE, CAUSES))
    tables = [*comparison_tables(compare(earlier, later))]
    assert tables
    for table in tables:
        expect(page.locator("#content").get_by_text(table.caption).first).to_be_attached()
        expect(page.locator("#content table tbody tr", has_text=str(table.rows[0][0])).first).to_be_attached()
    assert_few_clicks(page)
