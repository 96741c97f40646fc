"""Measuring models over texts: attention, rotary pairs, distances and loss."""

from headscope.probe import Probe


class Measure(Probe):
    """The declaration of the probe `measure`."""

    name = "measure"
    title = "Measures"
    tab = None
    group = "Heads"
    summary = "Measure models over texts: effective length, rotary pairs, distance profiles, loss by position."
    order = 10
    command = "run"
    example = "headscope run --model base=smollm2-135m --model yarn=smollm2-135m@yarn:factor=8 --length 2048"
    parts = (
        "options runner tables statistics=declaration.STATISTICS head_columns model_columns roles "
        "questions=questions.QUESTIONS results head_results glossary charts overview_cards=cards.overview_cards "
        "page_cards head_card head_charts"
    )


PROBE = Measure()
