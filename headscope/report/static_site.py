"""Pages as files that any web server or file share shows: one plotly.js for all, each page with its figures, packed.

A page holds what it shows of every model, what is the same of several of them once; the browser shows one at a time.
Knows neither the app nor the probes: pages come as `Content`, with links that name files of the bundle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from headscope.plots.highlight import HeadIndex
from headscope.plots.style import GRAPH_CONFIG, TEMPLATE
from headscope.report.blocks import Block, Chart, Link, PageContent, TextTable
from headscope.report.html_page import gzip_base64, template_environment, to_json_values, to_script_json


@dataclass(frozen=True)
class SortableTable(TextTable):
    """A listing that a click on the name of a column sorts."""

    sortable: bool = True


@dataclass(frozen=True)
class SitePage:
    """A page of the bundle, to lie at `file`: its content under each model that it can be shown of, {"": ...} if none.

    `statistics` are the pages that show the same of another one.
    """

    path: str
    content_by_model: Mapping[str, PageContent]
    statistic_links: Sequence[Link] = ()


def shared_files(heads: Sequence[HeadIndex]) -> dict[str, str]:
    """The files that all pages share, by name."""
    known = [f"{layer}.{head}" for layer, head in heads]
    parts = {
        "template": to_script_json(_plotly_template()),
        "config": to_script_json(GRAPH_CONFIG),
        "heads": to_script_json(known),
    }
    return {
        "plotly.min.js": get_plotlyjs(),
        "site.js": template_environment().get_template("site.js.jinja").render(parts),
        "site.css": template_environment().get_template("page.css.jinja").render(),
    }


def render_page(site_page: SitePage, main_pages: Sequence[Link], runs: Sequence[str]) -> str:
    """The sheet as HTML text, under links to the main `pages`."""
    page = template_environment().get_template("site_page.html.jinja")
    root = "../" * site_page.path.count("/")
    figures: dict[Markup, int] = {}
    contents = list(site_page.content_by_model.values())
    headings = dict.fromkeys(heading for content in contents for heading in content.sections)
    lead = [
        [Markup('<p class="wide">{}</p>').format(content.introduction)] if content.introduction else []
        for content in contents
    ]
    sections = {"": _merge_models(lead)} if any(lead) else {}
    for heading in headings:
        parts = [
            [_block_html(part, figures, root) for part in content.sections.get(heading, ())] for content in contents
        ]
        sections[heading] = sections.get(heading, {}) | _merge_models(parts)
    return page.render(
        root=root,
        current_path=site_page.path,
        title=contents[0].title,
        pages=main_pages,
        models=[*site_page.content_by_model],
        last=str(len(contents) - 1),
        statistic_links=site_page.statistic_links,
        sections=sections,
        figures=[*map(gzip_base64, figures)],
        runs=runs,
    )


def _merge_models(blocks_by_model: Sequence[Sequence[Markup]]) -> dict[Markup, str]:
    """Every part once, in order, with the numbers of the models that have it, "" for all of them."""
    having: dict[Markup, list[int]] = {}
    for place in range(max(map(len, blocks_by_model))):
        for model, own in enumerate(blocks_by_model):
            if place < len(own):
                having.setdefault(own[place], []).append(model)
    return {
        part: "" if len(models) == len(blocks_by_model) else " ".join(map(str, models))
        for part, models in having.items()
    }


def _block_html(block: Block, figure_indices: dict[Markup, int], root: str) -> Markup:
    at = 0
    if isinstance(block, Chart):
        figure = to_json_values(block.figure.to_plotly_json())
        if figure["layout"].get("template") == _plotly_template():
            del figure["layout"]["template"]  # which all share
        at = figure_indices.setdefault(to_script_json(figure), len(figure_indices))
    made: Markup = template_environment().get_template("blocks.html.jinja").module.render_block(block, at, root)  # type: ignore[attr-defined]
    return made


@cache
def _plotly_template() -> object:
    return to_json_values(TEMPLATE.to_plotly_json())
