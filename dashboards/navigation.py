"""Navigation by question: one tab per question, and below it the pages that answer it. Probes declare their tab."""

from collections.abc import Mapping
from typing import Any

from dash import html

from dashboards.pages import Page, checkpoints, compare, head, heads, overview, playground, probe, runs
from headscope.runs.run import Run

PAGES_BEFORE: Mapping[str, Page] = {"Overview": overview, "Heads": heads, "Head": head, "Compare": compare}
"""Tabs of pages that are not of a probe."""
PROBE_GROUPS = ("Prompts", "Tasks", "Causes")
"""Tabs of probes that the app names; a tab with another name comes after them."""
PAGES_IN_GROUPS: Mapping[str, Page] = {"Prompts": playground}
"""Pages that are not of a probe, by the tab that they end."""
PAGES_AFTER: Mapping[str, Page] = {"Training": checkpoints, "Runs": runs}
PAGE_LABELS = {heads.PATH: "All heads"}
"""Names of pages below a tab of the same name."""


def all_pages() -> list[Page]:
    """Every page in the order of reports and static sites; those of probes come before the last."""
    return [*PAGES_BEFORE.values(), *PAGES_IN_GROUPS.values(), *probe.probe_pages(), *PAGES_AFTER.values()]


def has_explorer(page: Page) -> bool:
    """Whether the page may show an explorer of a probe, which reads parameters of its own."""
    return page is head or page.PATH in {entry.PATH for entry in probe.probe_pages()}


def page_groups() -> dict[str, list[Page]]:
    """The pages by tab, in the order of the navigation; a tab without a page is left out."""
    groups: dict[str, list[Page]] = {name: [page] for name, page in PAGES_BEFORE.items()}
    groups |= {name: [] for name in PROBE_GROUPS}
    last_groups: dict[str, list[Page]] = {name: [page] for name, page in PAGES_AFTER.items()}
    for page in probe.probe_pages():
        name = page.probe.navigation_group
        (last_groups if name in last_groups else groups).setdefault(name, []).append(page)
    for name, extra_page in PAGES_IN_GROUPS.items():
        groups[name].append(extra_page)
    return {name: pages for name, pages in (groups | last_groups).items() if pages}


def navigation() -> html.Nav:
    """The tabs, and one row of pages for each tab with several; the browser shows the row of the current tab."""
    groups = page_groups()
    tabs = html.Ul(
        [html.Li(_page_link(name, pages[0], name)) for name, pages in groups.items()], **{"aria-label": "Questions"}
    )
    rows = [
        html.Ul(
            [html.Li(_page_link(PAGE_LABELS.get(page.PATH, page.NAME), page)) for page in pages],
            hidden=True,
            **{"aria-label": f"Pages of {name}", "data-group": name},
        )
        for name, pages in groups.items()
        if len(pages) > 1
    ]
    return html.Nav([tabs, *rows], **{"aria-label": "Pages"})


def _page_link(text: str, page: Page, group: str = "") -> html.A:
    attributes = {"data-tab": group} if group else {"data-page": page.PATH}
    return html.A(text, href=page.PATH, className="keep-state", **attributes)


def navigation_state(page: Page, run: Run) -> dict[str, Any]:
    """The current tab, the first page of each tab that the run has data for, and for each page without data the command
    that would store it."""
    groups = page_groups()
    missing = {entry.PATH: entry.missing_command(run) for pages in groups.values() for entry in pages}
    first = {name: next((p for p in pages if not missing[p.PATH]), pages[0]).PATH for name, pages in groups.items()}
    current = next((name for name, pages in groups.items() if any(p.PATH == page.PATH for p in pages)), "")
    return {"group": current, "first_paths": first, "missing": {path: text for path, text in missing.items() if text}}
