"""Probe `detectors`: heads that attend to the previous token, the first token, a duplicate, or the token after it."""

from headscope.plugins import Probe

PROBE = Probe(
    name="detectors",
    title="Head detectors",
    tab="Detectors",
    summary="Score heads as previous-token, current-token, first-token, duplicate-token and induction heads.",
    group="Heads",
    order=25,
    takes=("models",),
    example="headscope detectors --model base=smollm2-135m --period 128,512 --sequences 8",
    options="probes.detectors.schema:DetectorsOptions",
    runner="probes.detectors.run:DetectorsRunner",
    tables="probes.detectors.schema:TABLES",
    statistics="probes.detectors.analysis:STATISTICS",
    head_columns="probes.detectors.analysis:head_statistics",
    model_columns="probes.detectors.analysis:model_statistics",
    roles="probes.detectors.analysis:ROLES",
    overview_cards="probes.detectors.report:overview_cards",
    charts="probes.detectors.report:charts",
    head_charts="probes.detectors.report:head_charts",
    questions="probes.detectors.questions:QUESTIONS",
    results="probes.detectors.results:results",
    head_results="probes.detectors.results:head_results",
    glossary="probes.detectors.report:GLOSSARY",
    overview="probes.detectors.results:overview",
    synthetic_rows="probes.detectors.schema:synthetic_cells",
    bench="probes.detectors.run:benchmark_variants",
)
