"""A head's most telling rows, as a table."""

import html

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.runs.column_metadata import number
from headscope.runs.run_tables import Stored
from probes.patterns.analysis import MAX_FAR_ROWS, document_text, top_far_rows
from probes.patterns.words import mark_token

ROW_HEIGHT = 30
"""Height of a row in px."""


def plot_far_rows(run: Stored, model: str, layer: int, head: int) -> go.Figure:
    """What the head looks at far back, and from where: its most telling rows over all documents."""
    title = f"What layer {layer}, head {head} finds far back: {style.escape_label(model)}"
    rows = top_far_rows(run, model, layer, head)[:MAX_FAR_ROWS]
    if rows.empty:
        return style.empty_figure(title, "no row sees a token that is neither the first nor within 32 tokens")
    made = style.new_figure(title, 110 + ROW_HEIGHT * len(rows))
    cell = {"align": ["right", "right", "left", "left"], "font": {"color": style.TEXT_COLOUR, "size": 12}}
    plain = {"fill": {"color": "rgba(0,0,0,0)"}, "line": {"color": style.GRID_COLOUR}}
    made.add_table(
        columnwidth=[9, 10, 40, 40],
        header={"values": ["weight", "tokens back", "it looks at", "from"], **cell, **plain},
        cells={"values": [*zip(*_table_cells(run, model, rows), strict=True)], "height": ROW_HEIGHT, **cell, **plain},
    )
    return made.update_layout(margin={"l": 0, "r": 0, "t": 46, "b": 10})


def _table_cells(run: Stored, model: str, rows: pd.DataFrame) -> list[tuple[str, ...]]:
    told: list[tuple[str, ...]] = []
    for doc, query, key, weight, distance in rows.itertuples(index=False, name=None):
        here = document_text(run, model, doc)
        seen, looking = (html.escape(mark_token(here, position), quote=False) for position in (key, query))
        told.append((number(weight), f"{distance:,}", seen, looking))
    return told
