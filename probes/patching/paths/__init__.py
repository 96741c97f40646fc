"""Probe `paths`: effects of paths between heads on the answer, by path patching between two prompts."""

from headscope.probe import Probe


class Paths(Probe):
    """The declaration of the probe `paths`."""

    name = "paths"
    title = "Path patching"
    tab = "Paths"
    summary = (
        "Measure the effect of single paths on the answer by path patching: from a head to a later head or to the "
        "logits."
    )
    group = "Causes"
    order = 45
    example = "headscope paths --model base=smollm2-135m --pairs ioi --count 8"
    parts = "options runner tables questions results head_results overview glossary charts"


PROBE = Paths()
