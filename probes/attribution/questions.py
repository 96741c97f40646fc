"""Questions that the results of the probe `attribution` answer."""

from headscope.results.answers import answer_questions
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
        name="attribution.answer",
        sentence="In {model}, {prompts}: the logit of the answer is above {compared} by {value}. Direct terms: "
        "{heads:+.2f} from heads, {mlps:+.2f} from MLPs and other layer terms, {embedding:+.2f} from the embedding and "
        "{biases:+.2f} from biases",
        headline="{prompts}: logit of the answer above {compared}: {value}",
        number="+.2f",
        value_unit="logits",
        samples="pairs",
        level="headline",
        better="higher",
    ),
    *answer_questions("attribution", "pairs"),
    Question(
        name="attribution.prompt",
        sentence="In {model}, {prompts}, prompt {pair}: the logit of the answer is above {compared} by {value}; of all "
        "heads, {most:+.3f} adds most and {least:+.3f} least",
        headline="{prompts}, {pair}: logit of the answer above {compared} {value}; {most:+.3f} most, {least:+.3f} "
        "least",
        number="+.2f",
        value_unit="logits",
        level="row",
    ),
    Question(
        name="attribution.answer_layer",
        sentence="In {model}, {prompts}: of all layers, the {component} adds most to the logit of the answer: {value}",
        headline="{prompts}: {component} adds most to the answer, {value}",
        number="+.3f",
        value_unit="logits",
        samples="pairs",
        level="headline",
    ),
)
