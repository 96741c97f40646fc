"""Probe `adapt`: train AdaRoPE, and optionally a LoRA, on a frozen checkpoint."""

from headscope.probe import Probe


class Adapt(Probe):
    """The declaration of the probe `adapt`."""

    name = "adapt"
    title = "AdaRoPE training"
    tab = None
    summary = "Train AdaRoPE on a frozen checkpoint: frequencies per KV group, temperature and growth per head."
    group = "Training"
    order = 20
    takes = ("model", "text", "docs")
    example = "headscope adapt --model smollm2-135m --factor 8"
    parts = "options runner tables questions results next_steps charts"


PROBE = Adapt()
