"""Charts of the needle probe for the report and the app."""

from collections.abc import Iterator, Sequence

import pandas as pd

from headscope.plots import head_scatter
from headscope.plots import heads as head_figures
from headscope.report.blocks import Chart, ChartGroup, RenderContext
from headscope.report.text import describe_extremes
from headscope.runs.run import Run
from probes.needle import PROBE, analysis, plots
from probes.needle.analysis import DETECTOR_PAIRS, scores_by_seed, seed_columns
from probes.needle.heads import retrieval_rows
from probes.needle.trial_explorer import cell_link


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Success of each model, retrieval scores, attribution and ablation of heads; nothing without trials."""
    needles = context.table("needles")
    if needles is not None:
        yield ChartGroup(
            PROBE.title, "Success by context length and depth", _success_by_length_charts(needles), app_pages="/"
        )
        yield ChartGroup(
            PROBE.title, "Success by context length and depth", _success_map_charts(needles, context.models)
        )
        yield ChartGroup(PROBE.title, "Retrieval scores of heads", _retrieval_charts(context))
        yield ChartGroup(PROBE.title, "Attribution through the needle", _attribution_charts(context))
        yield ChartGroup(PROBE.title, "Ablation of retrieval heads", _ablation_charts(context))


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """Retrieval score of one head by context length and depth."""
    if "retrieval" in run.tables:
        yield Chart(
            plots.plot_head_retrieval(run.derived(retrieval_rows), model, layer, head),
            "Share of the needle that this head copies in successful trials.",
            half_width=True,
        )


def _success_by_length_charts(needles: pd.DataFrame) -> Iterator[Chart]:
    for mode in analysis.present_modes(needles):
        yield Chart(
            plots.plot_success_by_length(needles, mode),
            "Over all depths, with a 95 % confidence band.",
            half_width=True,
        )


def _success_map_charts(needles: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    for label in models:
        for mode in analysis.present_modes(needles):
            trials = needles[(needles["model"] == label) & (needles["mode"] == mode)]
            lengths = sorted(trials["context_length"].unique())
            yield Chart(
                plots.plot_success_map(needles, label, mode),
                "One cell per context length and depth. A trial succeeds if its answer contains more than half of the "
                "needle's words.",
                half_width=True,
                cell_links=[
                    [cell_link(label, mode, length, depth) for length in lengths]
                    for depth in sorted(trials["depth"].unique())
                ],
            )


def _attribution_charts(context: RenderContext) -> Iterator[Chart]:
    """Direct logit attribution through the needle, and its relation to the retrieval score."""
    for name in ("needle_write", "needle_write_indirect"):
        for label in context.finite_values(name):
            yield Chart(
                head_figures.plot_matrix(context.heads, name, label),
                "Direct logit attribution of each head to the answer through its attention to the needle, minus "
                "the same "
                "in the control without the needle.",
                describe_extremes(context.heads, name, label),
                half_width=True,
            )
    for label in context.models:
        for x, y in DETECTOR_PAIRS:
            if label in context.finite_values(x) and label in context.finite_values(y):
                yield Chart(
                    plots.plot_detector_comparison(context.heads, label, x, y),
                    "One point per head: two scores that detect retrieval heads.",
                    half_width=True,
                )


def _ablation_charts(context: RenderContext) -> Iterator[Chart]:
    """Success by the number of ablated heads."""
    if "needle_ablation" not in context.run.tables:
        return
    lines = context.run.derived(analysis.ablation_curve)
    for (label, _, _), curve in lines[lines["model"].isin(list(context.models))].groupby(["model", "mode", "ablation"]):
        yield Chart(
            plots.plot_ablation_curve(curve, str(label)),
            "Heads are ranked on one half of the needles and ablated on the other half. Bands: 95 % confidence "
            "interval over trials; thin lines: extremes of the random sets.",
            half_width=True,
        )


def _retrieval_charts(context: RenderContext) -> Iterator[Chart]:
    """Retrieval score of every head, its relation to growth, and agreement of models and haystacks."""
    heads = context.heads
    with_score, with_growth = context.finite_values("retrieval"), context.finite_values("growth")
    scored = [label for label in context.models if label in with_score]
    for label in scored:
        yield Chart(
            head_figures.plot_matrix(heads, "retrieval", label),
            "Share of the needle that a head copies in successful trials: its largest attention weight is on the token "
            "that the model outputs.",
            describe_extremes(heads, "retrieval", label),
            half_width=True,
        )
    if scored:
        yield Chart(
            plots.plot_ranked_scores(heads),
            "Heads above the dotted line, a score of 0.1, are retrieval heads. Bands: 95 % confidence interval over "
            "trials.",
            half_width=True,
        )
    for label in scored:
        if label in with_growth:
            yield Chart(
                plots.plot_against_growth(heads, label),
                "One point per head. A retrieval head is expected to have a growth exponent near 0: its effective "
                "length does not grow with the context.",
                half_width=True,
            )
    if len(scored) > 1:
        yield Chart(
            head_scatter.plot_against_baseline(heads, "retrieval", scored[0]),
            f"One point per head. On the dashed line the score equals that under {scored[0]}.",
        )
    scores = context.run.derived(scores_by_seed)
    for label in scored if len(seed_columns(scores)) > 1 else ():
        yield Chart(
            plots.plot_seed_agreement(scores, label),
            "The same needles in two haystacks. One point per head.",
            half_width=True,
        )
