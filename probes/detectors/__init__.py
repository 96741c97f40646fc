"""Probe `detectors`: heads that attend to the previous token, the first token, a duplicate, or the token after it."""

from headscope.probe import Probe


class Detectors(Probe):
    """The declaration of the probe `detectors`."""

    name = "detectors"
    title = "Head detectors"
    tab = "Detectors"
    summary = "Score heads as previous-token, current-token, first-token, duplicate-token and induction heads."
    group = "Heads"
    order = 25
    takes = ("models",)
    example = "headscope detectors --model base=smollm2-135m --period 128,512 --sequences 8"
    parts = "options runner tables scores questions=results.QUESTIONS results head_results glossary head_charts"


PROBE = Detectors()
