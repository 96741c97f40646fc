"""Probe `evaluate`: scores of each model on tasks of EleutherAI's lm-evaluation-harness."""

from headscope.plugins import Probe

PROBE = Probe(
    name="evaluate",
    title="Tasks",
    tab="Benchmarks",
    summary="Score each model on tasks of the lm-evaluation-harness: RULER, common benchmarks, your own task files.",
    group="Tasks",
    order=35,
    takes=("models",),
    example="headscope evaluate --model base=smollm2-135m --tasks niah_single_1,ruler_vt --length 4096 --limit 50",
    options="probes.evaluate.schema:EvaluateOptions",
    runner="probes.evaluate.run:EvaluateRunner",
    tables="probes.evaluate.schema:TABLES",
    charts="probes.evaluate.report:charts",
    questions="probes.evaluate.results:QUESTIONS",
    results="probes.evaluate.results:results",
    statistics="probes.evaluate.analysis:STATISTICS",
    model_columns="probes.evaluate.analysis:model_statistics",
    glossary="probes.evaluate.report:GLOSSARY",
    overview="probes.evaluate.results:overview",
    synthetic_rows="probes.evaluate.schema:synthetic_cells",
)
