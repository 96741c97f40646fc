"""The token lens: it shows the stored row in its text and under other models; the URL holds its whole state."""

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pandas as pd
import pytest
from axe_playwright_python.sync_playwright import Axe
from dash import html
from playwright.sync_api import Browser, Page, expect
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run
from werkzeug.serving import make_server

from dashboards import explorer_components, export
from dashboards.app import create_app
from dashboards.view_state import ViewState
from headscope.rendering import assembly
from headscope.rendering.blocks import Chart, PageContent, TextBlock
from headscope.rendering.explorer_blocks import KeyLinks, LinkChoice, Passage, Token, passage_table, query_link
from headscope.rendering.token_spans import context_spans, shaded_tokens
from headscope.runs.run import Run
from probes.patterns import results
from probes.patterns.lens import far_rows_table, lens_page, resolve_state

SHORT, LONG = 256, 2048


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("lens"), layers=2, lengths=(SHORT, LONG), docs=2)


def open_lens(run: Run, model: str = "base", **query: object) -> PageContent:
    return lens_page(assembly.render_context(run, model), {name: str(value) for name, value in query.items()})


def blocks_of(content: PageContent, kind: type) -> list[Any]:
    sections = (blocks for heading, blocks in content.sections.items() if heading != "Why here?")
    return [block for blocks in sections for block in blocks if isinstance(block, kind)]


def query_of(href: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(href).query))


def tokens_of(passage: Passage) -> list[Token]:
    return [token for row in passage.cells for cell in row if not isinstance(cell, str) for token in cell]


# Content -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_tokens_are_shaded_by_the_weights_of_the_stored_row(run: Run, length: int) -> None:
    pattern_key = ("base", length, "synthetic/1", 1, 2)
    query = results.stored_queries(run, pattern_key)[9]
    content = open_lens(run, doc="synthetic/1", length=length, layer=1, head=2, row=query)
    assert content.title == "Token lens: layer 1, head 2"
    tokens = tokens_of(blocks_of(content, Passage)[0])
    keys = results.top_keys(run, pattern_key, query)
    shades = sorted((token.shading for token in tokens if token.shading), reverse=True)
    # Two tokens that share a character are shaded as one.
    assert sum(shades) == pytest.approx(float(keys["weight"].sum()))
    assert len(shades) in (len(keys), len(keys) - 1)
    (marked,) = [token for token in tokens if token.is_marked]
    assert f"{query:,}" in marked.tooltip
    assert_names(content.introduction, f"{query:,}", "synthetic/1", "base")


@pytest.mark.slow
def test_a_long_text_is_shown_in_spans_with_their_distances(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    other = edited(run, monkeypatch, "base", key=lambda rows: (rows["query"] - 300 * rows["rank"]).clip(lower=0))
    pattern_key = ("base", LONG, "synthetic/0", 0, 0)
    query = results.stored_queries(other, pattern_key)[-1]
    passage = blocks_of(open_lens(other, doc="synthetic/0", layer=0, head=0, row=query), Passage)[0]
    assert [row[0] for row in passage.rows] == ["890 to 910", "590 to 610", "290 to 310", "query"]
    texts = results.document_text(other, "base", "synthetic/0").token_texts
    for row, key in zip(passage.cells, (query - 900, query - 600, query - 300), strict=False):
        (shaded,) = [token for token in row[1] if token.shading]
        assert shaded.text.strip("⏎") == texts[key].strip("\n") or not texts[key]


def test_spans_hold_the_context_and_are_joined_if_they_nearly_meet() -> None:
    assert [*context_spans({50: (3, 2), 57: (1, 1), 5: (10, 1), 99: (1, 5)}, 100)] == [
        range(7),
        range(47, 59),
        range(98, 100),
    ]


@pytest.mark.slow
def test_the_row_is_compared_with_other_models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is not stored is bounded by the least stored weight and by the rest of the row."""
    other = edited(
        run,
        monkeypatch,
        "yarn",
        key=lambda rows: (rows["query"] - 2 * rows["rank"]).clip(lower=0),
        weight=lambda rows: rows["weight"] * 0.8,
    )
    query = results.stored_queries(other, ("base", LONG, "synthetic/0", 0, 0))[5]
    table = blocks_of(open_lens(other, doc="synthetic/0", layer=0, head=0, row=query), Passage)[1]
    assert [*table.column_names] == ["token", "distance", "base", "yarn", "yarn − base"]
    rows = {int(row[1]): row[2:] for row in table.rows}
    assert rows[0] == ["0.500", "0.400", "-0.100"]
    assert rows[2] == ["0.125", "0.200", "+0.075"]
    assert rows[1] == ["0.250", "≤ 0.050", "≤ -0.200"]
    assert rows[6] == ["≤ 0.063", "0.050", "≥ -0.013"]
    assert [*rows] == [0, 1, 2, 3, 4, 6]


def test_a_chart_shows_the_weights_of_the_row_by_distance_under_each_model(run: Run) -> None:
    state = resolve_state(run, "yarn", {"layer": "1", "head": "2"})
    (chart,) = blocks_of(open_lens(run, "yarn", layer=1, head=2), Chart)
    traces = {trace.name: trace for trace in chart.figure.data}
    assert [*traces] == run.models
    keys = results.top_keys(run, state.pattern_key, state.query_position)
    assert traces["yarn"].customdata.tolist() == keys["distance"].tolist()
    np.testing.assert_allclose(traces["yarn"].y, keys["weight"], rtol=1e-6)


def test_a_model_with_other_tokens_is_left_out_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Run(run.path, run.manifest)
    texts = run.pattern_texts.astype({"tokenizer": str})
    texts.loc[texts["model"] == "yarn", "tokenizer"] = "other"
    monkeypatch.setitem(other._frames, "pattern_texts", texts)
    content = open_lens(other)
    assert "yarn" not in blocks_of(content, Passage)[1].column_names
    assert_names(blocks_of(content, TextBlock)[0].sentences[0], "yarn")


def edited(run: Run, monkeypatch: pytest.MonkeyPatch, model: str, **columns: Callable[[pd.DataFrame], Any]) -> Run:
    """The run with other values in the top keys of one model."""
    other = Run(run.path, run.manifest)
    rows = run.top_keys.copy()
    is_model = rows["model"] == model
    for name, compute in columns.items():
        rows.loc[is_model, name] = compute(rows[is_model]).astype(rows[name].dtype)
    monkeypatch.setitem(other._frames, "top_keys", rows)
    return other


# Kinds of tokens ----------------------------------------------------------------------------------------------------

TEXTS = [
    "<|im_start|>",
    "a",
    "",
    "",
    "😀",
    "\u0301",
    " של",
    "ום",
    "<b>",
    "\t\n",
    "\u202e",
    "",
    "<|end|>",
    "x",
    "",
]
TEXT = results.TokenizedText(np.array(TEXTS, object), np.array([text.startswith("<|") for text in TEXTS]))


def test_tokens_that_share_a_character_are_joined_and_every_key_is_visible() -> None:
    weights = dict.fromkeys(range(len(TEXTS)), 0.1)
    tokens = shaded_tokens(TEXT, range(len(TEXTS)), weights)
    assert [token.text for token in tokens] == [
        *("<|im_start|>", "a", "😀", "◌\u0301", " של", "ום", "<b>", "⇥⏎", "\ufffd", "▯", "<|end|>", "x", "▯")
    ]
    assert [token.is_special for token in tokens].count(True) == 2
    assert tokens[2].shading == pytest.approx(0.3)
    assert_names(tokens[2].tooltip, 2, 4, "0.300")
    assert sum(token.shading for token in tokens) == pytest.approx(0.1 * len(TEXTS))


@pytest.mark.parametrize("span", [range(3, 4), range(4, 5), range(2, 3)])
def test_a_span_never_cuts_a_character(span: range) -> None:
    (token_cell,) = shaded_tokens(TEXT, span, {3: 0.5}, marked_positions={2}, links={4: "?row=4"})
    assert (token_cell.text, token_cell.shading, token_cell.is_marked, token_cell.href) == ("😀", 0.5, True, "?row=4")


def test_a_combining_mark_without_weight_stays_with_its_letter() -> None:
    assert "".join(token.text for token in shaded_tokens(TEXT, range(4, 6), {})) == "😀\u0301"


def test_tokens_are_text_in_the_app_and_in_the_export(run: Run) -> None:
    view = ViewState.from_query({}, run)
    tokens = [Token("<b>x</b>", 0.5, is_marked=True), Token("y")]
    component = explorer_components.build_component(passage_table("It", ("a",), [[tokens]]), view, "0")
    (cell,) = [item for item in component._traverse() if isinstance(item, html.Td)]
    assert isinstance(cell.children, html.Bdi)
    token, plain = cell.children.children
    assert (token.children, plain) == ("<b>x</b>", "y")
    page = export.render_page_html(open_lens(run), run, view)
    assert "<|endoftext|>" not in page
    assert "&lt;|endoftext|&gt;" in page
    assert "<b> \u05e9" not in page


# The URL -------------------------------------------------------------------------------------------------------------


def test_every_link_leads_to_the_value_that_it_names(run: Run) -> None:
    start = {"doc": "synthetic/0", "length": str(SHORT), "layer": "1", "head": "2"}
    content = open_lens(run, **start)
    lists = {choice.label: choice for choice in blocks_of(content, LinkChoice)}
    assert {label: choice.links[choice.selected_index or 0].text for label, choice in lists.items()} == {
        "Text": "synthetic/0",
        "Context length": "256",
        "Layer": "1",
        "Head": "2",
    }
    for choice in lists.values():
        choices = blocks_of(open_lens(run, **start | query_of(choice.links[-1].href)), LinkChoice)
        (again,) = [other for other in choices if other.label == choice.label]
        assert again.selected_index == len(choice.links) - 1
    after = open_lens(run, **start | query_of(shortcut(content, "ArrowRight")))
    back = open_lens(run, **start | query_of(shortcut(after, "ArrowLeft")))
    assert back.introduction == content.introduction


def shortcut(content: PageContent, key: str) -> str:
    """The link that this key follows."""
    (links,) = blocks_of(content, KeyLinks)
    href: str = dict(zip(links.keys, links.links, strict=True))[key].href
    return href


def test_page_opens_on_the_top_far_row_of_the_top_head(run: Run) -> None:
    base = run.heads[run.heads["model"] == "base"]
    best = base.loc[base["far_weight"].idxmax()]
    content = open_lens(run)
    assert content.title == f"Token lens: layer {best['layer']}, head {best['head']}"
    first = results.top_far_rows(run, "base", int(best["layer"]), int(best["head"])).iloc[0]
    assert_names(content.introduction, f"{first['query']:,}", first["doc"])


def test_links_encode_any_model_name() -> None:
    query = {"doc": "a&b=c+d #é/1", "row": "3"}
    assert query_of(query_link(**query)) == query
    assert query_link("/lens", row=3) == "/lens?row=3"


def test_the_page_of_a_head_links_to_its_top_far_rows(run: Run) -> None:
    rows = results.top_far_rows(run, "yarn", 1, 3).head(results.MAX_FAR_ROWS)
    queries = [token for token in tokens_of(far_rows_table(run, "yarn", 1, 3)) if token.href and token.is_marked]
    assert len(queries) == len(rows)
    for token, query, doc in zip(queries, rows["query"], rows["doc"], strict=True):
        content = open_lens(run, **query_of(token.href))
        assert_names(content.introduction, f"{query:,}", doc, "yarn")


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"doc": "none"}, ("‘none’", "synthetic")),
        ({"length": "-1"}, ("‘-1’", LONG)),
        ({"layer": "9"}, ("‘9’",)),
        ({"head": "<b>"}, ("‘<b>’",)),
        ({"row": "3"}, ("‘3’",)),
        ({"row": "9" * 200}, ()),
    ],
)
def test_unknown_query_value_gives_a_note(run: Run, query: dict[str, str], named: tuple[object, ...]) -> None:
    (text,) = [sentence for block in blocks_of(open_lens(run, **query), TextBlock) for sentence in block.sentences]
    ((parameter, value),) = query.items()
    assert_names(text, parameter, *named)
    assert f"‘{value[:50]}" in text
    assert len(text) < 150


def test_model_without_patterns_gives_a_note(run: Run) -> None:
    assert_names(open_lens(run, "adarope").introduction, "adarope", "base", "yarn")


# In a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def app(run: Run) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, create_app(run.path.parent).server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.browser
def test_selecting_a_row_by_any_control_updates_the_url(app: str, chromium: Browser) -> None:
    page, errors = chromium.new_page(), list[str]()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{app}/head/1.2?model=yarn")
    rows = page.locator(".passage a.token")
    expect(rows.first).to_be_visible()
    rows.first.click()
    expect(page.locator("h1")).to_have_text("Token lens: layer 1, head 2")
    first = row_of(page)
    page.keyboard.press("ArrowRight")
    page.wait_for_url(lambda url: row_of(page, url) > first)
    expect(page.locator(".introduction")).to_contain_text(f"token {row_of(page):,} of")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(lambda url: row_of(page, url) == first)
    expect(page.locator(".introduction")).to_contain_text(f"token {first:,} of")
    page.evaluate("window.scrollTo(0, 200)")
    scrolled = page.evaluate("window.scrollY")
    page.locator("a.token[data-in-place]:not(.marked)").last.evaluate(
        "token => { token.focus({ preventScroll: true }); token.click(); }"
    )
    page.wait_for_url(lambda url: row_of(page, url) != first)
    last = row_of(page)
    expect(page.locator(".introduction")).to_contain_text(f"token {last:,} of")
    assert page.evaluate("window.scrollY") == scrolled > 0
    page.keyboard.press("ArrowLeft")  # the token that was clicked has the focus
    page.wait_for_url(lambda url: row_of(page, url) < last)
    page.get_by_label("Layer", exact=True).select_option("0")
    expect(page.locator("h1")).to_have_text("Token lens: layer 0, head 2")
    page.get_by_label("Context length").select_option(f"{SHORT}")
    expect(page.locator("bdi", has_text="<|endoftext|>").first).to_be_visible()
    assert not page.locator("bdi b").count()
    expect(page.locator("bdi").first).to_have_css("unicode-bidi", "isolate")
    violations = Axe().run(page).response["violations"]
    assert [item["id"] for item in violations if item["impact"] in ("critical", "serious")] == []
    page.go_back()
    expect(page.get_by_label("Context length")).to_have_value(re.compile(rf"length={LONG}|layer=0"))
    assert errors == []
    page.close()


def row_of(page: Page, url: str = "") -> int:
    return int(query_of(url or page.url).get("row", -1))
