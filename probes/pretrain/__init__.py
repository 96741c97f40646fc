"""Probe `pretrain`: train small models from random weights that differ only in their position scheme."""

from headscope.probe import Probe


class Pretrain(Probe):
    """The declaration of the probe `pretrain`."""

    name = "pretrain"
    title = "Pretraining"
    tab = None
    summary = "Train small models from random weights under different position schemes, on the same batches."
    group = "Training"
    order = 22
    takes = ("text", "docs")
    example = "headscope pretrain --training-texts 'file:texts/**/*.txt' --text 'file:held/*.txt' --trainings rope"
    parts = "options runner questions results next_steps charts"


PROBE = Pretrain()
