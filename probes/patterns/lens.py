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
from probes.patterns.analysis import TELLING, Text, places, queries, row, same_tokens, telling, text
from probes.patterns.lens_state import At, where
from probes.patterns.token_spans import stretch, windows
from probes.patterns.words import marked

TITLE = "Token lens"
KEY = (10, 10)
"""Tokens before and after a key."""
QUERY = (24, 3)
"""Tokens before and after the one that looks."""
OTHER = (5, 1)
"""Tokens before and after one that can be chosen to look from."""
WHOLE = 1024
"""Tokens of a text that is shown whole."""


def lens(shown: RenderContext, asked: Mapping[str, str]) -> PageContent:
    """The row that is asked for; what is asked in vain takes a default, which is told."""
    run, model = shown.run, shown.selected_model
    if model not in (known := places(run)):
        return PageContent(TITLE, f"Nothing was read under {model}: choose {' or '.join(known)}.", {})
    at = where(run, model, asked)
    words, top = text(run, model, at.doc), row(run, at.place, at.row)
    sections: dict[str, list[Block]] = {
        "": [
            *_choices(run, at),
            _steps(run, at),
            *([TextBlock(at.notes)] if at.notes else []),
            _seen(run, at, words, top),
        ],
        "The same row under each model": [*_under_each(run, at, words, shown.models)],
        "Look from another token": [*_rows(run, at, words)],
        "What this head finds far back": [found_far_back(run, model, at.layer, at.head)],
    }
    told = {heading: parts for heading, parts in sections.items() if parts}
    return PageContent(f"{TITLE}: layer {at.layer}, head {at.head}", _lead(at, words, top), told)


def found_far_back(run: Run, model: str, layer: int, head: int) -> Passage:
    """A head's most telling rows in their context, each a way into the lens."""
    cells: list[list[TextCell]] = []
    best = telling(run, model, layer, head).head(TELLING)
    for doc, query, key, weight, distance in best.itertuples(index=False, name=None):
        words = text(run, model, doc)
        href = query_link(PROBE.explorer_path, model=model, doc=doc, layer=layer, head=head, row=query)
        looks = stretch(words, words.about(query, 6, 0), {}, {query}, {query: href})
        told = [Token(number(weight), weight, href)]
        cells.append([told, f"{distance:,}", stretch(words, words.about(key, 6, 3), {key: weight}), looks])
    caption = (
        f"Rows with most weight on one token that is neither the first nor within 32, under {model}. Click to open."
    )
    return passage_table(caption, ("weight", "tokens back", "it looks at", "from"), cells)


def _lead(at: At, words: Text, top: pd.DataFrame) -> str:
    best = top.iloc[0]
    held, back = number(float(top["weight"].sum())), int(best["distance"])
    where = "on itself" if not back else f"on “{marked(words, int(best['key']), 3, 2)}”, {back:,} tokens back"
    return (
        f"From “{marked(words, at.row, 6, 0)}”, token {at.row:,} of {at.doc}, under {at.model}: the most weight, "
        f"{number(float(best['weight']))}, is {where}. The {len(top)} keys shown hold {held} of all weight."
    )


def _choices(run: Run, at: At) -> Iterator[LinkChoice]:
    """Lists of texts, lengths, layers and heads; of texts and lengths only where there are several."""
    known = places(run)[at.model]
    texts, lengths, heads = [*known.texts], [*known.texts[at.doc]], known.heads[at.layer]
    lists: list[tuple[str, str, list[str], str]] = [
        ("Text", "doc", texts, at.doc),
        ("Context length", "length", [*map(str, lengths)], str(at.length)),
        ("Layer", "layer", [*map(str, known.heads)], str(at.layer)),
        ("Head", "head", [*map(str, heads)], str(at.head)),
    ]
    for label, name, values, value in lists:
        if len(values) > 1:
            ways = [Link(f"{int(each):,}" if name == "length" else each, query_link(**{name: each})) for each in values]
            yield LinkChoice(ways, label, values.index(value))


def _steps(run: Run, at: At) -> KeyLinks:
    rows = queries(run, at.place)
    here = rows.index(at.row)
    before = [(Link("← Row before", query_link(row=rows[here - 1])), "ArrowLeft")] if here else []
    after = [(Link("Row after →", query_link(row=rows[here + 1])), "ArrowRight")] if here + 1 < len(rows) else []
    head = [(Link("This head's page", f"/head/{at.layer}.{at.head}"), "")]
    links, keys = zip(*before, *after, *head, strict=True)
    return KeyLinks(links, keys)


def _seen(run: Run, at: At, words: Text, top: pd.DataFrame) -> Passage:
    """The keys in the text: all of it where it is short, else windows around them."""
    weights = {int(key): float(weight) for key, weight in zip(top["key"], top["weight"], strict=True)}
    ways = {query: query_link(row=query) for query in queries(run, at.place)}
    if at.length <= WHOLE:
        whole = stretch(words, range(at.length), weights, {at.row}, ways, broken=True)
        which = "any" if len(ways) == at.length else "an underlined"
        return passage_table(f"{_how(at)} Click {which} token to look from there.", ("",), [[whole]])
    spans = windows({**dict.fromkeys(weights, KEY), at.row: QUERY}, at.length)
    cells: list[list[TextCell]] = [
        [_back(at.row, span), stretch(words, span, weights, {at.row}, ways)] for span in spans
    ]
    return passage_table(_how(at), ("tokens back", "text"), cells)


def _how(at: At) -> str:
    return f"Layer {at.layer}, head {at.head} under {at.model}: the more colour a token has, the more weight it gets."


def _back(query: int, span: range) -> str:
    return "here" if query in span else f"{query - span.stop + 1:,} to {query - span.start:,}"


def _rows(run: Run, at: At, words: Text) -> Iterator[Passage]:
    """The tokens that can be chosen, in what stands around each, where the text is not shown whole."""
    if at.length <= WHOLE:
        return
    ways = {query: query_link(row=query) for query in queries(run, at.place)}
    told: list[Token] = []
    for span in windows(dict.fromkeys(ways, OTHER), at.length):
        told += [*stretch(words, span, {}, {at.row}, ways), Token(" … ")]
    yield passage_table(f"The {len(ways):,} tokens whose rows were kept, underlined.", ("",), [[told]])


def _under_each(run: Run, at: At, words: Text, models: Sequence[str]) -> Iterator[Block]:
    """Weights of the keys that lead the row under any model, and how they differ from the first model's."""
    tops: dict[str, pd.Series] = {}
    for label in models:
        top = row(run, (label, *at.place[1:]), at.row) if same_tokens(run, at.doc, at.model, label) else None
        if top is not None and len(top):
            tops[label] = top.set_index("key")["weight"].astype("float64")
    order = {int(key): None for label in (at.model, *tops) for key in tops[label].index}
    first, *others = [label for label in models if label in tops]
    names = ["token", "tokens back", *tops, *(f"{label} − {first}" for label in others)]
    cells: list[list[TextCell]] = []
    for key in order:
        weights = [_weight(top, key) for top in tops.values()]
        changes = [_change(tops[first], tops[label], key) for label in others]
        seen = stretch(words, words.about(key, 4, 2), {}, {key})
        cells.append([seen, f"{at.row - key:,}", *weights, *changes])
    yield passage_table("Keys among the leading ones of this row under any model.", names, cells)
    if left := [label for label in models if label not in tops]:
        yield TextBlock([f"Left out, as this row of this text was not kept in the same tokens: {', '.join(left)}."])


def _weight(top: pd.Series, key: int) -> TextCell:
    if key in top.index:
        return [Token(number(top[key]), float(top[key]))]
    return f"≤ {_up(_rest(top)):.3f}"


def _rest(top: pd.Series) -> float:
    """The most that a key which is not among the leading ones can have."""
    return max(0.0, min(float(top.min()), 1 - float(top.sum())))


def _change(first: pd.Series, other: pd.Series, key: int) -> str:
    """The difference; a bound where one of the two was not among the leading keys."""
    if key in first.index and key in other.index:
        return _signed(other[key] - first[key])
    if key in first.index:
        return f"≤ {_signed(_up(_rest(other) - first[key]))}"
    return f"≥ {_signed(-_up(_rest(first) - other[key]))}" if key in other.index else ""


def _signed(change: float) -> str:
    told = f"{change:+.3f}"
    return "0.000" if told in ("+0.000", "-0.000") else told.replace("-", "−")


def _up(bound: float) -> float:
    """The bound as it is shown: still one where its third digit is the last."""
    return math.ceil(1000 * bound - 1e-3) / 1000
