"""Pages as files that any web server or file share shows: one plotly.js for all, each page with its figures, packed.

A page holds what it shows of every model, what is the same of several of them once; the browser shows one at a time.
Knows neither the app nor the probes: pages come as `Content`, with links that name files of the bundle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from headscope.figures.marks import Head
from headscope.figures.style import GRAPH_CONFIG, TEMPLATE
from headscope.report.content import Chart, Content, Link, Listing, Piece
from headscope.report.html import as_json, compact, environment, packed


@dataclass(frozen=True)
class Sortable(Listing):
    """A listing that a click on the name of a column sorts."""

    sortable: bool = True


@dataclass(frozen=True)
class Sheet:
    """A page of the bundle, to lie at `file`: its content under each model that it can be shown of, {"": ...} if none.

    `statistics` are the pages that show the same of another one.
    """

    file: str
    contents: Mapping[str, Content]
    statistics: Sequence[Link] = ()


def assets(heads: Sequence[Head]) -> dict[str, str]:
    """The files that all pages share, by name."""
    known = [f"{layer}.{head}" for layer, head in heads]
    parts = {"template": as_json(_template()), "config": as_json(GRAPH_CONFIG), "heads": as_json(known)}
    return {
        "plotly.min.js": get_plotlyjs(),
        "site.js": environment().get_template("site.js.jinja").render(parts),
        "site.css": environment().get_template("page.css.jinja").render(),
    }


def render(sheet: Sheet, pages: Sequence[Link], runs: Sequence[str]) -> str:
    """The sheet as HTML text, under links to the main `pages`."""
    page = environment().get_template("sheet.html.jinja")
    root = "../" * sheet.file.count("/")
    figures: dict[Markup, int] = {}
    contents = list(sheet.contents.values())
    headings = dict.fromkeys(heading for content in contents for heading in content.sections)
    lead = [[Markup('<p class="wide">{}</p>').format(content.lead)] if content.lead else [] for content in contents]
    sections = {"": _of_models(lead)} if any(lead) else {}
    for heading in headings:
        parts = [[_html(part, figures, root) for part in content.sections.get(heading, ())] for content in contents]
        sections[heading] = sections.get(heading, {}) | _of_models(parts)
    return page.render(
        root=root,
        at=sheet.file,
        title=contents[0].title,
        pages=pages,
        models=[*sheet.contents],
        last=str(len(contents) - 1),
        statistics=sheet.statistics,
        sections=sections,
        figures=[*map(packed, figures)],
        runs=runs,
    )


def _of_models(parts: Sequence[Sequence[Markup]]) -> dict[Markup, str]:
    """Every part once, in order, with the numbers of the models that have it, "" for all of them."""
    having: dict[Markup, list[int]] = {}
    for place in range(max(map(len, parts))):
        for model, own in enumerate(parts):
            if place < len(own):
                having.setdefault(own[place], []).append(model)
    return {part: "" if len(models) == len(parts) else " ".join(map(str, models)) for part, models in having.items()}


def _html(part: Piece, figures: dict[Markup, int], root: str) -> Markup:
    at = 0
    if isinstance(part, Chart):
        figure = compact(part.figure.to_plotly_json())
        if figure["layout"].get("template") == _template():
            del figure["layout"]["template"]  # which all share
        at = figures.setdefault(as_json(figure), len(figures))
    made: Markup = environment().get_template("parts.html.jinja").module.piece(part, at, root)  # type: ignore[attr-defined]
    return made


@cache
def _template() -> object:
    return compact(TEMPLATE.to_plotly_json())
