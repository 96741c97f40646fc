"""Small models trained from random weights under different position schemes, alike in everything else."""

from headscope.plugins import Probe

PROBE = Probe(
    name="pretrain",
    title="From scratch",
    summary="Train small models from random weights under different position schemes, on the same batches.",
    tab=None,
    order=22,
    takes=("text", "docs"),
    example="headscope pretrain --train 'file:texts/**/*.txt' --text 'file:held/*.txt' --trainings rope",
    options="probes.pretrain.options:PretrainOptions",
    runner="probes.pretrain.run:PretrainRunner",
    charts="probes.pretrain.report:charts",
    findings="probes.pretrain.findings:findings",
    next_steps="probes.pretrain.findings:next_steps",
    bench="probes.pretrain.bench:benchmark_variants",
)
