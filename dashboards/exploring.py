"""The parts of an explorer as Dash components: shaded tokens, lists to choose from, and ways that keys take."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from dash import html

from dashboards.components import component
from dashboards.view import View
from headscope.report.explorer_blocks import KeyLinks, LinkChoice, Passage, TextCell, Token


@component.register
def _passage(part: Passage, view: View, key: str) -> html.Div:
    named = [html.Th(name, scope="col") for name in part.column_names] if any(part.column_names) else []
    head = [html.Thead(html.Tr(named))] if named else []
    body = html.Tbody([html.Tr([html.Td(**_cell(cell, view)) for cell in row]) for row in part.cells])
    table = html.Table([html.Caption(part.caption), *head, body])
    return html.Div(table, className="scroll passage", role="region", tabIndex=0, **{"aria-label": part.caption})


def _cell(cell: TextCell, view: View) -> dict[str, Any]:
    """What a cell holds. A text stands in its own direction and turns nothing beside it."""
    if isinstance(cell, str):
        return {"children": cell, "className": "told"}
    told = "text" if not all(token.href for token in cell) else "text all"  # where all lead on, none need say so
    return {"children": html.Bdi([*_tokens(cell, view)]), "className": told}


def _tokens(tokens: Sequence[Token], view: View) -> Iterator[Any]:
    """One part a token that can be seen or clicked as one; what lies between as text."""
    for plain, some in groupby(tokens, key=_is_plain):
        if plain:
            yield "".join(token.text for token in some)
        else:
            yield from (_token(token, view) for token in some)


def _is_plain(token: Token) -> bool:
    return not (token.shading or token.href or token.is_special or token.is_marked)


def _token(token: Token, view: View) -> Any:
    kinds = [name for name in ("special", "marked") if getattr(token, name)]
    told: dict[str, Any] = {"className": " ".join(["token", *kinds])}
    if token.shading:
        told["style"] = {"--shade": f"{100 * token.shading**0.5:.1f}%"}  # a little is to be seen, too
    if token.tooltip:
        told["title"] = token.tooltip
    if token.is_marked:
        told["aria-current"] = "true"
    return html.A(token.text, **told, **_leads(token.href, view)) if token.href else html.Span(token.text, **told)


def _leads(href: str, view: View) -> dict[str, str]:
    """Where a link goes; one that changes only what is looked at leaves the page where it is."""
    return {"href": view.leads(href)} | ({"data-stays": "true"} if href.startswith("?") else {})


@component.register
def _choice(part: LinkChoice, view: View, key: str) -> html.Label:
    """A native list, whose values are addresses."""
    named = [html.Option("choose", value="", selected=True)] if part.selected_index is None else []
    named += [
        html.Option(link.text, value=view.leads(link.href), selected=place == part.selected_index)
        for place, link in enumerate(part.links)
    ]
    chosen = html.Select(named, **{"data-goes": "true", "aria-label": part.label})
    return html.Label([part.label, chosen], className="choice")


@component.register
def _steps(part: KeyLinks, view: View, key: str) -> html.Div:
    ways = [
        html.A(link.text, **_leads(link.href, view), **_by(taken))
        for link, taken in zip(part.links, part.keys, strict=True)
    ]
    return html.Div(ways, className="tools")


def _by(key: str) -> dict[str, str]:
    return {"data-key": key, "aria-keyshortcuts": key} if key else {}
