"""The static site: HTML pages with compressed figures that share one plotly.js, for any web server or file share.

A page holds its content for every model, and blocks that several models share only once; the browser shows one model at
a time. Pages come as `PageContent` with links to files of the site; this module knows neither the app nor the probes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from headscope.base.heads import Head
from headscope.plots.style import GRAPH_CONFIG, TEMPLATE
from headscope.rendering.blocks import Block, Chart, Link, Links, PageContent, RecordTable, TextBlock, TextTable
from headscope.rendering.html_page import (
    BlockRenderer,
    figure_values,
    template_environment,
    to_json_values,
    to_script_json,
)


@dataclass(frozen=True)
class SortableTable(TextTable):
    """A text table that a click on a column name sorts."""

    sortable: bool = True


@dataclass(frozen=True)
class SitePage:
    """A page of the site: its path, and its content by model label, or {"": ...} if it does not depend on the model.

    `statistic_links` are links to the same page for other statistics.
    """

    path: str
    content_by_model: Mapping[str, PageContent]
    statistic_links: Sequence[Link] = ()


def static_block(block: Block, to_link: Callable[[Link], Link]) -> Block | None:
    """The block for a page outside the app, with the links that `to_link` gives: one without a target becomes text.

    Records become a table of text. None if nothing of the block is left.
    """
    match block:
        case Links():
            return _static_links(block, to_link)
        case TextBlock():
            return replace(block, links=block.links and _static_links(block.links, to_link))
        case RecordTable():
            names = block.column_names
            records = [
                (row.get("href") or "", ["" if row[name] is None else str(row[name]) for name in names])
                for row in block.rows
            ]
            rows: list[list[str | Link | Links]] = [[Link(cells[0], href), *cells[1:]] for href, cells in records]
            return static_block(TextTable(block.caption, names, rows), to_link)
        case TextTable():
            return replace(block, rows=[[_static_cell(cell, to_link) for cell in row] for row in block.rows])
        case _:
            return block


def _static_links(block: Links, to_link: Callable[[Link], Link]) -> Links | None:
    links = [link for link in map(to_link, block.links) if link.href]
    return Links(links) if links else None


def _static_cell(cell: str | Link | Links, to_link: Callable[[Link], Link]) -> str | Link | Links:
    if isinstance(cell, Links):
        links = [*map(to_link, cell.links)]
        return Links(links) if any(link.href for link in links) else ", ".join(link.text for link in links)
    if isinstance(cell, Link):
        link = to_link(cell)
        return link if link.href else link.text
    return cell


def shared_files(heads: Sequence[Head]) -> dict[str, str]:
    """The contents of the files that all pages share, by name."""
    head_names = [f"{layer}.{head}" for layer, head in heads]
    variables = {
        "template": to_script_json(_plotly_template()),
        "config": to_script_json(GRAPH_CONFIG),
        "heads": to_script_json(head_names),
    }
    return {
        "plotly.min.js": get_plotlyjs(),
        "site.js": template_environment().get_template("site.js.jinja").render(variables),
        "site.css": template_environment().get_template("page.css.jinja").render(),
    }


def render_page(site_page: SitePage, main_pages: Sequence[Link], runs: Sequence[str]) -> str:
    """The page as HTML text, with a navigation of links to the main pages."""
    template = template_environment().get_template("site_page.html.jinja")
    root = "../" * site_page.path.count("/")
    renderer = _SiteRenderer(root)
    contents = list(site_page.content_by_model.values())
    headings = dict.fromkeys(heading for content in contents for heading in content.sections)
    introductions = [
        [Markup('<p class="wide">{}</p>').format(content.introduction)] if content.introduction else []
        for content in contents
    ]
    sections = {"": _merge_models(introductions)} if any(introductions) else {}
    for heading in headings:
        blocks = [[*map(renderer.html, content.sections.get(heading, ()))] for content in contents]
        sections[heading] = sections.get(heading, {}) | _merge_models(blocks)
    return template.render(
        root=root,
        current_path=site_page.path,
        title=contents[0].title,
        pages=main_pages,
        models=[*site_page.content_by_model],
        last=str(len(contents) - 1),
        statistic_links=site_page.statistic_links,
        sections={heading: blocks.items() for heading, blocks in sections.items()},
        renderer=renderer,
        runs=runs,
    )


def _merge_models(blocks_by_model: Sequence[Sequence[Markup]]) -> dict[Markup, str]:
    """Each distinct block once, in order, with the indices of its models as text, or "" for all models."""
    model_indices: dict[Markup, list[int]] = {}
    for position in range(max(map(len, blocks_by_model))):
        for model, blocks in enumerate(blocks_by_model):
            if position < len(blocks):
                model_indices.setdefault(blocks[position], []).append(model)
    return {
        block: "" if len(models) == len(blocks_by_model) else " ".join(map(str, models))
        for block, models in model_indices.items()
    }


class _SiteRenderer(BlockRenderer):
    """As `BlockRenderer`, but equal figures have one number, because several models may show them.

    It recognises figures by identity: the blocks must be kept as long as the renderer.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._numbers: dict[tuple[int, type[Chart]] | Markup, int] = {}

    def add_figure(self, chart: Chart) -> int:
        key = id(chart.figure), type(chart)
        if key not in self._numbers:
            text = _figure_json(chart.picture)
            if text not in self._numbers:
                self._numbers[text] = len(self.figures)
                self.figures.append(text)
            self._numbers[key] = self._numbers[text]
        return self._numbers[key]


def _figure_json(figure: go.Figure) -> Markup:
    """The figure without its template, which the pages share."""
    values = figure_values(figure)
    if values["layout"].get("template") == _plotly_template():
        del values["layout"]["template"]
    return to_script_json(values)


@cache
def _plotly_template() -> object:
    return to_json_values(TEMPLATE.to_plotly_json())
