"""What a report shows of trainings from scratch, beyond what it shows of any training."""

from collections.abc import Iterator, Mapping

from headscope.report import wording
from headscope.report.content import Chart, Group, Listing, Shown
from headscope.runs.run import Run
from headscope.sections.pretrain import figures
from headscope.sections.pretrain.cast import Training, last
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
    finals = last(run)
    if "nll" in run.tables and len({each.variant for each in finals}) > 1:
        yield Group("Trained from scratch", "Every variant", _variants(run, finals), page="/compare")


def _variants(run: Run, finals: Mapping[Training, str]) -> Iterator[Listing]:
    first = next(iter(finals)).variant
    yield wording.table(
        f"Held-out loss of every variant at its last step, and against {first} with the same seed; 95 % intervals over "
        "documents in brackets",
        variants(run, finals),
    )
