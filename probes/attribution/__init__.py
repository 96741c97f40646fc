"""Writes: what each head adds directly to the logit of the token that comes next."""

from headscope.plugins import Probe

PROBE = Probe(
    name="writes",
    title="What heads write",
    tab="Writes",
    summary="What each head adds directly to the logit of the next token, and the parts that the logit is the sum of.",
    order=28,
    example="headscope writes --model base=smollm2-135m --length 2048",
    options="probes.attribution.options:AttributionOptions",
    runner="probes.attribution.run:AttributionRunner",
    tables="probes.attribution.tables:TABLES",
    statistics="probes.attribution.analysis:STATISTICS",
    head_columns="probes.attribution.analysis:head_statistics",
    charts="probes.attribution.report:charts",
    head_charts="probes.attribution.report:head_charts",
    findings="probes.attribution.findings:findings",
    head_findings="probes.attribution.findings:head_findings",
    glossary="probes.attribution.findings:GLOSSARY",
    synthetic_rows="probes.attribution.sample:synthetic_cells",
    bench="probes.attribution.run:benchmark_variants",
)
