"""What a report shows of trainings from scratch, beyond what it shows of any training."""

from collections.abc import Iterator

from headscope.report.content import Chart, Group, Shown
from headscope.sections.pretrain import figures
from headscope.sections.pretrain.losses import variants


def charts(shown: Shown) -> Iterator[Group]:
    """The held-out loss of several trainings beside each other, while they learned and at their end."""
    run = shown.run
    if "validation" in run.tables and run.validation["adapter"].nunique() > 1:
        chart = Chart(
            figures.against_first(run.validation),
            "The same documents after as many steps. Below zero is better than the first training; bands are 95 % "
            "intervals over documents.",
        )
        yield Group("During training", "Training", [chart], page="/checkpoints")
    if told := [*variants(run)]:
        yield Group("Trained from scratch", "Every variant", told, page="/compare")
