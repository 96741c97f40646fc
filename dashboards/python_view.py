"""A page of the app in Python, as the code of its button "Copy as Python" opens it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from flask import Flask

from dashboards.layout import resolve_url
from dashboards.run_store import RunStore
from dashboards.view_state import parse_query
from headscope.errors import BadInput, did_you_mean
from headscope.plots.head_scatter import highlight_heads
from headscope.rendering.blocks import Card, Chart
from headscope.runs.run import Run


class FiguresByTitle(dict[str, Any]):
    """The plotly figures of a page by title; figures of equal titles are "TITLE (1)", "TITLE (2)", ..."""

    def __missing__(self, title: str) -> Any:
        raise BadInput(f"this page has no figure {title!r}{did_you_mean(title, self)}. It has: {'; '.join(self)}")


@dataclass(frozen=True)
class PythonView:
    """A page of the app: its runs, the rows of `run.heads` that pass its filters, and its figures."""

    run: Run
    heads: pd.DataFrame
    figures: FiguresByTitle


def open_view(folder: Path | str, address: str) -> PythonView:
    """A page of the app: `address` is its path and query, `folder` holds its runs.

    Raises BadInput for an unknown page, run or head.
    """
    path, _, search = address.partition("?")
    server, figures = Flask("headscope"), FiguresByTitle()
    server.config["RUN_STORE"] = RunStore(Path(folder), is_read_only=True)
    with server.app_context():
        _, run, view, content = resolve_url(path, parse_query(search))
        blocks = [block for section in content.sections.values() for block in section]
    charts = [block for block in blocks if isinstance(block, Chart | Card)]
    counts, numbers = Counter(figure_title(block.figure) for block in charts), Counter[str]()
    for block in charts:
        title = figure_title(block.figure)
        numbers[title] += 1
        key = f"{title} ({numbers[title]})" if counts[title] > 1 else title
        figures[key] = highlight_heads(block.figure, view.selected_heads)
    return PythonView(run, view.filter_heads(run.heads), figures)


def figure_title(figure: Any) -> str:
    """The title of a figure on one line."""
    return str(figure.layout.title.text).replace("<br>", " ")
