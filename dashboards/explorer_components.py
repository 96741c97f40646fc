"""The parts of an explorer as Dash components: shaded tokens, lists to choose from, and ways that keys take."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from dash import html

from dashboards.components import build_component
from dashboards.view_state import ViewState
from headscope.report.explorer_blocks import KeyLinks, LinkChoice, Passage, TextCell, Token


@build_component.register
def _passage_component(block: Passage, view: ViewState, block_id: str) -> html.Div:
    named = [html.Th(name, scope="col") for name in block.column_names] if any(block.column_names) else []
    head = [html.Thead(html.Tr(named))] if named else []
    body = html.Tbody([html.Tr([html.Td(**_cell_attributes(cell, view)) for cell in row]) for row in block.cells])
    table = html.Table([html.Caption(block.caption), *head, body])
    return html.Div(table, className="scroll passage", role="region", tabIndex=0, **{"aria-label": block.caption})


def _cell_attributes(cell: TextCell, view: ViewState) -> dict[str, Any]:
    """What a cell holds. A text stands in its own direction and turns nothing beside it."""
    if isinstance(cell, str):
        return {"children": cell, "className": "told"}
    told = "text" if not all(token.href for token in cell) else "text all"  # where all lead on, none need say so
    return {"children": html.Bdi([*_token_components(cell, view)]), "className": told}


def _token_components(tokens: Sequence[Token], view: ViewState) -> Iterator[Any]:
    """One part a token that can be seen or clicked as one; what lies between as text."""
    for plain, some in groupby(tokens, key=_is_plain):
        if plain:
            yield "".join(token.text for token in some)
        else:
            yield from (_token_component(token, view) for token in some)


def _is_plain(token: Token) -> bool:
    return not (token.shading or token.href or token.is_special or token.is_marked)


def _token_component(token: Token, view: ViewState) -> Any:
    kinds = [name for name in ("special", "marked") if getattr(token, f"is_{name}")]
    told: dict[str, Any] = {"className": " ".join(["token", *kinds])}
    if token.shading:
        told["style"] = {"--shade": f"{100 * token.shading**0.5:.1f}%"}  # a little is to be seen, too
    if token.tooltip:
        told["title"] = token.tooltip
    if token.is_marked:
        told["aria-current"] = "true"
    return (
        html.A(token.text, **told, **_link_attributes(token.href, view))
        if token.href
        else html.Span(token.text, **told)
    )


def _link_attributes(href: str, view: ViewState) -> dict[str, str]:
    """Where a link goes; one that changes only what is looked at leaves the page where it is."""
    return {"href": view.resolve_link(href)} | ({"data-stays": "true"} if href.startswith("?") else {})


@build_component.register
def _choice_component(block: LinkChoice, view: ViewState, block_id: str) -> html.Label:
    """A native list, whose values are addresses."""
    named = [html.Option("choose", value="", selected=True)] if block.selected_index is None else []
    named += [
        html.Option(link.text, value=view.resolve_link(link.href), selected=place == block.selected_index)
        for place, link in enumerate(block.links)
    ]
    chosen = html.Select(named, **{"data-goes": "true", "aria-label": block.label})
    return html.Label([block.label, chosen], className="choice")


@build_component.register
def _key_links_component(block: KeyLinks, view: ViewState, block_id: str) -> html.Div:
    ways = [
        html.A(link.text, **_link_attributes(link.href, view), **_shortcut_attributes(taken))
        for link, taken in zip(block.links, block.keys, strict=True)
    ]
    return html.Div(ways, className="tools")


def _shortcut_attributes(key: str) -> dict[str, str]:
    return {"data-key": key, "aria-keyshortcuts": key} if key else {}
