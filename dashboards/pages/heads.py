"""All heads of a model in one statistic, as values or against a pinned baseline, and the grid that goes with it."""

from dashboards.view import View
from headscope.figures import heads as head_figures
from headscope.report.content import Chart, Content, Grid, Piece, Words
from headscope.report.words import extremes
from headscope.runs.run import Run
from headscope.runs.statistics import statistic
from headscope.runs.summary import beside

NAME = "Heads"
PATH = "/heads"
CONTROLS = ("model", "base", "stat", "layers", "role", "low", "high")


def content(run: Run, view: View) -> Content:
    """A layer x head matrix of the statistic, and every head of the model in a grid."""
    if not view.stat:
        why = "These runs measured no statistic of heads. Add them: headscope run --model NAME=CHECKPOINT@SCHEME."
        return Content("Heads", "", {"": [Words([why])]})
    shown = statistic(view.stat)
    kept = view.kept(run.heads)
    if view.base and view.base != view.model:
        how = "ratio" if shown.log_scale else "difference"
        figure = head_figures.change(view.masked(run.heads), view.stat, view.model, view.base)
        chart = Chart(figure, f"The {how} of {view.model} to {view.base}: red is more, blue is less, white is alike.")
        lead = f"{view.model} against {view.base}, head by head."
    else:
        figure = head_figures.matrix(view.masked(run.heads), view.stat, view.model)
        chart = Chart(figure, "A cell is a head, the first layer at the bottom.", extremes(kept, view.stat, view.model))
        lead = f"{view.model}, head by head."
    grid = Grid(view.model, beside(kept, view.stat, view.model, view.base), view.stat)
    parts: list[Piece] = [chart, grid]
    return Content(shown.title, lead if len(kept) else "No head passes the filters.", {"": parts})
