"""Probe `circuits`: OV and QK circuits of heads from their weights, with rotation, and composition between heads."""

from headscope.plugins import Probe

PROBE = Probe(
    name="circuits",
    title="Circuits",
    tab="Circuits",
    summary="Analyse heads' weights: OV copying, QK logits with rotation, composition between heads, QK attribution.",
    order=27,
    example="headscope circuits --model base=smollm2-135m --tokens king,queen --heads L5H3",
    options="probes.circuits.schema:CircuitsOptions",
    runner="probes.circuits.run:CircuitsRunner",
    tables="probes.circuits.schema:TABLES",
    statistics="probes.circuits.analysis:STATISTICS",
    head_columns="probes.circuits.analysis:head_statistics",
    charts="probes.circuits.report:charts",
    head_charts="probes.circuits.report:head_charts",
    questions="probes.circuits.questions:QUESTIONS",
    results="probes.circuits.results:results",
    head_results="probes.circuits.results:head_results",
    row_charts="probes.circuits.report:row_charts",
    glossary="probes.circuits.report:GLOSSARY",
    synthetic_rows="probes.circuits.synthetic:synthetic_cells",
    bench="probes.circuits.bench:benchmark_variants",
)
