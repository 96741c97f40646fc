"""Charts and glossary of attention patterns: example rows, and pooled maps of heads, compared between models."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from headscope.base.bins import map_blocks
from headscope.plots import style
from headscope.plots.axes import MAX_PANEL_TOKEN_LABELS, escape_token_label
from headscope.plots.colour_range import symmetric_colorbar, symmetric_limit
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.rendering.explorer_blocks import Passage, query_link
from headscope.rendering.token_spans import mark_token, to_display_line, token_labels
from headscope.runs.arrow import decode_map
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from probes.patterns import PROBE
from probes.patterns.lens import far_rows_table
from probes.patterns.results import (
    MAX_FAR_ROWS,
    document_text,
    have_same_tokens,
    layers_and_heads,
    mapped_models,
    prompt_rows,
    stored_queries,
    top_far_rows,
)

LOWEST_DECADE = -4
"""The colour scale of weights ends at 10 to this power; smaller weights have its last colour."""
SCALE_STEPS = 8
"""Colours per decade of the scale of weights."""
PANEL_HEIGHT, TOP_MARGIN = 330, 62
"""Height of a row of panels and the space above it, in px."""
BAR_PLACE = {"x": 1, "len": 0.5, "y": 1, "yanchor": "top", "thickness": 12, "outlinewidth": 0}
"""Plotly settings of a colour bar beside the upper half of the panels."""
BLOCK_TOKENS = 6
"""Tokens of a block that its hover text shows."""
TICKS = 4
"""Intervals between tick labels."""


@dataclass(frozen=True)
class AttentionMap:
    """The pooled map of one head under one model: weights [blocks, blocks] over `length` tokens of a document."""

    model: str
    doc: str
    length: int
    weights: npt.NDArray[np.float64]

    @property
    def first_tokens(self) -> npt.NDArray[np.int64]:
        """The first token of each block."""
        return np.arange(len(self.weights)) * map_blocks(self.length)[0]

    @property
    def last_tokens(self) -> npt.NDArray[np.int64]:
        """The last token of each block."""
        return np.minimum(self.first_tokens + map_blocks(self.length)[0], self.length) - 1


def head_map(run: RunTables, model: str, layer: int, head: int) -> AttentionMap | None:
    """The map of a head, or None if it is not stored."""
    if "attention_maps" not in run.tables:
        return None
    rows = run.rows("attention_maps", model=model, layer=layer, head=head).sort_values("query_block")
    if rows.empty:
        return None
    length, doc = int(rows["context_length"].iloc[0]), str(rows["doc"].iloc[0])
    return AttentionMap(model, doc, length, decode_map(rows["weights"].tolist()))


def head_map_chart(run: Run, model: str, layer: int, head: int) -> Chart | None:
    """The head's map under the first model and under `model`, and their difference; None without a stored map.

    If `model` is the first model, or has no map, the next one is shown beside it. A block links to the stored row
    nearest to it.
    """
    labels = mapped_models(run)
    compared = [model] if model in labels[1:] else labels[1:2]
    maps = [stored for label in (*labels[:1], *compared) if (stored := head_map(run, label, layer, head))]
    if not maps:
        return None
    same_text = len({(pooled_map.doc, pooled_map.length) for pooled_map in maps}) == 1
    links = _row_links(run, maps[0], layer, head)
    missing = "" if model in labels else f" No map of {model} is stored."
    hint = " A block leads to the nearest stored row in Lens." if links else ""
    map_models = [pooled_map.model for pooled_map in maps]
    difference = len(maps) == 2 and same_text and have_same_tokens(run, maps[0].doc, maps[0].length, *map_models)
    size = map_blocks(maps[0].length)[0]
    blocks = f"blocks of {size} tokens" if size > 1 else "single tokens"
    return Chart(
        plot_head_maps(run, maps, layer, head, difference),
        f"Mean weight of the query rows of a block on the keys of a block; {blocks} of {maps[0].doc}, "
        f"{maps[0].length:,} tokens. The colour scale ends at 0.0001.{missing} Drag to zoom.{hint}",
        cell_links=links,
    )


def plot_head_maps(
    run: RunTables, maps: Sequence[AttentionMap], layer: int, head: int, with_difference: bool
) -> go.Figure:
    """One panel per model in a logarithmic colour scale, and with two models the second minus the first."""
    names = [style.escape_label(pooled_map.model, 30) for pooled_map in maps]
    panels = [*names, f"{names[1]} − {names[0]}"] if with_difference else names
    figure = _panels(f"Attention map of layer {layer}, head {head}", panels)
    for index, pooled_map in enumerate(maps):
        _add_map(figure, pooled_map, style.panel_row_col(index, panels))
    if with_difference:
        _add_difference(figure, maps[0], maps[1], style.panel_row_col(2, panels))
    _label_axes(figure, run, maps, len(panels))
    return style.set_metadata(figure, value="weight", x="key token", y="query token")


def plot_map_gallery(run: RunTables, maps: Sequence[tuple[str, AttentionMap]], title: str) -> go.Figure:
    """Maps of several heads of one model in one colour scale, each under its heading."""
    figure = _panels(style.escape_label(title), [style.escape_label(heading, 26) for heading, _ in maps])
    style.set_top_margin(figure, TOP_MARGIN + 16)  # headings of two lines
    for index, (_, pooled_map) in enumerate(maps):
        _add_map(figure, pooled_map, style.panel_row_col(index, maps))
    _label_axes(figure, run, [pooled_map for _, pooled_map in maps], len(maps))
    return style.set_metadata(figure, value="weight", x="key token", y="query token")


def _panels(title: str, headings: Sequence[str]) -> go.Figure:
    figure = style.panel_figure(title, headings, height=PANEL_HEIGHT)
    ticks = [*range(LOWEST_DECADE, 1)]
    texts = [f"{'≤ ' if tick == LOWEST_DECADE else ''}{10.0**tick:g}" for tick in ticks]
    bar = {**BAR_PLACE, "title": {"text": "weight", "font": {"size": 12}}, "tickvals": ticks, "ticktext": texts}
    marker = {"color": [LOWEST_DECADE, 0], "colorscale": style.SEQUENTIAL_SCALE, "showscale": True}
    figure.add_scatter(  # only its colour bar shows: a heat map's own would be linear
        x=[None, None], y=[None, None], mode="markers", marker=marker | {"colorbar": bar}, hoverinfo="skip"
    )
    return style.set_top_margin(figure.update_layout(showlegend=False), TOP_MARGIN)


def _log_colour_scale() -> list[tuple[float, str]]:
    """A colour scale over weights 0 to 1 that is logarithmic down to the lowest decade."""
    shares = np.linspace(0, 1, -LOWEST_DECADE * SCALE_STEPS + 1)
    weights = 10.0 ** (LOWEST_DECADE * (1 - shares))
    colours = sample_colorscale(style.SEQUENTIAL_SCALE, shares.tolist())
    return [(0.0, colours[0]), *zip(weights.tolist(), colours, strict=True)]


def _add_map(figure: go.Figure, pooled_map: AttentionMap, place: dict[str, int]) -> None:
    _add_heat_map(
        figure, pooled_map, pooled_map.weights, "weight %{z:.3g}", place, zmin=0, zmax=1, colorscale=_log_colour_scale()
    )


def _add_difference(figure: go.Figure, first: AttentionMap, second: AttentionMap, place: dict[str, int]) -> None:
    change = np.round(second.weights - first.weights, 4)
    limit = symmetric_limit(change[np.tril_indices(len(change))], minimum=1e-3)
    bar = {**BAR_PLACE, "y": 0, "yanchor": "bottom", "title": {"text": "difference<br> ", "font": {"size": 12}}}
    bar |= {name: labels[::2] for name, labels in symmetric_colorbar(change, limit).items()}  # half a bar holds three
    scale = {"zmin": -limit, "zmax": limit, "colorscale": style.DIVERGING_SCALE}
    _add_heat_map(figure, second, change, "difference %{z:+.3g}", place, **scale, colorbar=bar, showscale=True)


def _add_heat_map(
    figure: go.Figure,
    pooled_map: AttentionMap,
    values: npt.NDArray[np.float64],
    hover: str,
    place: dict[str, int],
    **settings: object,
) -> None:
    visible = np.where(np.tri(len(values), dtype=bool), values, np.nan).astype(np.float32)
    centers = (pooled_map.first_tokens + pooled_map.last_tokens) / 2
    figure.add_heatmap(
        x=centers,
        y=centers,
        z=visible,
        name=style.escape_label(pooled_map.model),
        meta=pooled_map.model,
        hoverongaps=False,
        hovertemplate=f"from %{{y}}<br>to %{{x}}<br>{hover}<extra></extra>",
        **{"showscale": False, **settings},
        **place,
    )


def _label_axes(figure: go.Figure, run: RunTables, maps: Sequence[AttentionMap], panel_count: int) -> None:
    """Name the tokens of a short prompt; label a longer text by some positions.

    Those labels are annotations: the ticks themselves hold the text of each block, for its hover label.
    """
    pooled_map = maps[0]
    is_short = pooled_map.length <= MAX_PANEL_TOKEN_LABELS
    centers = ((pooled_map.first_tokens + pooled_map.last_tokens) / 2).tolist()
    texts = _block_texts(run, pooled_map)
    axis = {"tickvals": centers, "ticktext": texts, "ticks": "", "showgrid": False, "constrain": "domain"}
    x_labels = style.turned_labels(texts, MAX_PANEL_TOKEN_LABELS) if is_short else {}
    y_labels = {"tickfont": {"size": 11}} if is_short else {}
    ends = [-0.5, pooled_map.length - 0.5]
    positions = [] if is_short else np.linspace(0, pooled_map.length - 1, TICKS + 1).round().astype(int).tolist()
    label = {"showarrow": False, "font": {"size": 11, "color": style.TEXT_COLOUR}, "name": "tick"}
    axes: dict[str, object] = {}
    ticks: list[dict[str, object]] = []
    for index in range(panel_count):
        number = "" if index == 0 else index + 1
        is_lowest, is_leftmost = index + 3 >= panel_count, index % 3 == 0
        x_title = {"text": "key token" if is_lowest else None, "standoff": 8 if is_short else 22}
        y_title = {"text": "query token" if is_leftmost else None, "standoff": 8 if is_short else 40}
        x_axis, y_axis = (figure.layout[f"{letter}axis{number}"].to_plotly_json() for letter in "xy")
        x_axis |= {**axis, **x_labels, "showticklabels": is_short and is_lowest, "range": ends, "title": x_title}
        y_axis |= {**axis, **y_labels, "showticklabels": is_short and is_leftmost, "range": ends[::-1]}
        axes[f"xaxis{number}"] = x_axis
        axes[f"yaxis{number}"] = y_axis | {"title": y_title, "scaleanchor": f"x{number}"}
        for position in positions:
            if is_lowest:
                place = {"x": position, "y": 0, "xref": f"x{number}", "yref": f"y{number} domain", "yanchor": "top"}
                ticks.append({**place, "text": f"{position:,}", **label})
            if is_leftmost:
                place = {"x": 0, "y": position, "xref": f"x{number} domain", "yref": f"y{number}", "xanchor": "right"}
                ticks.append({**place, "text": f"{position:,} ", **label})
    figure.update_layout(axes, overwrite=True)  # plotly takes longer to merge settings than to replace them
    style.add_annotations(figure, ticks)


def _block_texts(run: RunTables, pooled_map: AttentionMap) -> list[str]:
    """The tokens of each block: their positions and the first of them as text."""
    text = document_text(run, pooled_map.model, pooled_map.doc).token_texts
    if pooled_map.length == len(pooled_map.weights):
        return [*map(escape_token_label, token_labels(range(pooled_map.length), text[: pooled_map.length]))]
    labels = []
    for first, last in zip(pooled_map.first_tokens.tolist(), pooled_map.last_tokens.tolist(), strict=True):
        span = f"{first:,}–{last:,}" if last > first else f"{first:,}"
        words = to_display_line("".join(text[first : min(last + 1, first + BLOCK_TOKENS)]))
        labels.append(f"{span} “{style.escape_label(words)}{'…' if last >= first + BLOCK_TOKENS else ''}”")
    return labels


def _row_links(run: RunTables, pooled_map: AttentionMap, layer: int, head: int) -> list[list[str]]:
    """For each block of query rows, one link to the stored row nearest to its middle."""
    if "top_keys" not in run.tables:
        return []
    queries = np.array(stored_queries(run, (pooled_map.model, pooled_map.length, pooled_map.doc, layer, head)))
    if not len(queries):
        return []
    middles = (pooled_map.first_tokens + pooled_map.last_tokens) / 2
    nearest = queries[np.abs(queries - middles[:, None]).argmin(1)]
    place = {"doc": pooled_map.doc, "length": pooled_map.length, "layer": layer, "head": head}
    return [[query_link(PROBE.explorer_path, **place, row=query)] for query in nearest.tolist()]


CARD_ROWS = 3
"""Top far rows on the card of a head."""
MAPPED_HEADS = 3
"""Attention maps in the report of a run without notable heads."""

GLOSSARY = (
    Term(
        "Top far row",
        "A row holds the weights that a head gives, from one query token, to the tokens before it. Most weight "
        "usually goes to the first token and to nearby tokens. A top far row has a large weight on one token that is "
        "neither the first nor within 32 tokens.",
        tables=("far_keys",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Maps of notable heads, and top far rows."""
    yield ChartGroup(PROBE.title, "Attention maps", _map_charts(context))
    yield ChartGroup(PROBE.title, "Top far rows", _far_row_charts(context))


def head_card(run: Run, model: str, layer: int, head: int) -> Iterator[Chart | Passage]:
    """The head's attention map, and its three top far rows."""
    if chart := head_map_chart(run, model, layer, head):
        yield chart
    if "far_keys" in run.tables and len(run.rows("far_keys", layer=layer, head=head)):
        yield replace(far_rows_table(run, model, layer, head, CARD_ROWS), half_width=True)


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Passage]:
    """All top far rows of the head, linked to the lens."""
    if "far_keys" in run.tables and len(run.rows("far_keys", layer=layer, head=head)) > CARD_ROWS:
        yield far_rows_table(run, model, layer, head)


def _map_charts(context: RenderContext) -> Iterator[Chart]:
    """Maps of the notable heads under the first model that has maps; without any, of the heads of top far weight, or of
    heads from the first to the last layer."""
    label = next((name for name in mapped_models(context.run) if name in context.models), "")
    heads, kind = context.notable_heads, "notable heads"
    if rows := prompt_rows(context.run, label):
        heads, kind = {(row.layer, row.head): "" for row in rows}, "the strongest attention"
    elif not heads and label in (values := context.finite_values("far_weight")):
        leading = context.heads.loc[values[label].nlargest(MAPPED_HEADS).index]
        heads, kind = dict.fromkeys(layers_and_heads(leading), "top far weight"), "heads of top far weight"
    elif not heads and label:
        mapped = layers_and_heads(context.run.table("attention_maps")[["layer", "head"]].drop_duplicates())
        spread = np.linspace(0, len(mapped) - 1, MAPPED_HEADS).astype(int)
        heads, kind = {mapped[index]: "" for index in spread}, "heads from the first to the last layer"
    head_maps = [
        (": ".join(filter(None, [f"L{layer}H{head}", reason.partition(";")[0]])), stored)
        for (layer, head), reason in heads.items()
        if (stored := head_map(context.run, label, layer, head))
    ]
    if head_maps:
        yield Chart(
            plot_map_gallery(context.run, head_maps, f"Attention maps of {kind}: {label}"),
            f"Mean weight of the query rows of a block of tokens on the keys of a block, over {head_maps[0][1].doc}. "
            "In the app, every head has its map on its page.",
        )


def _far_row_charts(context: RenderContext) -> Iterator[Chart]:
    for label, values in list(context.finite_values("far_weight").items())[:1]:
        leading = context.heads.loc[values.sort_values().index[-3:][::-1]]
        for layer, head in leading[["layer", "head"]].itertuples(index=False, name=None):
            yield _far_rows_chart(context.run, label, int(layer), int(head))


def _far_rows_chart(run: Run, model: str, layer: int, head: int) -> Chart:
    return Chart(
        plot_far_rows(run, model, layer, head),
        "Stored rows with the largest weight on one distant token. ‹ › marks the token within its context.",
    )


ROW_HEIGHT = 30
"""Height of a table row in px."""


def plot_far_rows(run: RunTables, model: str, layer: int, head: int) -> go.Figure:
    """A table of the head's top far rows over all documents: weight, distance, attended token and query token."""
    title = f"Top far rows of layer {layer}, head {head}: {style.escape_label(model)}"
    rows = top_far_rows(run, model, layer, head)[:MAX_FAR_ROWS]
    if rows.empty:
        return style.empty_figure(title, "every visible token is the first one or within 32 tokens")
    figure = style.new_figure(title, 110 + ROW_HEIGHT * len(rows))
    cell = {"align": ["right", "right", "left", "left"], "font": {"color": style.TEXT_COLOUR, "size": 12}}
    background = {"fill": {"color": "rgba(0,0,0,0)"}, "line": {"color": style.GRID_COLOUR}}
    values = [*zip(*_table_cells(run, model, rows), strict=True)]
    figure.add_table(
        columnwidth=[9, 10, 40, 40],
        header={"values": ["weight", "distance", "attended token", "query token"], **cell, **background},
        cells={"values": values, "height": ROW_HEIGHT, **cell, **background},
    )
    return figure.update_layout(margin={"l": 0, "r": 0, "t": 46, "b": 10})


def _table_cells(run: RunTables, model: str, rows: pd.DataFrame) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = []
    for doc, query, key, weight, distance in rows.itertuples(index=False, name=None):
        text = document_text(run, model, doc)
        key_text, query_text = (html.escape(mark_token(text, position), quote=False) for position in (key, query))
        cells.append((format_number(weight), f"{distance:,}", key_text, query_text))
    return cells
