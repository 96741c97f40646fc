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
    config="probes.detectors.options:DetectorsConfig",
    cells="probes.detectors.run:DetectorsSection",
    tables="probes.detectors.tables:TABLES",
    statistics="probes.detectors.analysis:STATISTICS",
    heads="probes.detectors.analysis:heads",
    roles="probes.detectors.analysis:ROLES",
    charts="probes.detectors.report:charts",
    head_charts="probes.detectors.report:of_head",
    findings="probes.detectors.findings:findings",
    head_findings="probes.detectors.findings:of_head",
    glossary="probes.detectors.findings:GLOSSARY",
    overview="probes.detectors.findings:overview",
    sample="probes.detectors.sample:rows",
    bench="probes.detectors.bench:ways",
)
