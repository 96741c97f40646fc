"""Probe `scaling`: numerical check of the scaling theorems."""

from headscope.probe import Probe


class Scaling(Probe):
    """The declaration of the probe `scaling`."""

    name = "scaling"
    title = "Scaling theorems"
    tab = "Scaling"
    summary = "Check Theorems 4 and 5 of the AdaRoPE paper numerically: effective length under a logit scale."
    group = "Training"
    order = 60
    takes = ()
    example = "headscope scaling"
    parts = "options runner tables questions=results.QUESTIONS results glossary charts"


PROBE = Scaling()
