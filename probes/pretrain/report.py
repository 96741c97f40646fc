"""What a report shows of trainings from scratch, beyond what it shows of any training."""

from collections.abc import Iterator, Mapping

from headscope.report.blocks import Chart, ChartGroup, RenderContext, TextTable
from headscope.report.text import statistics_table
from headscope.runs.run import Run
from probes.pretrain import plots
from probes.pretrain.analysis import variant_table
from probes.pretrain.checkpoint_index import TrainingKey, final_checkpoint_labels


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The held-out loss of several trainings beside each other, while they learned and at their end."""
    run = context.run
    if "validation" in run.tables and run.validation["adapter"].nunique() > 1:
        chart = Chart(
            plots.plot_loss_against_first(run.validation),
            "The same documents after as many steps. Below zero is better than the first training; bands are 95 % "
            "intervals over documents.",
        )
        yield ChartGroup("During training", "Training", [chart], app_pages="/checkpoints")
    finals = final_checkpoint_labels(run)
    if "nll" in run.tables and len({each.variant for each in finals}) > 1:
        yield ChartGroup("Trained from scratch", "Every variant", _variant_listing(run, finals), app_pages="/compare")


def _variant_listing(run: Run, final_labels: Mapping[TrainingKey, str]) -> Iterator[TextTable]:
    first = next(iter(final_labels)).variant
    yield statistics_table(
        f"Held-out loss of every variant at its last step, and against {first} with the same seed; 95 % intervals over "
        "documents in brackets",
        variant_table(run, final_labels),
    )
