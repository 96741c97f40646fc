"""What a report shows of the needle probe, and the sentence that says how to read each chart."""

from collections.abc import Iterator, Sequence

import pandas as pd

from headscope.plots import head_scatter
from headscope.plots import heads as head_figures
from headscope.report.blocks import Chart, ChartGroup, RenderContext
from headscope.report.text import describe_extremes
from headscope.runs.run import Run
from probes.needle import PROBE, analysis, plots
from probes.needle.analysis import DETECTOR_PAIRS, scores_by_seed, seed_columns
from probes.needle.browser import cell_link
from probes.needle.heads import retrieval_rows


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Where each model finds the needle, and which heads copy it; nothing without trials."""
    needles = context.table("needles")
    if needles is not None:
        yield ChartGroup(PROBE.title, "Where the needle is found", _success_by_length_charts(needles), app_pages="/")
        yield ChartGroup(PROBE.title, "Where the needle is found", _success_map_charts(needles, context.models))
        yield ChartGroup(PROBE.title, "Which heads copy it", _retrieval_charts(context))
        yield ChartGroup(PROBE.title, "Which heads write it", _attribution_charts(context))
        yield ChartGroup(PROBE.title, "Without its top heads", _ablation_charts(context))


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """Where one head copies the needle."""
    if "retrieval" in run.tables:
        yield Chart(
            plots.plot_head_retrieval(run.derived(retrieval_rows), model, layer, head),
            "Share of the needle that this head copies while the model answers right, by length and depth.",
            half_width=True,
        )


def _success_by_length_charts(needles: pd.DataFrame) -> Iterator[Chart]:
    for mode in analysis.present_modes(needles):
        yield Chart(
            plots.plot_success_by_length(needles, mode),
            "Over all depths; the band is the 95 % interval of the share.",
            half_width=True,
        )


def _success_map_charts(needles: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    for label in models:
        for mode in analysis.present_modes(needles):
            mine = needles[(needles["model"] == label) & (needles["mode"] == mode)]
            lengths = sorted(mine["context_length"].unique())
            yield Chart(
                plots.plot_success_map(needles, label, mode),
                "A cell is a context length and a depth; a trial succeeds where the answer holds more than half of the "
                "needle's words.",
                half_width=True,
                cell_links=[
                    [cell_link(label, mode, length, depth) for length in lengths]
                    for depth in sorted(mine["depth"].unique())
                ],
            )


def _attribution_charts(context: RenderContext) -> Iterator[Chart]:
    """What heads write through the needle, and how that goes with what they copy."""
    for name in ("needle_write", "needle_write_indirect"):
        for label in context.finite_values(name):
            yield Chart(
                head_figures.plot_matrix(context.heads, name, label),
                "Logits that a head adds directly to the answered tokens through its weight on the needle, less what "
                "it adds through the tokens there in the control without a needle.",
                describe_extremes(context.heads, name, label),
                half_width=True,
            )
    for label in context.models:
        for x, y in DETECTOR_PAIRS:
            if label in context.finite_values(x) and label in context.finite_values(y):
                yield Chart(
                    plots.plot_detector_comparison(context.heads, label, x, y),
                    "A point is a head: two ways to detect those that retrieve.",
                    half_width=True,
                )


def _ablation_charts(context: RenderContext) -> Iterator[Chart]:
    """Success against the number of heads silenced."""
    if "needle_ablation" not in context.run.tables:
        return
    lines = context.run.derived(analysis.ablation_curve)
    for (label, _, _), mine in lines[lines["model"].isin(list(context.models))].groupby(["model", "mode", "ablation"]):
        yield Chart(
            plots.plot_ablation_curve(mine, str(label)),
            "Heads are ranked on one half of the needles and silenced while the other half is asked for. Bands: 95 % "
            "Wilson interval over trials; thin lines: the least and the most that one random set leaves.",
            half_width=True,
        )


def _retrieval_charts(context: RenderContext) -> Iterator[Chart]:
    """Score of every head, how scores go with growth, and how far models and haystacks agree."""
    heads = context.heads
    with_score, with_growth = context.finite_values("retrieval"), context.finite_values("growth")
    scored = [label for label in context.models if label in with_score]
    for label in scored:
        yield Chart(
            head_figures.plot_matrix(heads, "retrieval", label),
            "Share of the needle that a head copies while the model answers right: at the step that writes a token, "
            "the head's largest weight lies on that very token of the needle.",
            describe_extremes(heads, "retrieval", label),
            half_width=True,
        )
    if scored:
        yield Chart(
            plots.plot_ranked_scores(heads),
            "Heads above the dotted line, a score of 0.1, are called retrieval heads. Bands: 95 % interval "
            "over trials.",
            half_width=True,
        )
    for label in scored:
        if label in with_growth:
            yield Chart(
                plots.plot_against_growth(heads, label),
                "A point is a head. Theory asks a retrieval head to keep its effective length: a growth exponent "
                "near 0.",
                half_width=True,
            )
    if len(scored) > 1:
        yield Chart(
            head_scatter.plot_against_baseline(heads, "retrieval", scored[0]),
            f"A point is a head. On the dashed line it copies as much as under {scored[0]}.",
        )
    scores = context.run.derived(scores_by_seed)
    for label in scored if len(seed_columns(scores)) > 1 else ():
        yield Chart(
            plots.plot_seed_agreement(scores, label),
            "The same needles in two haystacks; a point is a head.",
            half_width=True,
        )
