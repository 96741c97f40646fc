"""Position parameters of every model: rotary frequencies per KV group, temperatures per head."""

from headscope.probe import Probe


class Positions(Probe):
    """The declaration of the probe `positions`."""

    name = "positions"
    title = "Position parameters"
    tab = None
    summary = "Rotary frequencies and logit temperatures of every model, read without a forward pass."
    order = 0
    takes = ("models",)
    runs_always = True
    parts = "runner tables"


PROBE = Positions()
