"""Dash components for the blocks of a page: charts with captions, texts, tables, and the table of heads."""

from collections.abc import Collection, Iterator, Sequence
from functools import singledispatch
from typing import Any

import dash_ag_grid as dag
import numpy as np
from dash import dcc, html

from dashboards import export
from dashboards.view_state import ViewState, describe_statistic
from headscope.base.heads import Head
from headscope.plots.colour_range import colorbar_space, colorbars
from headscope.plots.head_scatter import has_head_points, highlight_heads
from headscope.plots.style import GRAPH_CONFIG, escape_label, set_metadata
from headscope.rendering.blocks import (
    Block,
    Card,
    Chart,
    Claim,
    ClaimTable,
    HeadTable,
    Link,
    Links,
    RecordTable,
    TextBlock,
    TextTable,
)
from headscope.results.words import count_nouns
from headscope.runs.aggregation import HEAD_KEYS
from headscope.runs.column_metadata import capitalise, is_statistic, parse_column, statistic
from headscope.runs.run import short_names

VISIBLE_SENTENCES, MAX_SENTENCES = 4, 6
"""A text of more than `MAX_SENTENCES` is folded after `VISIBLE_SENTENCES`, so that charts come early."""
PLAYGROUND_BLOCK = "playground"
"""Id of the charts of the playground."""
PAGE_ROWS = 50
"""Rows of a page of a table of records."""
HEAD_GRID_OPTIONS = {
    "enableCellTextSelection": True,
    "rowSelection": {"mode": "multiRow", "selectAll": "filtered", "enableClickSelection": False},
    "selectionColumnDef": {"pinned": "left", "width": 40},
}
"""AG Grid's options of the table of heads: a box per row selects its head."""
HEAD_COLUMN_OPTIONS = {
    "sortable": True,
    "filter": "agNumberColumnFilter",
    "resizable": True,
    "minWidth": 64,
    "sortingOrder": ["desc", "asc"],
}
NARROW = {"suppressHeaderFilterButton": True, "minWidth": 56, "width": 72}
LASSO_GRAPH_CONFIG = {**GRAPH_CONFIG, "modeBarButtonsToRemove": ["autoScale2d"]}


@singledispatch
def build_component(block: Block, view: ViewState, block_id: str) -> Any:
    """The component of a block; `block_id` is unique on its page."""
    raise TypeError(f"no component for {type(block).__name__}")


@build_component.register
def _chart_component(block: Chart, view: ViewState, block_id: str) -> html.Figure:
    figure, links = block.figure, [[view.resolve_link(link) for link in row] for row in block.cell_links]
    if links:
        set_metadata(figure, cell_links=links)
    set_metadata(figure, models=[escape_label(label, 200) for label in view.models])
    has_heads, has_points = has_head_points(figure), _has_selectable_points(figure)
    hint = _chart_hint(block, has_heads, has_points, has_heads and _has_matrix(figure))
    return build_chart(block, view.selected_heads, block_id, hint)


def build_chart(block: Chart, selected_heads: Collection[Head], block_id: str, hint: str) -> html.Figure:
    """The component of a chart with these heads highlighted; `hint` says what a click on it does."""
    has_points = _has_selectable_points(block.figure)
    figure = highlight_heads(block.figure, selected_heads)
    has_heads = has_head_points(figure)
    if has_points:
        figure.update_layout(dragmode="lasso")
    if bars := colorbars(figure):
        figure.update_layout(margin_r=max(map(colorbar_space, bars)))
    width = block.least_width
    graph = dcc.Graph(
        id={"chart": block_id, "heads": has_heads},
        figure=figure,
        config=LASSO_GRAPH_CONFIG if has_points else GRAPH_CONFIG,
        style={"height": f"{figure.layout.height}px"} | ({"minWidth": f"{width}px"} if width else {}),
    )
    title = str(figure.layout.title.text).replace("<br>", " ")
    buttons = [
        html.Button(kind.upper(), type="button", **{"data-export": kind, "aria-label": f"{kind.upper()}: {title}"})
        for kind in ("png", "svg", "csv")
    ]
    attributes: dict[str, Any] = {"aria-label": title}
    if width:
        attributes |= {"className": "wide-plot", "tabIndex": 0}
    if has_heads and _has_matrix(figure):
        attributes |= {
            "tabIndex": 0,
            "data-head-matrix": "heads",
            "aria-label": f"{title}; arrow keys move from head to head",
        }
        graph = [graph, html.Span(className="visually-hidden", **{"aria-live": "polite"})]
    if block_id != PLAYGROUND_BLOCK:  # its charts are not part of a run
        attributes_of_copy = {"data-copy-python": title, "aria-label": f"Copy as Python: {title}"}
        buttons.append(html.Button("Python", type="button", title="Copy as Python", **attributes_of_copy))
    explanation = f"{block.explanation}{hint}".strip()
    how_to_read = [html.Details([html.Summary("How to read"), html.P(explanation)])] if explanation else []
    caption = html.Div([html.P(block.line), *how_to_read])
    export = html.Div(buttons, className="export-buttons", role="group", **{"aria-label": f"Save {title}"})
    return html.Figure(
        [html.Div(graph, role="group", **attributes), html.Figcaption([caption, export])],
        className="half-width" if block.half_width else "",
    )


@build_component.register
def _card_component(block: Card, view: ViewState, block_id: str) -> html.Article:
    figure = block.picture
    title = str(block.figure.layout.title.text).replace("<br>", " ")
    graph = dcc.Graph(
        id={"chart": block_id, "heads": has_head_points(figure)},
        figure=figure,
        config={**GRAPH_CONFIG, "displayModeBar": False},
        style={"height": f"{figure.layout.height}px"},
    )
    question = html.H2(html.A(block.question, href=view.resolve_link(block.href)))
    picture = html.Div(graph, role="group", **{"aria-label": title})
    return html.Article([question, picture, html.P(block.caption)], className="card")


def _has_matrix(figure: Any) -> bool:
    return any(trace.type == "heatmap" for trace in figure.data)


def _chart_hint(block: Chart, has_heads: bool, has_points: bool, is_matrix: bool) -> str:
    """How to open or select what the chart shows."""
    if is_matrix:
        return " Click a head to open it, shift-click to select it, or move with the arrow keys and press Enter."
    if has_points:
        return " Click a head to open it, shift-click to select it; draw a lasso to select several."
    if has_heads:
        return " Click a head to open it."
    return " Click a cell to open it." if block.cell_links else ""


def _has_selectable_points(figure: Any) -> bool:
    """Whether the points of the figure are single heads: not cells of a matrix, not whole KV groups."""
    if not has_head_points(figure) or any(trace.type == "heatmap" for trace in figure.data):
        return False
    return all(point[1] >= 0 for trace in figure.data if trace.customdata is not None for point in trace.customdata)


@build_component.register
def _text_component(block: TextBlock, view: ViewState, block_id: str) -> html.Div:
    items = [html.Li(sentence) for sentence in block.sentences]
    is_single = len(items) == 1 and not block.heading
    parts: list[Any] = [html.P(block.sentences[0]) if is_single else html.Ul(items)]
    if not block.collapsed and len(items) > MAX_SENTENCES:
        more = html.Summary(f"{len(items) - VISIBLE_SENTENCES} more sentences")
        parts = [html.Ul(items[:VISIBLE_SENTENCES]), html.Details([more, html.Ul(items[VISIBLE_SENTENCES:])])]
    if block.command:
        copy = html.Button("Copy", type="button", **{"data-copy-text": block.command, "aria-label": "Copy the command"})
        parts.append(html.Div([html.Pre(html.Code(block.command)), copy], className="command"))
    if block.links:
        parts.append(_links_component(block.links, view, block_id))
    if block.collapsed:
        count = f" ({len(block.sentences)})"
        return html.Details([html.Summary([html.H3(block.heading), count]), *parts], className="text-block")
    if not block.heading:
        return html.Div(parts, className="text-block")
    return html.Div([html.H3(block.heading), *parts], className="text-block")


@build_component.register
def _links_component(block: Links, view: ViewState, block_id: str) -> html.Div:
    return html.Div([html.A(link.text, href=link_href(link, view)) for link in block.links], className="toolbar")


@build_component.register
def _table_component(block: TextTable, view: ViewState, block_id: str) -> html.Div:
    head = html.Thead(html.Tr([*map(column_header, block.column_names)]))
    body = html.Tbody([html.Tr([*_row_cells(block, row, view)]) for row in block.rows])
    return scrolling_table(block, html.Table([html.Caption(block.caption), head, body]))


def column_header(name: str) -> html.Th | html.Td:
    """The header of a column; a column without a name has none."""
    return html.Th(name, scope="col") if name else html.Td()


def _evidence(claim: Claim) -> list[html.P]:
    criterion = [html.P(f"Our criterion: {claim.criterion}.")] if claim.criterion else []
    return [html.P(f"{claim.evidence}."), *criterion]


@build_component.register
def _claims_component(block: ClaimTable, view: ViewState, block_id: str) -> html.Div:
    rows = [
        html.Tr(
            [
                html.Td(
                    [html.Span(claim.mark, **{"aria-hidden": "true"}), f" {claim.verdict}"],
                    className=claim.verdict.replace(" ", "-"),
                ),
                html.Td([claim.statement, html.Details([html.Summary("Evidence"), *_evidence(claim)])]),
            ]
        )
        for claim in block.claims
    ]
    head = html.Thead(html.Tr([html.Th("verdict", scope="col"), html.Th("claim", scope="col")]))
    table = html.Table([head, html.Tbody(rows)], className="claims")
    return html.Div(table, className="scroll", role="region", tabIndex=0, **{"aria-label": "Claims of the paper"})


def scrolling_table(block: TextTable, table: html.Table, class_name: str = "scroll") -> html.Div:
    """The table in a frame that scrolls; a collapsed one opens on request."""
    label = {"aria-label": block.caption}
    frame = html.Div(table, className=class_name, role="region", tabIndex=0, **label)
    if block.collapsed:
        return html.Div(html.Details([html.Summary(block.caption), frame], className="text-block"))
    return html.Div(frame, className="half-width") if block.half_width else frame


def link_href(link: Link, view: ViewState) -> str:
    """The address of a link; one within the app that names no run keeps the state of the page."""
    is_partial = link.href.startswith(("/", "?")) and "run=" not in link.href
    return view.resolve_link(link.href) if is_partial else link.href


def _cell_content(cell: str | Link | Links, view: ViewState) -> Any:
    if isinstance(cell, Links):
        return [part for link in cell.links for part in (_cell_content(link, view), " ")]
    return html.A(cell.text, href=link_href(cell, view)) if isinstance(cell, Link) else cell


def _row_cells(table: TextTable, row: Any, view: ViewState) -> Iterator[Any]:
    for index, cell in enumerate(row):
        content = _cell_content(cell, view)
        if index == 0 and isinstance(cell, str) and cell in table.definitions:
            content = html.Details([html.Summary(cell), html.P(table.definitions[cell])])
        yield html.Th(content, scope="row") if index == 0 else html.Td(content)


@build_component.register
def _head_table_component(block: HeadTable, view: ViewState, block_id: str) -> html.Div:
    heads = block.heads
    rows = heads.replace([np.inf, -np.inf], np.nan).astype(object).where(heads.notna(), None)
    selected = [f"{layer}.{head}" for layer, head in sorted(view.selected_heads)]
    state = ", filtered" if view.has_filters else ""
    state += f", {len(selected)} selected" if selected else ""
    tools = [
        html.Span(f"{block.caption}: {count_nouns(len(rows), 'heads')}{state}.", id="head-table-count"),
        html.Button("CSV", id="head-table-csv", type="button"),
    ]
    hover = {"cellMouseOver": ["hoverHeadRow(params)"], "cellMouseOut": ["hoverHeadRow(params)"]}
    table = dag.AgGrid(
        id="head-table",
        rowData=rows.to_dict("records"),
        columnDefs=[_column_definition(str(name), block.highlighted_column, view) for name in block.heads],
        filterModel=dict(view.column_filters),
        getRowId="params.data.layer + '.' + params.data.head",
        selectedRows={"ids": selected},
        defaultColDef=HEAD_COLUMN_OPTIONS,
        columnSize="autoSize",
        csvExportParams={"fileName": _table_file_name(block, view)},
        eventListeners={"cellKeyDown": ["openHeadCell(params)"], "cellClicked": ["openHeadCell(params)"], **hover},
        dashGridOptions={**HEAD_GRID_OPTIONS, "animateRows": False, "tooltipShowDelay": 200},
        style={"height": _table_height(len(rows), 66)},
    )
    return html.Div([html.Div(tools, className="toolbar"), table], className="half-width head-table")


def _table_file_name(block: HeadTable, view: ViewState) -> str:
    """The file name of the table: its model, statistic, runs and filters."""
    runs = view.query.get("run", [])
    parts = [
        "heads",
        block.caption,
        block.highlighted_column,
        *short_names([runs] if isinstance(runs, str) else [*runs]),
    ]
    return f"{export.to_slug(' '.join([*parts, *view.describe_filters()]), 150)}.csv"


@build_component.register
def _records_component(block: RecordTable, view: ViewState, block_id: str) -> html.Div:
    table = dag.AgGrid(
        id={"record-table": block_id},
        rowData=[dict(row) for row in block.rows],
        columnDefs=[
            {"field": name, "filter": _filter_type(block.rows, name), "floatingFilter": True, "tooltipField": name}
            for name in block.column_names
        ],
        defaultColDef={"sortable": True, "resizable": True, "minWidth": 90, "maxWidth": 360},
        columnSize="autoSize",
        eventListeners={"cellClicked": ["openRecord(params)"], "cellKeyDown": ["openRecord(params)"]},
        dashGridOptions={"animateRows": False, "tooltipShowDelay": 200, **_pagination(len(block.rows))},
        style={"height": _table_height(len(block.rows), 116)},
    )
    return html.Div([html.Div(html.Span(f"{block.caption}."), className="toolbar"), table])


def _pagination(row_count: int) -> dict[str, Any]:
    """AG Grid's options for pages of PAGE_ROWS rows; none for a table that fits on one page."""
    is_long = row_count > PAGE_ROWS
    return {"pagination": True, "paginationPageSize": PAGE_ROWS, "paginationPageSizeSelector": False} if is_long else {}


def _table_height(row_count: int, header_height: int) -> str:
    """CSS height of a table of so many rows under a header of `header_height` px, limited to part of the window."""
    return f"min({header_height + 42 * max(row_count, 2)}px, 560px, 70vh)"


def _filter_type(rows: Sequence[Any], column_name: str) -> str:
    numbers = any(isinstance(row[column_name], int | float) for row in rows)
    return "agNumberColumnFilter" if numbers else "agTextColumnFilter"


def _column_definition(name: str, highlighted_column: str, view: ViewState) -> dict[str, Any]:
    """AG Grid's definition of one column of the per-head table."""
    parsed = parse_column(name)
    definition: dict[str, Any] = {"field": name, "headerName": name}
    if name == (view.sort[0] if view.sort else highlighted_column):
        definition["sort"] = view.sort[1] if view.sort else "desc"
    if name in HEAD_KEYS:
        label = {"layer": "layer", "head": "head", "kv_group": "KV group"}[name]
        return definition | {"headerName": label, "pinned": "left" if name != "kv_group" else None, **NARROW}
    if parsed.ending == "method" and is_statistic(parsed.value_column):
        described = statistic(name)
        return definition | {"headerName": described.label, "headerTooltip": f"{capitalise(described.meaning)}."}
    definition["useValueFormatterForExport"] = False
    definition["valueFormatter"] = {"function": "params.value == null ? '–' : d3.format(',.4~g')(params.value)"}
    if is_statistic(parsed.value_column):
        end = f", {parsed.ending}" if parsed.ending else ""
        definition["headerName"] = statistic(parsed.value_column).label + end
        definition["headerTooltip"] = describe_statistic(parsed.value_column)
    if name == "change":
        definition["headerTooltip"] = "Ratio to the baseline for logarithmic statistics, else difference from it."
    if name == highlighted_column:
        definition["cellClass"] = "highlight"
    return definition
