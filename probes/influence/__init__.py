"""Head influence: how the loss changes when one head or KV group is reset or ablated."""

from typing import TYPE_CHECKING, Any

from headscope.plugins import Probe

if TYPE_CHECKING:
    from probes.influence.run import head_influence

__all__ = ["PROBE", "head_influence"]

PROBE = Probe(
    name="influence",
    title="Head influence",
    tab="Influence",
    summary="Measure how the loss changes when one head or KV group is reset or ablated.",
    group="Causes",
    order=40,
    example="headscope influence --model learned=smollm2-135m@adarope:adapter=PATH --length 2048",
    options="probes.influence.schema:InfluenceOptions",
    runner="probes.influence.run:InfluenceRunner",
    tables="probes.influence.schema:TABLES",
    statistics="probes.influence.heads:STATISTICS",
    head_columns="probes.influence.heads:head_statistics",
    overview_cards="probes.influence.report:overview_cards",
    charts="probes.influence.report:charts",
    questions="probes.influence.questions:QUESTIONS",
    results="probes.influence.results:results",
    head_results="probes.influence.results:head_results",
    glossary="probes.influence.report:GLOSSARY",
    page="probes.influence.report:page",
    synthetic_rows="probes.influence.schema:synthetic_cells",
    bench="probes.influence.bench:benchmark_variants",
)


def __getattr__(name: str) -> Any:
    if name == "head_influence":  # imports torch
        from probes.influence.run import head_influence

        return head_influence
    raise AttributeError(f"module 'probes.influence' has no attribute '{name}'")
