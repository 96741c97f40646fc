"""Probe `budget`: which share of the KV groups can stream, that is drop most of their cache, and what that costs."""

from headscope.probe import Probe


class Budget(Probe):
    """The declaration of the probe `budget`."""

    name = "budget"
    title = "KV-cache budget"
    tab = "Budget"
    summary = "Let a growing share of the KV groups keep only the first and last tokens, and measure what that costs."
    order = 49
    takes = ("models", "text", "docs")
    example = "headscope budget --model base=smollm2-135m --length 2048"
    parts = (
        "options runner tables statistics model_columns loss_by_kept_keys questions results overview glossary "
        "charts overview_cards"
    )


PROBE = Budget()
