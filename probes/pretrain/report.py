"""Report of pretraining: comparison of the trainings, findings, and the commands that analyse their checkpoints."""

from collections.abc import Iterator, Mapping

from headscope.report.blocks import Chart, ChartGroup, Finding, RenderContext, TextTable
from headscope.report.text import statistics_table
from headscope.runs.run import Run
from probes.pretrain import plots
from probes.pretrain.analysis import final_checkpoint_labels, variant_table
from probes.pretrain.claims import pretraining_claims
from probes.pretrain.options import TrainingKey


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The validation losses of several trainings: during training, and of the final models."""
    run = context.run
    if "validation" in run.tables and run.validation["adapter"].nunique() > 1:
        chart = Chart(
            plots.plot_loss_against_first(run.validation),
            "Difference on the same documents after the same number of steps. Below zero, the loss is lower than that "
            "of the first training; bands are 95 % confidence intervals over documents.",
        )
        yield ChartGroup("During training", "Training", [chart], app_pages="/checkpoints")
    finals = final_checkpoint_labels(run)
    if "nll" in run.tables and len({training.variant for training in finals}) > 1:
        yield ChartGroup("Pretraining", "All variants", _variant_listing(run, finals), app_pages="/compare")


def _variant_listing(run: Run, final_labels: Mapping[TrainingKey, str]) -> Iterator[TextTable]:
    first = next(iter(final_labels)).variant
    yield statistics_table(
        f"Validation loss of every variant at its last step, and its difference from {first} with the same seed; 95 % "
        "confidence intervals over documents in brackets",
        variant_table(run, final_labels),
    )


def findings(run: Run) -> Iterator[Finding]:
    """The paper's claims, if the run measured checkpoints of pretraining."""
    yield from pretraining_claims(run)


def next_steps(run: Run) -> Iterator[str]:
    """Commands that measure the checkpoints of each training, and the last ones of all."""
    trainings = sorted((run.path / "checkpoints").glob("*"))
    for training in trainings:
        yield f"Measure every checkpoint of {training.name}: headscope run --checkpoints '{training}/step-*'"
    if len(trainings) > 1:
        last = {training: max(training.glob("step-*")) for training in trainings}
        models = " ".join(f"--model {training.name}={folder}" for training, folder in last.items())
        yield f"Compare the last checkpoints: headscope run {models}"
