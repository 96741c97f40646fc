"""Learning AdaRoPE, and a LoRA if asked, on a frozen checkpoint."""

from headscope.door import Probe

PROBE = Probe(
    name="adapt",
    title="During training",
    summary="Learn AdaRoPE on a frozen checkpoint: frequencies per KV group, temperature and growth per head.",
    tab=None,
    order=20,
    takes=("model", "text", "docs"),
    example="headscope adapt --model smollm2-135m --factor 8",
    config="headscope.sections.adapt.config:Adapt",
    cells="headscope.sections.adapt.cells:AdaptSection",
    tables="headscope.sections.adapt.tables:TABLES",
    charts="headscope.sections.adapt.charts:charts",
    findings="headscope.sections.adapt.findings:findings",
    next_steps="headscope.sections.adapt.findings:next_steps",
)
