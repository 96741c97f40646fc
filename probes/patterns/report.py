"""Charts and glossary of attention patterns."""

import html
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.rendering.explorer_blocks import Passage
from headscope.rendering.token_spans import mark_token
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from probes.patterns import PROBE, maps
from probes.patterns.analysis import MAX_FAR_ROWS, document_text, layers_and_heads, mapped_models, top_far_rows
from probes.patterns.lens import far_rows_table
from probes.patterns.prompt_rows import prompt_rows

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
    if chart := maps.head_map_chart(run, model, layer, head):
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
        (": ".join(filter(None, [f"L{layer}H{head}", reason.partition(";")[0]])), head_map)
        for (layer, head), reason in heads.items()
        if (head_map := maps.head_map(context.run, label, layer, head))
    ]
    if head_maps:
        yield Chart(
            maps.plot_map_gallery(context.run, head_maps, f"Attention maps of {kind}: {label}"),
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
