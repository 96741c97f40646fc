"""All heads of a model in one statistic, as values or against a pinned baseline, and the grid that goes with it."""

from collections.abc import Sequence

from dashboards.view import FILTERS, View
from headscope.figures import heads as head_figures
from headscope.report import outline
from headscope.report.content import Chart, Content, Grid, Link, Links, Piece, Words
from headscope.report.words import extremes
from headscope.runs.run import Run
from headscope.runs.statistics import statistic
from headscope.runs.summary import beside

NAME = "Heads"
PATH = "/heads"


def controls(run: Run) -> Sequence[str]:
    """All, where heads were measured."""
    return ("model", "base", "stat", *FILTERS) if outline.statistics_of(run) else ()


def content(run: Run, view: View) -> Content:
    """A layer x head matrix of the statistic, and every head of the model in a grid."""
    if not view.stat:
        why = "These runs measured no statistic of heads. Add them: headscope run --model NAME=CHECKPOINT@SCHEME."
        return Content("Heads", "", {"": [Words([why])]})
    shown = statistic(view.stat)
    having = outline.having(run, view.stat)
    lacking = [label for label in dict.fromkeys((view.model, view.base)) if label and label not in having]
    kept = view.kept(run.heads)
    lead = f"{view.model}, head by head."
    if lacking:
        parts: list[Piece] = [_lacks(view, lacking, having)]
    elif view.base and view.base != view.model:
        how = "ratio" if shown.log_scale else "difference"
        figure = head_figures.change(view.masked(run.heads), view.stat, view.model, view.base)
        parts = [Chart(figure, f"The {how} of {view.model} to {view.base}: red is more, blue is less, white is alike.")]
        lead = f"{view.model} against {view.base}, head by head."
    else:
        figure = head_figures.matrix(view.masked(run.heads), view.stat, view.model)
        how = "A cell is a head, the first layer at the bottom. The colours mean the same under every model."
        parts = [Chart(figure, how, extremes(kept, view.stat, view.model))]
    parts.append(Grid(view.model, beside(kept, view.stat, view.model, view.base), view.stat))
    return Content(shown.title, lead if len(kept) else "No head passes the filters.", {"": parts})


def _lacks(view: View, lacking: Sequence[str], having: Sequence[str]) -> Piece:
    """Which models lack the statistic, who has it, and what would measure it."""
    label = statistic(view.stat).label
    told = [f"Of {' and '.join(lacking)} there is no {label} in these runs; of {', '.join(having)} there is."]
    if probe := outline.measuring(view.stat):
        told.append(f"Measure it: {probe.command_line}")
    links = [Link(f"{label} of {model}", view.link("", "base", model=model)) for model in having]
    return Words(told, links=Links(links))
