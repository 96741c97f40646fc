"""Needle-in-a-Haystack probe: whether the model retrieves a hidden fact, and which heads copy it."""

from headscope.probe import Probe


class Needle(Probe):
    """The declaration of the probe `needle`."""

    name = "needle"
    title = "Needle in a haystack"
    tab = "Retrieval"
    summary = "Test whether the model retrieves a fact hidden in a long text, and score the heads that copy it."
    group = "Tasks"
    order = 30
    takes = ("models", "text")
    example = "headscope needle --model base=smollm2-135m --length 10000 --steps 20 --depths 10 --needles 1"
    explorer_tab = "Trials"
    head_explorer_heading = "At the needle's answer"
    head_explorer_table = "needle_keys"
    parts = (
        "options runner tables scores=scores.SCORES statistics model_columns questions=results.QUESTIONS results "
        "head_results overview glossary charts head_charts head_explorer explorer=trial_explorer.trials_page"
    )


PROBE = Needle()
