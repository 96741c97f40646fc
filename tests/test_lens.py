"""The token lens: it shows the stored row in its text and beside the other models, and its address is all it knows."""

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
from werkzeug.serving import make_server

from dashboards import explorer_components, export
from dashboards.app import create_app
from dashboards.view_state import ViewState
from headscope.report import assembly
from headscope.report.blocks import PageContent, TextBlock
from headscope.report.explorer_blocks import KeyLinks, LinkChoice, Passage, Token, passage_table, query_link
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from probes.patterns import analysis
from probes.patterns.lens import far_rows_table, lens_page
from probes.patterns.token_spans import context_spans, shaded_tokens

SHORT, LONG = 256, 2048


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("lens"), layers=2, lengths=(SHORT, LONG), docs=2)


def looked(run: Run, model: str = "base", **asked: object) -> PageContent:
    return lens_page(assembly.render_context(run, model), {name: str(value) for name, value in asked.items()})


def parts(content: PageContent, kind: type) -> list[Any]:
    return [part for group in content.sections.values() for part in group if isinstance(part, kind)]


def asked(href: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(href).query))


def tokens(part: Passage) -> list[Token]:
    return [token for row in part.cells for cell in row if not isinstance(cell, str) for token in cell]


# What it shows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_shades_are_the_weights_of_the_stored_row(run: Run, length: int) -> None:
    place = ("base", length, "synthetic/1", 1, 2)
    query = analysis.stored_queries(run, place)[9]
    content = looked(run, doc="synthetic/1", length=length, layer=1, head=2, row=query)
    assert content.title == "Token lens: layer 1, head 2"
    seen = parts(content, Passage)[0]
    kept = analysis.top_keys(run, place, query)
    shades = sorted((token.shading for token in tokens(seen) if token.shading), reverse=True)
    # Two tokens that make one character are shaded as one.
    assert sum(shades) == pytest.approx(float(kept["weight"].sum()))
    assert len(shades) in (len(kept), len(kept) - 1)
    (here,) = [token for token in tokens(seen) if token.is_marked]
    assert f"{query:,}" in here.tooltip
    assert f"token {query:,} of synthetic/1, under base" in content.introduction


def test_a_long_text_is_folded_into_windows_that_tell_how_far_they_are(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = edited(run, monkeypatch, "base", key=lambda rows: (rows["query"] - 300 * rows["rank"]).clip(lower=0))
    place = ("base", LONG, "synthetic/0", 0, 0)
    query = analysis.stored_queries(other, place)[-1]
    seen = parts(looked(other, doc="synthetic/0", layer=0, head=0, row=query), Passage)[0]
    assert [row[0] for row in seen.rows] == ["890 to 910", "590 to 610", "290 to 310", "here"]
    words = analysis.document_text(other, "base", "synthetic/0").token_texts
    for row, key in zip(seen.cells, (query - 900, query - 600, query - 300), strict=False):
        (shaded,) = [token for token in row[1] if token.shade]
        assert shaded.text.strip("⏎") == words[key].strip("\n") or not words[key]


def test_windows_hold_what_stands_around_and_meet_where_they_all_but_do() -> None:
    assert [*context_spans({50: (3, 2), 57: (1, 1), 5: (10, 1), 99: (1, 5)}, 100)] == [
        range(7),
        range(47, 59),
        range(98, 100),
    ]


def test_the_same_row_stands_beside_that_of_the_other_models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that was not kept is bounded by the least that was, and by what was left of the row."""
    other = edited(
        run, monkeypatch, "yarn", key=lambda rows: (rows["query"] - 2 * rows["rank"]).clip(lower=0), weight=shrunk
    )
    query = analysis.stored_queries(other, ("base", LONG, "synthetic/0", 0, 0))[5]
    table = parts(looked(other, doc="synthetic/0", layer=0, head=0, row=query), Passage)[1]
    assert [*table.names] == ["token", "tokens back", "base", "yarn", "yarn − base"]
    rows = {int(row[1]): row[2:] for row in table.rows}
    assert rows[0] == ["0.500", "0.400", "−0.100"]
    assert rows[2] == ["0.125", "0.200", "+0.075"]
    assert rows[1] == ["0.250", "≤ 0.050", "≤ −0.200"]
    assert rows[6] == ["≤ 0.063", "0.050", "≥ −0.013"]
    assert [*rows] == [0, 1, 2, 3, 4, 6]


def test_a_model_of_other_tokens_is_left_out_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Run(run.path, run.manifest)
    told = run.passages.astype({"tokenizer": str})
    told.loc[told["model"] == "yarn", "tokenizer"] = "other"
    monkeypatch.setitem(other._frames, "pattern_texts", told)
    content = looked(other)
    assert "yarn" not in parts(content, Passage)[1].names
    assert "not kept in the same tokens: yarn" in parts(content, TextBlock)[0].sentences[0]


def edited(run: Run, monkeypatch: pytest.MonkeyPatch, model: str, **columns: Callable[[pd.DataFrame], Any]) -> Run:
    """The run, with other numbers in the table of reads of one model."""
    other = Run(run.path, run.manifest)
    rows = run.reads.copy()
    mine = rows["model"] == model
    for name, make in columns.items():
        rows.loc[mine, name] = make(rows[mine]).astype(rows[name].dtype)
    monkeypatch.setitem(other._frames, "reads", rows)
    return other


def shrunk(rows: pd.DataFrame) -> "pd.Series[Any]":
    return rows["weight"] * 0.8


# Tokens of all kinds -----------------------------------------------------------------------------------------------

PIECES = ["<|im_start|>", "a", "", "", "😀", "\u0301", " של", "ום", "<b>", "\t\n", "\u202e", "", "<|end|>", "x", ""]
TEXT = analysis.TokenizedText(np.array(PIECES, object), np.array([piece.startswith("<|") for piece in PIECES]))


def test_tokens_that_share_a_character_are_one_and_every_key_is_to_be_seen() -> None:
    everything = dict.fromkeys(range(len(PIECES)), 0.1)
    told = shaded_tokens(TEXT, range(len(PIECES)), everything)
    assert [token.text for token in told] == [
        *("<|im_start|>", "a", "😀", "◌\u0301", " של", "ום", "<b>", "⇥⏎", "\ufffd", "▯", "<|end|>", "x", "▯")
    ]
    assert [token.is_special for token in told].count(True) == 2
    assert told[2].shading == pytest.approx(0.3)
    assert told[2].tooltip == "tokens 2 to 4, which make one character: 0.300 of the weight"
    assert sum(token.shading for token in told) == pytest.approx(0.1 * len(PIECES))


@pytest.mark.parametrize("window", [range(3, 4), range(4, 5), range(2, 3)])
def test_a_window_never_cuts_a_character(window: range) -> None:
    (whole,) = shaded_tokens(TEXT, window, {3: 0.5}, marked_positions={2}, links={4: "?row=4"})
    assert (whole.text, whole.shading, whole.is_marked, whole.href) == ("😀", 0.5, True, "?row=4")


def test_a_mark_stays_with_its_letter_where_nothing_is_seen_of_it_alone() -> None:
    assert "".join(token.text for token in shaded_tokens(TEXT, range(4, 6), {})) == "😀\u0301"


def test_on_screen_and_on_paper_every_token_is_text(run: Run) -> None:
    view = ViewState.from_query({}, run)
    drawn = explorer_components.build_component(
        passage_table("It", ("a",), [[[Token("<b>x</b>", 0.5, is_marked=True), Token("y")]]]), view, "0"
    )
    (cell,) = [part for part in drawn._traverse() if isinstance(part, html.Td)]
    assert isinstance(cell.children, html.Bdi)
    token, plain = cell.children.children
    assert (token.children, plain) == ("<b>x</b>", "y")
    page = export.render_page_html(looked(run), run, view)
    assert "<|endoftext|>" not in page
    assert "&lt;|endoftext|&gt;" in page
    assert "<b> \u05e9" not in page


# The address -------------------------------------------------------------------------------------------------------


def test_every_way_leads_to_what_it_names(run: Run) -> None:
    start = {"doc": "synthetic/0", "length": str(SHORT), "layer": "1", "head": "2"}
    content = looked(run, **start)
    lists = {part.label: part for part in parts(content, LinkChoice)}
    assert {label: part.links[part.at or 0].text for label, part in lists.items()} == {
        "Text": "synthetic/0",
        "Context length": "256",
        "Layer": "1",
        "Head": "2",
    }
    for part in lists.values():
        last = asked(part.links[-1].href)
        (again,) = [each for each in parts(looked(run, **start | last), LinkChoice) if each.label == part.label]
        assert again.at == len(part.links) - 1
    (steps,) = parts(content, KeyLinks)
    keys = dict(zip(steps.keys, steps.links, strict=True))
    after = looked(run, **start | asked(keys["ArrowRight"].href))
    back = dict(zip(parts(after, KeyLinks)[0].keys, parts(after, KeyLinks)[0].links, strict=True))["ArrowLeft"]
    assert looked(run, **start | asked(back.href)).introduction == content.introduction


def test_it_opens_on_the_most_telling_row_of_the_head_that_finds_most_far_back(run: Run) -> None:
    base = run.heads[run.heads["model"] == "base"]
    best = base.loc[base["far_weight"].idxmax()]
    content = looked(run)
    assert content.title == f"Token lens: layer {best['layer']}, head {best['head']}"
    first = analysis.top_far_rows(run, "base", int(best["layer"]), int(best["head"])).iloc[0]
    assert f"token {first['query']:,} of {first['doc']}" in content.introduction


def test_a_way_holds_whatever_a_name_does() -> None:
    told = {"doc": "a&b=c+d #é/1", "row": "3"}
    assert asked(query_link(**told)) == told
    assert query_link("/lens", row=3) == "/lens?row=3"


def test_the_head_s_page_leads_to_its_most_telling_rows(run: Run) -> None:
    rows = analysis.top_far_rows(run, "yarn", 1, 3).head(analysis.MAX_FAR_ROWS)
    leading = [token for token in tokens(far_rows_table(run, "yarn", 1, 3)) if token.href and token.is_marked]
    assert len(leading) == len(rows)
    for token, query, doc in zip(leading, rows["query"], rows["doc"], strict=True):
        content = looked(run, **asked(token.href))
        assert f"token {query:,} of {doc}, under yarn" in content.introduction


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"doc": "none"}, "Unknown doc ‘none’: showing doc synthetic/"),
        ({"length": "-1"}, f"Unknown length ‘-1’: showing length {LONG} instead."),
        ({"layer": "9"}, "Unknown layer ‘9’: "),
        ({"head": "<b>"}, "Unknown head ‘<b>’: "),
        ({"row": "3"}, "Unknown row ‘3’: showing row"),
        ({"row": "9" * 200}, "Unknown row ‘999"),
    ],
)
def test_what_is_asked_in_vain_is_told(run: Run, wrong: dict[str, str], told: str) -> None:
    (note,) = [sentence for part in parts(looked(run, **wrong), TextBlock) for sentence in part.sentences]
    assert note.startswith(told)
    assert len(note) < 150


def test_a_model_under_which_nothing_was_read_is_told(run: Run) -> None:
    assert looked(run, "adarope").introduction == "Nothing was read under adarope: choose base or yarn."


# In a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def app(run: Run) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, create_app(run.path.parent).server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.browser
def test_rows_are_chosen_by_key_click_and_list_and_the_address_follows(app: str, chromium: Browser) -> None:
    expect.set_options(timeout=30_000)
    page, noise = chromium.new_page(), list[str]()
    page.on("console", lambda message: noise.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.goto(f"{app}/head/1.2?model=yarn")
    rows = page.locator(".passage a.token")
    expect(rows.first).to_be_visible()
    rows.first.click()
    expect(page.locator("h1")).to_have_text("Token lens: layer 1, head 2")
    first = row_of(page)
    page.keyboard.press("ArrowRight")
    page.wait_for_url(lambda url: row_of(page, url) > first)
    expect(page.locator(".lead")).to_contain_text(f"token {row_of(page):,} of")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(lambda url: row_of(page, url) == first)
    expect(page.locator(".lead")).to_contain_text(f"token {first:,} of")
    page.evaluate("window.scrollTo(0, 200)")
    scrolled = page.evaluate("window.scrollY")
    page.locator("a.token[data-stays]:not(.marked)").last.evaluate(
        "each => { each.focus({ preventScroll: true }); each.click(); }"
    )
    page.wait_for_url(lambda url: row_of(page, url) != first)
    last = row_of(page)
    expect(page.locator(".lead")).to_contain_text(f"token {last:,} of")
    assert page.evaluate("window.scrollY") == scrolled > 0
    page.keyboard.press("ArrowLeft")  # the token that was clicked has the focus
    page.wait_for_url(lambda url: row_of(page, url) < last)
    page.get_by_label("Layer", exact=True).select_option("0")
    expect(page.locator("h1")).to_have_text("Token lens: layer 0, head 2")
    page.get_by_label("Context length").select_option(f"{SHORT}")
    expect(page.locator("bdi", has_text="<|endoftext|>").first).to_be_visible()
    assert not page.locator("bdi b").count()
    expect(page.locator("bdi").first).to_have_css("unicode-bidi", "isolate")
    found = Axe().run(page).response["violations"]
    assert [each["id"] for each in found if each["impact"] in ("critical", "serious")] == []
    page.go_back()
    expect(page.get_by_label("Context length")).to_have_value(re.compile(rf"length={LONG}|layer=0"))
    assert noise == []
    page.close()


def row_of(page: Page, url: str = "") -> int:
    return int(asked(url or page.url).get("row", -1))
