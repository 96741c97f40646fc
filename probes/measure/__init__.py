"""Measuring models over texts: attention, rotary pairs, distances and loss."""

from headscope.plugins import Probe

PROBE = Probe(
    name="measure",
    title="Measures",
    summary="Measure models over texts: effective length, rotary pairs, distance profiles, loss by position.",
    tab=None,
    order=10,
    command="run",
    example="headscope run --model base=smollm2-135m --model yarn=smollm2-135m@yarn:factor=8 --length 2048",
    config="probes.measure.options:Measure",
    cells="probes.measure.run:MeasureSection",
    tables="probes.measure.tables:TABLES",
    statistics="probes.measure.analysis:STATISTICS",
    heads="probes.measure.analysis:heads",
    models="probes.measure.analysis:models",
    roles="probes.measure.analysis:ROLES",
    charts="probes.measure.report:charts",
    head_charts="probes.measure.report:of_head",
    findings="probes.measure.findings:findings",
    head_findings="probes.measure.findings:of_head",
    glossary="probes.measure.findings:GLOSSARY",
    sample="probes.measure.sample:rows",
)
