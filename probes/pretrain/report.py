"""What a report shows of trainings from scratch, beyond what it shows of any training."""

from collections.abc import Iterator, Mapping

from headscope.report import statistics_text
from headscope.report.blocks import Chart, ChartGroup, RenderContext, TextTable
from headscope.runs.run import Run
from probes.pretrain import plots
from probes.pretrain.checkpoint_index import Training, last
from probes.pretrain.losses import variants


def charts(shown: RenderContext) -> Iterator[ChartGroup]:
    """The held-out loss of several trainings beside each other, while they learned and at their end."""
    run = shown.run
    if "validation" in run.tables and run.validation["adapter"].nunique() > 1:
        chart = Chart(
            plots.against_first(run.validation),
            "The same documents after as many steps. Below zero is better than the first training; bands are 95 % "
            "intervals over documents.",
        )
        yield ChartGroup("During training", "Training", [chart], app_pages="/checkpoints")
    finals = last(run)
    if "nll" in run.tables and len({each.variant for each in finals}) > 1:
        yield ChartGroup("Trained from scratch", "Every variant", _variants(run, finals), app_pages="/compare")


def _variants(run: Run, finals: Mapping[Training, str]) -> Iterator[TextTable]:
    first = next(iter(finals)).variant
    yield statistics_text.statistics_table(
        f"Held-out loss of every variant at its last step, and against {first} with the same seed; 95 % intervals over "
        "documents in brackets",
        variants(run, finals),
    )
