"""Dash components for the blocks of an explorer: shaded tokens, lists of links, and links with keyboard shortcuts."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from dash import html

from dashboards.components import build_component, column_header, scrolling_table
from dashboards.view_state import ViewState
from headscope.rendering.explorer_blocks import Badges, KeyLinks, LinkChoice, Passage, TextCell, Token


@build_component.register
def _passage_component(block: Passage, view: ViewState, block_id: str) -> html.Div:
    names = [column_header(name) for name in block.column_names] if any(block.column_names) else []
    head = [html.Thead(html.Tr(names))] if names else []
    body = html.Tbody([html.Tr([html.Td(**_cell_attributes(cell, view)) for cell in row]) for row in block.cells])
    table = html.Table([html.Caption(block.caption), *head, body])
    return scrolling_table(block, table, "scroll passage")


@build_component.register
def _badges_component(block: Badges, view: ViewState, block_id: str) -> html.Div:
    badges = [
        html.A(link.text, href=view.resolve_link(link.href), title=meaning, className="badge")
        for link, meaning in zip(block.links, block.meanings, strict=True)
    ]
    return html.Div(badges, className="badges")


def _cell_attributes(cell: TextCell, view: ViewState) -> dict[str, Any]:
    """Content and class of a cell. Tokens are isolated, so right-to-left text does not reorder the text around them."""
    if isinstance(cell, str):
        return {"children": cell, "className": "plain-cell"}
    # If every token is a link, none of them is underlined.
    name = "token-cell all-links" if all(token.href for token in cell) else "token-cell"
    return {"children": html.Bdi([*_token_components(cell, view)]), "className": name}


def _token_components(tokens: Sequence[Token], view: ViewState) -> Iterator[Any]:
    """One component per token that is shaded, marked or linked; plain text between them."""
    for is_plain, group in groupby(tokens, key=_is_plain):
        if is_plain:
            yield "".join(token.text for token in group)
        else:
            yield from (_token_component(token, view) for token in group)


def _is_plain(token: Token) -> bool:
    return not (token.shading or token.href or token.is_special or token.is_marked)


def _token_component(token: Token, view: ViewState) -> Any:
    kinds = [name for name in ("special", "marked") if getattr(token, f"is_{name}")]
    attributes: dict[str, Any] = {"className": " ".join(["token", *kinds])}
    if token.shading:
        attributes["style"] = {"--shade": f"{100 * token.shading**0.5:.1f}%"}  # the root keeps small weights visible
    if token.tooltip:
        attributes["title"] = token.tooltip
    if token.is_marked:
        attributes["aria-current"] = "true"
    if token.href and not token.text.strip():
        attributes["aria-label"] = "blank token"
    if not token.href:
        return html.Span(token.text, **attributes)
    return html.A(token.text, **attributes, **_link_attributes(token.href, view))


def _link_attributes(href: str, view: ViewState) -> dict[str, str]:
    """Attributes of a link; a link within the page does not scroll."""
    return {"href": view.resolve_link(href)} | ({"data-in-place": "true"} if href.startswith("?") else {})


@build_component.register
def _choice_component(block: LinkChoice, view: ViewState, block_id: str) -> html.Label:
    """A native select element whose values are URLs."""
    options = [html.Option("choose", value="", selected=True)] if block.selected_index is None else []
    options += [
        html.Option(link.text, value=view.resolve_link(link.href), selected=index == block.selected_index)
        for index, link in enumerate(block.links)
    ]
    select = html.Select(options, **{"data-navigates": "true", "aria-label": block.label})
    return html.Label([block.label, select], className="link-choice")


@build_component.register
def _key_links_component(block: KeyLinks, view: ViewState, block_id: str) -> html.Div:
    links = [
        html.A(link.text, **_link_attributes(link.href, view), **_shortcut_attributes(key))
        for link, key in zip(block.links, block.keys, strict=True)
    ]
    return html.Div(links, className="toolbar")


def _shortcut_attributes(key: str) -> dict[str, str]:
    return {"data-shortcut": key, "aria-keyshortcuts": key} if key else {}
