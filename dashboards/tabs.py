"""Tabs of a long page: one section at a time, and the URL's parameter `tab` names it."""

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from dashboards import export
from dashboards.view_state import ViewState
from headscope.rendering.blocks import Block, PageContent

MIN_TABS = 3
"""A page with fewer sections shows all of them at once."""


def visible_sections(content: PageContent, view: ViewState) -> Mapping[str, Sequence[Block]]:
    """The sections of the chosen tab; all sections of a page without tabs.

    A section without a heading is above every tab.
    """
    headings = _tab_headings(content)
    if not headings:
        return content.sections
    chosen = _chosen_heading(headings, view)
    return {heading: blocks for heading, blocks in content.sections.items() if heading in ("", chosen)}


def tab_bar(content: PageContent, view: ViewState) -> list[Any]:
    """Links to the tabs; empty for a page without tabs."""
    headings = _tab_headings(content)
    if not headings:
        return []
    chosen = _chosen_heading(headings, view)
    links = [
        html.A(
            heading,
            href=view.link("", "tab") if heading == headings[0] else view.link("", tab=tab_name(heading)),
            **{"data-in-place": "true"} | ({"aria-current": "page"} if heading == chosen else {}),
        )
        for heading in headings
    ]
    return [html.Nav(links, className="tabs", **{"aria-label": "Parts of this page"})]


def tab_name(heading: str) -> str:
    """The value of the URL's parameter for a heading; the heading itself if it has no Latin letter or digit."""
    return export.to_slug(heading, 60) or heading


def _tab_headings(content: PageContent) -> list[str]:
    headings = [heading for heading, blocks in content.sections.items() if heading and blocks] if content.tabs else []
    return headings if len(headings) >= MIN_TABS else []


def _chosen_heading(headings: Sequence[str], view: ViewState) -> str:
    """The heading that the URL names, else the first."""
    return next((heading for heading in headings if tab_name(heading) == view.query.get("tab")), headings[0])
