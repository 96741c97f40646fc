"""What a report shows of a training."""

from collections.abc import Iterator

from headscope.report.content import Chart, Group, Shown
from headscope.sections.adapt import figures


def charts(shown: Shown) -> Iterator[Group]:
    """The loss of the batches, and of the held-out documents."""
    yield Group("During training", "Training", _learning(shown), page="/checkpoints")


def _learning(shown: Shown) -> Iterator[Chart]:
    run = shown.run
    if "training" in run.tables:
        yield Chart(
            figures.batches(run.training),
            "Loss of each step's own batch, before the step: noisy, because batches differ in how hard they are, and "
            "lower where sequences are longer; the shape of a point tells the length.",
            half=True,
        )
    if "validation" in run.tables:
        yield Chart(
            figures.held_out(run.validation),
            "Held-out documents, never learned from. The line is the mean over documents, the band reaches from the "
            "document that gained most to the one that gained least. Below zero is better than at step 0.",
            half=True,
        )
        for adapter in run.validation["adapter"].unique():
            yield Chart(
                figures.held_out_by_position(run.validation, str(adapter)),
                "The same documents by position: what each kept adapter gained over step 0.",
                half=True,
            )
