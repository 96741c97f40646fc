"""Layout around every page: navigation, header and notes of a page, and the pages for errors."""

import hashlib
from collections.abc import Mapping
from typing import Any

import dash_mantine_components as dmc
from dash import html, no_update

from dashboards import export
from dashboards.controls import bound_placeholders, build_controls, build_run_control, control_values, run_options
from dashboards.empty_pages import missing_data_page
from dashboards.navigation import all_pages, has_explorer, navigation, navigation_state
from dashboards.pages import Page, head, playground
from dashboards.run_store import current_store
from dashboards.selection import selection_panel
from dashboards.view_state import (
    BROWSER_PARAMETERS,
    FILTER_PARAMETERS,
    KNOWN_PARAMETERS,
    Query,
    ViewState,
    build_url,
    describe_statistic,
    format_heads,
)
from headscope.errors import BadInput
from headscope.rendering import assembly
from headscope.rendering.blocks import PageContent
from headscope.runs.column_metadata import capitalise, is_role_measured, statistic
from headscope.runs.run import Run
from headscope.runs.summary import default_models


def page_shell() -> list[Any]:
    """The components that stay while pages change: navigation, and containers for controls and page."""
    label = {"aria-label": "Go to a head, such as L18H6 or 18.6"}
    go_to_head = dmc.TextInput(id="go-to-head", placeholder="Go to L18H6", size="xs", w=110, **label)
    return [
        html.A("Skip to content", href="#content", className="skip-link"),
        html.Header(
            [
                html.A("headscope", href="/", className="brand keep-state"),
                navigation(),
                html.Form(go_to_head, id="go-to-head-form", role="search"),
                html.Button("Theme", id="theme-toggle", type="button", title="Light or dark"),
            ]
        ),
        html.Div(id="banner", role="alert"),
        html.Div(
            [
                html.Aside(
                    [html.Div(id="run-control"), html.Div(id="controls"), _newer_run_note()],
                    id="sidebar",
                    **{"aria-label": "Controls"},
                ),
                html.Main(html.P("Loading the run …", className="introduction"), id="content", tabIndex=-1),
            ],
            className="page-columns",
        ),
    ]


def _newer_run_note() -> html.P:
    """Offers a run that has finished since the app was started; the browser fills it in."""
    link = html.A(id="newer-run-link", href="/")
    return html.P(["A newer run has finished: ", link], id="newer-run", hidden=True, role="status")


def resolve_url(path: str, query: Query) -> tuple[Page, Run, ViewState, PageContent]:
    """Page, run, state and content of a URL. Raises HeadscopeError if there is no such page, run or head."""
    _, name, *rest = path.split("/", 2)
    page_path = f"/{name}"
    page = next((page for page in all_pages() if page_path == page.PATH), None)
    if page is None or (rest and page is not head):
        raise BadInput(f"unknown page '{path[:60]}'. Open / for the overview")
    names = query.get("run", [])
    run = current_store().open_combined([names] if isinstance(names, str) else names)
    # The URL names the run from here on, so that a link does not change when a newer run finishes.
    view = ViewState.from_query({**query, "run": [part.path.name for part in run.parts]}, run, page.controls(run))
    if page is not playground and page.missing_command(run):  # no run has what the playground needs
        content = missing_data_page(page, run)
    else:
        content = head.content(run, view, *rest) if page is head else page.content(run, view)
    return page, run, view, content


def page_header(page: Page, run: Run, content: PageContent, view: ViewState) -> list[Any]:
    """The components above the blocks of a page: title, introduction, notes, filters and selected heads."""
    introduction_class = "head-summary" if page is head else "introduction"
    parts: list[Any] = [html.H1(content.title), html.P(content.introduction, className=introduction_class)]
    if "stat" in page.controls(run) and view.statistic_name:
        label = html.Summary(f"Definition of {statistic(view.statistic_name).label}")
        definition = html.P(describe_statistic(view.statistic_name))
        parts.append(html.Details([label, definition], className="statistic-definition"))
    notes = (*view.notes, *omission_notes(page, run, view))
    parts += [html.P(note, className="notice", role="status") for note in notes]
    if view.has_filters:
        show_all = html.A("Show all", href=view.link("", *FILTER_PARAMETERS))
        parts.append(html.P([_filter_summary(run, view), show_all, *_select_link(run, view)], className="notice"))
    return parts + selection_panel(run, view)


def _select_link(run: Run, view: ViewState) -> list[Any]:
    """A link that selects the heads that pass the filters; none for an empty or a selected set."""
    heads = view.filter_heads(run.heads[run.heads["model"] == view.filter_model])
    shown_heads = frozenset(zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True))
    if not shown_heads or format_heads(shown_heads) == format_heads(view.selected_heads):
        return []
    return [" ", html.A("Select these heads", href=view.link("", heads=format_heads(shown_heads)))]


def _filter_summary(run: Run, view: ViewState) -> str:
    """How many heads pass the filters, and the conditions."""
    heads = run.heads[run.heads["model"] == view.filter_model]
    if view.role and not is_role_measured(heads, view.role):
        return f"The role {view.role} was not measured in {view.filter_model}, so no head is shown. "
    return f"{len(view.filter_heads(heads))} of {len(heads)} heads shown: {', '.join(view.describe_filters())}. "


def omission_notes(page: Page, run: Run, view: ViewState) -> list[str]:
    """Data of the runs that the page leaves out by default, and parameters that it does not read."""
    notes = assembly.dropped_row_notes(run)
    if not has_explorer(page) and (unknown := sorted({*view.query} - KNOWN_PARAMETERS)):
        notes.append(f"Unknown parameters, which are ignored: {', '.join(name[:60] for name in unknown)}.")
    if "models" in page.controls(run) and len(run.models) > len(view.shown_models) == len(default_models(run)):
        notes.append(f"{len(view.shown_models)} of {len(run.models)} models shown: {', '.join(view.shown_models)}.")
    return notes


def browser_state(
    path: str, search: str, page: Page, run: Run, view: ViewState, content: PageContent
) -> dict[str, Any]:
    """The state of the page at `path` + `search` for the browser.

    `query_string` is its complete query, with the values of all controls but without `BROWSER_PARAMETERS`;
    `listed_runs` changes with the options of the control of runs.
    """
    query = {name: value for name, value in view.query.items() if name not in BROWSER_PARAMETERS}
    return {
        "title": content.title,
        "nav_path": page.PATH,
        "control_values": control_values(page, run, view),
        "listed_runs": hashlib.sha256(repr(run_options()).encode()).hexdigest(),
        "placeholders": bound_placeholders(run, view),
        "query_string": build_url("", query),
        "pathname": path,
        "requested_query": search,
        "models": run.models,
        "file_suffix": export.file_name_suffix(run, view),
        "navigation": navigation_state(page, run),
        "head_sets": [*view.head_sets],
        "python": export.python_code(current_store().folder, build_url(path, query)),
    }


EMPTY_STATE: Mapping[str, Any] = {
    "title": "Nothing to show",
    "nav_path": "",
    "control_values": {},
    "listed_runs": "",
    "placeholders": {},
    "query_string": None,
    "pathname": "",
    "requested_query": "",
    "models": [],
    "file_suffix": "",
    "navigation": {"group": "", "first_paths": {}, "missing": {}},
    "head_sets": [],
    "python": "",
}
"""The browser's state without a page."""


def is_same_page(path: str, query: Query, state: Mapping[str, Any]) -> bool:
    """Whether the URL differs from the page in the browser at most in what only the browser applies."""
    query = {name: value for name, value in query.items() if name not in BROWSER_PARAMETERS}
    return bool(state["query_string"]) and build_url(path, query) == f"{state['pathname']}{state['query_string']}"


def new_controls(
    before: Mapping[str, Any] | None, state: Mapping[str, Any], page: Page, run: Run, view: ViewState
) -> tuple[Any, Any]:
    """The control of runs and the other controls, or `no_update` for those that the browser already has.

    They stay in place and keep the focus; the list of runs may be long.
    """
    has_run_control = before and before["listed_runs"] == state["listed_runs"]
    has_page_controls = before and _controls_signature(before) == _controls_signature(state)
    run_control = no_update if has_run_control else build_run_control(run)
    return run_control, no_update if has_page_controls else build_controls(page, run, view)


def _controls_signature(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the controls depend on, apart from their values: page, runs, names of the controls, and named sets."""
    return state["nav_path"], state["control_values"].get("run"), [*state["control_values"]], state["head_sets"]


def error_page(error: Exception) -> list[Any]:
    """The page for an internal error."""
    return empty_page(f"this view cannot be shown: {describe_error(error)}")


def describe_error(error: Exception) -> str:
    """An internal error in words, and what to do."""
    text = f"{type(error).__name__}: {str(error)[:200]}"
    return f"{text}. See the terminal that runs headscope dash for details. Please report it with this URL"


def empty_page(reason: str) -> list[Any]:
    """The page for a URL that cannot be shown: the reason, and links to the runs."""
    runs = [name for name, run in current_store().list_runs().items() if isinstance(run, Run)]
    unfinished = [
        html.Li(
            f"{name} is unfinished, {cells} work item{'' if cells == 1 else 's'} stored. To continue, repeat its "
            "command with --resume."
        )
        for name, cells in current_store().unfinished_jobs().items()
    ]
    links = [html.Li(html.A(name, href=build_url("/", {"run": name}))) for name in runs[:10]]
    start = html.Li(["Start a run: ", html.Code("headscope demo"), " or ", html.Code("headscope run --help")])
    newest = html.Li(html.A("Overview of the newest run", href="/"))
    suggestions = html.Ul([newest, *links, *unfinished, start])
    return [html.H1("Nothing to show"), html.P(f"{capitalise(reason)}.", className="introduction"), suggestions]
