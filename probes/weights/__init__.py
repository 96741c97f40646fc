"""Probe `weights`: OV and QK circuits of heads from their weights, with rotation, and composition between heads."""

from headscope.probe import Probe


class Weights(Probe):
    """The declaration of the probe `weights`."""

    name = "weights"
    title = "OV and QK circuits, composition"
    tab = "Weights"
    summary = "Analyse heads' weights: OV copying, QK logits, composition, QK attribution."
    order = 27
    example = "headscope weights --model base=smollm2-135m --tokens king,queen --heads L5H3"
    parts = (
        "options runner tables statistics head_columns questions=results.QUESTIONS results head_results glossary "
        "charts head_charts row_charts"
    )


PROBE = Weights()
