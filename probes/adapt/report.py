"""Charts of a training."""

from collections.abc import Iterator

from headscope.rendering.blocks import Chart, ChartGroup, RenderContext
from probes.adapt import plots


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The loss of the training batches and of the validation documents."""
    yield ChartGroup("During training", "Training", _loss_charts(context), app_pages="/checkpoints")


def _loss_charts(context: RenderContext) -> Iterator[Chart]:
    run = context.run
    if "training" in run.tables:
        yield Chart(
            plots.plot_training_loss(run.training),
            "Loss of each step's batch, before the step. It is noisy because batches differ in difficulty, and it is "
            "lower for longer sequences. The symbol of a point shows the sequence length.",
            half_width=True,
        )
    if "validation" in run.tables:
        yield Chart(
            plots.plot_validation_loss(run.validation),
            "Validation documents are never trained on. The line is the mean over documents; the band spans the "
            "documents, from the largest to the smallest improvement. Below 0, the loss is lower than at step 0.",
            half_width=True,
        )
        for adapter in run.validation["adapter"].unique():
            yield Chart(
                plots.plot_validation_loss_by_position(run.validation, str(adapter)),
                "The same documents by position: change of the loss since step 0, one line per saved adapter.",
                half_width=True,
            )
