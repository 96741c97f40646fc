"""Heads during training: any statistic and every role by training step, for one or several trainings."""

from collections.abc import Iterator, Sequence
from itertools import chain

import pandas as pd

from dashboards.view_state import ViewState
from headscope.base import plugins
from headscope.plots import layers, role_emergence
from headscope.rendering import assembly
from headscope.rendering.blocks import Block, Chart, LazySequence, PageContent, TextBlock, TextTable
from headscope.results.words import count_nouns
from headscope.runs.column_metadata import measured_roles, roles
from headscope.runs.columns import TableParts
from headscope.runs.run import Run
from headscope.runs.trainings import has_mixed_lengths, measured_checkpoints, role_onsets, training_checkpoints

NAME = "Checkpoints"
PATH = "/checkpoints"
MAX_LINES = 8
"""Heads with a line of their own."""


def controls(run: Run) -> Sequence[str]:
    """Statistic and filters, if the run has several checkpoints."""
    return ("stat", "layers", "role") if len(assembly.training_steps(run)) > 1 and assembly.run_statistics(run) else ()


def missing_command(run: Run) -> str:
    """The command that measures checkpoints; "" if the run has several, or a table of a probe of trainings."""
    trained = [probe for probe in plugins.probes().values() if probe.group == "Training" and probe.tab is None]
    names = {table.name for probe in trained for table in plugins.call_part(probe, TableParts.tables)}
    has_training = len(assembly.training_steps(run)) > 1 or bool(names & {*run.tables})
    return "" if has_training else "headscope run --checkpoints 'ckpts/step-*'"


def content(run: Run, view: ViewState) -> PageContent:
    """The statistic and the roles by step, and what probes show of a training."""
    steps = assembly.training_steps(run)
    training_steps = training_checkpoints(run.manifest["models"])
    heads = view.filter_heads(run.heads)
    context = assembly.render_context(run, view.model, heads)
    sections: dict[str, Sequence[Block]] = {"": LazySequence(assembly.cards_for_page(context, PATH))}
    if len(steps) > 1 and view.statistic_name:
        sections["Roles"] = LazySequence(_role_charts(heads, training_steps))
        sections["Over checkpoints"] = LazySequence(_statistic_charts(run, view, heads, training_steps))
    for heading, charts in assembly.charts_for_page(context, PATH).items():
        sections[heading] = LazySequence(chain(sections.get(heading, ()), charts))
    if not any(sections.values()):
        reason = "No two models of these runs have a training step. Measure several checkpoints in one run: "
        text = TextBlock([f"{reason}headscope run --checkpoints 'ckpts/step-*'."])
        return PageContent("Checkpoints", "", {"": [text]})
    return PageContent("Checkpoints", _introduction(training_steps), sections)


def _introduction(training_steps: pd.DataFrame) -> str:
    trainings = training_steps["training"].nunique()
    suffix = f", from {trainings} trainings" if trainings > 1 else ""
    return f"{count_nouns(len(training_steps), 'models')} with a training step{suffix}."


def _statistic_charts(run: Run, view: ViewState, heads: pd.DataFrame, training_steps: pd.DataFrame) -> Iterator[Chart]:
    is_single_training = training_steps["training"].nunique() == 1
    if is_single_training:
        highlighted = sorted(view.selected_heads) or list(assembly.notable_heads(run.heads))
        steps = assembly.training_steps(run)
        yield Chart(
            layers.plot_over_steps(heads, view.statistic_name, steps, highlighted[:MAX_LINES]),
            "Grey: the median head and the middle 80 % of heads. Coloured: selected heads, else notable ones.",
            half_width=True,
        )
        yield Chart(
            layers.plot_layers_by_step(heads, view.statistic_name, steps),
            "Median over the heads of a layer.",
            half_width=True,
        )
    caption = (
        "One line per head."
        if is_single_training
        else "One line per training: the median over the heads of the layer. Dotted: selected heads."
    )
    yield Chart(
        role_emergence.plot_training_by_layer(heads, view.statistic_name, training_steps, view.selected_heads), caption
    )


def _role_charts(heads: pd.DataFrame, training_steps: pd.DataFrame) -> Iterator[Block]:
    """The number of heads with each role by step, and the step from which each head has its final role."""
    role_names = measured_roles(heads)
    if has_mixed_lengths(heads[heads["model"].isin(training_steps["label"])]):
        text = "These checkpoints were measured at different context lengths, so their roles are not comparable."
        yield TextBlock([f"{text} Measure all of them at the same lengths."])
    yield Chart(
        role_emergence.plot_roles_by_layer(heads, training_steps, role_names),
        "Number of heads of a layer that have the role"
        + ("; drag the slider to another step." if training_steps["step"].nunique() > 1 else "."),
    )
    yield Chart(
        role_emergence.plot_role_counts(heads, training_steps, role_names),
        "Number of heads with the role at that step.",
        half_width=True,
    )
    checkpoints = measured_checkpoints(heads, training_steps)
    if checkpoints.empty:
        return
    onsets, trainings = role_onsets(heads, checkpoints, role_names), list(dict.fromkeys(training_steps["training"]))
    yield Chart(
        role_emergence.plot_role_onsets(onsets, trainings, list(checkpoints["step"])),
        "One point per head: the first step from which it has the role at every later step.",
        half_width=True,
    )
    if len(onsets):
        yield _role_onset_table(onsets, list(dict.fromkeys(checkpoints["training"])))


def _role_onset_table(onsets: pd.DataFrame, trainings: Sequence[str]) -> TextTable:
    """One row per role, one column per training."""
    steps = onsets.groupby(["role", "training"], sort=False)["step"]
    cells = {
        key: f"{len(step)} head{'s' if len(step) > 1 else ''}; first at step {step.min():,}, "
        f"half by step {step.sort_values().iloc[(len(step) - 1) // 2]:,}"
        for key, step in steps
    }
    role_names = onsets["role"].unique()
    rows = [(role, *(cells.get((role, training), "none") for training in trainings)) for role in role_names]
    caption = "Heads with each role at the last step, and the steps from which they have it"
    return TextTable(caption, ("role", *trainings), rows, {name: role.meaning for name, role in roles().items()})
