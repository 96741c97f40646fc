"""Probe `imported`: scores of heads from a file of another tool, stored beside headscope's own measures."""

from headscope.plugins import Probe

PROBE = Probe(
    name="imported",
    title="Imported scores",
    tab="Imported",
    summary="Store the head scores of another tool's file with a model, to compare them with headscope's own measures.",
    group="Heads",
    order=48,
    command="import",
    function="import_scores",
    takes=("models",),
    example="headscope import --model base=smollm2-135m --file scores.json",
    options="probes.imported.schema:ImportedOptions",
    runner="probes.imported.run:ImportedRunner",
    tables="probes.imported.schema:TABLES",
    statistics="probes.imported.schema:STATISTICS",
    head_columns="probes.imported.schema:head_statistics",
    charts="probes.imported.report:charts",
    questions="probes.imported.results:QUESTIONS",
    results="probes.imported.results:results",
    synthetic_rows="probes.imported.schema:synthetic_cells",
)
