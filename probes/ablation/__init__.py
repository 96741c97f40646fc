"""Probe `ablation`: how the answer to a prompt changes when heads are ablated."""

from headscope.probe import Probe


class Ablation(Probe):
    """The declaration of the probe `ablation`."""

    name = "ablation"
    title = "Ablation on prompts"
    tab = "Ablation"
    summary = "Measure how the answer to a prompt changes when heads are ablated."
    group = "Causes"
    order = 46
    command = "ablate"
    function = "ablate"
    takes = ("models", "text", "docs")
    example = "headscope ablate --model base=smollm2-135m --prompt 'The capital of France is' --answer ' Paris'"
    parts = (
        "options runner tables statistics=results.STATISTICS head_columns=results.head_statistics questions "
        "results head_results glossary charts"
    )


PROBE = Ablation()
