"""What a report shows of the detectors, and the sentence that says how to read each chart."""

from collections.abc import Iterator

from headscope.figures import heads as head_figures
from headscope.report.content import Chart, Group, Shown
from headscope.report.statistic_charts import against_chart
from headscope.report.words import extremes, here, with_others
from headscope.runs.run import Run
from headscope.runs.statistics import statistic
from probes.detectors import PROBE, figures
from probes.detectors.heads import COLUMNS


def charts(shown: Shown) -> Iterator[Group]:
    """Every kind of head in the first model, and against the others."""
    yield Group(PROBE.title, "What each head looks at on random tokens that come twice", _matrices(shown))
    yield Group(PROBE.title, "Under the other models", _against(shown))


def of_head(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """What one head looks at, under every model and by length."""
    if "detectors" not in run.tables:
        return
    rows = run.table("detectors")
    rows = rows[here(rows, layer, head)]
    if rows.empty:
        return
    yield Chart(
        figures.of_head(rows, with_others(run, model), layer, head),
        "Mean weight on each kind of key, on random tokens that come twice, in the longest context. Horizontal marks: "
        "what weights that are spread evenly would give. Error bars: 95 % interval over sequences.",
        half=True,
    )
    if rows["context_length"].nunique() > 1:
        yield Chart(
            figures.by_length(rows, model, layer, head),
            "A head that finds the earlier copy however far it is stays level.",
            half=True,
        )


def _matrices(shown: Shown) -> Iterator[Chart]:
    for name in COLUMNS.values():
        for label in list(shown.finite(name))[:1]:
            yield Chart(
                head_figures.matrix(shown.heads, name, label),
                f"A cell is a head, the first layer at the bottom. {statistic(name).title}: {statistic(name).meaning}.",
                extremes(shown.heads, name, label),
                half=True,
            )


def _against(shown: Shown) -> Iterator[Chart]:
    for name in COLUMNS.values():
        scored = list(shown.finite(name))
        if len(scored) > 1:
            yield against_chart(shown.heads, name, scored[0])
