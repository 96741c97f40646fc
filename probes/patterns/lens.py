"""The token lens: one attention row of one head shown in its text, under each model, with links to other rows.

The URL holds the whole state: text (`doc`, `length`), head (`layer`, `head`) and query position (`row`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from headscope.plots import axes, shapes, style
from headscope.rendering import assembly
from headscope.rendering.blocks import Block, Chart, Link, PageContent, RenderContext, TextBlock
from headscope.rendering.explorer_blocks import (
    KeyLinks,
    LinkChoice,
    Passage,
    TextCell,
    Token,
    choice_or_default,
    passage_table,
    query_link,
)
from headscope.rendering.token_spans import TokenizedText, context_spans, mark_token, shaded_tokens
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run
from probes.patterns import PROBE
from probes.patterns.results import (
    MAX_FAR_ROWS,
    PatternKey,
    document_text,
    have_same_tokens,
    stored_patterns,
    stored_queries,
    top_far_rows,
    top_keys,
)

TITLE = "Token lens"
KEY_CONTEXT = (10, 10)
"""Tokens before and after a key."""
QUERY_CONTEXT = (24, 3)
"""Tokens before and after the query token."""
CHOICE_CONTEXT = (5, 1)
"""Tokens before and after a token that can be selected as query."""
CHART_HEIGHT = 210
"""Height of the chart of a row in px."""
MAX_WHOLE_TEXT = 1024
"""A text of at most so many tokens is shown whole."""


@dataclass(frozen=True)
class LensState:
    """The row that is shown, and notes on requested values that do not exist."""

    pattern_key: PatternKey
    query_position: int
    notes: Sequence[str]

    @property
    def model(self) -> str:
        return self.pattern_key[0]

    @property
    def length(self) -> int:
        return self.pattern_key[1]

    @property
    def doc(self) -> str:
        return self.pattern_key[2]

    @property
    def layer(self) -> int:
        return self.pattern_key[3]

    @property
    def head(self) -> int:
        return self.pattern_key[4]


def resolve_state(run: Run, model: str, url_query: Mapping[str, str]) -> LensState:
    """The row that the URL names; by default the top far row of the head with the largest top far weight."""
    patterns, notes = stored_patterns(run)[model], list[str]()
    default_layer, default_head = _default_head(run, model)
    layer = int(choice_or_default("layer", patterns.heads_by_layer, url_query, notes, default_layer))
    heads = patterns.heads_by_layer[layer]
    head = int(choice_or_default("head", heads, url_query, notes, default_head if layer == default_layer else None))
    far_rows = top_far_rows(run, model, layer, head)
    doc = choice_or_default("doc", patterns.lengths_by_document, url_query, notes, next(iter(far_rows["doc"]), None))
    lengths = patterns.lengths_by_document[doc]
    length = int(choice_or_default("length", lengths, url_query, notes, lengths[-1]))
    pattern_key = (model, length, doc, layer, head)
    queries = stored_queries(run, pattern_key)
    default_query = next(
        (query for query in far_rows[far_rows["doc"] == doc]["query"] if query in queries), queries[-1]
    )
    return LensState(pattern_key, int(choice_or_default("row", queries, url_query, notes, default_query)), notes)


def lens_page(context: RenderContext, url_query: Mapping[str, str]) -> PageContent:
    """The lens on the row that the URL names; a value that does not exist is replaced and noted."""
    run, model = context.run, context.selected_model
    if not (patterns := stored_patterns(run)):
        hint = (
            "These runs store only attention maps; the page of a head shows them. To use Lens, store query rows with:"
        )
        return PageContent(TITLE, "", {"": [TextBlock([hint], command=PROBE.command_line)]})
    if model not in patterns:
        return PageContent(TITLE, f"No attention patterns of {model} are stored. Choose {' or '.join(patterns)}.", {})
    state = resolve_state(run, model, url_query)
    text, keys = document_text(run, model, state.doc), top_keys(run, state.pattern_key, state.query_position)
    rows = _rows_by_model(run, state, context.models)
    sections: dict[str, list[Block]] = {
        "": [
            *_selection_lists(run, state),
            _row_links(run, state),
            *([TextBlock(state.notes)] if state.notes else []),
            _weights_chart(state, text, rows),
            _attended_text(run, state, text, keys),
        ],
        "Why here?": [*assembly.row_blocks(run, *state.pattern_key, state.query_position)],
        "The same row under each model": [*_compare_models(state, text, context.models, rows)],
        "Other query tokens": [*_query_choices(run, state, text)],
        "Top far rows of this head": [far_rows_table(run, model, state.layer, state.head)],
    }
    filled = {heading: blocks for heading, blocks in sections.items() if blocks}
    title = f"{TITLE}: layer {state.layer}, head {state.head}"
    return PageContent(title, _introduction(state, text, keys), filled)


def far_rows_table(run: Run, model: str, layer: int, head: int, max_rows: int = MAX_FAR_ROWS) -> Passage:
    """A head's top far rows in their context, each linked to the lens."""
    cells: list[list[TextCell]] = []
    rows = top_far_rows(run, model, layer, head).head(max_rows)
    for doc, query, key, weight, distance in rows.itertuples(index=False, name=None):
        text = document_text(run, model, doc)
        href = query_link(PROBE.explorer_path, model=model, doc=doc, layer=layer, head=head, row=query)
        query_cell = shaded_tokens(text, text.context_range(query, 6, 0), {}, {query}, {query: href})
        key_cell = shaded_tokens(text, text.context_range(key, 6, 3), {key: weight})
        cells.append([[Token(format_number(weight), weight, href)], f"{distance:,}", key_cell, query_cell])
    caption = (
        f"Rows with the largest weight on one token that is neither the first nor within 32 tokens, under {model}. "
        "Click a row to open it."
    )
    return passage_table(caption, ("weight", "distance", "attended token", "query token"), cells)


def _introduction(state: LensState, text: TokenizedText, top_keys: pd.DataFrame) -> str:
    first = top_keys.iloc[0]
    total, distance = format_number(float(top_keys["weight"].sum())), int(first["distance"])
    key = f"“{mark_token(text, int(first['key']), 3, 2)}”, {distance:,} tokens back" if distance else "itself"
    return (
        f"Query “{mark_token(text, state.query_position, 6, 0)}”, token {state.query_position:,} of {state.doc}, "
        f"under {state.model}. The largest weight, {format_number(float(first['weight']))}, is on {key}. "
        f"The {len(top_keys)} keys shown hold {total} of the weight."
    )


def _selection_lists(run: Run, state: LensState) -> Iterator[LinkChoice]:
    """Lists of texts, lengths, layers and heads; a list of one item is left out."""
    patterns = stored_patterns(run)[state.model]
    lists: list[tuple[str, str, list[str], str]] = [
        ("Text", "doc", [*patterns.lengths_by_document], state.doc),
        ("Context length", "length", [*map(str, patterns.lengths_by_document[state.doc])], str(state.length)),
        ("Layer", "layer", [*map(str, patterns.heads_by_layer)], str(state.layer)),
        ("Head", "head", [*map(str, patterns.heads_by_layer[state.layer])], str(state.head)),
    ]
    for label, name, values, value in lists:
        if len(values) > 1:
            links = [
                Link(f"{int(item):,}" if name == "length" else item, query_link(**{name: item})) for item in values
            ]
            yield LinkChoice(links, label, values.index(value))


def _row_links(run: Run, state: LensState) -> KeyLinks:
    queries = stored_queries(run, state.pattern_key)
    index = queries.index(state.query_position)
    before = [(Link("← Previous row", query_link(row=queries[index - 1])), "ArrowLeft")] if index else []
    after = [(Link("Next row →", query_link(row=queries[index + 1])), "ArrowRight")] if index + 1 < len(queries) else []
    head = [(Link("Page of this head", f"/head/{state.layer}.{state.head}"), "")]
    links, keys = zip(*before, *after, *head, strict=True)
    return KeyLinks(links, keys)


def _attended_text(run: Run, state: LensState, text: TokenizedText, top_keys: pd.DataFrame) -> Passage:
    """The keys in the text: the whole text if it is short, else spans around them."""
    weights = {int(key): float(weight) for key, weight in zip(top_keys["key"], top_keys["weight"], strict=True)}
    links = {query: query_link(row=query) for query in stored_queries(run, state.pattern_key)}
    if state.length <= MAX_WHOLE_TEXT:
        token_cells = shaded_tokens(
            text, range(state.length), weights, {state.query_position}, links, keep_line_breaks=True
        )
        clickable = "any" if len(links) == state.length else "an underlined"
        return passage_table(f"{_caption(state)} Click {clickable} token to make it the query.", ("",), [[token_cells]])
    spans = context_spans({**dict.fromkeys(weights, KEY_CONTEXT), state.query_position: QUERY_CONTEXT}, state.length)
    cells: list[list[TextCell]] = [
        [_distance_label(state.query_position, span), shaded_tokens(text, span, weights, {state.query_position}, links)]
        for span in spans
    ]
    return passage_table(_caption(state), ("distance", "text"), cells)


def _caption(state: LensState) -> str:
    return f"Layer {state.layer}, head {state.head} under {state.model}. A stronger colour means a larger weight."


def _distance_label(query: int, span: range) -> str:
    return "query" if query in span else f"{query - span.stop + 1:,} to {query - span.start:,}"


def _query_choices(run: Run, state: LensState, text: TokenizedText) -> Iterator[Passage]:
    """The tokens that can be selected as query, in their context, unless the text is shown whole."""
    if state.length <= MAX_WHOLE_TEXT:
        return
    links = {query: query_link(row=query) for query in stored_queries(run, state.pattern_key)}
    tokens: list[Token] = []
    for span in context_spans(dict.fromkeys(links, CHOICE_CONTEXT), state.length):
        tokens += [*shaded_tokens(text, span, {}, {state.query_position}, links), Token(" … ")]
    yield passage_table(f"The {len(links):,} query tokens with stored rows, underlined.", ("",), [[tokens]])


def _rows_by_model(run: Run, state: LensState, models: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The top keys of the row under each model that splits the text into the same tokens."""
    same = [label for label in models if have_same_tokens(run, state.doc, state.length, state.model, label)]
    rows = {label: top_keys(run, (label, *state.pattern_key[1:]), state.query_position) for label in same}
    return {label: keys for label, keys in rows.items() if len(keys)}


def _weights_chart(state: LensState, text: TokenizedText, rows: Mapping[str, pd.DataFrame]) -> Chart:
    """How far back the top keys of the row are, and their weights, under each model."""
    keys = pd.concat(rows, names=["model"]).reset_index("model")
    axis = axes.CountAxis(keys["distance"])
    figure = style.new_figure(f"Weight by distance: layer {state.layer}, head {state.head}", CHART_HEIGHT)
    for label, model_style in style.model_styles(keys).items():
        of_model = keys[keys["model"] == label]
        weights = of_model["weight"].astype("float64")
        figure.add_scatter(
            x=axis.positions(of_model["distance"]),
            y=weights,
            name=model_style.name,
            mode="markers",
            marker={"color": model_style.colour, "symbol": model_style.symbol, "size": 8},
            error_y={"array": 0 * weights, "arrayminus": weights, "width": 0, "thickness": 1.5},
            text=[style.escape_label(mark_token(text, key, 3, 2)) for key in of_model["key"]],
            customdata=of_model["distance"],
            hovertemplate="%{text}<br>distance %{customdata:,}<br>weight %{y:.3f}",
        )
    x = {**axis.settings, "range": axis.range[::-1], "title_text": "distance (tokens)"}
    shapes.finish(figure, x, {"title_text": "weight", "range": [0, 1.05]})
    caption = f"The top keys of query token {state.query_position:,}. The query is at the right, as in the text."
    return Chart(figure, caption)


def _compare_models(
    state: LensState, text: TokenizedText, models: Sequence[str], rows: Mapping[str, pd.DataFrame]
) -> Iterator[Block]:
    """Weights of the keys that lead the row under any model, and differences from the first model."""
    weights = {label: keys.set_index("key")["weight"].astype("float64") for label, keys in rows.items()}
    ordered_keys = {int(key): None for label in (state.model, *weights) for key in weights[label].index}
    baseline, *compared = [label for label in models if label in weights]
    names = ["token", "distance", *weights, *(f"{label} − {baseline}" for label in compared)]
    cells: list[list[TextCell]] = []
    for key in ordered_keys:
        weight_cells = [_weight_cell(of_model, key) for of_model in weights.values()]
        changes = [_format_change(weights[baseline], weights[label], key) for label in compared]
        token_cell = shaded_tokens(text, text.context_range(key, 4, 2), {}, {key})
        cells.append([token_cell, f"{state.query_position - key:,}", *weight_cells, *changes])
    yield passage_table("Keys among the top keys of this row under any model.", names, cells)
    if missing := [label for label in models if label not in weights]:
        yield TextBlock([f"Left out, because this row is not stored in the same tokens: {', '.join(missing)}."])


def _weight_cell(weights: pd.Series, key: int) -> TextCell:
    if key in weights.index:
        return [Token(format_number(weights[key]), float(weights[key]))]
    return f"≤ {_round_bound_up(_max_unlisted_weight(weights)):.3f}"


def _max_unlisted_weight(weights: pd.Series) -> float:
    """Upper bound on the weight of a key that is not among the top keys."""
    return max(0.0, min(float(weights.min()), 1 - float(weights.sum())))


def _format_change(baseline: pd.Series, other: pd.Series, key: int) -> str:
    """The difference; a bound if the key is missing from the top keys of one of the two."""
    if key in baseline.index and key in other.index:
        return _format_signed(other[key] - baseline[key])
    if key in baseline.index:
        return f"≤ {_format_signed(_round_bound_up(_max_unlisted_weight(other) - baseline[key]))}"
    if key in other.index:
        return f"≥ {_format_signed(-_round_bound_up(_max_unlisted_weight(baseline) - other[key]))}"
    return ""


def _format_signed(change: float) -> str:
    text = f"{change:+.3f}"
    return "0.000" if text in ("+0.000", "-0.000") else text


def _round_bound_up(bound: float) -> float:
    """The bound rounded up to three decimals, so that it still holds as shown."""
    return math.ceil(1000 * bound - 1e-3) / 1000


def _default_head(run: Run, model: str) -> tuple[int, int]:
    """The head of the model with the largest top far weight, else its first head."""
    heads = run.heads[run.heads["model"] == model]
    if "far_weight" in heads and heads["far_weight"].notna().any():
        best = heads.sort_values("far_weight", ascending=False).iloc[0]
        return int(best["layer"]), int(best["head"])
    layer, numbers = next(iter(stored_patterns(run)[model].heads_by_layer.items()))
    return layer, numbers[0]
