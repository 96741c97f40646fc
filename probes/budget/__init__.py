"""Probe `budget`: which share of the KV groups can stream, that is drop most of their cache, and what that costs."""

from headscope.plugins import Probe

PROBE = Probe(
    name="budget",
    title="KV-cache budget",
    tab="Budget",
    summary="Let a growing share of the KV groups keep only the first and last tokens, and measure what that costs.",
    order=49,
    takes=("models", "text", "docs"),
    example="headscope budget --model base=smollm2-135m --length 2048",
    options="probes.budget.schema:BudgetOptions",
    runner="probes.budget.run:BudgetRunner",
    tables="probes.budget.schema:TABLES",
    overview_cards="probes.budget.report:overview_cards",
    charts="probes.budget.report:charts",
    questions="probes.budget.questions:QUESTIONS",
    results="probes.budget.results:results",
    statistics="probes.budget.analysis:STATISTICS",
    model_columns="probes.budget.analysis:model_statistics",
    glossary="probes.budget.report:GLOSSARY",
    overview="probes.budget.results:overview",
    synthetic_rows="probes.budget.synthetic:synthetic_cells",
    bench="probes.budget.bench:benchmark_variants",
)
