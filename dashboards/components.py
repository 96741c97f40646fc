"""Parts of a page as Dash components: charts with their captions, tables, and the grid of heads."""

from collections.abc import Iterator, Sequence
from functools import singledispatch
from typing import Any

import dash_ag_grid as dag
import numpy as np
from dash import dcc, html

from dashboards.grid import select_rows
from dashboards.view_state import ViewState, describe_statistic
from headscope.plots.highlight import has_head_points, highlight_heads
from headscope.plots.style import GRAPH_CONFIG
from headscope.report.blocks import Block, Chart, HeadTable, Link, Links, RecordTable, TextBlock, TextTable
from headscope.runs.aggregation import HEAD_KEYS
from headscope.runs.column_metadata import column, is_statistic, statistic

VISIBLE_SENTENCES, MAX_SENTENCES = 4, 6
"""So many sentences are seen of more than so many: a page shows before it tells."""
LASSO_GRAPH_CONFIG = {**GRAPH_CONFIG, "modeBarButtonsToRemove": ["autoScale2d"]}


@singledispatch
def build_component(block: Block, view: ViewState, block_id: str) -> Any:
    """The part on screen; `key` tells it from others of its page."""
    raise TypeError(f"no component for {type(block).__name__}")


@build_component.register
def _chart_component(block: Chart, view: ViewState, block_id: str) -> html.Figure:
    figure = highlight_heads(block.figure, view.selected_heads)
    heads, points = has_head_points(figure), _has_selectable_points(block.figure)
    if points:
        figure.update_layout(dragmode="lasso")
    if _has_colorbar(block.figure):
        figure.update_layout(margin_r=100)  # plotly draws a chart twice whose margin it has to widen
    if block.cell_links:
        ways = [[view.resolve_link(way) for way in row] for row in block.cell_links]
        figure.update_layout(meta={**(figure.layout.meta or {}), "cell_links": ways})
    graph = dcc.Graph(
        id={"chart": block_id, "heads": heads},
        figure=figure,
        config=LASSO_GRAPH_CONFIG if points else GRAPH_CONFIG,
        style={"height": f"{figure.layout.height}px"},
    )
    hint = (
        " Click a head to open it, with shift to pick it; draw around points to pick them."
        if points
        else " Click a head to open it."
    )
    elsewhere = " Click a cell to open what is in it." if block.cell_links else ""
    caption = [block.caption, hint if heads else elsewhere, " ", html.B(block.summary)]
    title = str(figure.layout.title.text).replace("<br>", " ")
    saves = [
        html.Button(kind.upper(), type="button", **{"data-save": kind, "aria-label": f"{kind.upper()}: {title}"})
        for kind in ("png", "svg", "csv")
    ]
    held: dict[str, Any] = {"aria-label": title}
    if heads and any(trace.type == "heatmap" for trace in figure.data):
        hint = " Click a head to open it, with shift to pick it, or go there with the arrow keys and Enter."
        caption[1] = hint
        held |= {"tabIndex": 0, "data-matrix": "heads", "aria-label": f"{title}; arrow keys go from head to head"}
        graph = [graph, html.Span(className="unseen", **{"aria-live": "polite"})]
    return html.Figure(
        [
            html.Div(graph, role="group", **held),
            html.Figcaption(
                [html.P(caption), html.Div(saves, className="saves", role="group", **{"aria-label": f"Save {title}"})]
            ),
        ],
        className="half" if block.half_width else "",
    )


def _has_colorbar(figure: Any) -> bool:
    """Whether a bar beside the figure tells what its colours mean."""
    return bool(figure.layout.coloraxis.colorbar.title.text) or any(
        trace.type == "heatmap" and trace.showscale is not False for trace in figure.data
    )


def _has_selectable_points(figure: Any) -> bool:
    """Whether the figure has points that are single heads: not cells, not whole key groups."""
    if not has_head_points(figure) or any(trace.type == "heatmap" for trace in figure.data):
        return False
    return all(place[1] >= 0 for trace in figure.data if trace.customdata is not None for place in trace.customdata)


@build_component.register
def _text_component(block: TextBlock, view: ViewState, block_id: str) -> html.Div:
    every = [html.Li(sentence) for sentence in block.sentences]
    told: list[Any] = [html.Ul(every)]
    if not block.collapsed and len(every) > MAX_SENTENCES:
        more = html.Summary(f"{len(every) - VISIBLE_SENTENCES} more sentences")
        told = [html.Ul(every[:VISIBLE_SENTENCES]), html.Details([more, html.Ul(every[VISIBLE_SENTENCES:])])]
    if block.links:
        told.append(_links_component(block.links, view, block_id))
    if block.collapsed:
        count = f" ({len(block.sentences)})"
        return html.Details([html.Summary([html.H3(block.heading), count]), *told], className="words")
    if not block.heading:
        return html.Div(told, className="words")
    return html.Div([html.H3(block.heading), *told], className="words")


@build_component.register
def _links_component(block: Links, view: ViewState, block_id: str) -> html.Div:
    return html.Div([html.A(link.text, href=link.href) for link in block.links], className="tools")


@build_component.register
def _table_component(block: TextTable, view: ViewState, block_id: str) -> html.Div:
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in block.column_names]))
    body = html.Tbody([html.Tr([*_row_cells(block, row)]) for row in block.rows])
    return html.Div(
        html.Table([html.Caption(block.caption), head, body]),
        className="scroll",
        role="region",
        tabIndex=0,
        **{"aria-label": block.caption},
    )


def _cell_content(cell: str | Link | Links) -> Any:
    if isinstance(cell, Links):
        return [part for link in cell.links for part in (_cell_content(link), " ")]
    return html.A(cell.text, href=cell.href) if isinstance(cell, Link) else cell


def _row_cells(table: TextTable, row: Any) -> Iterator[Any]:
    for at, cell in enumerate(row):
        shown = _cell_content(cell)
        if at == 0 and isinstance(cell, str) and cell in table.definitions:
            shown = html.Details([html.Summary(cell), html.P(table.definitions[cell])])
        yield html.Th(shown, scope="row") if at == 0 else html.Td(shown)


@build_component.register
def _head_table_component(block: HeadTable, view: ViewState, block_id: str) -> html.Div:
    heads = select_rows(block.heads, view)
    rows = heads.replace([np.inf, -np.inf], np.nan).astype(object).where(heads.notna(), None)
    count = f"{len(rows):,} heads" + (", picked" if view.selected_heads else ", filtered" if view.has_filters else "")
    tools = [
        html.Span(f"{block.caption}: {count}.", id="grid-count"),
        html.Button("CSV", id="grid-csv", type="button"),
    ]
    grid = dag.AgGrid(
        id="grid",
        rowData=rows.to_dict("records"),
        columnDefs=[_column_definition(str(name), block.highlighted_column, view) for name in block.heads],
        filterModel=dict(view.column_filters),
        defaultColDef={"sortable": True, "filter": "agNumberColumnFilter", "resizable": True, "minWidth": 84},
        columnSize="autoSize",
        csvExportParams={"fileName": f"heads-{block.caption}-{block.highlighted_column}.csv"},
        eventListeners={"cellKeyDown": ["openHead(params)"], "cellClicked": ["openHead(params)"]},
        dashGridOptions={"animateRows": False, "tooltipShowDelay": 200, "enableCellTextSelection": True},
        style={"height": _table_height(len(rows), 66)},
    )
    return html.Div([html.Div(tools, className="tools"), grid])


@build_component.register
def _records_component(block: RecordTable, view: ViewState, block_id: str) -> html.Div:
    grid = dag.AgGrid(
        id={"records": block_id},
        rowData=[dict(row) for row in block.rows],
        columnDefs=[
            {"field": name, "filter": _filter_type(block.rows, name), "floatingFilter": True, "tooltipField": name}
            for name in block.column_names
        ],
        defaultColDef={"sortable": True, "resizable": True, "minWidth": 90, "maxWidth": 360},
        columnSize="autoSize",
        eventListeners={"cellClicked": ["openRow(params)"], "cellKeyDown": ["openRow(params)"]},
        dashGridOptions={"animateRows": False, "tooltipShowDelay": 200},
        style={"height": _table_height(len(block.rows), 116)},
    )
    return html.Div([html.Div(html.Span(f"{block.caption}."), className="tools"), grid])


def _table_height(row_count: int, header_height: int) -> str:
    """Of a grid: that of its rows under a head of so many px, and no more than a part of the window."""
    return f"min({header_height + 42 * max(row_count, 2)}px, 560px, 70vh)"


def _filter_type(rows: Sequence[Any], column_name: str) -> str:
    numbers = any(isinstance(row[column_name], int | float) for row in rows)
    return "agNumberColumnFilter" if numbers else "agTextColumnFilter"


def _column_definition(name: str, highlight: str, view: ViewState) -> dict[str, Any]:
    """How the grid shows one column of the wide table, or one derived from it."""
    at = column(name)
    shown: dict[str, Any] = {"field": name, "headerName": name}
    if view.sort and view.sort[0] == name:
        shown["sort"] = view.sort[1]
    if name in HEAD_KEYS:
        called = {"layer": "layer", "head": "head", "kv_group": "key group"}[name]
        return shown | {"headerName": called, "pinned": "left" if name != "kv_group" else None, "width": 84}
    shown["useValueFormatterForExport"] = False
    shown["valueFormatter"] = {"function": "params.value == null ? '–' : d3.format(',.4~g')(params.value)"}
    if is_statistic(at.value):
        end = f", {at.end}" if at.end else ""
        shown |= {"headerName": statistic(at.value).label + end, "headerTooltip": describe_statistic(at.value)}
    if name == "change":
        shown["headerTooltip"] = "Value over baseline where the statistic is logarithmic, else value less baseline."
    if name == highlight:
        shown["cellClass"] = "highlight"
    return shown
