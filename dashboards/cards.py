"""Parts of a page as Dash components: charts with their captions, tables, and the grid of heads."""

from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import dash_ag_grid as dag
import numpy as np
from dash import dcc, html

from dashboards.view import View, described
from headscope.figures.marks import mark
from headscope.figures.style import GRAPH_CONFIG
from headscope.report.content import Chart, Grid, Link, Links, Listing, Piece, Words
from headscope.runs.means import HEAD_KEYS
from headscope.runs.statistics import column, is_statistic, statistic

LASSO = {**GRAPH_CONFIG, "modeBarButtonsToRemove": ["autoScale2d"]}


@singledispatch
def component(part: Piece, view: View, key: str) -> Any:
    """The part on screen; `key` tells it from others of its page."""
    raise TypeError(f"no component for {type(part).__name__}")


@component.register
def _chart(part: Chart, view: View, key: str) -> html.Figure:
    figure = mark(part.figure, view.picked)
    heads, points = figure.layout.meta == "heads", _can_be_picked(part.figure)
    if points:
        figure.update_layout(dragmode="lasso")
    graph = dcc.Graph(
        id={"chart": key, "heads": heads},
        figure=figure,
        config=LASSO if points else GRAPH_CONFIG,
        style={"height": f"{figure.layout.height}px"},
    )
    hint = " Click a head to open it; draw around points to pick them." if points else " Click a head to open it."
    caption = [part.caption, hint if heads else "", " ", html.B(part.summary)]
    title = str(figure.layout.title.text)
    saves = [
        html.Button(kind.upper(), type="button", **{"data-save": kind, "aria-label": f"{kind.upper()}: {title}"})
        for kind in ("png", "svg", "csv")
    ]
    return html.Figure(
        [
            html.Div(graph, role="group", **{"aria-label": title}),
            html.Figcaption(
                [html.P(caption), html.Div(saves, className="saves", role="group", **{"aria-label": f"Save {title}"})]
            ),
        ],
        className="half" if part.half else "",
    )


def _can_be_picked(figure: Any) -> bool:
    """Whether the figure has points that are single heads: not cells, not whole key groups."""
    if figure.layout.meta != "heads" or any(trace.type == "heatmap" for trace in figure.data):
        return False
    return all(place[1] >= 0 for trace in figure.data if trace.customdata is not None for place in trace.customdata)


@component.register
def _words(part: Words, view: View, key: str) -> html.Div:
    told = html.Ul([html.Li(sentence) for sentence in part.sentences])
    if not part.heading:
        return html.Div(told, className="whole words")
    return html.Div([html.H3(part.heading), told], className="words")


@component.register
def _links(part: Links, view: View, key: str) -> html.Div:
    return html.Div([html.A(link.text, href=link.href) for link in part.links], className="whole tools")


@component.register
def _table(part: Listing, view: View, key: str) -> html.Div:
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in part.names]))
    body = html.Tbody([html.Tr([*_cells(part, row)]) for row in part.rows])
    return html.Div(
        html.Table([html.Caption(part.caption), head, body]),
        className="scroll",
        role="region",
        tabIndex=0,
        **{"aria-label": part.caption},
    )


def _cells(table: Listing, row: Any) -> Iterator[Any]:
    for at, cell in enumerate(row):
        shown = html.A(cell.text, href=cell.href) if isinstance(cell, Link) else cell
        if at == 0 and cell in table.defined:
            shown = html.Details([html.Summary(cell), html.P(table.defined[cell])])
        yield html.Th(shown, scope="row") if at == 0 else html.Td(shown)


@component.register
def _grid(part: Grid, view: View, key: str) -> html.Div:
    heads = (
        part.heads[part.heads[["layer", "head"]].apply(tuple, axis=1).isin(view.picked)] if view.picked else part.heads
    )
    rows = heads.replace([np.inf, -np.inf], np.nan).astype(object).where(heads.notna(), None)
    count = f"{len(rows):,} heads" + (", picked" if view.picked else ", filtered" if view.filtering else "")
    tools = [
        html.Span(f"{part.caption}: {count}.", id="grid-count"),
        html.Button("CSV", id="grid-csv", type="button"),
    ]
    if view.picked:
        tools.insert(1, html.A("Show all", href=view.link("", "pick")))
    grid = dag.AgGrid(
        id="grid",
        rowData=rows.to_dict("records"),
        columnDefs=[_column(str(name), part.highlight) for name in part.heads],
        defaultColDef={"sortable": True, "filter": "agNumberColumnFilter", "resizable": True, "minWidth": 84},
        columnSize="autoSize",
        csvExportParams={"fileName": "heads.csv"},
        eventListeners={"cellKeyDown": ["openHead(params)"], "cellClicked": ["openHead(params)"]},
        dashGridOptions={"animateRows": False, "tooltipShowDelay": 200, "enableCellTextSelection": True},
        style={"height": "min(560px, 70vh)"},
    )
    return html.Div([html.Div(tools, className="tools"), grid], className="whole")


def _column(name: str, highlight: str) -> dict[str, Any]:
    """How the grid shows one column of the wide table, or one derived from it."""
    at = column(name)
    shown: dict[str, Any] = {"field": name, "headerName": name}
    if name in HEAD_KEYS:
        called = {"layer": "layer", "head": "head", "kv_group": "key group"}[name]
        return shown | {"headerName": called, "pinned": "left" if name != "kv_group" else None, "width": 84}
    shown["useValueFormatterForExport"] = False
    shown["valueFormatter"] = {"function": "params.value == null ? '–' : d3.format(',.4~g')(params.value)"}
    if is_statistic(at.value):
        end = f", {at.end}" if at.end else ""
        shown |= {"headerName": statistic(at.value).label + end, "headerTooltip": described(at.value)}
    if name == "change":
        shown["headerTooltip"] = "Value over baseline where the statistic is logarithmic, else value less baseline."
    if name == highlight:
        shown["cellClass"] = "highlight"
    return shown
