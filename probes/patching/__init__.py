"""Probe `patching`: effects of heads on the answer, by activation patching between a clean and a corrupted prompt."""

from headscope.probe import Probe


class Patching(Probe):
    """The declaration of the probe `patching`."""

    name = "patching"
    title = "Activation patching"
    tab = "Patching"
    summary = "Measure each head's effect on the answer by activation patching between two prompts."
    group = "Causes"
    order = 45
    command = "patch"
    function = "patch"
    example = "headscope patch --model base=smollm2-135m --pairs ioi --count 8"
    parts = (
        "options runner tables statistics head_columns questions=results.QUESTIONS results head_results overview "
        "glossary charts overview_cards head_charts"
    )


PROBE = Patching()
