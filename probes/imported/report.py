"""Report of imported scores: a matrix, agreement with the own measures, and findings."""

from collections.abc import Iterator

from headscope.plugin_api import (
    Chart,
    ChartGroup,
    Finding,
    RenderContext,
    Run,
    describe_extremes,
    plot_matrix,
)
from headscope.report.blocks import FindingData
from headscope.report.text import default_models
from headscope.runs.column_metadata import statistic
from probes.imported import PROBE
from probes.imported.analysis import NAME, correlations
from probes.imported.plots import plot_against_measure


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The scores of all heads, and their plot against the measure that ranks the heads most like them."""
    yield ChartGroup(PROBE.title, "Imported score of each head", _charts(context))


def _charts(context: RenderContext) -> Iterator[Chart]:
    for label in context.finite_values(NAME):
        yield Chart(
            plot_matrix(context.heads, NAME, label, context.scale_heads),
            "One cell per head; the first layer is at the bottom. Heads without a score in the file are empty.",
            describe_extremes(context.heads, NAME, label),
            half_width=True,
        )
        for row in correlations(context.heads, label).head(1).to_dict("records"):
            yield Chart(
                plot_against_measure(context.heads, NAME, row["name"], label),
                f"One point per head. Spearman's rank correlation over {row['heads']} heads: {row['correlation']:.2f}.",
                half_width=True,
            )


def findings(run: Run) -> Iterator[Finding]:
    """The measures that rank the heads most like the imported scores."""
    for label in default_models(run):
        rows = correlations(run.heads, label).head(3)
        if rows.empty:
            continue
        pairs = zip(rows["name"].tolist(), rows["correlation"].tolist(), strict=True)
        measures = [f"{statistic(name).label} ({correlation:.2f})" for name, correlation in pairs]
        best = rows.iloc[0]
        yield Finding(
            PROBE.title,
            f"In {label}, the measures that rank the {best['heads']} scored heads most like the imported scores are "
            f"{', '.join(measures)}; in parentheses, Spearman's rank correlation.",
            label,
            data=FindingData(best["correlation"], n=int(best["heads"])),
        )
