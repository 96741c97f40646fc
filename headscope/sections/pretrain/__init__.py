"""Small models trained from random weights under different position schemes, alike in everything else."""

from headscope.door import Probe

PROBE = Probe(
    name="pretrain",
    title="From scratch",
    summary="Train small models from random weights under different position schemes, on the same batches.",
    tab=None,
    order=22,
    takes=("text", "docs"),
    example="headscope pretrain --train 'file:texts/**/*.txt' --text 'file:held/*.txt' --trainings rope",
    config="headscope.sections.pretrain.config:Pretrain",
    cells="headscope.sections.pretrain.cells:PretrainSection",
    charts="headscope.sections.pretrain.charts:charts",
    findings="headscope.sections.pretrain.findings:findings",
    next_steps="headscope.sections.pretrain.findings:next_steps",
    bench="headscope.sections.pretrain.bench:ways",
)
