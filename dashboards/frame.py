"""What surrounds every page: navigation, the controls of what is shown, and words where nothing can be shown."""

from typing import Any

import dash_mantine_components as dmc
from dash import html

from dashboards.cards import component
from dashboards.library import current
from dashboards.pages import Page, checkpoints, compare, head, heads, overview, probe
from dashboards.view import FILTERS, Query, View, described, linked
from headscope.errors import BadInput
from headscope.report.content import Content
from headscope.report.outline import measured
from headscope.runs.roles import roles
from headscope.runs.run import Run
from headscope.runs.statistics import sentence, statistic


def pages() -> list[Page]:
    """Every page in the order of the navigation, those of the probes in the middle."""
    return [overview, heads, head, compare, *probe.pages(), checkpoints]


def shell() -> list[Any]:
    """What stays while pages change: navigation, the place of the controls, the place of the page."""
    links = [html.Li(html.A(page.NAME, href=page.PATH, className="keep")) for page in pages()]
    return [
        html.A("Skip to content", href="#content", className="skip"),
        html.Header(
            [
                html.A("headscope", href="/", className="brand keep"),
                html.Nav(html.Ul(links), **{"aria-label": "Pages"}),
                html.Button("Theme", id="theme", type="button", title="Light or dark"),
            ]
        ),
        html.Aside(id="controls", **{"aria-label": "What is shown"}),
        html.Main(html.P("Reading the run …", className="lead"), id="content", tabIndex=-1),
    ]


def leads_to(path: str, query: Query) -> tuple[Page, Run, View, Content]:
    """What a URL shows: its page, run, state and content. Raises HeadscopeError when it leads nowhere."""
    _, name, *rest = path.split("/", 2)
    page = next((page for page in pages() if f"/{name}" == page.PATH), None)
    if page is None or (rest and page is not head):
        raise BadInput(f"there is no page '{path[:60]}'")
    named = query.get("run", [])
    run = current().opened([named] if isinstance(named, str) else named)
    view = View.of(query, run)
    return page, run, view, head.content(run, view, *rest) if page is head else page.content(run, view)


def body(page: Page, content: Content, view: View) -> list[Any]:
    """The page as components."""
    parts: list[Any] = [html.H1(content.title), html.P(content.lead, className="lead")]
    if "stat" in page.CONTROLS and view.stat:
        # The definition behind the name of the statistic that is shown.
        told = html.Summary(f"What {statistic(view.stat).label} means")
        parts.append(html.Details([told, html.P(described(view.stat))], className="meaning"))
    parts += [html.P(note, className="note", role="status") for note in view.notes]
    if view.filtering or view.picked:
        told = f"{len(view.picked)} picked heads. " if view.picked else "Some heads are left out. "
        parts.append(html.P([told, html.A("Show all", href=view.link("", *FILTERS))], className="note"))
    for at, (heading, group) in enumerate(content.sections.items()):
        inside = [component(part, view, f"{at}-{place}") for place, part in enumerate(group)]
        title = [html.H2(heading)] if heading else []
        parts.append(html.Section([*title, html.Div(inside, className="parts")]))
    return parts


def nothing(reason: str) -> list[Any]:
    """The page where a URL leads nowhere: why, and the ways out."""
    runs = [name for name, run in current().listing().items() if isinstance(run, Run)]
    waiting = [
        html.Li(f"{name} is unfinished, with {cells} cells stored: the same command with --resume goes on.")
        for name, cells in current().unfinished().items()
    ]
    links = [html.Li(html.A(name, href=linked("/", {"run": name}))) for name in runs[:10]]
    start = html.Li(["Make a run: ", html.Code("headscope demo"), " or ", html.Code("headscope run --help")])
    newest = html.Li(html.A("Overview of the newest run", href="/"))
    ways = html.Ul([newest, *links, *waiting, start])
    return [html.H1("Nothing to show"), html.P(f"{sentence(reason)}.", className="lead"), ways]


def values(page: Page, run: Run, view: View) -> dict[str, Any]:
    """What each control of the page is set to in this state; a run without models has none to set."""
    top = int(run.heads["layer"].max()) if len(run.heads) else 0
    every = {
        "model": view.model,
        "base": view.base or (run.models[0] if page is compare and run.models else None),
        "stat": view.stat,
        "layers": list(view.layers or (0, top)),
        "role": view.role,
        "low": "" if view.low is None else view.low,
        "high": "" if view.high is None else view.high,
    }
    return {"run": [part.name for part in run.parts]} | {name: every[name] for name in page.CONTROLS if run.models}


def controls(page: Page, run: Run, view: View) -> list[Any]:
    """The controls that the page asks for, set to the state."""
    runs = [{"value": name, "label": _run_label(name)} for name in current().listing()]
    stats = [{"value": name, "label": statistic(name).label} for name in measured(run.heads)]
    called = [{"value": name, "label": f"{name}: {role.meaning}"} for name, role in roles().items()]
    top = int(run.heads["layer"].max()) if len(run.heads) else 0
    made: dict[str, Any] = {
        "run": (dmc.MultiSelect, {"label": "Runs, read as one", "data": runs, "searchable": True}),
        "model": (dmc.Select, {"label": "Model", "data": run.models, "allowDeselect": False}),
        "base": (
            dmc.Select,
            {"label": "Pinned baseline", "data": run.models, "clearable": True, "placeholder": "none: show values"},
        ),
        "stat": (dmc.Select, {"label": "Statistic", "data": stats, "searchable": True, "allowDeselect": False}),
        "layers": (
            dmc.RangeSlider,
            {
                "min": 0,
                "max": top,
                "minRange": 0,
                "marks": [{"value": end, "label": str(end)} for end in (0, top)],
                "thumbFromLabel": "First layer",
                "thumbToLabel": "Last layer",
                "mb": 22,
            },
        ),
        "role": (dmc.Select, {"label": "Role", "data": called, "clearable": True, "placeholder": "all heads"}),
        "low": (dmc.NumberInput, {"label": "Statistic at least", "placeholder": "any", "debounce": 600}),
        "high": (dmc.NumberInput, {"label": "Statistic at most", "placeholder": "any", "debounce": 600}),
    }
    parts: list[Any] = []
    for name, value in values(page, run, view).items():
        kind, how = made[name]
        control = kind(id={"control": name}, value=value, **how)
        parts.append(dmc.InputWrapper(control, label="Layers") if name == "layers" else control)
    buttons = [html.Button("Copy link", id="copy", type="button"), html.Button("Save page", id="save", type="button")]
    return [*parts, html.Div(buttons, className="tools")]


def _run_label(name: str) -> str:
    """A run's name without its hash: example, 11-21 13:35."""
    stamp, _, rest = name.partition("-")
    if len(stamp) != 16 or not rest:
        return name
    slug = rest.rpartition("-")[0] or rest
    return f"{slug}, {stamp[4:6]}-{stamp[6:8]} {stamp[9:11]}:{stamp[11:13]}"
