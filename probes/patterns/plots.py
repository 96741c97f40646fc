"""Table of a head's top far rows."""

import html

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.runs.column_metadata import format_number
from headscope.runs.run_tables import RunTables
from probes.patterns.analysis import MAX_FAR_ROWS, document_text, top_far_rows
from probes.patterns.token_spans import mark_token

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
