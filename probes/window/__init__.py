"""Probe `window`: which rotary frequencies one head needs to retrieve a needle from a window of distances."""

from headscope.probe import Probe


class Window(Probe):
    """The declaration of the probe `window`."""

    name = "window"
    title = "Needle retrieval from a window"
    tab = "Window"
    summary = "Train one-head toy models to retrieve a needle from a window, with fixed, learned, partial or no RoPE."
    group = "Training"
    order = 50
    takes = ()
    example = "headscope window"
    parts = "options runner tables questions=results.QUESTIONS results glossary charts"


PROBE = Window()
