"""Charts and glossary of the needle probe for the report and the app."""

from collections.abc import Iterator, Sequence

import pandas as pd

from headscope.plots import head_scatter
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.rendering.statistic_charts import matrix_panels, model_panels
from headscope.runs.run import Run
from probes.needle import PROBE, analysis, plots
from probes.needle.analysis import DETECTOR_PAIRS, scores_by_seed, seed_columns
from probes.needle.scores import RETRIEVAL_THRESHOLD, retrieval_rows
from probes.needle.trial_explorer import success_map_chart

GLOSSARY = (
    Term(
        "Retrieval score",
        "A fact, the needle, is hidden in a long text, the haystack. A question at the end of the prompt asks for it. "
        "A head copies a token of the needle if its largest attention weight is on that token at the step at which the "
        "model outputs it. The score is the share of the needle that a head copies, 0 to 1, averaged over successful "
        "trials, with a 95 % confidence interval over trials. Control prompts omit the needle: their scores arise by "
        "chance.",
        tables=("retrieval",),
    ),
    Term(
        "Attribution through the needle",
        "Direct logit attribution of a head to the answer through its attention to the needle's tokens, minus the same "
        "through the tokens at that position in the control prompt. It does not require copying, so it also detects "
        "heads that retrieve the answer to a question that shares no word with the needle.",
        "Σ_needle α v W_h · g ∘ (U_y − mean U) / scale of the final norm",
        ("needle_attribution",),
    ),
    Term(
        "Ablation of retrieval heads",
        "Zero ablation sets the outputs of a set of heads to zero; mean:text sets them to their mean over a reference "
        "text. The top heads have the highest scores over the other half of the needles. They are compared with "
        "random sets that have as many heads in each layer.",
        tables=("needle_ablation",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Success of each model, retrieval scores, attribution through the needle, and ablation of heads.

    A run without trials has no charts.
    """
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
            "Over all depths. Bands: 95 % confidence interval over trials.",
            half_width=True,
        )


def _success_map_charts(needles: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    for mode in analysis.present_modes(needles):
        yield from model_panels((label, success_map_chart(needles, label, mode)) for label in models)


def _attribution_charts(context: RenderContext) -> Iterator[Chart]:
    """Direct logit attribution through the needle, and its relation to the retrieval score."""
    for name in ("needle_write", "needle_write_indirect"):
        yield from matrix_panels(
            context,
            name,
            "Direct logit attribution of each head to the answer through its attention to the needle, minus the same "
            "through the tokens at that position in the control prompt.",
        )
    caption = "One point per head. Each axis is a score that detects retrieval heads."
    for x, y in DETECTOR_PAIRS:
        yield from model_panels(
            (label, Chart(plots.plot_detector_comparison(context.heads, label, x, y), caption, half_width=True))
            for label in context.finite_values(x)
            if label in context.finite_values(y)
        )


def _ablation_charts(context: RenderContext) -> Iterator[Chart]:
    """Success by the number of ablated heads, for each model, mode and ablation."""
    if "needle_ablation" not in context.run.tables:
        return
    curves = context.run.derived(analysis.ablation_curves)
    curves = curves[curves["model"].isin(list(context.models))]
    caption = (
        "Each half of the needles is tested with heads ranked on the other half. Bands: 95 % confidence interval over "
        "trials; thin lines: minimum and maximum over random sets. Top heads have no random set where a layer has too "
        "few others."
    )
    for _, of_kind in curves.groupby([name for name in analysis.ABLATION_SWEEP.keys if name != "model"]):
        yield from model_panels(
            (
                label,
                Chart(plots.plot_ablation_curve(of_kind[of_kind["model"] == label], label), caption, half_width=True),
            )
            for label in context.models
            if (of_kind["model"] == label).any()
        )


def _retrieval_charts(context: RenderContext) -> Iterator[Chart]:
    """Retrieval score of every head, its relation to growth, and agreement of models and haystacks."""
    heads, growth_models = context.heads, context.finite_values("growth")
    score_models = [label for label in context.models if label in context.finite_values("retrieval")]
    yield from matrix_panels(
        context,
        "retrieval",
        "Share of the needle that a head copies in successful trials: its largest attention weight is on the token "
        "that the model outputs.",
    )
    if score_models:
        yield Chart(
            plots.plot_ranked_scores(heads),
            f"Heads above the dotted line ({RETRIEVAL_THRESHOLD}) are retrieval heads. Bands: 95 % confidence interval "
            "over trials.",
            half_width=True,
        )
    caption = (
        "One point per head. A retrieval head is expected to have a growth exponent near 0: its effective length does "
        "not grow with the context."
    )
    yield from model_panels(
        (label, Chart(plots.plot_against_growth(heads, label), caption, half_width=True))
        for label in score_models
        if label in growth_models
    )
    if len(score_models) > 1:
        yield Chart(
            head_scatter.plot_against_baseline(heads, "retrieval", score_models[0]),
            f"One point per head. On the dashed line the score equals that in {score_models[0]}.",
        )
    scores = context.run.derived(scores_by_seed)
    caption = "The same needles in two haystacks. One point per head."
    yield from model_panels(
        (label, Chart(plots.plot_seed_agreement(scores, label), caption, half_width=True))
        for label in (score_models if len(seed_columns(scores)) > 1 else ())
    )
