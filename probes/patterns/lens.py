"""The token lens: one row of one head in its text, under each model, and the ways to other rows.

The address tells the text (`doc`, `length`), the head (`layer`, `head`) and the token that looks (`row`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from headscope.report.blocks import Block, Link, PageContent, RenderContext, TextBlock
from headscope.report.explorer_blocks import KeyLinks, LinkChoice, Passage, TextCell, Token, passage_table, query_link
from headscope.runs.column_metadata import number
from headscope.runs.run import Run
from probes.patterns import PROBE
from probes.patterns.analysis import (
    MAX_FAR_ROWS,
    TokenizedText,
    document_text,
    have_same_tokens,
    stored_patterns,
    stored_queries,
    top_far_rows,
    top_keys,
)
from probes.patterns.lens_state import LensState, resolve_state
from probes.patterns.token_spans import context_spans, shaded_tokens
from probes.patterns.words import mark_token

TITLE = "Token lens"
KEY_CONTEXT = (10, 10)
"""Tokens before and after a key."""
QUERY_CONTEXT = (24, 3)
"""Tokens before and after the one that looks."""
CHOICE_CONTEXT = (5, 1)
"""Tokens before and after one that can be chosen to look from."""
MAX_WHOLE_TEXT = 1024
"""Tokens of a text that is shown whole."""


def lens_page(context: RenderContext, url_query: Mapping[str, str]) -> PageContent:
    """The row that is asked for; what is asked in vain takes a default, which is told."""
    run, model = context.run, context.selected_model
    if model not in (known := stored_patterns(run)):
        return PageContent(TITLE, f"Nothing was read under {model}: choose {' or '.join(known)}.", {})
    at = resolve_state(run, model, url_query)
    words, top = document_text(run, model, at.doc), top_keys(run, at.pattern_key, at.query_position)
    sections: dict[str, list[Block]] = {
        "": [
            *_selection_lists(run, at),
            _row_links(run, at),
            *([TextBlock(at.notes)] if at.notes else []),
            _attended_text(run, at, words, top),
        ],
        "The same row under each model": [*_compare_models(run, at, words, context.models)],
        "Look from another token": [*_query_choices(run, at, words)],
        "What this head finds far back": [far_rows_table(run, model, at.layer, at.head)],
    }
    told = {heading: parts for heading, parts in sections.items() if parts}
    return PageContent(f"{TITLE}: layer {at.layer}, head {at.head}", _introduction(at, words, top), told)


def far_rows_table(run: Run, model: str, layer: int, head: int) -> Passage:
    """A head's most telling rows in their context, each a way into the lens."""
    cells: list[list[TextCell]] = []
    best = top_far_rows(run, model, layer, head).head(MAX_FAR_ROWS)
    for doc, query, key, weight, distance in best.itertuples(index=False, name=None):
        words = document_text(run, model, doc)
        href = query_link(PROBE.explorer_path, model=model, doc=doc, layer=layer, head=head, row=query)
        looks = shaded_tokens(words, words.context_range(query, 6, 0), {}, {query}, {query: href})
        told = [Token(number(weight), weight, href)]
        cells.append(
            [told, f"{distance:,}", shaded_tokens(words, words.context_range(key, 6, 3), {key: weight}), looks]
        )
    caption = (
        f"Rows with most weight on one token that is neither the first nor within 32, under {model}. Click to open."
    )
    return passage_table(caption, ("weight", "tokens back", "it looks at", "from"), cells)


def _introduction(state: LensState, text: TokenizedText, top_keys: pd.DataFrame) -> str:
    best = top_keys.iloc[0]
    held, back = number(float(top_keys["weight"].sum())), int(best["distance"])
    where = "on itself" if not back else f"on “{mark_token(text, int(best['key']), 3, 2)}”, {back:,} tokens back"
    return (
        f"From “{mark_token(text, state.query_position, 6, 0)}”, token {state.query_position:,} of {state.doc}, under {state.model}: the most weight, "
        f"{number(float(best['weight']))}, is {where}. The {len(top_keys)} keys shown hold {held} of all weight."
    )


def _selection_lists(run: Run, state: LensState) -> Iterator[LinkChoice]:
    """Lists of texts, lengths, layers and heads; of texts and lengths only where there are several."""
    known = stored_patterns(run)[state.model]
    texts, lengths, heads = (
        [*known.lengths_by_document],
        [*known.lengths_by_document[state.doc]],
        known.heads_by_layer[state.layer],
    )
    lists: list[tuple[str, str, list[str], str]] = [
        ("Text", "doc", texts, state.doc),
        ("Context length", "length", [*map(str, lengths)], str(state.length)),
        ("Layer", "layer", [*map(str, known.heads_by_layer)], str(state.layer)),
        ("Head", "head", [*map(str, heads)], str(state.head)),
    ]
    for label, name, values, value in lists:
        if len(values) > 1:
            ways = [Link(f"{int(each):,}" if name == "length" else each, query_link(**{name: each})) for each in values]
            yield LinkChoice(ways, label, values.index(value))


def _row_links(run: Run, state: LensState) -> KeyLinks:
    rows = stored_queries(run, state.pattern_key)
    here = rows.index(state.query_position)
    before = [(Link("← Row before", query_link(row=rows[here - 1])), "ArrowLeft")] if here else []
    after = [(Link("Row after →", query_link(row=rows[here + 1])), "ArrowRight")] if here + 1 < len(rows) else []
    head = [(Link("This head's page", f"/head/{state.layer}.{state.head}"), "")]
    links, keys = zip(*before, *after, *head, strict=True)
    return KeyLinks(links, keys)


def _attended_text(run: Run, state: LensState, text: TokenizedText, top_keys: pd.DataFrame) -> Passage:
    """The keys in the text: all of it where it is short, else windows around them."""
    weights = {int(key): float(weight) for key, weight in zip(top_keys["key"], top_keys["weight"], strict=True)}
    ways = {query: query_link(row=query) for query in stored_queries(run, state.pattern_key)}
    if state.length <= MAX_WHOLE_TEXT:
        whole = shaded_tokens(text, range(state.length), weights, {state.query_position}, ways, keep_line_breaks=True)
        which = "any" if len(ways) == state.length else "an underlined"
        return passage_table(f"{_caption(state)} Click {which} token to look from there.", ("",), [[whole]])
    spans = context_spans({**dict.fromkeys(weights, KEY_CONTEXT), state.query_position: QUERY_CONTEXT}, state.length)
    cells: list[list[TextCell]] = [
        [_distance_label(state.query_position, span), shaded_tokens(text, span, weights, {state.query_position}, ways)]
        for span in spans
    ]
    return passage_table(_caption(state), ("tokens back", "text"), cells)


def _caption(state: LensState) -> str:
    return f"Layer {state.layer}, head {state.head} under {state.model}: the more colour a token has, the more weight it gets."


def _distance_label(query: int, span: range) -> str:
    return "here" if query in span else f"{query - span.stop + 1:,} to {query - span.start:,}"


def _query_choices(run: Run, state: LensState, text: TokenizedText) -> Iterator[Passage]:
    """The tokens that can be chosen, in what stands around each, where the text is not shown whole."""
    if state.length <= MAX_WHOLE_TEXT:
        return
    ways = {query: query_link(row=query) for query in stored_queries(run, state.pattern_key)}
    told: list[Token] = []
    for span in context_spans(dict.fromkeys(ways, CHOICE_CONTEXT), state.length):
        told += [*shaded_tokens(text, span, {}, {state.query_position}, ways), Token(" … ")]
    yield passage_table(f"The {len(ways):,} tokens whose rows were kept, underlined.", ("",), [[told]])


def _compare_models(run: Run, state: LensState, text: TokenizedText, models: Sequence[str]) -> Iterator[Block]:
    """Weights of the keys that lead the row under any model, and how they differ from the first model's."""
    tops: dict[str, pd.Series] = {}
    for label in models:
        top = (
            top_keys(run, (label, *state.pattern_key[1:]), state.query_position)
            if have_same_tokens(run, state.doc, state.model, label)
            else None
        )
        if top is not None and len(top):
            tops[label] = top.set_index("key")["weight"].astype("float64")
    order = {int(key): None for label in (state.model, *tops) for key in tops[label].index}
    first, *others = [label for label in models if label in tops]
    names = ["token", "tokens back", *tops, *(f"{label} − {first}" for label in others)]
    cells: list[list[TextCell]] = []
    for key in order:
        weights = [_weight_cell(top, key) for top in tops.values()]
        changes = [_format_change(tops[first], tops[label], key) for label in others]
        seen = shaded_tokens(text, text.context_range(key, 4, 2), {}, {key})
        cells.append([seen, f"{state.query_position - key:,}", *weights, *changes])
    yield passage_table("Keys among the leading ones of this row under any model.", names, cells)
    if left := [label for label in models if label not in tops]:
        yield TextBlock([f"Left out, as this row of this text was not kept in the same tokens: {', '.join(left)}."])


def _weight_cell(weights: pd.Series, key: int) -> TextCell:
    if key in weights.index:
        return [Token(number(weights[key]), float(weights[key]))]
    return f"≤ {_round_bound_up(_max_unlisted_weight(weights)):.3f}"


def _max_unlisted_weight(weights: pd.Series) -> float:
    """The most that a key which is not among the leading ones can have."""
    return max(0.0, min(float(weights.min()), 1 - float(weights.sum())))


def _format_change(baseline: pd.Series, other: pd.Series, key: int) -> str:
    """The difference; a bound where one of the two was not among the leading keys."""
    if key in baseline.index and key in other.index:
        return _format_signed(other[key] - baseline[key])
    if key in baseline.index:
        return f"≤ {_format_signed(_round_bound_up(_max_unlisted_weight(other) - baseline[key]))}"
    return (
        f"≥ {_format_signed(-_round_bound_up(_max_unlisted_weight(baseline) - other[key]))}"
        if key in other.index
        else ""
    )


def _format_signed(change: float) -> str:
    told = f"{change:+.3f}"
    return "0.000" if told in ("+0.000", "-0.000") else told.replace("-", "−")


def _round_bound_up(bound: float) -> float:
    """The bound as it is shown: still one where its third digit is the last."""
    return math.ceil(1000 * bound - 1e-3) / 1000
