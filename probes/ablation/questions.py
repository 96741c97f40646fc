"""Questions of the ablation probe: the answers of the unchanged model, single heads, and named heads together."""

from headscope.effects.results import sweep_questions
from headscope.results.questions import Question

_SWEEP = "{change:capital} in {model}, {prompts}"
_SUBJECT = f"{_SWEEP}, one head at a time, change of the {{label}} ({{label_unit}})"

EFFECT = Question(
    name="ablation.head",
    sentence=f"{_SWEEP}: the {{label}} changes by {{value}} ({{label_unit}})",
    number="+.3g",
    samples="prompts",
)
"""The effect of one head."""

QUESTIONS = (
    Question(
        name="ablation.answered",
        sentence="{model}, {prompts}: the unchanged model gives the answer ({answer_criterion}) in {value}[. "
        "{unanswered:n prompts} without it: their effects do not show how the model answers][. {doubt}]",
        number="percent",
        samples="prompts",
        better="higher",
    ),
    *sweep_questions("ablation", _SUBJECT, "{change:capital}, {prompts}", number="+.3g", samples="prompts"),
    EFFECT,
    Question(
        name="ablation.set",
        sentence=f"{_SWEEP}: with all {{size:n named heads}} ablated together, the {{label}} changes by {{value}} "
        "({label_unit}), from {before:.2f} to {after:.2f}",
        number="+.3g",
        samples="prompts",
    ),
)
