"""Export of a page as one self-contained HTML file, rendered by the report's templates."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dashboards.view_state import ViewState
from headscope.plots.head_scatter import highlight_heads
from headscope.rendering import html_page as report
from headscope.rendering.blocks import (
    Block,
    Chart,
    HeadTable,
    Link,
    PageContent,
)
from headscope.rendering.static_site import static_block
from headscope.rendering.text import statistics_table
from headscope.results.words import count_nouns
from headscope.runs.run import Run, short_names

COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "equals": operator.eq,
    "notEqual": operator.ne,
    "greaterThan": operator.gt,
    "greaterThanOrEqual": operator.ge,
    "lessThan": operator.lt,
    "lessThanOrEqual": operator.le,
}
"""AG Grid's number filters that compare with one number."""


def render_page_html(content: PageContent, run: Run, view: ViewState, address: str = "") -> str:
    """The page as HTML, with its runs, filters, selected heads and the address that it was saved from."""
    sections = {
        heading: [static for block in blocks if (static := _printable_block(block, view)) is not None]
        for heading, blocks in content.sections.items()
    }
    facts = {"Runs": run.name, "Address": address}
    if view.has_filters:
        facts["Only heads"] = ", ".join(view.describe_filters())
    if view.selected_heads:
        facts["Selected heads"] = ", ".join(f"L{layer}H{head}" for layer, head in sorted(view.selected_heads))
    facts = {name: text for name, text in facts.items() if text}
    return report.render_page(replace(content, sections=sections), facts)


def export_file_name(content: PageContent, run: Run) -> str:
    """A file name from the titles of the page and its runs."""
    text = " ".join([content.title, *short_names([part.name for part in run.parts])])
    return f"{to_slug(text, 100)}.html"


def file_name_suffix(run: Run, view: ViewState) -> str:
    """The runs, and the filters if there are any, as the end of a file name."""
    runs = short_names([part.name for part in run.parts])
    return to_slug(" ".join([*runs, *view.describe_filters()]), 120)


def python_code(folder: Path, address: str) -> str:
    """Code that opens the page at this address."""
    return (
        "from dashboards.python_view import open_view\n\n"
        f"view = open_view({str(folder.resolve())!r}, {address!r})\n"
        "view.run  # every table by name, such as view.run.attention\n"
        "view.heads  # one row per model and head that the page shows\n"
    )


def to_slug(text: str, length: int) -> str:
    """The text as part of a file name, of at most `length` characters."""
    return re.sub("[^a-z0-9.]+", "-", text.lower()).strip("-.")[:length]


def visible_rows(block: HeadTable, view: ViewState) -> pd.DataFrame:
    """The rows of the table of heads as AG Grid shows them: filtered by column, sorted; selected or not."""
    rows = block.heads
    for name, column_filter in view.column_filters.items():
        if name in rows and isinstance(column_filter, Mapping):
            rows = rows[_filter_mask(rows[name], column_filter)]
    column, direction = view.sort or (block.highlighted_column, "desc")
    if column not in rows:
        return rows
    if direction == "asc":
        return rows.sort_values(column, kind="stable", na_position="first")
    return rows.sort_values(column, ascending=False, kind="stable")


def _filter_mask(values: pd.Series, column_filter: Mapping[str, Any]) -> pd.Series:
    """Which values pass a filter of AG Grid; all of them if its kind is unknown."""
    if conditions := column_filter.get("conditions"):
        masks = np.array([_filter_mask(values, condition) for condition in conditions])
        passes = masks.any(axis=0) if column_filter.get("operator") == "OR" else masks.all(axis=0)
        return pd.Series(passes, values.index)
    kind, low, high = str(column_filter.get("type")), column_filter.get("filter"), column_filter.get("filterTo")
    if kind in ("blank", "notBlank"):
        return values.isna() if kind == "blank" else values.notna()
    if kind == "inRange" and isinstance(low, int | float) and isinstance(high, int | float):
        return values.between(low, high, inclusive="neither")
    if kind in COMPARISONS and isinstance(low, int | float):
        mask: pd.Series = COMPARISONS[kind](values, low) & values.notna()
        return mask
    return pd.Series(True, values.index)


def _printable_block(block: Block, view: ViewState) -> Block | None:
    """The block for print: selected heads framed, links as text, interactive tables as plain ones."""
    match block:
        case Chart():
            highlight_heads(block.figure, view.selected_heads)
            return block
        case HeadTable():
            heads = visible_rows(block, view)
            return statistics_table(f"{block.caption}: {count_nouns(len(heads), 'heads')}", heads)
        case _:
            return static_block(block, lambda link: Link(link.text, ""))
