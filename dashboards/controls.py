"""The controls of what is shown: only those that do something on the page, set to what the URL says."""

from typing import Any

import dash_mantine_components as dmc
from dash import html

from dashboards.pages import Page
from dashboards.run_store import current_store
from dashboards.view_state import FILTER_PARAMETERS, ViewState
from headscope.report.assembly import run_statistics
from headscope.report.text import default_models
from headscope.runs.column_metadata import statistic
from headscope.runs.roles import roles
from headscope.runs.run import Run

RANK_LINE_OPTIONS = [
    {"value": "leading", "label": "leading or picked heads"},
    {"value": "changed", "label": "heads changed beyond noise"},
]


def control_values(page: Page, run: Run, view: ViewState) -> dict[str, Any]:
    """What each control of the page is set to in this state; a run without heads has none to set."""
    top = int(run.heads["layer"].max()) if len(run.heads) else 0
    first = next(iter(default_models(run)), None)
    every = {
        "model": view.model,
        "models": list(view.shown_models),
        "base": view.baseline or (first if "models" in page.controls(run) else None),
        "stat": view.statistic_name,
        "lines": view.rank_lines,
        "layers": list(view.layers or (0, top)),
        "role": view.role,
        "low": "" if view.min_value is None else view.min_value,
        "high": "" if view.max_value is None else view.max_value,
    }
    return {"run": [part.name for part in run.parts]} | {name: every[name] for name in page.controls(run)}


def build_controls(page: Page, run: Run, view: ViewState) -> list[Any]:
    """The controls that the page asks for, set to the state."""
    made = _control_specs(run)
    parts: list[Any] = []
    for name, value in control_values(page, run, view).items():
        kind, how = made[name]
        control = kind(id={"control": name}, value=value, **how)
        parts.append(dmc.InputWrapper(control, label="Layers") if name == "layers" else control)
        if name == "run" and (newer := _newer_run(run)):
            told = [
                "A newer run has finished: ",
                html.A(_run_label(newer), href=view.link("", *FILTER_PARAMETERS, run=newer)),
            ]
            parts.append(html.P(told, className="offer", role="status"))
    buttons = [html.Button("Copy link", id="copy", type="button"), html.Button("Save page", id="save", type="button")]
    return [*parts, html.Div(buttons, className="tools")]


def _control_specs(run: Run) -> dict[str, Any]:
    """Component and its settings by control."""
    runs = [{"value": name, "label": _run_label(name)} for name in current_store().list_runs()]
    stats = [{"value": name, "label": statistic(name).label} for name in run_statistics(run)]
    called = [{"value": name, "label": f"{name}: {role.meaning}"} for name, role in roles().items()]
    top = int(run.heads["layer"].max()) if len(run.heads) else 0
    layers = {
        "min": 0,
        "max": top,
        "minRange": 0,
        "marks": [{"value": end, "label": str(end)} for end in (0, top)],
        "thumbFromLabel": "First layer",
        "thumbToLabel": "Last layer",
        "mb": 22,
    }
    baseline = {"clearable": True, "placeholder": "none: show values"}
    threshold = {"placeholder": "any", "debounce": 600}
    return {
        "run": (dmc.MultiSelect, {"label": "Runs, read as one", "data": runs, "searchable": True}),
        "model": (dmc.Select, {"label": "Model", "data": run.models, "allowDeselect": False}),
        "models": (dmc.MultiSelect, {"label": "Models drawn", "data": run.models, "searchable": True}),
        "base": (dmc.Select, {"label": "Pinned baseline", "data": run.models, **baseline}),
        "stat": (dmc.Select, {"label": "Statistic", "data": stats, "searchable": True, "allowDeselect": False}),
        "lines": (dmc.Select, {"label": "Rank shift of", "data": RANK_LINE_OPTIONS, "allowDeselect": False}),
        "layers": (dmc.RangeSlider, layers),
        "role": (dmc.Select, {"label": "Role", "data": called, "clearable": True, "placeholder": "all heads"}),
        "low": (dmc.NumberInput, {"label": "Statistic at least", **threshold}),
        "high": (dmc.NumberInput, {"label": "Statistic at most", **threshold}),
    }


def _newer_run(run: Run) -> str | None:
    """The newest run that has finished since the app was started, if it is not shown."""
    newest = current_store().newest_since_start()
    return newest if newest not in {part.name for part in run.parts} else None


def _run_label(run_name: str) -> str:
    """A run's name without its hash: example, 11-21 13:35."""
    stamp, _, rest = run_name.partition("-")
    if len(stamp) != 16 or not rest:
        return run_name
    slug = rest.rpartition("-")[0] or rest
    return f"{slug}, {stamp[4:6]}-{stamp[6:8]} {stamp[9:11]}:{stamp[11:13]}"
