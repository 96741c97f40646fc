"""What a report shows of writing, and the sentence that says how to read each chart."""

from collections.abc import Iterator

from headscope.figures import heads as head_figures
from headscope.report.content import Chart, Group, Shown
from headscope.report.statistic_charts import against_chart
from headscope.report.words import extremes, here, with_others
from headscope.runs.run import Run
from probes.writes import PROBE, figures


def charts(shown: Shown) -> Iterator[Group]:
    """What every head adds to the next token's logit, and what else it is made of."""
    yield Group(PROBE.title, "What each head adds to the next token's logit", _heads(shown))
    yield Group(PROBE.title, "What the logit is made of", _parts(shown))


def of_head(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """What one head adds along the context."""
    if "writes" not in run.tables:
        return
    rows = run.table("writes")
    rows = rows[here(rows, layer, head)]
    if len(rows):
        yield Chart(
            figures.by_position(rows, with_others(run, model), layer, head),
            "Directly, past every later layer: above zero the head makes the token that comes next more likely. The "
            "band is a 95 % interval over documents, where there are three or more.",
            half=True,
        )


def _heads(shown: Shown) -> Iterator[Chart]:
    scored = list(shown.finite("next_token_write"))
    for label in scored[:1]:
        yield Chart(
            head_figures.matrix(shown.heads, "next_token_write", label),
            "A cell is a head, the first layer at the bottom. Logits that the head adds directly to the token that "
            "comes next, less the mean over the vocabulary.",
            extremes(shown.heads, "next_token_write", label),
            half=True,
        )
    if len(scored) > 1:
        yield against_chart(shown.heads, "next_token_write", scored[0])


def _parts(shown: Shown) -> Iterator[Chart]:
    parts = shown.table("write_parts")
    if parts is None:
        return
    for label in shown.models:
        if (parts["model"] == label).any():
            yield Chart(
                figures.by_layer(parts, label),
                "Mean over positions and documents. With the embedding and what is the same for all tokens the bars "
                "add up to the logit, less its mean over the vocabulary.",
                half=True,
            )
