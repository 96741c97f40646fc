"""Questions that the results of the probe `scaling` answer."""

from headscope.results.questions import Question

QUESTIONS = (
    Question(
        name="scaling.ratio",
        sentence="With {scheme} logits and target ESS_{beta:g} = L^{exponent:g} (case {case}), the geometric mean of "
        "effective length / target at L = {context_length:,} is {value}",
        headline="ESS_{beta:g} of {scheme} logits / target L^{exponent:g} at L = {context_length:,}: {value}",
        number=".3f",
        samples="rows",
        level="headline",
    ),
)
