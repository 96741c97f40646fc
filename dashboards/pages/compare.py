"""Models against a baseline: every head's statistic, pairs, parameters and loss."""

import pandas as pd

from dashboards.content import Content, Part, Words
from dashboards.view import View
from headscope import charts
from headscope.chart import Chart
from headscope.figures import layers
from headscope.findings import few
from headscope.store import Run
from headscope.summary import statistic

NAME = "Compare"
PATH = "/compare"
CONTROLS = ("base", "stat", "model", "layers", "role", "low", "high")


def content(run: Run, view: View) -> Content:
    """The statistic of each head against the baseline, then what differs: pairs, parameters and loss."""
    first = view.base or (run.models[0] if run.models else "")
    models = [first, *(label for label in few(run.models) if label != first)]
    if len(models) < 2 or not view.stat:
        why = "A comparison needs two models with a statistic of their heads. Give headscope run two: --model A=... "
        return Content("Compare", "", {"": [Words([f"{why}--model B=..."])]})
    heads = view.kept(run.heads[run.heads["model"].isin(models)])
    shown = statistic(view.stat)
    spread = [name for name in dict.fromkeys([view.stat, "cov"]) if name in heads]
    sections: dict[str, list[Part]] = {
        f"{shown.label[0].upper()}{shown.label[1:]}": [
            charts.against_chart(heads, view.stat, first),
            *(part for name in spread for part in (charts.box_chart(heads, name), _by_layer(heads, name))),
        ],
        "Position parameters": [*charts.parameter_charts(run, heads, models)],
        "Loss along the context": [*charts.loss_charts(run, models)],
    }
    told = "" if len(heads) else " No head passes the filters."
    return Content(
        f"Models against {first}",
        f"{', '.join(models[1:])} against {first}, head by head.{told}",
        {name: parts for name, parts in sections.items() if parts},
    )


def _by_layer(heads: pd.DataFrame, name: str) -> Chart:
    caption = "Mean over the heads of a layer; the band holds the middle 80 % of heads."
    return Chart(layers.by_layer(heads, name), caption, half=True)
