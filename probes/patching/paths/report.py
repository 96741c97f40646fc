"""Charts of path patching and its glossary."""

from collections.abc import Iterator

import pandas as pd

from headscope.effects.agreement import compared_units
from headscope.effects.results import effect_text
from headscope.effects.sweep import Effects
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term, TextTable
from headscope.results.words import format_value, sentence
from probes.patching.labels import describe_path_sweep, path_name
from probes.patching.paths import PROBE, plots
from probes.patching.paths.analysis import PLACE_COLUMNS, strongest_paths, sweeps_of_model
from probes.patching.paths.questions import EFFECT
from probes.patching.paths.results import has_paths, path_results
from probes.patching.paths.schema import PATH_ESTIMATES, PATHS

TABLE_ROWS = 15
"""Paths in the table of the strongest."""

GLOSSARY = (
    Term(
        "Path patching",
        "Activation patching of one path: the queries, keys or values of a receiver head change as if one sender head "
        "had its output of the other run, while all heads and MLPs between them keep their values; then the rest of "
        "the model runs. A path to the logits is the sender's direct effect. An effect of 0 changes nothing; an effect "
        "of 1 moves the metric to its value in the other run.",
        "(m(patched) - m(unpatched)) / (m(source) - m(unpatched)); source: the run that the sender's output comes from",
        (PATHS.name, PATH_ESTIMATES.name),
    ),
)
GRAPH_CAPTION = (
    "One line per path, from the sender to the receiver; wider lines have larger effects. Red: towards the run that "
    "the sender's output comes from; blue: away from it. The dash shows the receiver's input that changes."
)

POSITION_CAPTION = (
    "Mean effect over pairs of patching a path at some positions of its sender or receiver, for the paths of largest "
    "effect at any of them. A position is a token of the clean prompt, by number, a range or a named span."
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The graph of the strongest paths, the strongest paths as a table, and the agreement of estimates."""
    if not has_paths(context.run):
        return
    for effects in context.run.derived(sweeps_of_model, context.selected_model):
        heading = f"{describe_path_sweep(effects)}, {effects.key['prompts']}"
        yield ChartGroup(PROBE.title, heading, _sweep_charts(effects))


def _sweep_charts(effects: Effects) -> Iterator[Chart | TextTable]:
    texts = {result.question: sentence(result) for result in path_results(effects)}
    yield Chart(plots.plot_graph(effects), GRAPH_CAPTION, texts["paths.top"])
    if (effects.units[PLACE_COLUMNS].nunique() > 1).any():
        yield Chart(plots.plot_positions(effects), POSITION_CAPTION)
    rows = [
        [path_name(path), effect_text(effects, path, EFFECT), _format_p(path["p_adjusted"])]
        for _, path in strongest_paths(effects, effects.units, TABLE_ROWS).iterrows()
    ]
    yield TextTable("The paths of largest absolute effect.", ["path", "effect, mean over pairs", "adjusted p"], rows)
    if "estimate" in effects.estimates and len(compared_units(effects, "estimate")) > 2:
        yield Chart(
            plots.plot_agreement(effects),
            "One point per path that was both estimated and patched. On the dashed line the estimate equals the exact "
            "effect.",
            texts.get("paths.agreement", ""),
            half_width=True,
        )


def _format_p(p: float) -> str:
    return "" if pd.isna(p) else format_value(p, ".3g")
