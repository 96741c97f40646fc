"""A page as one HTML file that stands alone: the same content, drawn by the report's templates."""

from dataclasses import replace

from dashboards.view import View
from headscope.figures.marks import mark
from headscope.report import cells
from headscope.report import html as report
from headscope.report.content import Chart, Content, Grid, Link, Links, Listing, Piece
from headscope.runs.run import Run


def saved(content: Content, run: Run, view: View) -> str:
    """The HTML text of a page's content."""
    sections = {
        heading: [_plain(part, view) for part in parts if not isinstance(part, Links)]
        for heading, parts in content.sections.items()
    }
    return report.view(content.title, content.lead, run.name, sections)


def _plain(part: Piece, view: View) -> Piece:
    """The part as it stands on paper: heads marked, links as their text, a grid as a table."""
    match part:
        case Chart():
            mark(part.figure, view.picked)
            return part
        case Listing():
            rows = [[cell.text if isinstance(cell, Link) else cell for cell in row] for row in part.rows]
            return replace(part, rows=rows)
        case Grid():
            return cells.table(part.caption, part.heads)
        case _:
            return part
