"""Questions that the results of the probe `scaling` answer."""

from headscope.results.questions import Question

QUESTIONS = (
    Question(
        name="scaling.ratio",
        sentence="With {scheme} logits and target ESS_{beta:g} = L^{exponent:g} (case {case}), the effective length at "
        "L = {context_length:,} is {value} times its target (geometric mean)",
        headline="ESS_{beta:g} of {scheme} logits at L = {context_length:,}: {value} times its target L^{exponent:g}",
        number=".3f",
        samples="rows",
        level="headline",
    ),
)
