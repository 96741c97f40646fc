"""Direct logit attribution: what each head adds to the logit of the next token."""

from headscope.probe import Probe


class Attribution(Probe):
    """The declaration of the probe `attribution`."""

    name = "attribution"
    title = "Direct logit attribution"
    tab = "Attribution"
    summary = (
        "Measure direct logit attribution (DLA): what each head, MLP and bias adds to the logit of the next token or "
        "of an answer."
    )
    group = "Causes"
    order = 28
    example = "headscope attribution --model base=smollm2-135m --length 2048"
    parts = "options runner tables scores questions results glossary charts head_charts"


PROBE = Attribution()
