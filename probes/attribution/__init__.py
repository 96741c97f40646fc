"""Writes: what each head adds directly to the logit of the token that comes next."""

from headscope.plugins import Probe

PROBE = Probe(
    name="writes",
    title="What heads write",
    tab="Writes",
    summary="What each head adds directly to the logit of the next token, and the parts that the logit is the sum of.",
    order=28,
    example="headscope writes --model base=smollm2-135m --length 2048",
    config="probes.attribution.options:WritesConfig",
    cells="probes.attribution.run:WritesSection",
    tables="probes.attribution.tables:TABLES",
    statistics="probes.attribution.analysis:STATISTICS",
    heads="probes.attribution.analysis:heads",
    charts="probes.attribution.report:charts",
    head_charts="probes.attribution.report:of_head",
    findings="probes.attribution.findings:findings",
    head_findings="probes.attribution.findings:of_head",
    glossary="probes.attribution.findings:GLOSSARY",
    sample="probes.attribution.sample:rows",
    bench="probes.attribution.bench:ways",
)
