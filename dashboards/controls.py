"""Controls of a page: those that have an effect there, set to the values of the URL."""

from typing import Any

import dash_mantine_components as dmc
import numpy as np
import pandas as pd
from dash import html

from dashboards.pages import Page
from dashboards.run_store import current_store, run_label
from dashboards.view_state import ViewState, roles_of_run
from headscope.rendering.assembly import run_statistics
from headscope.runs.column_metadata import roles, statistic
from headscope.runs.run import Run
from headscope.runs.summary import default_models

PYTHON_TOOLTIP = "Copy code that opens this page in Python: its runs, the heads that it shows, and its figures"
RANK_LINE_OPTIONS = [
    {"value": "top", "label": "top or selected heads"},
    {"value": "changed", "label": "heads whose confidence intervals do not overlap"},
]


def control_values(page: Page, run: Run, view: ViewState) -> dict[str, Any]:
    """The value of each control of the page in this state."""
    last_layer = int(run.heads["layer"].max()) if len(run.heads) else 0
    first_model = next(iter(default_models(run)), None)
    values = {
        "model": view.model,
        "models": list(view.shown_models),
        "baseline": view.baseline or (first_model if "models" in page.controls(run) else None),
        "stat": view.statistic_name,
        "rank_lines": view.rank_lines,
        "layers": list(view.layers or (0, last_layer)),
        "role": view.role,
        "set": view.set_name,
        "min": "" if view.min_value is None else view.min_value,
        "max": "" if view.max_value is None else view.max_value,
    }
    names = [name for name in page.controls(run) if name != "set" or view.head_sets]
    return {"run": [part.name for part in run.parts]} | {name: values[name] for name in names}


def bound_placeholders(run: Run, view: ViewState) -> dict[str, str]:
    """The least and the largest value of the statistic in the model that filters apply to, for the empty bounds."""
    of_model = run.heads[run.heads["model"] == view.filter_model]
    values = of_model.get(view.statistic_name, pd.Series(dtype="float64"))
    values = values[np.isfinite(values)]
    return {"min": f"{values.min():.4g}", "max": f"{values.max():.4g}"} if len(values) else {"min": "any", "max": "any"}


def run_options() -> list[dict[str, str]]:
    """Values and labels of the control of runs: every run of the folder, newest first."""
    return [
        {"value": name, "label": run_label(name) if isinstance(run, Run) else f"{run_label(name)} (damaged)"}
        for name, run in current_store().list_runs().items()
    ]


def build_run_control(run: Run) -> dmc.MultiSelect:
    """The control that chooses and combines runs, which every page has."""
    names = [part.name for part in run.parts]
    settings = {"label": "Combined runs", "data": run_options(), "searchable": True}
    return dmc.MultiSelect(id={"control": "run"}, value=names, **settings)


def build_controls(page: Page, run: Run, view: ViewState) -> list[Any]:
    """The other controls of the page, set to the state, and the buttons below them."""
    specs, values = _control_specs(run, view), control_values(page, run, view)
    del values["run"]
    parts: list[Any] = []
    for name, value in values.items():
        component, settings = specs[name]
        control = component(id={"control": name}, value=value, **settings)
        parts.append(dmc.InputWrapper(control, label="Layers") if name == "layers" else control)
    buttons = [
        html.Button("Copy link", id="copy-link", type="button"),
        html.Button("Copy as Python", id="copy-python", type="button", title=PYTHON_TOOLTIP),
        html.Button("Save page", id="save-page", type="button"),
    ]
    return [*parts, html.Div(buttons, className="toolbar")]


def _control_specs(run: Run, view: ViewState) -> dict[str, Any]:
    """Component and settings, by control."""
    statistics = [{"value": name, "label": statistic(name).label} for name in run_statistics(run)]
    role_options = [{"value": name, "label": f"{name}: {roles()[name].meaning}"} for name in roles_of_run(run)]
    last_layer = int(run.heads["layer"].max()) if len(run.heads) else 0
    layers = {
        "min": 0,
        "max": last_layer,
        "minRange": 0,
        "marks": [{"value": end, "label": str(end)} for end in (0, last_layer)],
        "thumbFromLabel": "First layer",
        "thumbToLabel": "Last layer",
        "mb": 22,
    }
    baseline = {"clearable": True, "placeholder": "none: show values"}
    placeholders = bound_placeholders(run, view)
    return {
        "model": (dmc.Select, {"label": "Model", "data": run.models, "allowDeselect": False}),
        "models": (dmc.MultiSelect, {"label": "Models shown", "data": run.models, "searchable": True}),
        "baseline": (dmc.Select, {"label": "Baseline", "data": run.models, **baseline}),
        "stat": (dmc.Select, {"label": "Statistic", "data": statistics, "searchable": True, "allowDeselect": False}),
        "rank_lines": (dmc.Select, {"label": "Rank shift of", "data": RANK_LINE_OPTIONS, "allowDeselect": False}),
        "layers": (dmc.RangeSlider, layers),
        "role": (dmc.Select, {"label": "Role", "data": role_options, "clearable": True, "placeholder": "all heads"}),
        "set": (dmc.Select, {"label": "Set", "data": [*view.head_sets], "clearable": True, "placeholder": "all heads"}),
        "min": (dmc.NumberInput, {"label": "Minimum value", "placeholder": placeholders["min"], "debounce": 600}),
        "max": (dmc.NumberInput, {"label": "Maximum value", "placeholder": placeholders["max"], "debounce": 600}),
    }
