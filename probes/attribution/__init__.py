"""Direct logit attribution: what each head adds to the logit of the next token."""

from headscope.plugins import Probe

PROBE = Probe(
    name="attribution",
    title="Direct logit attribution",
    tab="Attribution",
    summary="Measure direct logit attribution (DLA): what each head, MLP and bias adds to the logit of the next token.",
    group="Causes",
    order=28,
    example="headscope attribution --model base=smollm2-135m --length 2048",
    options="probes.attribution.schema:AttributionOptions",
    runner="probes.attribution.run:AttributionRunner",
    tables="probes.attribution.schema:TABLES",
    statistics="probes.attribution.schema:STATISTICS",
    head_columns="probes.attribution.schema:head_statistics",
    charts="probes.attribution.report:charts",
    head_charts="probes.attribution.report:head_charts",
    questions="probes.attribution.questions:QUESTIONS",
    results="probes.attribution.results:results",
    head_results="probes.attribution.results:head_results",
    glossary="probes.attribution.report:GLOSSARY",
    synthetic_rows="probes.attribution.schema:synthetic_cells",
    bench="probes.attribution.run:benchmark_variants",
)
