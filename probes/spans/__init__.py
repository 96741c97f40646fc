"""Probe `spans`: how much each head attends from one named part of a prompt to another, or to classes of tokens."""

from headscope.probe import Probe


class Spans(Probe):
    """The declaration of the probe `spans`."""

    name = "spans"
    title = "Attention between spans"
    tab = "Spans"
    explorer_tab = "Span pairs"
    summary = "Measure how much each head attends from one named part of a prompt to another, or to classes of tokens."
    group = "Prompts"
    order = 22
    example = "headscope spans --model base=smollm2-135m --prompts prompts.jsonl --key context"
    parts = (
        "options runner tables statistics head_columns questions results head_results overview=analysis.overview "
        "glossary charts overview_cards head_card head_charts explorer=view.pair_page"
    )


PROBE = Spans()
