"""Writes: what each head adds directly to the logit of the token that comes next."""

from headscope.door import Probe

PROBE = Probe(
    name="writes",
    title="What heads write",
    tab="Writes",
    summary="What each head adds directly to the logit of the next token, and the parts that the logit is the sum of.",
    order=28,
    example="headscope writes --model base=smollm2-135m --length 2048",
    config="probes.writes.config:WritesConfig",
    cells="probes.writes.cells:WritesSection",
    tables="probes.writes.tables:TABLES",
    statistics="probes.writes.heads:STATISTICS",
    heads="probes.writes.heads:heads",
    charts="probes.writes.charts:charts",
    head_charts="probes.writes.charts:of_head",
    findings="probes.writes.findings:findings",
    head_findings="probes.writes.findings:of_head",
    glossary="probes.writes.findings:GLOSSARY",
    sample="probes.writes.sample:rows",
    bench="probes.writes.bench:ways",
)
