"""A page as one HTML file that stands alone: the same content, drawn by the report's templates."""

import re
from dataclasses import replace

from dashboards import grid
from dashboards.view import View
from headscope.plots.highlight import highlight_heads
from headscope.report import html_page as report
from headscope.report import statistics_text
from headscope.report.blocks import Block, Chart, HeadTable, Link, Links, PageContent, RecordTable, TextBlock, TextTable
from headscope.runs.run import Run, short_names


def saved(content: PageContent, run: Run, view: View, address: str = "") -> str:
    """The HTML text of a page's content, which names its runs, what it leaves out, and where it was saved from."""
    sections = {
        heading: [_plain(part, view) for part in parts if not isinstance(part, Links)]
        for heading, parts in content.sections.items()
    }
    facts = {"Runs": run.name, "Address": address}
    if view.filtering:
        facts["Only heads"] = ", ".join(view.filters())
    if view.picked:
        facts["Picked heads"] = ", ".join(f"L{layer}H{head}" for layer, head in sorted(view.picked))
    return report.render_page(
        content.title, content.introduction, {name: told for name, told in facts.items() if told}, sections
    )


def file_name(content: PageContent, run: Run) -> str:
    """A file named after what it shows: the page, and the runs."""
    told = " ".join([content.title, *short_names([part.name for part in run.parts])])
    return f"{re.sub('[^a-z0-9]+', '-', told.lower()).strip('-')[:100]}.html"


def _plain(part: Block, view: View) -> Block:
    """The part as it stands on paper: heads marked, links as their text, a grid as a table."""
    match part:
        case Chart():
            highlight_heads(part.figure, view.picked)
            return part
        case TextTable():
            return replace(part, rows=[[_text(cell) for cell in row] for row in part.rows])
        case TextBlock():
            return replace(part, links=None, collapsed=False)
        case RecordTable():
            rows = [[str(row[name] or "") for name in part.column_names] for row in part.rows]
            return TextTable(part.caption, part.column_names, rows)
        case HeadTable():
            heads = grid.shown(part.heads, view)
            return statistics_text.statistics_table(f"{part.caption}: {len(heads):,} heads", heads)
        case _:
            return part


def _text(cell: str | Link | Links) -> str:
    if isinstance(cell, Links):
        return ", ".join(link.text for link in cell.links)
    return cell.text if isinstance(cell, Link) else cell
