"""Detectors: which heads look at the previous token, the first, a duplicate, or at what followed a duplicate."""

from headscope.door import Probe

PROBE = Probe(
    name="detectors",
    title="Head detectors",
    tab="Detectors",
    summary="Which heads look at the previous token, at the first, at a duplicate, or at what followed it (induction).",
    order=25,
    takes=("models",),
    example="headscope detectors --model base=smollm2-135m --period 128,512 --sequences 8",
    config="probes.detectors.config:DetectorsConfig",
    cells="probes.detectors.cells:DetectorsSection",
    tables="probes.detectors.tables:TABLES",
    statistics="probes.detectors.heads:STATISTICS",
    heads="probes.detectors.heads:heads",
    roles="probes.detectors.heads:ROLES",
    charts="probes.detectors.charts:charts",
    head_charts="probes.detectors.charts:of_head",
    findings="probes.detectors.findings:findings",
    head_findings="probes.detectors.findings:of_head",
    glossary="probes.detectors.findings:GLOSSARY",
    overview="probes.detectors.findings:overview",
    sample="probes.detectors.sample:rows",
    bench="probes.detectors.bench:ways",
)
