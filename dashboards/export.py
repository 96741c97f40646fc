"""A page as one HTML file that stands alone: the same content, drawn by the report's templates."""

import re
from dataclasses import replace

from dashboards import grid
from dashboards.view_state import ViewState
from headscope.plots.highlight import highlight_heads
from headscope.report import html_page as report
from headscope.report.blocks import Block, Chart, HeadTable, Link, Links, PageContent, RecordTable, TextBlock, TextTable
from headscope.report.text import statistics_table
from headscope.runs.run import Run, short_names


def render_page_html(content: PageContent, run: Run, view: ViewState, address: str = "") -> str:
    """The HTML text of a page's content, which names its runs, what it leaves out, and where it was saved from."""
    sections = {
        heading: [_printable_block(part, view) for part in parts if not isinstance(part, Links)]
        for heading, parts in content.sections.items()
    }
    facts = {"Runs": run.name, "Address": address}
    if view.has_filters:
        facts["Only heads"] = ", ".join(view.describe_filters())
    if view.selected_heads:
        facts["Picked heads"] = ", ".join(f"L{layer}H{head}" for layer, head in sorted(view.selected_heads))
    return report.render_page(
        content.title, content.introduction, {name: told for name, told in facts.items() if told}, sections
    )


def export_file_name(content: PageContent, run: Run) -> str:
    """A file named after what it shows: the page, and the runs."""
    told = " ".join([content.title, *short_names([part.name for part in run.parts])])
    return f"{re.sub('[^a-z0-9]+', '-', told.lower()).strip('-')[:100]}.html"


def _printable_block(block: Block, view: ViewState) -> Block:
    """The part as it stands on paper: heads marked, links as their text, a grid as a table."""
    match block:
        case Chart():
            highlight_heads(block.figure, view.selected_heads)
            return block
        case TextTable():
            return replace(block, rows=[[_cell_text(cell) for cell in row] for row in block.rows])
        case TextBlock():
            return replace(block, links=None, collapsed=False)
        case RecordTable():
            rows = [[str(row[name] or "") for name in block.column_names] for row in block.rows]
            return TextTable(block.caption, block.column_names, rows)
        case HeadTable():
            heads = grid.visible_rows(block.heads, view)
            return statistics_table(f"{block.caption}: {len(heads):,} heads", heads)
        case _:
            return block


def _cell_text(cell: str | Link | Links) -> str:
    if isinstance(cell, Links):
        return ", ".join(link.text for link in cell.links)
    return cell.text if isinstance(cell, Link) else cell
