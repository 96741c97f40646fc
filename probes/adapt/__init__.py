"""Probe `adapt`: train AdaRoPE, and optionally a LoRA, on a frozen checkpoint."""

from headscope.plugins import Probe

PROBE = Probe(
    name="adapt",
    title="AdaRoPE training",
    summary="Train AdaRoPE on a frozen checkpoint: frequencies per KV group, temperature and growth per head.",
    tab=None,
    group="Training",
    order=20,
    takes=("model", "text", "docs"),
    example="headscope adapt --model smollm2-135m --factor 8",
    options="probes.adapt.schema:AdaptOptions",
    runner="probes.adapt.run:AdaptRunner",
    tables="probes.adapt.schema:TABLES",
    charts="probes.adapt.report:charts",
    questions="probes.adapt.questions:QUESTIONS",
    results="probes.adapt.results:results",
    next_steps="probes.adapt.results:next_steps",
)
