"""Measuring models over texts: attention, rotary pairs, distances and loss."""

from headscope.door import Probe

PROBE = Probe(
    name="measure",
    title="Measures",
    summary="Measure models over texts: effective length, rotary pairs, distance profiles, loss by position.",
    tab=None,
    order=10,
    command="run",
    example="headscope run --model base=smollm2-135m --model yarn=smollm2-135m@yarn:factor=8 --length 2048",
    config="headscope.sections.measure.config:Measure",
    cells="headscope.sections.measure.cells:MeasureSection",
    tables="headscope.sections.measure.tables:TABLES",
    statistics="headscope.sections.measure.heads:STATISTICS",
    heads="headscope.sections.measure.heads:heads",
    models="headscope.sections.measure.heads:models",
    roles="headscope.sections.measure.heads:ROLES",
    charts="headscope.sections.measure.charts:charts",
    head_charts="headscope.sections.measure.charts:of_head",
    findings="headscope.sections.measure.findings:findings",
    head_findings="headscope.sections.measure.findings:of_head",
    glossary="headscope.sections.measure.findings:GLOSSARY",
    sample="headscope.sections.measure.sample:rows",
)
