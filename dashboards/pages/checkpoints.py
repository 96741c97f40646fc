"""How heads come into being: any statistic and every role against training step, of one training or of several."""

from collections.abc import Iterator, Sequence
from itertools import chain

import pandas as pd

from dashboards.view_state import ViewState
from headscope.plots import layers, role_emergence
from headscope.report import assembly
from headscope.report.blocks import Block, Chart, LazySequence, PageContent, TextBlock, TextTable
from headscope.runs.column_metadata import by_length
from headscope.runs.roles import roles
from headscope.runs.run import Run
from headscope.runs.training_runs import courses

NAME = "Checkpoints"
PATH = "/checkpoints"


def controls(run: Run) -> Sequence[str]:
    """Where models are checkpoints."""
    return ("stat", "layers", "role") if len(assembly.training_steps(run)) > 1 and assembly.run_statistics(run) else ()


def content(run: Run, view: ViewState) -> PageContent:
    """The statistic and the roles over steps, and what probes show of a training."""
    steps = assembly.training_steps(run)
    course = courses(run.manifest["models"])
    sections: dict[str, Sequence[Block]] = {}
    heads = view.filter_heads(run.heads)
    if len(steps) > 1 and view.statistic_name:
        sections["Over checkpoints"] = LazySequence(_statistic_charts(run, view, heads, course))
        sections["Roles"] = LazySequence(_role_charts(run.heads, course))
    for heading, charts in assembly.charts_for_page(assembly.render_context(run, view.model, heads), PATH).items():
        sections[heading] = LazySequence(chain(sections.get(heading, ()), charts))
    if not any(sections.values()):
        why = "No two models of these runs carry a training step. Measure checkpoints in a batch: "
        return PageContent("Checkpoints", "", {"": [TextBlock([f"{why}headscope run --checkpoints 'ckpts/step-*'."])]})
    return PageContent("Checkpoints", _introduction(course), sections)


def _introduction(training_steps: pd.DataFrame) -> str:
    trainings = training_steps["training"].nunique()
    of = f", of {trainings} trainings" if trainings > 1 else ""
    return f"{len(training_steps)} models carry a training step{of}."


def _statistic_charts(run: Run, view: ViewState, heads: pd.DataFrame, training_steps: pd.DataFrame) -> Iterator[Chart]:
    alone = training_steps["training"].nunique() == 1
    if alone:
        chosen = sorted(view.selected_heads) or list(assembly.notable_heads(run.heads))
        steps = assembly.training_steps(run)
        yield Chart(
            layers.plot_over_steps(heads, view.statistic_name, steps, chosen[:8]),
            "Grey: the median head and the middle 80 % of heads. Coloured: picked heads, else notable ones.",
            half_width=True,
        )
        yield Chart(
            layers.plot_layers_by_step(heads, view.statistic_name, steps),
            "Median over the heads of a layer.",
            half_width=True,
        )
    told = (
        "A line a head."
        if alone
        else "A line a training: the median over the heads of the layer; dotted: picked heads."
    )
    yield Chart(
        role_emergence.plot_training_by_layer(heads, view.statistic_name, training_steps, view.selected_heads), told
    )


def _role_charts(heads: pd.DataFrame, training_steps: pd.DataFrame) -> Iterator[Block]:
    """How many heads bear each role at each step, and since when those of the last step do."""
    known = list(roles())
    if has_mixed_lengths(heads[heads["model"].isin(training_steps["label"])]):
        told = "These checkpoints were measured at different lengths, by which roles that go by effective length differ"
        yield TextBlock([f"{told}: measure all of them alike."])
    yield Chart(
        role_emergence.plot_role_counts(heads, training_steps, known),
        "Heads that bear the role at that step.",
        half_width=True,
    )
    taken = role_emergence.role_onsets(heads, training_steps, known)
    trainings = list(dict.fromkeys(training_steps["training"]))
    yield Chart(
        role_emergence.plot_role_onsets(taken, trainings, list(training_steps["step"])),
        "A point a head: the first step from which it bears the role at every later one.",
        half_width=True,
    )
    if len(taken):
        yield _role_onset_table(taken, trainings)


def has_mixed_lengths(heads: pd.DataFrame) -> bool:
    """Whether some of the models were measured at other lengths than others."""
    lengths = heads[by_length(map(str, heads), "ess2")].notna()
    return len(lengths.groupby(heads["model"], observed=True).any().drop_duplicates()) > 1


def _role_onset_table(onsets: pd.DataFrame, trainings: Sequence[str]) -> TextTable:
    """A row a role, a column a training."""
    steps = onsets.groupby(["role", "training"], sort=False)["step"]
    told = {
        place: f"{len(at)} from {at.min():,}, half by {at.sort_values().iloc[(len(at) - 1) // 2]:,}"
        for place, at in steps
    }
    rows = [(role, *(told.get((role, each), "none") for each in trainings)) for role in onsets["role"].unique()]
    caption = "Heads that bear a role at the end: how many, from which step the first, and by which half of them"
    return TextTable(caption, ("role", *trainings), rows, {name: role.meaning for name, role in roles().items()})
