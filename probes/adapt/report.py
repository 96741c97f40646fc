"""What a report shows of a training."""

from collections.abc import Iterator

from headscope.report.blocks import Chart, ChartGroup, RenderContext
from probes.adapt import plots


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The loss of the batches, and of the held-out documents."""
    yield ChartGroup("During training", "Training", _loss_charts(context), app_pages="/checkpoints")


def _loss_charts(context: RenderContext) -> Iterator[Chart]:
    run = context.run
    if "training" in run.tables:
        yield Chart(
            plots.plot_training_loss(run.training),
            "Loss of each step's own batch, before the step: noisy, because batches differ in how hard they are, and "
            "lower where sequences are longer; the shape of a point tells the length.",
            half_width=True,
        )
    if "validation" in run.tables:
        yield Chart(
            plots.plot_held_out_loss(run.validation),
            "Held-out documents, never learned from. The line is the mean over documents, the band reaches from the "
            "document that gained most to the one that gained least. Below zero is better than at step 0.",
            half_width=True,
        )
        for adapter in run.validation["adapter"].unique():
            yield Chart(
                plots.plot_held_out_loss_by_position(run.validation, str(adapter)),
                "The same documents by position: what each kept adapter gained over step 0.",
                half_width=True,
            )
