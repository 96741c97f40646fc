"""Learning AdaRoPE, and a LoRA if asked, on a frozen checkpoint."""

from headscope.plugins import Probe

PROBE = Probe(
    name="adapt",
    title="During training",
    summary="Learn AdaRoPE on a frozen checkpoint: frequencies per KV group, temperature and growth per head.",
    tab=None,
    order=20,
    takes=("model", "text", "docs"),
    example="headscope adapt --model smollm2-135m --factor 8",
    options="probes.adapt.options:AdaptOptions",
    runner="probes.adapt.run:AdaptRunner",
    tables="probes.adapt.tables:TABLES",
    charts="probes.adapt.report:charts",
    findings="probes.adapt.findings:findings",
    next_steps="probes.adapt.findings:next_steps",
)
