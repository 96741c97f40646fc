"""Probe `sparsity`: how few keys each head needs, and what rules that choose keys cost each head."""

from headscope.probe import Probe


class Sparsity(Probe):
    """The declaration of the probe `sparsity`."""

    name = "sparsity"
    title = "Sparse attention"
    tab = "Sparsity"
    summary = "Measure how few keys each head needs, and what it loses if it attends to the keys of a rule only."
    group = "Heads"
    order = 24
    example = "headscope sparsity --model base=smollm2-135m --length 2048"
    parts = (
        "options runner tables statistics head_columns questions results head_results overview=analysis.overview "
        "glossary charts overview_cards head_charts"
    )


PROBE = Sparsity()
