"""What a training found, what the paper says of learned AdaRoPE, and what to do with the adapter."""

from collections.abc import Iterator

from headscope.report.blocks import Finding
from headscope.runs.aggregation import losses
from headscope.runs.run import Run
from probes.adapt.claims import adaptation_claims


def findings(run: Run) -> Iterator[Finding]:
    """The held-out loss of a training, and the paper's claims where a learned model was measured."""
    yield from _training_findings(run)
    yield from adaptation_claims(run)


def next_steps(run: Run) -> Iterator[str]:
    """Commands that measure the last adapter, and all of them."""
    adapters = run.path / "adapters"
    files = sorted(adapters.glob("step-*.safetensors"), key=lambda file: int(file.stem.removeprefix("step-")))
    if files:
        checkpoint = run.manifest["models"][0]["spec"]
        measured = f"--model base={checkpoint} --model adarope={checkpoint}@adarope:adapter={files[-1]}"
        yield f"Adapter: {files[-1]}"
        yield f"Measure it: headscope run {measured}"
        yield f"Or how it came about: headscope run --checkpoints '{checkpoint}@adarope:adapter={adapters}/step-*'"


def _training_findings(run: Run) -> Iterator[Finding]:
    if "validation" not in run.tables:
        return
    means = losses(run.validation.astype({"nll": "float64"}), ["adapter", "step"])
    for label, block in means.rename("loss").reset_index().groupby("adapter", observed=True):
        order = block.sort_values("step")
        start, last = order.iloc[0]["loss"], order.iloc[-1]
        best = order.sort_values("loss").iloc[0]
        yield Finding(
            "Training",
            f"{label}: held-out loss {start:.4f} nats/token at step 0, {last['loss']:.4f} "
            f"({last['loss'] - start:+.4f}) after {last['step']} steps; lowest at step {best['step']} with "
            f"{best['loss']:.4f}.",
        )
