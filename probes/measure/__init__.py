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
    options="probes.measure.schema:MeasureOptions",
    runner="probes.measure.run:MeasureRunner",
    tables="probes.measure.schema:TABLES",
    statistics="probes.measure.analysis:STATISTICS",
    head_columns="probes.measure.analysis:head_statistics",
    model_columns="probes.measure.analysis:model_statistics",
    roles="probes.measure.analysis:ROLES",
    overview_cards="probes.measure.overview_cards:overview_cards",
    charts="probes.measure.report:charts",
    head_card="probes.measure.report:head_card",
    head_charts="probes.measure.report:head_charts",
    questions="probes.measure.questions:QUESTIONS",
    results="probes.measure.results:results",
    head_results="probes.measure.results:head_results",
    glossary="probes.measure.glossary:GLOSSARY",
    synthetic_rows="probes.measure.synthetic:synthetic_cells",
)
