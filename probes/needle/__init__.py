"""Needle-in-a-Haystack: does the model find a hidden fact, and which heads copy it."""

from typing import TYPE_CHECKING, Any

from headscope.door import Probe

if TYPE_CHECKING:
    from probes.needle.cells import retrieval_scores

__all__ = ["PROBE", "retrieval_scores"]

PROBE = Probe(
    name="needle",
    title="Needle in a haystack",
    tab="Retrieval",
    summary="Whether the model finds a fact that is hidden in a long text, and which heads copy it.",
    order=30,
    takes=("models", "text"),
    example="headscope needle --model base=smollm2-135m --lengths 20 --max-length 10000 --depths 10 --needles 1",
    config="probes.needle.config:NeedleGrid",
    cells="probes.needle.cells:NeedleSection",
    tables="probes.needle.tables:TABLES",
    statistics="probes.needle.heads:STATISTICS",
    heads="probes.needle.heads:heads",
    roles="probes.needle.heads:ROLES",
    charts="probes.needle.charts:charts",
    head_charts="probes.needle.charts:of_head",
    findings="probes.needle.findings:findings",
    head_findings="probes.needle.findings:of_head",
    glossary="probes.needle.findings:GLOSSARY",
    overview="probes.needle.findings:overview",
    sample="probes.needle.sample:rows",
    bench="probes.needle.bench:ways",
)


def __getattr__(name: str) -> Any:
    if name == "retrieval_scores":  # imports torch
        from probes.needle.cells import retrieval_scores

        return retrieval_scores
    raise AttributeError(f"module 'probes.needle' has no attribute '{name}'")
