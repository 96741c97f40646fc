"""All heads of a model in one statistic, as values or against a baseline, with the table of heads."""

from collections.abc import Sequence

from dashboards.empty_pages import command_for_run
from dashboards.view_state import FILTER_PARAMETERS, ViewState
from headscope.plots import head_matrices as head_figures
from headscope.rendering import assembly, similar_heads
from headscope.rendering.blocks import Block, Chart, HeadTable, LazySequence, Link, Links, PageContent, TextBlock
from headscope.rendering.text import describe_extremes
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from headscope.runs.summary import heads_of_model

NAME = "Heads"
PATH = "/heads"


def controls(run: Run) -> Sequence[str]:
    """Model, baseline, statistic and filters, if the run has statistics of heads."""
    return ("model", "baseline", "stat", *FILTER_PARAMETERS) if assembly.run_statistics(run) else ()


def missing_command(run: Run) -> str:
    """The command that measures heads; "" if the run has statistics of heads."""
    return "" if assembly.run_statistics(run) else command_for_run("headscope run", run)


def content(run: Run, view: ViewState) -> PageContent:
    """A layer x head matrix of the statistic, and every head of the model in a table."""
    selected = statistic(view.statistic_name)
    models_with = assembly.models_with_statistic(run, view.statistic_name)
    labels = dict.fromkeys((view.model, view.baseline))
    models_without = [label for label in labels if label and label not in models_with]
    heads = view.filter_heads(run.heads)
    introduction = f"{view.model}, head by head."
    if models_without:
        blocks: list[Block] = [_missing_statistic(view, models_without, models_with)]
    elif view.baseline and view.baseline != view.model:
        change = "Ratio" if selected.log_scale else "Difference"
        figure = head_figures.plot_change(
            view.mask_filtered(run.heads), view.statistic_name, view.model, view.baseline, run.heads
        )
        caption = f"{change} of {view.model} to {view.baseline}. Red: higher. Blue: lower. White: equal."
        blocks = [Chart(figure, caption, half_width=True)]
        introduction = f"{view.model} against {view.baseline}, head by head."
    else:
        figure = head_figures.plot_matrix(view.mask_filtered(run.heads), view.statistic_name, view.model, run.heads)
        caption = "One cell per head; layer 0 is at the bottom. The colour scale is the same for every model."
        blocks = [Chart(figure, caption, half_width=True)]
        introduction = f"{introduction} {describe_extremes(heads, view.statistic_name, view.model)}".strip()
    columns = heads_of_model(heads, view.statistic_name, view.model, view.baseline)
    blocks.append(HeadTable(view.model, columns, view.statistic_name))
    matching_heads = {*zip(columns["layer"], columns["head"], strict=True)} if view.has_filters else None
    sections: dict[str, Sequence[Block]] = {
        "": blocks,
        "Heads with similar statistics": LazySequence(
            similar_heads.components_chart(run, view.model, matching_heads=matching_heads)
        ),
    }
    return PageContent(selected.title, introduction if len(heads) else "No head matches the filters.", sections)


def _missing_statistic(view: ViewState, models_without: Sequence[str], models_with: Sequence[str]) -> Block:
    """Which models lack the statistic, which have it, and the command that measures it."""
    label = statistic(view.statistic_name).label
    sentences = [
        f"These runs do not contain the {label} of {' and '.join(models_without)}, only of {', '.join(models_with)}."
    ]
    if probe := assembly.probe_for_statistic(view.statistic_name):
        sentences.append(f"Measure it: {probe.command_line}")
    links = [Link(f"{label} of {model}", view.link("", "baseline", model=model)) for model in models_with]
    return TextBlock(sentences, links=Links(links))
