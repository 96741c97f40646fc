"""What trainings from scratch found, what the paper says of such models, and what to do with their checkpoints."""

from collections.abc import Iterator

from headscope.report.blocks import Finding
from headscope.runs.run import Run
from probes.pretrain.claims import pretraining_claims


def findings(run: Run) -> Iterator[Finding]:
    """The paper's claims, where checkpoints of such trainings were measured."""
    yield from pretraining_claims(run)


def next_steps(run: Run) -> Iterator[str]:
    """Commands that measure the checkpoints of each training, and the last ones of all."""
    trainings = sorted((run.path / "checkpoints").glob("*"))
    for training in trainings:
        yield f"How {training.name} came about: headscope run --checkpoints '{training}/step-*'"
    if len(trainings) > 1:
        last = {training: max(training.glob("step-*")) for training in trainings}
        models = " ".join(f"--model {training.name}={folder}" for training, folder in last.items())
        yield f"All of them beside each other: headscope run {models}"
