"""Questions that the results of the probe `attribution` answer."""

from headscope.results.questions import Question

QUESTIONS = (
    Question(
        name="attribution.logit",
        sentence="In {model}, the logit of the next token is above the mean logit of the vocabulary by {value}. Direct "
        "terms: {heads:+.2f} from heads, {other:+.2f} from MLPs and other layer terms, {embedding:+.2f} from the "
        "embedding and {bias:+.2f} from biases",
        number=".2f",
        samples="documents",
    ),
    Question(
        name="attribution.raising_heads",
        sentence="In {model}, {value} of {n:n heads} raise the logit of the next token directly",
        number=",.0f",
    ),
    Question(
        name="attribution.extreme",
        sentence="In {model}, {unit} has the {which} direct logit attribution of the next token: {value}",
        headline="{which:capital} direct logit attribution: {unit}, {value}",
        number="+.3f",
        value_unit="logits",
        samples="documents",
        level="headline",
    ),
)
