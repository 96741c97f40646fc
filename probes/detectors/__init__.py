"""Detectors: which heads look at the previous token, the first, a duplicate, or at what followed a duplicate."""

from headscope.plugins import Probe

PROBE = Probe(
    name="detectors",
    title="Head detectors",
    tab="Detectors",
    summary="Which heads look at the previous token, at the first, at a duplicate, or at what followed it (induction).",
    order=25,
    takes=("models",),
    example="headscope detectors --model base=smollm2-135m --period 128,512 --sequences 8",
    options="probes.detectors.options:DetectorsOptions",
    runner="probes.detectors.run:DetectorsRunner",
    tables="probes.detectors.tables:TABLES",
    statistics="probes.detectors.analysis:STATISTICS",
    head_columns="probes.detectors.analysis:head_statistics",
    roles="probes.detectors.analysis:ROLES",
    charts="probes.detectors.report:charts",
    head_charts="probes.detectors.report:head_charts",
    findings="probes.detectors.findings:findings",
    head_findings="probes.detectors.findings:head_findings",
    glossary="probes.detectors.findings:GLOSSARY",
    overview="probes.detectors.findings:overview",
    synthetic_rows="probes.detectors.sample:synthetic_cells",
    bench="probes.detectors.bench:benchmark_variants",
)
