"""Probe `patching`: effects of heads on the answer, by activation patching between a clean and a corrupted prompt."""

from headscope.plugins import Probe

PROBE = Probe(
    name="patching",
    title="Activation patching",
    tab="Patching",
    summary="Measure each head's effect on the answer by activation patching between two prompts.",
    group="Causes",
    order=45,
    command="patch",
    function="patch",
    example="headscope patch --model base=smollm2-135m --pairs ioi --count 8",
    options="probes.patching.schema:PatchingOptions",
    runner="probes.patching.run:PatchingRunner",
    tables="probes.patching.schema:TABLES",
    statistics="probes.patching.analysis:STATISTICS",
    head_columns="probes.patching.analysis:head_statistics",
    overview_cards="probes.patching.report:overview_cards",
    charts="probes.patching.report:charts",
    head_charts="probes.patching.report:head_charts",
    questions="probes.patching.questions:QUESTIONS",
    results="probes.patching.results:results",
    head_results="probes.patching.results:head_results",
    glossary="probes.patching.report:GLOSSARY",
    overview="probes.patching.results:overview",
    synthetic_rows="probes.patching.schema:synthetic_cells",
    bench="probes.patching.bench:benchmark_variants",
)
