"""A page as one HTML file that stands alone: the same content, drawn by the report's templates."""

from typing import Any

from dashboards.content import Content, Grid, Link, Links, Part, Table, Words
from dashboards.view import View
from headscope import report
from headscope.chart import Chart
from headscope.figures.marks import mark
from headscope.store import Run


def saved(content: Content, run: Run, view: View) -> str:
    """The HTML text of a page's content."""
    sections = {
        heading: [_plain(part, view) for part in parts if not isinstance(part, Links)]
        for heading, parts in content.sections.items()
    }
    return report.view(content.title, content.lead, run.name, sections)


def _plain(part: Part, view: View) -> dict[str, Any]:
    match part:
        case Chart():
            mark(part.figure, view.picked)
            return {"chart": part}
        case Words():
            return {"heading": part.heading, "sentences": part.sentences}
        case Table():
            rows = [[cell.text if isinstance(cell, Link) else cell for cell in row] for row in part.rows]
            return {"caption": part.caption, "names": part.names, "rows": rows}
        case Grid():
            return {"caption": part.caption} | report.table_rows(part.heads)
        case _:
            raise TypeError(f"no way to save {type(part).__name__}")
