"""Probe `ablation`: how the answer to a prompt changes when heads are ablated."""

from headscope.plugins import Probe

PROBE = Probe(
    name="ablation",
    title="Ablation on prompts",
    tab="Ablation",
    summary="Measure how the answer to a prompt changes when heads are ablated.",
    group="Causes",
    order=46,
    command="ablate",
    function="ablate",
    takes=("models", "text", "docs"),
    example="headscope ablate --model base=smollm2-135m --prompt 'The capital of France is' --answer ' Paris'",
    options="probes.ablation.schema:AblationOptions",
    runner="probes.ablation.run:AblationRunner",
    tables="probes.ablation.schema:TABLES",
    statistics="probes.ablation.analysis:STATISTICS",
    head_columns="probes.ablation.analysis:head_statistics",
    charts="probes.ablation.report:charts",
    questions="probes.ablation.questions:QUESTIONS",
    results="probes.ablation.results:results",
    head_results="probes.ablation.results:head_results",
    glossary="probes.ablation.report:GLOSSARY",
    synthetic_rows="probes.ablation.schema:synthetic_cells",
)
