"""What surrounds every page: navigation, the controls of what is shown, and words where nothing can be shown."""

from collections.abc import Mapping
from typing import Any

import dash_mantine_components as dmc
from dash import html

from dashboards.controls import control_values
from dashboards.pages import Page, checkpoints, compare, head, heads, overview, probe, runs
from dashboards.run_store import current_store
from dashboards.selection import selection_panel
from dashboards.view_state import FILTER_PARAMETERS, TABLE_PARAMETERS, Query, ViewState, build_url, describe_statistic
from headscope.errors import BadInput
from headscope.report import assembly
from headscope.report.blocks import PageContent
from headscope.report.text import default_models
from headscope.runs.column_metadata import sentence, statistic
from headscope.runs.run import Run


def all_pages() -> list[Page]:
    """Every page in the order of the navigation, those of the probes in the middle."""
    return [overview, heads, head, compare, *probe.probe_pages(), checkpoints, runs]


def page_shell() -> list[Any]:
    """What stays while pages change: navigation, the place of the controls, the place of the page."""
    of_probes = probe.probe_pages()
    groups = [[page for page in all_pages() if page not in of_probes], of_probes]
    links = [
        html.Ul(
            [html.Li(html.A(page.NAME, href=page.PATH, className="keep")) for page in group], **{"aria-label": name}
        )
        for name, group in zip(("Run", "Probes"), groups, strict=True)
    ]
    says = {"aria-label": "Go to a head, such as L18H6 or 18.6"}
    jump = dmc.TextInput(id="jump", placeholder="Go to L18H6", size="xs", w=110, **says)
    return [
        html.A("Skip to content", href="#content", className="skip"),
        html.Header(
            [
                html.A("headscope", href="/", className="brand keep"),
                html.Nav(links, **{"aria-label": "Pages"}),
                html.Form(jump, id="jump-form", role="search"),
                html.Button("Theme", id="theme", type="button", title="Light or dark"),
            ]
        ),
        html.Div(id="banner", role="alert"),
        html.Div(
            [
                html.Aside(id="controls", **{"aria-label": "What is shown"}),
                html.Main(html.P("Reading the run …", className="lead"), id="content", tabIndex=-1),
            ],
            className="sides",
        ),
    ]


def resolve_url(path: str, query: Query) -> tuple[Page, Run, ViewState, PageContent]:
    """What a URL shows: its page, run, state and content. Raises HeadscopeError when it leads nowhere."""
    _, name, *rest = path.split("/", 2)
    page = next((page for page in all_pages() if f"/{name}" == page.PATH), None)
    if page is None or (rest and page is not head):
        raise BadInput(f"there is no page '{path[:60]}'")
    named = query.get("run", [])
    run = current_store().open_combined([named] if isinstance(named, str) else named)
    # The newest run is named from here on: what a link shows does not change when another finishes.
    view = ViewState.from_query({**query, "run": [part.path.name for part in run.parts]}, run, page.controls(run))
    return page, run, view, head.content(run, view, *rest) if page is head else page.content(run, view)


def page_header(page: Page, run: Run, content: PageContent, view: ViewState) -> list[Any]:
    """What stands above the parts of a page: its title and lead, what is left out, picked heads."""
    parts: list[Any] = [
        html.H1(content.title),
        html.P(content.introduction, className="answer" if page is head else "lead"),
    ]
    if "stat" in page.controls(run) and view.statistic_name:
        # The definition behind the name of the statistic that is shown.
        told = html.Summary(f"What {statistic(view.statistic_name).label} means")
        parts.append(html.Details([told, html.P(describe_statistic(view.statistic_name))], className="meaning"))
    parts += [html.P(note, className="note", role="status") for note in (*view.notes, *omission_notes(page, run, view))]
    if view.has_filters:
        parts.append(
            html.P(
                [_filter_summary(run, view), html.A("Show all", href=view.link("", *FILTER_PARAMETERS))],
                className="note",
            )
        )
    return parts + (selection_panel(run, view) if page.controls(run) else [])


def _filter_summary(run: Run, view: ViewState) -> str:
    """What the filters ask for, and how many heads they leave."""
    every = run.heads[run.heads["model"] == view.filter_model]
    kept = len(view.filter_heads(every))
    return f"{kept} of {len(every)} heads are shown, those {', '.join(view.describe_filters())}. "


def omission_notes(page: Page, run: Run, view: ViewState) -> list[str]:
    """What of the runs the page does not show, though nobody asked it not to."""
    told = assembly.dropped_row_notes(run)
    if "models" in page.controls(run) and len(run.models) > len(view.shown_models) == len(default_models(run)):
        told.append(f"{len(view.shown_models)} of {len(run.models)} models are drawn: {', '.join(view.shown_models)}.")
    return told


def browser_state(path: str, page: Page, run: Run, view: ViewState, content: PageContent) -> dict[str, Any]:
    """What the browser is told of the page that it shows; `address` is its URL, but for how the grid is sorted."""
    address = build_url("", {name: value for name, value in view.query.items() if name not in TABLE_PARAMETERS})
    return {
        "title": content.title,
        "path": page.PATH,
        "values": control_values(page, run, view),
        "address": address,
        "at": path,
    }


EMPTY_STATE: Mapping[str, Any] = {"title": "Nothing to show", "path": "", "values": {}, "address": None, "at": ""}
"""What the browser is told where there is no page."""


def is_same_page(path: str, query: Query, shown_state: Mapping[str, Any]) -> bool:
    """Whether the URL leads to the page that is shown, the grid perhaps sorted otherwise."""
    asked = {name: value for name, value in query.items() if name not in TABLE_PARAMETERS}
    return bool(shown_state["address"]) and build_url(path, asked) == f"{shown_state['at']}{shown_state['address']}"


def controls_signature(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes controls what they are: the page, the runs, and which there are."""
    return state["path"], state["values"].get("run"), [*state["values"]]


def error_page(error: Exception) -> list[Any]:
    """The page where headscope itself fails: what happened, and the ways out."""
    return empty_page(f"this view cannot be drawn, and no other is shown instead: {describe_error(error)}")


def describe_error(error: Exception) -> str:
    """What failed in headscope itself, and what to do next."""
    told = f"{type(error).__name__}: {str(error)[:200]}"
    return f"{told}. The terminal that runs headscope dash tells more. Please report it with this address"


def empty_page(reason: str) -> list[Any]:
    """The page where a URL leads nowhere: why, and the ways out."""
    runs = [name for name, run in current_store().list_runs().items() if isinstance(run, Run)]
    waiting = [
        html.Li(f"{name} is unfinished, with {cells} cells stored: the same command with --resume goes on.")
        for name, cells in current_store().unfinished_cells().items()
    ]
    links = [html.Li(html.A(name, href=build_url("/", {"run": name}))) for name in runs[:10]]
    start = html.Li(["Make a run: ", html.Code("headscope demo"), " or ", html.Code("headscope run --help")])
    newest = html.Li(html.A("Overview of the newest run", href="/"))
    ways = html.Ul([newest, *links, *waiting, start])
    return [html.H1("Nothing to show"), html.P(f"{sentence(reason)}.", className="lead"), ways]
