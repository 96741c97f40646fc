"""Charts and glossary of the ablation probe."""

from collections.abc import Iterator

from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.rendering.statistic_charts import matrix_chart
from probes.ablation import PROBE
from probes.ablation.declaration import ABLATION
from probes.ablation.results import STATISTICS

GLOSSARY = (
    Term(
        "Zero, mean and resample ablation",
        "A head's output z before o_proj is replaced: by 0 (zero), by its mean over the positions of a reference text "
        "(mean:text) or of the same prompt (mean:document), or by its value at the same positions of other prompts of "
        "the set (resample, averaged over several). The change of the answer's metric is the head's total effect, "
        "through all later layers.",
        tables=(ABLATION.name,),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The change of the metric for every head, by kind of ablation."""
    yield ChartGroup(PROBE.title, "Change of the answer's metric when one head is ablated", _matrix_charts(context))


def _matrix_charts(context: RenderContext) -> Iterator[Chart]:
    for column in STATISTICS:
        for label in list(context.finite_values(column))[:1]:
            caption = "Mean over prompts. Blue: the metric falls without the head."
            yield matrix_chart(context.heads, column, label, context.scale_heads, caption)
