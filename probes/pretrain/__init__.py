"""Probe `pretrain`: train small models from random weights that differ only in their position scheme."""

from headscope.plugins import Probe

PROBE = Probe(
    name="pretrain",
    title="Pretraining",
    summary="Train small models from random weights under different position schemes, on the same batches.",
    tab=None,
    group="Training",
    order=22,
    takes=("text", "docs"),
    example="headscope pretrain --training-texts 'file:texts/**/*.txt' --text 'file:held/*.txt' --trainings rope",
    options="probes.pretrain.schema:PretrainOptions",
    runner="probes.pretrain.run:PretrainRunner",
    charts="probes.pretrain.report:charts",
    questions="probes.pretrain.questions:QUESTIONS",
    results="probes.pretrain.results:results",
    next_steps="probes.pretrain.results:next_steps",
    bench="probes.pretrain.run:benchmark_variants",
)
