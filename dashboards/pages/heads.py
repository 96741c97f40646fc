"""All heads of a model in one statistic, as values or against a pinned baseline, and the grid that goes with it."""

from collections.abc import Sequence

from dashboards.view_state import FILTER_PARAMETERS, ViewState
from headscope.plots import heads as head_figures
from headscope.report import assembly
from headscope.report.blocks import Block, Chart, HeadTable, Link, Links, PageContent, TextBlock
from headscope.report.text import describe_extremes
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from headscope.runs.summary import beside

NAME = "Heads"
PATH = "/heads"


def controls(run: Run) -> Sequence[str]:
    """All, where heads were measured."""
    return ("model", "base", "stat", *FILTER_PARAMETERS) if assembly.run_statistics(run) else ()


def content(run: Run, view: ViewState) -> PageContent:
    """A layer x head matrix of the statistic, and every head of the model in a grid."""
    if not view.statistic_name:
        why = "These runs measured no statistic of heads. Add them: headscope run --model NAME=CHECKPOINT@SCHEME."
        return PageContent("Heads", "", {"": [TextBlock([why])]})
    shown = statistic(view.statistic_name)
    having = assembly.models_with_statistic(run, view.statistic_name)
    lacking = [label for label in dict.fromkeys((view.model, view.baseline)) if label and label not in having]
    kept = view.filter_heads(run.heads)
    lead = f"{view.model}, head by head."
    if lacking:
        parts: list[Block] = [_missing_statistic(view, lacking, having)]
    elif view.baseline and view.baseline != view.model:
        how = "ratio" if shown.log_scale else "difference"
        figure = head_figures.plot_change(view.mask_filtered(run.heads), view.statistic_name, view.model, view.baseline)
        parts = [
            Chart(figure, f"The {how} of {view.model} to {view.baseline}: red is more, blue is less, white is alike.")
        ]
        lead = f"{view.model} against {view.baseline}, head by head."
    else:
        figure = head_figures.plot_matrix(view.mask_filtered(run.heads), view.statistic_name, view.model)
        how = "A cell is a head, the first layer at the bottom. The colours mean the same under every model."
        parts = [Chart(figure, how, describe_extremes(kept, view.statistic_name, view.model))]
    parts.append(
        HeadTable(view.model, beside(kept, view.statistic_name, view.model, view.baseline), view.statistic_name)
    )
    return PageContent(shown.title, lead if len(kept) else "No head passes the filters.", {"": parts})


def _missing_statistic(view: ViewState, models_without: Sequence[str], models_with: Sequence[str]) -> Block:
    """Which models lack the statistic, who has it, and what would measure it."""
    label = statistic(view.statistic_name).label
    told = [
        f"Of {' and '.join(models_without)} there is no {label} in these runs; of {', '.join(models_with)} there is."
    ]
    if probe := assembly.probe_for_statistic(view.statistic_name):
        told.append(f"Measure it: {probe.command_line}")
    links = [Link(f"{label} of {model}", view.link("", "base", model=model)) for model in models_with]
    return TextBlock(told, links=Links(links))
